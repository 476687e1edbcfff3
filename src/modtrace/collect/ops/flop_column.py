"""Counts the floating-point operations of many ops, once for each set of shapes."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

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
        #: Whether the count of an op may differ from 0.
        self._is_counted: Callable[[OpSchema], bool] = cache(lambda schema: is_counted(schema.func))
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, found: JoinedOps, schemas: Sequence[OpSchema], geometries: Sequence[Geometry]) -> Ints:
        """Returns the floating-point operations of each op; UNKNOWN where they are not known."""
        flops = np.zeros(len(found.events), np.int64)
        schema = found.events[:, SCHEMA]
        used = np.zeros(len(schemas), bool)
        used[schema] = True
        counted = np.array(
            [is_used and self._is_counted(known) for known, is_used in zip(schemas, used, strict=False)]
        )
        ops = np.flatnonzero(counted[schema])
        known: dict[tuple[int, bytes, bytes], int] = {}
        for op, argument, (given, returned) in zip(
            ops.tolist(), found.argument[ops].tolist(), found.geometries_of(ops), strict=True
        ):
            key = argument, given.tobytes(), returned.tobytes()
            if key not in known:
                uses, outputs = ([geometries[at] for at in side.tolist()] for side in (given, returned))
                known[key] = self._one(found.arguments[argument], uses, outputs)
            flops[op] = known[key]
        return flops

    def _one(self, arguments: Arguments, uses: Sequence[Geometry], outputs: Sequence[Geometry]) -> int:
        key = (arguments, *(use.shape for use in uses), *(output.shape for output in outputs))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known = {}
            found = self._known[key] = _count(arguments, uses, outputs)
        return found


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
