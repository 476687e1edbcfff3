"""Plugin of pytest: the option `--modtrace-update`, and the fixture `modtrace` with assertions about models.

pytest imports this file each time that it starts, so it imports nothing else before the fixture is used.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .model_assertions import ModelAssertions


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that records again what tests compare with."""
    parser.getgroup("modtrace").addoption(
        "--modtrace-update",
        action="store_true",
        help="record the golden recordings of modtrace.assert_same() again, where they differ",
    )


@pytest.fixture
def modtrace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "ModelAssertions":
    """Assertions about models: `assert_same` compares with a golden recording, `assert_finite` finds a NaN."""
    from .model_assertions import ModelAssertions

    return ModelAssertions(
        folder=request.path.parent / "golden",
        test=request.node.nodeid,
        update=request.config.getoption("--modtrace-update"),
        make_folder=lambda: tmp_path_factory.mktemp("modtrace"),
    )
