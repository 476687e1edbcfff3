"""What leaves an op by an exception is the user's own, and marks the op and the calls that it ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import modtrace
from collect.ops.test_ops_tensors import op_rows
from modtrace.measure.moments.rows import HostRows

LINEAR = ["aten.ones.default", "aten.t.default", "aten.addmm.default"]


def recording() -> Any:
    return modtrace.record(ops=True, values=None, strict=True)


def names(rec: modtrace.Recording) -> list[str]:
    return [row["name"] for row in op_rows(rec)]


def run(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 2))


class Stopping(nn.Module):
    """Calls an op that raises what it is told to."""

    error: BaseException | None = None

    def forward(self, x):
        return torch.ops.modtrace_errors.stop(x * 2)


@pytest.fixture(scope="module", autouse=True)
def stopping_op() -> Iterator[None]:
    def stop(x):
        if Stopping.error is not None:
            raise Stopping.error
        return x + 1

    library = torch.library.Library("modtrace_errors", "FRAGMENT")
    library.define("stop(Tensor x) -> Tensor")
    library.impl("stop", stop, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_exception_in_an_op_is_the_users_own_and_marks_the_op_and_its_calls(kind):
    model = nn.Sequential(Stopping())
    Stopping.error = kind("on purpose")
    with recording() as rec:
        with pytest.raises(kind, match="on purpose") as caught:
            run(model)
        Stopping.error = None
        run(model)
    assert caught.value.__context__ is None and caught.value.__cause__ is None
    once = [("aten.ones.default", False), ("aten.mul.Tensor", False)]
    assert [(row["name"], row["raised"]) for row in op_rows(rec)] == [
        *once,
        ("modtrace_errors.stop.default", True),
        *once,
        ("modtrace_errors.stop.default", False),
    ]
    assert [call["raised"] for call in rec.table("calls").to_pylist()] == [True, True, False, False]
    assert rec.meta.marks == ()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_op_after_an_exception_is_outside_of_the_calls_that_it_ended(kind):
    model = nn.Sequential(Stopping())
    Stopping.error = kind("on purpose")
    with recording() as rec:
        with pytest.raises(kind):
            run(model)
        torch.zeros(1)
    Stopping.error = None
    last = op_rows(rec)[-1]
    assert (last["name"], last["phase"], last["call_id"]) == ("aten.zeros.default", None, None)


def test_error_of_torch_is_the_same_with_the_users_frames():
    model = nn.Linear(2, 2)
    between = ("module.py", "mode.py")  # with hooks torch calls a module through one more function

    def failure() -> tuple[Any, ...]:
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(1, 3))
        frames = [(Path(entry.path).name, entry.name) for entry in caught.traceback]
        return type(caught.value), str(caught.value), [frame for frame in frames if frame[0] not in between]

    plain = failure()
    with recording() as rec:
        recorded = failure()
    assert recorded == plain
    assert [row["raised"] for row in op_rows(rec)] == [False, False, True]
    assert [call["raised"] for call in rec.table("calls").to_pylist()] == [True]


def test_exception_that_leaves_the_block_leaves_no_mode_and_a_partial_recording(tmp_path):
    model = nn.Linear(2, 2)
    with (
        pytest.raises(RuntimeError, match="cannot be multiplied"),
        modtrace.record(to=tmp_path / "run", ops=True, values=None, strict=True),
    ):
        run(model)
        model(torch.ones(1, 3))
    rec = modtrace.open_recording(tmp_path / "run")
    assert names(rec) == LINEAR * 2
    assert [row["raised"] for row in op_rows(rec)] == [False] * 5 + [True]
    assert _get_current_dispatch_mode_stack() == []


def test_exception_in_a_backward_marks_the_op():
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.ops.modtrace_errors.stop(grad)

    Stopping.error = ValueError("on purpose")
    with recording() as rec:
        y = Refusing.apply(nn.Linear(2, 2)(torch.ones(1, 2)))
        with pytest.raises(ValueError, match="on purpose"):
            y.sum().backward()
    Stopping.error = None
    assert [(row["name"], row["phase"]) for row in op_rows(rec) if row["raised"]] == [
        ("modtrace_errors.stop.default", "backward")
    ]


def test_failure_while_rows_of_ops_are_written_leaves_the_calls(monkeypatch):
    def fail(self, *args):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("modtrace.collect.ops.rows.OpTables.of", fail)
    model = nn.Linear(2, 2)
    with (
        pytest.warns(modtrace.ModtraceWarning, match="records no more ops") as warned,
        modtrace.record(model, ops=True, values=None) as rec,
    ):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert len(warned) == 1
    assert rec.table("calls").num_rows == 2
    assert rec.meta.marks == (
        "ops are incomplete from step 2: modtrace failed at while writing ops: ZeroDivisionError: on purpose",
    )


def test_output_that_cannot_be_measured_has_a_note_and_the_next_ones_are_measured(monkeypatch):
    take, refused = HostRows.take, [MemoryError("no row"), MemoryError("no row")]

    def take_later(rows):
        if refused:
            raise refused.pop()
        return take(rows)

    with modtrace.record(ops=True, values=modtrace.Capture(roles=("op_output",)), strict=True) as rec:
        with monkeypatch.context() as patch:
            patch.setattr(HostRows, "take", take_later)
            torch.ones(2)
        torch.ones(3)
    found = [(row["shape"], row["note"], row["max"]) for row in rec.table("values").to_pylist()]
    assert found == [([2], "not measured: MemoryError: no row", None), ([3], None, 1.0)]
