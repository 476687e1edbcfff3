"""An account of every op that knows nothing of modtrace, for other tests to compare with, and the proof of it.

It is made in a run of its own, by a dispatch mode that asks `helpers.truth`: hooks on each module keep a stack, a
function mode walks the graph and writes on each node the module call that made it. Which op made a node is told by
names: the k-th `MulBackward0` of a call is of the k-th `aten.mul` there that had something to differentiate.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import modtrace
from helpers.truth import ACCUMULATE, Comparison, Label, Truth

#: Runs a model; calls what it is given with each optimizer that it makes.
Program = Callable[[nn.Module, Callable[[torch.optim.Optimizer], None]], None]

#: What autograd calls the node of an op whose name is another one.
_NODE_NAMES = {
    "nllloss": "nlllossforward",
    "copybackwards": "copy",
    "torch::autograd::copyslices": "copyslices",
}


class TrueOp(NamedTuple):
    """What is true of one op."""

    name: str
    phase: str | None
    label: Label | None
    accumulation: bool


class TrueOps(Comparison):
    """Keeps what is true of every op that runs inside."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(None, truth)  # it asks no tracker
        self.ops: list[TrueOp] = []
        self.node_of: dict[int, tuple[Any, ...]] = {}  # by backward op: what it works for
        self._differentiated: defaultdict[Any, list[int]] = defaultdict(list)
        self._made: defaultdict[Any, set[int]] = defaultdict(set)
        self._optimizing = False

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Has what the optimizer does be told apart."""
        optimizer.register_step_pre_hook(lambda *_: self._set_optimizing(True))
        optimizer.register_step_post_hook(lambda *_: self._set_optimizing(False))

    def _set_optimizing(self, value: bool) -> None:
        self._optimizing = value

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        number = len(self.ops)
        op = self._true_op(str(function))
        self.ops.append(op)
        node = torch._C._current_autograd_node()
        if op.phase == "backward" and node is not None and node._sequence_nr() != ACCUMULATE:
            self.node_of[number] = self._key_of(node)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            self._differentiated[op.label, _kind_of_node(op.name, tensors[0])].append(number)
        return function(*args, **(kwargs or {}))

    def _true_op(self, name: str) -> TrueOp:
        if self._optimizing:
            return TrueOp(name, "optimizer", None, False)
        answer = self._true_answer(name)
        if answer.phase == "recompute" and not self.truth.stack:
            answer = answer._replace(label=self._latest(answer.label))
        node = torch._C._current_autograd_node()
        accumulates = node is not None and node._sequence_nr() == ACCUMULATE and name.startswith("aten.add")
        return TrueOp(name, answer.phase, answer.label, answer.addition or accumulates)

    def _latest(self, label: Label | None) -> Label | None:
        """What repeats a `forward` without hooks repeats the last call of that module."""
        return None if label is None else Label(label.module, self.truth.counts[label.module])

    def _key_of(self, node: Any) -> tuple[Any, ...]:
        label, stem = (
            node.metadata.get("truth"),
            _stem(node.name().removesuffix("0").removesuffix("Backward")),
        )
        return label, _NODE_NAMES.get(stem, stem), node._sequence_nr()

    def note_nodes(self, nodes: Iterable[Any]) -> None:
        """Nodes that are there, each with its label; told of as often as one likes."""
        for node in nodes:
            label, stem, number = self._key_of(node)
            self._made[label, stem].add(number)

    def forward_op(self, number: int) -> int | None:
        """The op that has made the node which a backward op works for; None: cannot be told."""
        if number not in self.node_of:
            return None
        label, stem, sequence = self.node_of[number]
        made, ops = sorted(self._made[label, stem]), self._differentiated[label, stem]
        if len(made) != len(ops) or sequence not in made:
            return None
        return ops[made.index(sequence)]


class _Walking(Truth):
    """Tells of all nodes that it labels."""

    account: TrueOps

    def _label(self, tensors):
        with torch._C.DisableTorchFunction():
            pending = [each.grad_fn for each in tensors if each.grad_fn is not None]
        found = []
        while pending:
            node = pending.pop()
            if "truth" in node.metadata or "met" in node.metadata or node._sequence_nr() == ACCUMULATE:
                continue
            node.metadata["met"] = True
            found.append(node)
            pending.extend(below for below, _ in node.next_functions if below is not None)
        super()._label(tensors)
        self.account.note_nodes(found)


def true_ops(model: nn.Module, program: Program) -> TrueOps:
    """What is true of a program's ops."""
    truth = _Walking(model)
    truth.account = account = TrueOps(truth)
    try:
        with truth, account:
            program(model, account.watch)
    finally:
        truth.close()
    return account


