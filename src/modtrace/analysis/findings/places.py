"""Names the places that findings are about: modules, what they return, and parameters."""

from typing import Any, NamedTuple

from ...recording.role import BY_NAME, GRAD_OUTPUT, LOSS, OF_PARAMETERS, PARAMETER
from ..tables.placement import read_modules
from ..tables.sampled_steps import SampledSteps


class Place(NamedTuple):
    """A module, or a parameter of it."""

    root: str | None
    path: str | None
    parameter: str | None
    name: (
        str  # `blocks.0.fc`, `blocks.0.fc.weight`; with several models `GPT/blocks.0.fc`; a model's own name
    )

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a `Finding`."""
        return {"root": self.root, "path": self.path, "parameter": self.parameter}


def place_of_module(run: SampledSteps, module_id: int | None, parameter: str | None = None) -> Place:
    """Returns the place of a module, or of a parameter in it; of a parameter that no module owns only its name."""
    modules = read_modules(run.data)
    module = modules.get(-1 if module_id is None else module_id)
    if module is None:
        return Place(None, None, parameter, parameter or "a module that is not known")
    top = modules.get(module.root_id, module)
    root = top.name or top.type
    name = ".".join(part for part in (module.path, parameter) if part) or root
    has_roots = len({one.root_id for one in modules.values()}) > 1
    return Place(root, module.path, parameter, f"{root}/{name}" if has_roots and name != root else name)


def place_of_site(run: SampledSteps, site_id: int) -> Place:
    """Returns the place of a site: of the call of a module, or of a parameter."""
    site = run.sites[site_id]
    if site.role in OF_PARAMETERS:
        return place_of_module(run, site.module_id, site.slot)
    place = place_of_module(run, site.module_id)
    nth = f"@{site.nth}" if site.nth else ""
    return place._replace(name=f"{place.name}{nth}{site.slot}")


def describe_site(run: SampledSteps, site_id: int) -> str:
    """Returns a site with its role: `the output of blocks.0`, `the gradient of head.weight`."""
    site, name = run.sites[site_id], place_of_site(run, site_id).name
    if site.role == LOSS:
        return f"the loss{site.slot}"
    if site.role == PARAMETER:
        return name
    if site.role in OF_PARAMETERS:
        return f"the gradient of {name}" if site.role.endswith("grad") else f"the {site.role} of {name}"
    if site.role == GRAD_OUTPUT:
        return f"the gradient at {name}"
    return f"the {BY_NAME[site.role or ''].of_one} of {name}"
