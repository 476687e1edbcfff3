"""Gives ids to sites, which are referred to by the rows of `values` and by the leaves of ops."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SiteName = tuple[str, str, str | None, int]  # role, slot, op and its n-th; None and -1 where no op is meant
_Site = tuple[int, int, SiteName]  # module_id, nth; -1 for null


class SiteIds:
    """The ids of all sites seen so far. A site has the same id in every step."""

    def __init__(self) -> None:
        self._ids: dict[_Site, int] = {}
        self._written = 0

    def get(
        self, module_ids: Iterable[int], nths: Iterable[int], named: Iterable[SiteName]
    ) -> npt.NDArray[np.int32]:
        """Returns the ids of sites. A site that was not seen before gets a new one."""
        ids = self._ids
        sites = zip(module_ids, nths, named, strict=True)
        return np.array([ids.setdefault(site, len(ids)) for site in sites], np.int32)

    def take_new(self) -> dict[str, Any] | None:
        """Returns the rows of the sites that are new since the last call; None if there are none."""
        first, self._written = self._written, len(self._ids)
        if first == self._written:
            return None
        new = list(self._ids)[first:]
        module_id, nth, named = (list(column) for column in zip(*new, strict=True))
        role, slot, op, op_nth = (list(column) for column in zip(*named, strict=True))
        return {
            "site_id": np.arange(first, self._written, dtype=np.int32),
            "module_id": _null_below_zero(module_id, np.int32),
            "nth": _null_below_zero(nth, np.int32),
            "role": role,
            "slot": slot,
            "op": op,
            "op_nth": _null_below_zero(op_nth, np.int32),
        }


def _null_below_zero(values: Sequence[int], kind: Any) -> Any:
    array = np.array(values, kind)
    return np.ma.masked_array(array, array < 0)