class Said(NamedTuple):
    """What a recording says of the ops, in order."""

    ops: list[TrueOp]
    forward_ops: list[int | None]
    rows: list[dict[str, Any]]


def said_ops(recording: modtrace.Recording) -> Said:
    """The ops of a recording in the terms of the truth."""
    labels = _labels(recording)
    rows = sorted(recording.table("ops").to_pylist(), key=lambda row: row["op_id"])
    numbers = {row["op_id"]: number for number, row in enumerate(rows)}
    ops = [
        TrueOp(row["name"], row["phase"], labels.get(row["call_id"]), bool(row["accumulation"]))
        for row in rows
    ]
    return Said(ops, [numbers.get(row["forward_op_id"]) for row in rows], rows)


def _labels(recording: modtrace.Recording) -> dict[int, Label]:
    """By call: the how-manieth execution of its module it is, or it is the backward of."""
    paths = {row["module_id"]: row["raw_path"] for row in recording.table("modules").to_pylist()}
    calls = sorted(recording.table("calls").to_pylist(), key=lambda call: call["start_ns"])
    counts: Counter[str] = Counter()
    labels: dict[int, Label] = {}
    for call in calls:
        if call["phase"] in ("forward", "recompute"):
            path = paths[call["module_id"]]
            labels[call["call_id"]] = Label(path, counts[path])
            counts[path] += 1
    for call in calls:
        if call["phase"] == "backward":
            labels[call["call_id"]] = labels[call["forward_call_id"]]
    return labels


def _kind_of_node(op: str, first: torch.Tensor) -> str:
    """The kind of the node that an op makes; one that writes into a view is wrapped."""
    name = op.split(".")[1]
    return "copyslices" if name.endswith("_") and first._is_view() else _stem(name)


def _stem(name: str) -> str:
    return name.replace("_", "").lower()


def test_account_of_a_model_with_a_loss_and_an_optimizer_is_the_one_that_is_written_out_here():
    def program(model, watch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        watch(optimizer)
        hidden = model(torch.ones(2, 3))
        (hidden * hidden).sum().backward()
        optimizer.step()

    account = true_ops(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh()), program)
    linear, tanh = Label("0", 0), Label("1", 0)
    assert account.ops == [
        TrueOp("aten.ones.default", None, None, False),
        TrueOp("aten.t.default", "forward", linear, False),
        TrueOp("aten.mm.default", "forward", linear, False),
        TrueOp("aten.tanh.default", "forward", tanh, False),
        TrueOp("aten.detach.default", "forward", tanh, False),  # of what autograd saves
        TrueOp("aten.mul.Tensor", None, None, False),
        TrueOp("aten.sum.default", None, None, False),
        TrueOp("aten.ones_like.default", None, None, False),
        TrueOp("aten.expand.default", "backward", None, False),
        TrueOp("aten.mul.Tensor", "backward", None, False),
        TrueOp("aten.mul.Tensor", "backward", None, False),
        TrueOp("aten.add.Tensor", "backward", None, True),
        TrueOp("aten.detach.default", "backward", tanh, False),
        TrueOp("aten.tanh_backward.default", "backward", tanh, False),
        TrueOp("aten.t.default", "backward", linear, False),
        TrueOp("aten.mm.default", "backward", linear, False),
        TrueOp("aten.t.default", "backward", linear, False),
        TrueOp("aten.t.default", "backward", linear, False),
        TrueOp("aten.detach.default", "backward", None, False),
        TrueOp("profiler._record_function_enter_new.default", None, None, False),
        TrueOp("aten.add_.Tensor", "optimizer", None, False),
        TrueOp("profiler._record_function_exit._RecordFunction", None, None, False),
    ]
    assert [account.forward_op(number) for number in range(8, 19)] == [6, 5, 5, 5, 3, 3, 2, 2, 2, 1, None]
