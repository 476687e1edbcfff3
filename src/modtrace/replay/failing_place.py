"""Finds where in a recording a call raised: the path of the module, and the op."""

from collections.abc import Sequence
from typing import Any

from ..recording.protocols import RecordingData

_Row = dict[str, Any]


def find_failing_place(data: RecordingData) -> str | None:
    """Returns where the exception that left the last outermost call was raised; None if that call returned.

    The place is the path of a module, or the name of a root, and the op: `layers.3.attn, at its op aten.mm.default`.

    An exception that the model caught itself is skipped: something ran after it in the enclosing call.
    """
    calls: list[_Row] = [row for row in data.table("calls").to_pylist() if row["phase"] == "forward"]
    ops: list[_Row] = sorted(data.table("ops").to_pylist(), key=lambda row: int(row["start_ns"]))
    outermost = [row for row in calls if row["parent_call_id"] is None]
    if not outermost or not outermost[-1]["raised"]:
        return None
    call = outermost[-1]
    while (inner := _left_with(call, calls, ops)) is not None:
        call = inner
    own = [row for row in ops if row["call_id"] == call["call_id"]]
    modules = data.table("modules").to_pylist()
    paths = {row["module_id"]: row["path"] or row["name"] or row["type"] for row in modules}
    path: str = paths.get(call["module_id"], "an unknown module")
    return f"{path}, at its op {own[-1]['name']}" if own and own[-1]["raised"] else path


def _left_with(call: _Row, calls: Sequence[_Row], ops: Sequence[_Row]) -> _Row | None:
    """Returns the call directly inside `call` that the same exception has left, or None."""
    inside = [row for row in calls if row["parent_call_id"] == call["call_id"]]
    if not inside or not inside[-1]["raised"]:
        return None
    end_ns = inside[-1]["end_ns"]
    after = any(row["call_id"] == call["call_id"] and row["start_ns"] > end_ns for row in ops)
    return None if after else inside[-1]
