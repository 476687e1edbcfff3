"""A tensor that raises when it is asked for something has an odd row that says why; the recording goes on."""

from typing import Any

import pytest
import torch
from torch import nn

import modtrace

#: What a recording may ask a tensor for. Torch itself asks for none of it through Python.
ATTRIBUTES = [
    "_base", "_version", "device", "dtype", "grad", "grad_fn", "is_leaf", "is_nested", "is_quantized", "is_sparse",
    "layout", "names", "ndim", "output_nr", "requires_grad", "shape",
]  # fmt: skip
METHODS = [
    "__bool__", "__eq__", "__format__", "__hash__", "__iter__", "__len__", "__repr__", "clone", "data_ptr", "detach",
    "dim", "element_size", "is_complex", "is_conj", "is_contiguous", "is_neg", "numel", "register_hook", "size",
    "storage_offset", "stride", "untyped_storage",
]  # fmt: skip
#: What a row of `tensors` needs; the layout is only asked for where shape, stride and dtype are new.
SHOWN = ["device", "dtype", "requires_grad", "shape", "storage_offset", "stride", "untyped_storage"]

EVERYTHING = modtrace.Capture(
    roles=[
        "input", "output", "grad_input", "grad_output", "parameter", "parameter_grad", "update", "buffer",
        "optimizer_state", "op_output", "leaf",
    ],
    stats=2, hash=True, sketch=True, sample=4, tensors=True, micro_batches=True,
)  # fmt: skip


class Switch:
    """What the tensors of a test do instead of answering, once it is on."""

    def __init__(self, error: BaseException | None = None, answer: Any = None) -> None:
        self.is_on = False
        self.error = error
        self.answer = answer

    def give(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer


def odd_class(name: str, switch: Switch, base: type[torch.Tensor] = torch.Tensor) -> type[torch.Tensor]:
    """A subclass with one attribute, or one method, of its own."""

    def ask(self: Any) -> Any:
        return switch.give() if switch.is_on else getattr(base, name).__get__(self)

    def call(self: Any, *args: Any) -> Any:
        return switch.give() if switch.is_on else getattr(base, name)(self, *args)

    own = {name: property(ask) if name in ATTRIBUTES else call}
    return type("Odd", (base,), own if name != "__eq__" else {**own, "__hash__": torch.Tensor.__hash__})


class Wrapping(torch.Tensor):
    """Runs its ops on a tensor that it holds, so that ops return it too."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [each.inner if isinstance(each, Wrapping) else each for each in args]
        found = func(*inner, **(kwargs or {}))
        return cls(found) if isinstance(found, torch.Tensor) else found


class Adding(nn.Module):
    """Adds a parameter and a buffer to its input, all of them odd."""

    def __init__(self, kind: type[torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).as_subclass(kind))
        self.register_buffer("held", torch.ones(2, 3).as_subclass(kind))

    def forward(self, x):
        return x + self.weight + self.held


def train(name: str, switch: Switch, record: bool) -> tuple[list[float], Any]:
    """Two steps with an odd input, parameter and buffer: the losses, and the recording."""
    kind = odd_class(name, switch)
    model, extra = Adding(kind), nn.Linear(3, 1)
    x = torch.ones(2, 3).as_subclass(kind).requires_grad_()
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1)
    nn.init.ones_(extra.weight), nn.init.ones_(extra.bias)
    losses: list[float] = []

    def steps() -> None:
        for _ in range(2):
            loss = extra(model(x).as_subclass(torch.Tensor)).sum()
            loss.backward()
            if name != "grad":  # which optimizers themselves ask for
                optimizer.step()
            losses.append(loss.item())

    def run() -> None:
        switch.is_on = True
        try:
            steps()
        finally:
            switch.is_on = False

    if not record:
        run()
        return losses, None
    with modtrace.record(model, ops=True, values=EVERYTHING, strict=True) as rec:
        run()
    return losses, rec


@pytest.mark.parametrize("name", ATTRIBUTES + METHODS)
def test_a_tensor_that_raises_when_it_is_asked_changes_nothing_and_ends_nothing(name):
    plain, _ = train(name, Switch(KeyError("odd")), record=False)
    losses, rec = train(name, Switch(KeyError("odd")), record=True)
    assert losses == plain
    assert list(rec.meta.marks) == []
    names = [row["name"] for row in rec.table("ops").to_pylist()]
    assert [each for each in names if each in ("aten.addmm.default", "aten.sum.default")] == 2 * [
        "aten.addmm.default", "aten.sum.default"
    ]  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize(
    "error", [KeyError("odd 17"), RuntimeError("odd 17"), NotImplementedError("odd 17")], ids=type
)
def test_an_odd_tensor_has_rows_that_say_why(name, error):
    _, rec = train(name, Switch(error), record=True)
    why = {KeyError: "KeyError: 'odd N'"}.get(type(error), f"{type(error).__name__}: odd N")
    rows = [row for row in rec.table("tensors").to_pylist() if row["note"] is not None]
    assert {row["note"] for row in rows} == {why}
    known = {"device": "cpu", "dtype": "float32", "layout": "strided", "shape": [2, 3], "storage": None}
    known |= {"device": {"device": None}, "dtype": {"dtype": None}, "shape": {"shape": []}}.get(name, {})
    assert all({each: row[each] for each in known} == known for row in rows)
    assert rows[0]["requires_grad"]
    if name != "requires_grad":  # values are measured without asking for it
        notes = [row["note"] or "" for row in rec.table("values").to_pylist()]
        assert any(note.startswith(f"not measured: {type(error).__name__}: {error}") for note in notes)


@pytest.mark.parametrize("name, answer", [
    ("shape", None), ("shape", "abc"), ("shape", ([],)), ("dtype", "float32"), ("layout", None), ("device", []),
    ("stride", 7), ("storage_offset", "0"), ("untyped_storage", 3), ("requires_grad", [1]), ("is_contiguous", "no"),
])  # fmt: skip
def test_a_tensor_that_answers_nonsense_ends_nothing(name, answer):
    plain, _ = train(name, Switch(answer=answer), record=False)
    losses, rec = train(name, Switch(answer=answer), record=True)
    assert losses == plain
    assert list(rec.meta.marks) == []
    assert len(rec.table("ops")) > 10


def test_an_interrupt_that_comes_while_a_tensor_is_asked_goes_on_to_the_user():
    with pytest.raises(KeyboardInterrupt):
        train("untyped_storage", Switch(KeyboardInterrupt()), record=True)


@pytest.mark.parametrize("name", ATTRIBUTES + METHODS)
def test_a_tensor_that_ops_return_and_that_raises_ends_nothing(name):
    switch = Switch(KeyError("odd"))
    x = odd_class(name, switch, Wrapping)(torch.ones(2, 3))
    with modtrace.record(ops=True, values=EVERYTHING, strict=True) as rec:
        switch.is_on = True
        torch.ones(3).mul(2)
        y = x * 3
        y.add_(1)
        switch.is_on = False
    names = ["aten.ones.default", "aten.mul.Tensor", "aten.mul.Tensor", "aten.add_.Tensor"]
    assert [row["name"] for row in rec.table("ops").to_pylist()] == names
    assert rec.meta.marks == ()
    notes = {row["note"] for row in rec.table("tensors").to_pylist()}
    assert notes == ({None, "KeyError: 'odd'"} if name in [*SHOWN, "layout"] else {None})
