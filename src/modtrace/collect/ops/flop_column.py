"""Counts the floating-point operations of many ops, once for each set of shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..flops.lookup import count_flops, is_counted
from ..log.nesting import Ints
from ..tensor_ids.argument_reader import TENSOR
from ..tensor_ids.tensor_ids import Geometry
from .arguments import Arguments
from .joined import JoinedOps
from .mode import SCHEMA
from .schemas import OpSchema

#: At most this many different costs are remembered.
_KEPT = 16384

UNKNOWN = -1


class OpFlops:
    """Counts floating-point operations, once for each combination of op and shapes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Arguments, bytes, bytes], int] = {}
        self._counted = np.zeros(0, bool)

    def of(self, found: JoinedOps, schemas: Sequence[OpSchema], geometries: Sequence[Geometry]) -> Ints:
        """Returns the floating-point operations of each op; UNKNOWN where they are not known."""
        flops = np.zeros(len(found.events), np.int64)
        ops = np.flatnonzero(self._are_counted(schemas)[found.events[:, SCHEMA]])
        keys = found.keys_of(ops)
        if len(self._known) >= _KEPT:
            self._known = {}
        known = self._known  # a signal handler may ask meanwhile, and begin anew
        for key in {*keys} - known.keys():
            arguments, *sides = key
            shown = ([geometries[number] for number in np.frombuffer(side, np.int64)] for side in sides)
            known[key] = _count(arguments, *shown)
        flops[ops] = [known[key] for key in keys]
        return flops

    def _are_counted(self, schemas: Sequence[OpSchema]) -> npt.NDArray[np.bool_]:
        """Returns, by number of schema, whether the count of an op may differ from 0."""
        new = schemas[len(self._counted) :]
        if new:
            self._counted = np.append(self._counted, [is_counted(schema.func) for schema in new])
        return self._counted


def _count(arguments: Arguments, uses: Sequence[Geometry], outputs: Sequence[Geometry]) -> int:
    shapes = iter([use.shape for use in uses])
    given = [(name, _with_shapes(value, shapes)) for name, value in arguments.by_name()]
    args = [value for _, value in given[: arguments.positional]]
    kwargs = dict(given[arguments.positional :])
    returned = [output.shape for output in outputs]
    flops = count_flops(arguments.schema.func, args, kwargs, returned[0] if len(returned) == 1 else returned)
    return UNKNOWN if flops is None else flops


def _with_shapes(value: Any, shapes: Iterator[Any]) -> Any:
    """Returns an argument with shapes in place of its tensors."""
    if value is TENSOR:
        return next(shapes)
    if isinstance(value, tuple):
        return [_with_shapes(item, shapes) for item in value]
    return value
