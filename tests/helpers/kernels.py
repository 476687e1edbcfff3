"""Kernels with and without their compiled part, for laws that hold for both."""

from types import ModuleType

import pytest


def use_kernel(name: str, patch: pytest.MonkeyPatch, *places: tuple[ModuleType, str]) -> None:
    """Takes the compiled function from where it stands if "numpy" is to be used; else skips where it was not built."""
    for module, function in places:
        if name == "numpy":
            patch.setattr(module, function, None)
        elif getattr(module, function) is None:
            pytest.skip("the compiled kernel has not been built: there was no C compiler")


def both_kernels(*places: tuple[ModuleType, str]):
    """A fixture of a module whose every test runs with both; its value is the name of the kernel."""

    @pytest.fixture(autouse=True, scope="module", params=["compiled", "numpy"])
    def kernel(request):
        with pytest.MonkeyPatch.context() as patch:
            use_kernel(request.param, patch, *places)
            yield request.param

    return kernel
