"""Finds the sites of parameters and buffers, and the captures that want them."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ...measure.measurers.measurer import Measurement
from ...measure.measurers.want import Want
from ...recording.module_path import join
from ..names.module_names import ModuleNames, NamedModule, ParameterOwner
from .capture_masks import CaptureMasks, Mask
from .measured import MeasuredParameters

#: A function that measures a tensor as captures want it; its name argument is for whole tensors.
Measure = Callable[[torch.Tensor, Want, str], Measurement]


class ParameterSite(NamedTuple):
    """One attribute of a module that holds a parameter or a buffer."""

    slot: str
    owner: NamedModule | None  # None if no known module has it
    path: str
    mask: Mask  # the captures that want it, in any role


class ParameterSites:
    """The sites of all parameters and buffers seen so far. Finding a known one takes 1 us."""

    def __init__(self, names: ModuleNames, capture_masks: CaptureMasks) -> None:
        self._names = names
        self._capture_masks = capture_masks
        self._owned: dict[ParameterOwner, ParameterSite] = {}
        self._unowned: dict[str, ParameterSite] = {}
        self._known_at = -1

    def of_owners(self, owners: Iterable[ParameterOwner]) -> list[ParameterSite]:
        """Returns the sites of a tensor, one for each of these modules, if a capture wants them."""
        if self._known_at != self._names.revision:  # a name learnt late may match a pattern
            self._owned, self._unowned, self._known_at = {}, {}, self._names.revision
        return [site for site in map(self._of_owner, owners) if site.mask]

    def of_unowned(self, name: str) -> list[ParameterSite]:
        """Returns the site of a tensor that no module holds, if a capture wants it."""
        site = self._unowned.get(name)
        if site is None:
            site = self._unowned[name] = ParameterSite(name, None, name, self._capture_masks.of_unowned(name))
        return [site] if site.mask else []

    def _of_owner(self, owner: ParameterOwner) -> ParameterSite:
        site = self._owned.get(owner)
        if site is None:
            path, mask = join(owner.module.path, owner.name), self._capture_masks.of_owner(owner)
            site = self._owned[owner] = ParameterSite(owner.name, owner.module, path, mask)
        return site


def wanted_by(sites: Iterable[ParameterSite], wanted: Mask) -> Mask:
    """Returns those of the captures `wanted` that want at least one of the sites."""
    mask = 0
    for site in sites:
        mask |= site.mask
    return mask & wanted


def store(
    measured: MeasuredParameters,
    found: Measurement,
    role: str,
    sites: Sequence[ParameterSite],
    wanted: Mask,
    below: str = "",
) -> None:
    """Stores one measurement under each of its sites.

    Args:
        below: a suffix of the slots, for tensors that belong to a parameter.
    """
    for site in sites:
        mask = site.mask & wanted
        if mask:
            measured.sites += (found, role, site.slot + below, site.owner, mask)


def name_of(sites: Sequence[ParameterSite], role: str, below: str = "") -> str:
    """Returns the name under which a whole tensor is stored."""
    return f"{sites[0].path}{below}.{role}"
