"""Names the places that findings are about: modules, what they return, and parameters."""

from typing import Any, NamedTuple

from ...recording.module_path import join
from ...recording.role import BY_NAME, GRAD_OUTPUT, LOSS, OF_PARAMETERS, PARAMETER
from ..tables.placement import PlaceName, name_in_text, read_modules
from ..tables.sampled_steps import SampledSteps


class Place(NamedTuple):
    """A module, or a parameter of it."""

    root: str | None
    path: str | None
    parameter: str | None
    name: str  # `blocks.0.fc`, `blocks.0.fc.weight`, of a model its own; see `name_in_text`

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
    name = name_in_text(run.data, root, join(module.path, parameter or ""))
    return Place(root, module.path, parameter, name)


def name_place(run: SampledSteps, place: PlaceName) -> str:
    """Returns the name of the place of a call in a sentence."""
    return place.name if place.root is None else name_in_text(run.data, place.root, place.path or "")


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
    site = run.sites[site_id]
    return describe_tensor(site.role or "", place_of_site(run, site_id).name, site.slot)


def describe_tensor(role: str, name: str, slot: str) -> str:
    """Returns a tensor by its role and its name, which may be unknown; a loss is known by its slot."""
    if role == LOSS or not name:
        return f"the {BY_NAME[role].of_one}{slot}"
    if role == PARAMETER:
        return name
    if role in OF_PARAMETERS:
        return f"the gradient of {name}" if role.endswith("grad") else f"the {role} of {name}"
    return f"the gradient at {name}" if role == GRAD_OUTPUT else f"the {BY_NAME[role].of_one} of {name}"
