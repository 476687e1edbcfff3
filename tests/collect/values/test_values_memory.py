"""Measuring holds on to nothing, reads no tensor's value in a step, and leaves no hook on any tensor."""

import copy
import gc
import io
import pickle
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
import zoo
from helpers.ours import assert_bounded, settled
from helpers.stat_rows import names, rows


def record(*arguments: Any, **options: Any) -> modtrace.LiveRecording:
    return modtrace.record(*arguments, strict=True, **options)


# No value of a tensor is read inside a step: on a GPU that would wait for it.

READS = (
    "item", "tolist", "cpu", "numpy", "to", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__",
    "__dlpack__", "__iter__", "__len__", "__contains__", "is_nonzero", "equal", "allclose", "nonzero", "unique",
    "__format__", "__repr__", "__reduce_ex__", "storage", "any", "all", "isnan", "isinf", "isfinite", "aminmax",
)  # fmt: skip

FUNCTIONS = (
    "equal", "allclose", "nonzero", "unique", "any", "all", "isnan", "isinf", "isfinite", "aminmax", "is_nonzero",
)  # fmt: skip


@contextmanager
def nobody_reads(allowed: threading.Event) -> Iterator[list[str]]:
    """Notes who reads a tensor's value while `allowed` is not set."""
    read: list[str] = []

    def guarded(name: str, original: Any) -> Any:
        def read_it(*args: Any, **kwargs: Any) -> Any:
            if not allowed.is_set():
                caller = sys._getframe(1)
                read.append(f"{name} by {caller.f_code.co_filename}:{caller.f_lineno}")
            return original(*args, **kwargs)

        return read_it

    patch = pytest.MonkeyPatch()
    for name in READS:
        patch.setattr(torch.Tensor, name, guarded(name, getattr(torch.Tensor, name)))
    for name in FUNCTIONS:
        patch.setattr(torch, name, guarded(f"torch.{name}", getattr(torch, name)))
    try:
        yield read
    finally:
        patch.undo()


class Mixed(nn.Module):
    """Outputs of many kinds, none of which torch itself reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens):
        x = self.layers(self.embed(tokens))
        return {"x": self.norm(x), "half": x.bfloat16(), "tokens": tokens, "view": x.transpose(0, 1)}


@pytest.mark.parametrize("to_folder", [False, True], ids=["in memory", "to a folder"])
def test_nobody_reads_a_tensors_value_in_a_step(tmp_path, to_folder):
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.tensor([[1, 2, 3], [2, 3, 4]])
    between = threading.Event()
    between.set()
    with (
        record(model, to=tmp_path / "run.modtrace" if to_folder else None) as rec,
        nobody_reads(between) as read,
    ):
        for _ in range(10):
            optimizer.zero_grad()
            between.clear()
            output = model(tokens)
            (output["x"].square().sum() + output["half"].sum() + output["view"].sum()).backward()
            between.set()
            del output
            optimizer.step()  # reads its own count of steps
    assert [each for each in read if "modtrace" in each] == []
    assert read == []
    assert len(rows(rec, role="grad_output")) > 0
    assert len(rows(rec, role="parameter")) == 70


def test_nobody_reads_a_parameter_before_the_optimizer_steps():
    model = Mixed()
    tokens = torch.tensor([[1, 2, 3], [2, 3, 4]])
    between = threading.Event()
    between.set()

    class Quiet(torch.optim.SGD):
        def step(self, closure=None):
            between.set()

    optimizer = Quiet(model.parameters(), lr=0.1)
    with record(model) as rec, nobody_reads(between) as read:
        for _ in range(3):
            model(tokens)["x"].sum().backward()
            between.clear()
            optimizer.step()
            between.set()
            model.zero_grad()
    assert read == []
    assert len(rows(rec, role="parameter_grad")) > 0


def test_a_double_that_reads_is_noticed():
    with nobody_reads(threading.Event()) as read:
        torch.ones(1).item()
        bool(torch.ones(1))
        float(torch.ones(1))
        torch.ones(2).tolist()
        torch.ones(2).cpu()
    assert [each.split()[0] for each in read[:1]] == ["item"]
    assert {each.split()[0] for each in read} >= {"item", "__bool__", "__float__", "tolist", "cpu"}


# What is kept.


class Training:
    """Steps of a tiny model, of which nothing of the user's grows."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).square().sum().backward()
            self.optimizer.step()


