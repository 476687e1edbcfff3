"""Finds where in a recording a call raised: the path of the module, and the op."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..recording.protocols import RecordingData

_Row = dict[str, Any]


@dataclass(frozen=True)
class FailingPlace:
    """The place where an exception was raised, written as `layers.3.attn, at its op aten.mm.default`."""

    path: str  # the name, for a root
    call_id: int
    op_id: int | None  # None: no op raised it
    op: str | None

    def __str__(self) -> str:
        return self.path if self.op is None else f"{self.path}, at its op {self.op}"


def find_failing_place(data: RecordingData) -> FailingPlace | None:
    """Returns the place where the exception that left the last outermost call was raised; None if that call returned.

    An exception that the model caught itself is skipped: something ran after it in the enclosing call.
    """
    calls = [row for row in _rows(data, "calls") if row["phase"] == "forward"]
    ops = sorted(_rows(data, "ops"), key=lambda row: int(row["start_ns"]))
    outermost = [row for row in calls if row["parent_call_id"] is None]
    if not outermost or not outermost[-1]["raised"]:
        return None
    call = outermost[-1]
    while (inner := _left_with(call, calls, ops)) is not None:
        call = inner
    own = [row for row in ops if row["call_id"] == call["call_id"]]
    failed = own[-1] if own and own[-1]["raised"] else None
    return FailingPlace(
        path=_paths(data).get(call["module_id"], "an unknown module"),
        call_id=call["call_id"],
        op_id=None if failed is None else failed["op_id"],
        op=None if failed is None else failed["name"],
    )


def _left_with(call: _Row, calls: Sequence[_Row], ops: Sequence[_Row]) -> _Row | None:
    """Returns the call directly inside `call` that the same exception has left, or None."""
    inside = [row for row in calls if row["parent_call_id"] == call["call_id"]]
    if not inside or not inside[-1]["raised"]:
        return None
    end_ns = inside[-1]["end_ns"]
    after = any(row["call_id"] == call["call_id"] and row["start_ns"] > end_ns for row in ops)
    return None if after else inside[-1]


def _rows(data: RecordingData, table: str) -> list[_Row]:
    rows: list[_Row] = data.table(table).to_pylist()
    return rows


def _paths(data: RecordingData) -> dict[int, str]:
    return {row["module_id"]: row["path"] or row["name"] or row["type"] for row in _rows(data, "modules")}
