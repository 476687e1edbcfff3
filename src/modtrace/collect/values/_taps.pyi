import weakref
from collections.abc import Callable
from typing import Any

from ...measure.measurers.measurer import Measurement
from ...measure.measurers.want import Want
from ..log.segments import Segment
from .capture_masks import Asked

class Tap:
    receive: Callable[[Any, Any], None]
    hooks_ref: weakref.ref[Any] | None
    segment: Segment
    event: int
    slot: str
    mark: int
    more: list[tuple[int, str, int]] | None
    path: str
    output: Measurement | None
    ref: weakref.ref[Any] | None
    version: int | None
    number: int
    task: int
    view: Any
    want: Want | None
    shape: Any
    output_nr: int
    def __init__(self, segment: Segment, receive: Callable[[Any, Any], None]) -> None: ...

def tap_tensor(
    held: tuple[Any, ...],
    tensor: Any,
    known: dict[int, Any],
    sites: list[Any],
    taps: list[Any],
    segment: Segment,
    event: int,
    slot: str,
    asked: Asked,
    first_seq: int | None,
    /,
) -> Any: ...
def tap_gradient(
    held: tuple[Any, ...],
    tap: Tap,
    gradient: Any,
    want: Want,
    sites: list[Any],
    last: tuple[Any, ...] | None,
    /,
) -> tuple[Any, ...]: ...