KINDS: dict[str, Callable[[Any], modtrace.LiveRecording]] = {
    "to a folder": lambda folder: record(to=folder / "run.modtrace"),
    "in memory": lambda folder: record(max_bytes=2**18),
}
SAMPLED = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.soak] if name == "in memory" else [])
        for name, make in KINDS.items()
    ],
)


@SAMPLED
def test_two_hundred_steps_leave_as_many_objects_as_fifty(tmp_path, make):
    training, counts = Training(), []
    with make(tmp_path) as rec:
        for _ in range(4):
            training.run(50)
            found = settled(rec, lambda: training.run(1))
            for name in ("_Sealed", "_Words"):  # of the rows in memory, which max_bytes bounds
                found.pop(name, None)
            counts.append(found)
    assert_bounded(counts[1:])


@SAMPLED
def test_python_holds_less_than_half_a_megabyte_more(tmp_path, make):
    training = Training()
    training.run(10)
    with make(tmp_path) as rec:
        training.run(50)
        rec.data  # noqa: B018 (writes what has ended)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(3):
                training.run(50)
                rec.data  # noqa: B018
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 2**19


def test_outputs_and_gradients_are_not_kept_alive():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[weakref.ref[Any]] = []
    model[1].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        with record(model):
            for _ in range(3):
                optimizer.zero_grad()
                y = model(torch.ones(2, 4))
                y.register_hook(lambda gradient: alive.append(weakref.ref(gradient)))
                y.sum().backward()
                del y
                assert [each() for each in alive if each() is not None] == []
                optimizer.step()
    finally:
        gc.enable()
    assert len(alive) == 6


def test_rows_of_steps_that_are_not_kept_are_free_again():
    training = Training()
    with record(training.model, steps="1000000:") as rec:
        training.run(50)
        counts = [settled(rec, lambda: training.run(1)) for _ in range(3)]
    assert_bounded(counts)
    assert rows(rec) == []


def test_one_step_without_an_end_takes_its_rows_and_gives_them_back():
    model = nn.Linear(4, 4)
    with record(model) as rec, torch.no_grad():
        rec.step()  # from now on steps end only here
        for _ in range(2):
            for _ in range(1100):  # a block has 1,024 rows
                model(torch.ones(1, 4))
            rec.step()
    assert names(rows(rec), "step", "nth", "order") == [
        (step, nth, nth) for step in range(2) for nth in range(1100)
    ]


# Hooks.


def hooks_of(*tensors: torch.Tensor) -> list[int]:
    return [len(each._backward_hooks or ()) for each in tensors]


