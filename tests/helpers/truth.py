"""Where each autograd node really comes from, found without sequence numbers: by walking the graph.

A hook on every module keeps a stack. After every torch function, and at every module's entry and exit, the
nodes that can be reached and have no label yet get the module call that is on top. Nodes keep their label in
`metadata`, which lives as long as they do.
"""

import sys
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modtrace.collect.backward.graph_watch import tensors_in
from modtrace.collect.scopes.tracker import ScopeTracker

ACCUMULATE = 2**64 - 1


class Label(NamedTuple):
    """The n-th call of a module since the truth began to watch, whatever its phase."""

    module: str
    nth: int


class Answer(NamedTuple):
    """What is said of one op."""

    op: str
    label: Label | None
    phase: str | None
    parameter: str | None = None
    addition: bool = False


class Truth(TorchFunctionMode):
    """Labels the nodes of everything that runs inside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack: list[Label] = []
        self.counts: dict[str, int] = {}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.parameters = {id(each): name for name, each in model.named_parameters()}
        self.finished: set[tuple[int, int]] = set()  # (graph task, node number): its own work is done
        self.handles = []
        for module in model.modules():
            self.handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module, args, kwargs):
        self._label(self._tensors((args, kwargs)))
        name = self.names[id(module)]
        nth = self.counts[name] = self.counts.get(name, -1) + 1
        self.stack.append(Label(name, nth))

    def _leave(self, module, args, output):
        self._label(self._tensors(output))
        self.stack.pop()

    @staticmethod
    def _tensors(value):
        with torch._C.DisableTorchFunction():
            return tensors_in(value)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._label([each for each in tree_leaves((result, args)) if isinstance(each, torch.Tensor)])
        return result

    def _label(self, tensors) -> None:
        label = self.stack[-1] if self.stack else self._label_of_checkpoint()
        with torch._C.DisableTorchFunction():
            pending = [each.grad_fn for each in tensors if each.grad_fn is not None]
        while pending:
            node = pending.pop()
            if "truth" in node.metadata or node._sequence_nr() == ACCUMULATE:
                continue
            node.metadata["truth"] = label
            number = node._sequence_nr()
            node.register_hook(
                lambda *_, number=number: self.finished.add((torch._C._current_graph_task_id(), number))
            )
            pending.extend(below for below, _ in node.next_functions if below is not None)

    @staticmethod
    def _label_of_checkpoint() -> Label | None:
        """Inside a reentrant checkpoint's recompute: the module call that the checkpoint itself stands in."""
        node = torch._C._current_autograd_node()
        return None if node is None else node.metadata.get("truth")

    def __enter__(self):
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._label_and_run
        return super().__enter__()

    def __exit__(self, *error):
        torch.autograd.backward = self._backward
        return super().__exit__(*error)

    def _label_and_run(self, tensors, *args, **kwargs):
        self._label(self._tensors(tensors))
        return self._backward(tensors, *args, **kwargs)


class Comparison(TorchDispatchMode):
    """Asks the truth and modtrace about every op, and keeps both answers."""

    def __init__(self, tracker: ScopeTracker, truth: Truth) -> None:
        super().__init__()
        self.tracker = tracker
        self.truth = truth
        self.pairs: list[tuple[Answer, object]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.pairs.append((self._true_answer(str(function)), self.tracker.where()))
        return function(*args, **(kwargs or {}))

    def _true_answer(self, op: str) -> Answer:
        node = torch._C._current_autograd_node()
        if torch._C._current_graph_task_id() < 0:
            return Answer(op, self._top(), "forward" if self.truth.stack else None)
        if self.truth.stack:  # modules running inside a backward
            return Answer(op, self._top(), "recompute")
        if torch.is_grad_enabled():  # a checkpointed `forward` itself
            return Answer(op, self._running_forward(), "recompute")
        if node is None:
            return Answer(op, None, "backward")
        if node._sequence_nr() == ACCUMULATE:
            return Answer(op, None, "backward", self.truth.parameters.get(id(node.variable)))
        label = node.metadata.get("truth")
        done = (torch._C._current_graph_task_id(), node._sequence_nr()) in self.truth.finished
        return Answer(op, label, "backward", addition=done)

    def _running_forward(self) -> Label | None:
        """The call that a checkpoint repeats without the module's hooks.

        A reentrant one is itself a node of that call. Else it is taken to be the first call of the module
        whose `forward` runs innermost.
        """
        node = torch._C._current_autograd_node()
        if "Checkpoint" in node.name():
            return node.metadata.get("truth")
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.truth.names:
                name = self.truth.names[id(owner)]
                return Label(name, 0)
            frame = frame.f_back
        return None

    def _top(self):
        return self.truth.stack[-1] if self.truth.stack else None

    def disagreements(self) -> list[tuple[Answer, Answer]]:
        """The ops about which the two differ. Needs the calls closed."""
        labels = _labels(self.tracker)
        wrong = []
        for true, where in self.pairs:
            label = None if where.call is None else labels[where.call]
            parameter = (
                None if where.parameter is None else self.tracker.names.parameter_name(where.parameter)
            )
            said = Answer(true.op, label, where.phase, parameter, bool(where.accumulation))
            if said != true or not where.known:
                wrong.append((true, said))
        return wrong


def _labels(tracker: ScopeTracker):
    """For each call that modtrace saw, the truth's name for it: calls of a module count in order of time."""
    from modtrace.collect.log.segments import CallRef

    calls = []
    for segment in tracker.kept:
        structure = segment.structure()
        for index, event in enumerate(structure.enter_event.tolist()):
            calls.append((int(segment.times[event]), CallRef(segment, index)))
    counts: dict[int, int] = {}
    labels = {}
    for _, call in sorted(calls, key=lambda each: each[0]):
        if call.named.unregistered:  # the truth knows registered modules only: its op is the caller's
            labels[call] = labels[call.parent]
            continue
        named = call.named
        nth = counts[named.module_id] = counts.get(named.module_id, -1) + 1
        labels[call] = Label(named.raw_path, nth)
    return labels
