"""Finds lists of modules in which one module stands several times."""

from collections.abc import Iterator

from ...recording.module_path import number_free
from ..tables.placement import name_in_text, read_modules
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import Finding
from .names import name_paths
from .places import place_of_module


@check("shared-modules", about="lists of layers in which one layer stands several times")
def SHARED_MODULES(run: SampledSteps) -> Iterator[Finding]:
    """Finds the module with parameters that stands most often in one list, as `[layer] * 4` makes it."""
    found = []
    for module in read_modules(run.data).values():
        alike = [path for path in module.aliases if number_free(path) == number_free(module.path)]
        alike = [path for path in alike if path.rpartition(".")[0] == module.path.rpartition(".")[0]]
        if alike and module.parameters:
            found.append((module, [module.path, *alike]))
    if not found:
        return
    module, paths = max(found, key=lambda one: len(one[1]))
    place = place_of_module(run, module.module_id)
    names = name_paths([name_in_text(run.data, place.root or "", path) for path in paths])
    yield Finding(
        severity="note",
        text=f"{names} are one module, with the same parameters at {len(paths)} places",
        remedy="make one for each place, if they were to have parameters of their own: [layer() for _ in range(4)], "
        "or copy.deepcopy",
        root=place.root,
        path=place.path,
    )