class Returns(nn.Module):
    """Returns its parameter, its input and something new."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.weight, x, self.layer(x)


def test_no_hook_is_left_after_each_step_on_tensors_that_live_on():
    model = Returns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    kept: list[torch.Tensor] = []
    with record(model):
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(x)
            assert hooks_of(*outputs) == [1, 1, 1]
            assert hooks_of(*kept) == [0] * len(kept)
            sum(each.sum() for each in outputs).backward()
            optimizer.step()
            kept.append(outputs[2])
    assert hooks_of(*kept, x, *model.parameters()) == [0] * 7


def test_parameter_that_every_call_returns_collects_no_hooks():
    model = Returns()
    x = torch.ones(2, 4)
    with record(model) as rec:
        for _ in range(50):
            weight, _, y = model(x)
            (weight.sum() + y.sum()).backward()
            model.zero_grad()
            assert len(weight._backward_hooks or ()) <= 2
    assert hooks_of(model.weight) == [0]
    gradients = rows(rec, role="grad_output", slot="[0]")
    assert names(gradients, "step", "sum") == [(step, 8.0) for step in range(50)]


def test_parameter_returned_by_two_calls_of_one_step_has_its_gradient_stored_under_both():
    model = Returns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record(model) as rec:
        first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))
        (first[0] + 2 * second[0] + first[2] + second[2]).sum().backward()
        optimizer.step()
    found = rows(rec, role="grad_output", slot="[0]", path="")
    assert sorted(names(found, "nth", "sum")) == [(0, 24.0), (1, 24.0)]


FAILURES: dict[str, Callable[[], BaseException]] = {
    "an error": lambda: ValueError("on purpose"),
    "an interrupt": KeyboardInterrupt,
}
EACH_FAILURE = pytest.mark.parametrize("make_error", FAILURES.values(), ids=FAILURES)


@EACH_FAILURE
def test_no_hook_is_left_when_forward_raises_and_the_run_goes_on(make_error):
    error = make_error()
    model = zoo.Failing(error)
    kept: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda module, args, output: kept.append(output))
    with record(model) as rec:
        for attempt in range(3):
            model.error = error if attempt != 1 else None
            try:
                model(torch.ones(2, 4)).sum().backward()
                model.zero_grad()
            except BaseException as caught:
                assert caught is error
    assert hooks_of(*kept) == [0, 0, 0]
    assert names(rows(rec, role="output", path="first"), "path") == ["first"] * 3
    assert names(rows(rec, role="grad_output", path="first"), "sum") == [8.0]
    assert rec.meta.marks == ()


class RaisesInBackward(torch.autograd.Function):
    error: BaseException | None = None

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if RaisesInBackward.error is not None:
            raise RaisesInBackward.error
        return grad


@EACH_FAILURE
def test_no_hook_is_left_when_backward_raises(make_error, monkeypatch):
    monkeypatch.setattr(RaisesInBackward, "error", make_error())
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with record({"first": first, "second": second}) as rec:
        hidden = first(torch.ones(2, 4))
        y = second(RaisesInBackward.apply(hidden))
        with pytest.raises(BaseException) as caught:
            y.sum().backward()
        assert caught.value is RaisesInBackward.error
        RaisesInBackward.error = None
        first.zero_grad()
        first(torch.ones(2, 4)).sum().backward()
    assert hooks_of(hidden, y) == [0, 0]
    gradients = rows(rec, role="grad_output")
    assert names(gradients, "root", "sum") == [("second", 8.0), ("first", 8.0)]
    assert rec.meta.marks == ()


def test_no_hook_is_left_by_a_recording_that_failed_inside(monkeypatch):
    from modtrace.measure.measurers.measurer import Measurer

    def fails(self, tensor, *more):
        raise ZeroDivisionError("inside of modtrace")

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with modtrace.record(model) as rec:
        first = model(torch.ones(2, 4))
        monkeypatch.setattr(Measurer, "measure", fails)
        with pytest.warns(modtrace.ModtraceWarning, match="internal error") as caught:
            second = model(torch.ones(2, 4))
            (first.sum() + second.sum()).backward()
        third = model(torch.ones(2, 4))
        assert hooks_of(first, second, third) == [0, 0, 0]
    assert len(caught) == 1
    assert len(rec.meta.marks) == 1
    assert rec.table("calls").num_rows >= 9
    assert hooks_of(first, second, third) == [0, 0, 0]


def test_error_in_asking_what_captures_want_does_not_reach_the_forward(monkeypatch):
    from modtrace.collect.values.capture_masks import CaptureMasks

    def fails(self, mask):
        raise ZeroDivisionError("inside of modtrace")

    model = nn.Linear(4, 4)
    with modtrace.record(model) as rec:
        monkeypatch.setattr(CaptureMasks, "want", fails)
        with pytest.warns(modtrace.ModtraceWarning, match="internal error"):
            output = model(torch.ones(2, 4))
    assert output.shape == (2, 4)
    assert rec.table("calls").num_rows == 1


def test_recording_that_cannot_begin_leaves_nothing(monkeypatch):
    from modtrace.collect.scopes import process

    def fails(self):
        raise RuntimeError("on purpose")

    model = nn.Linear(4, 4)
    with monkeypatch.context() as patch:
        patch.setattr("modtrace.collect.recorder.flush_timer.FlushTimer.start", fails)
        with pytest.raises(RuntimeError, match="on purpose"), record(model):
            raise AssertionError("it began")
    left = process.current()
    y = model(torch.ones(2, 4))
    for listener in list(left.subscribers.users if left is not None else ()):
        process.release(listener)  # for the tests that follow
    assert left is None
    assert hooks_of(y) == [0]


# What users do with outputs while they bear a hook.


def test_outputs_are_saved_copied_and_pickled_without_a_warning():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.ones(2, 4, requires_grad=True)
    with record(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = model(x)
        torch.save({"y": y.detach(), "x": nn.Identity()(x)}, io.BytesIO())
        torch.save(y, io.BytesIO())
        for each in (nn.Identity()(x), nn.Identity()(model[0].weight)):
            assert hooks_of(each) != [0]
            again = copy.deepcopy(each)
            assert torch.equal(again, each)
            assert torch.equal(pickle.loads(pickle.dumps(each)), each)
            (again.sum() * 2).backward()
        y.sum().backward()
    assert hooks_of(again) == [0]
