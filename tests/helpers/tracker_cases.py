"""Asks a tracker about every op and every hook, and PyTorch's own trackers and hooks about the same."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

import modtrace
from modtrace.collect.structures.find import find_slots

#: PyTorch's own, by how a test calls them.
MODULE_TRACKER, MOD_TRACKER = ModuleTracker, ModTracker
BOTH = (MODULE_TRACKER, MOD_TRACKER)


class Ops(TorchDispatchMode):
    """Asks our tracker at every op. Ops in a row that get one answer make one line.

    A line is the phase, the stack, and the ops. Behind the stack stand what else was said: `@1` is the second call
    of the module in its step, `@?` one of an unknown number, `-> l.weight` the parameter that the gradient goes to,
    `for M.c` the module whose backward asked for a recompute, `+` that gradients are added, `unknown` that nobody
    knows.
    """

    def __init__(self, tracker: modtrace.ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.found: list[tuple[str | None, str, str]] = []
        self.contradictions: list[str] = []
        self.steps: list[int | None] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.found.append((*self._answer(name), name))
        return function(*args, **(kwargs or {}))

    def _answer(self, op: str) -> tuple[str | None, str]:
        tracker = self.tracker
        where = tracker.where()
        call = where.call
        said = [" > ".join(where.stack)]
        if call is not None and call.nth != 0:
            said.append(f"@{'?' if call.nth is None else call.nth}")
        if where.phase == "recompute" and where.trigger is not None:
            said.append(f"for {where.trigger}")
        if where.parameter is not None:
            said.append(f"-> {where.parameter}")
        if where.accumulation:
            said.append("+")
        if not where.known:
            said.append("unknown")
        self.steps.append(None if call is None else call.step)
        agreeing = (
            tracker.parents == {"Global", *where.stack}
            and tracker.stack == where.stack
            and tracker.paths == where.paths
            and len(where.paths) == len(where.stack)
            and tracker.phase == where.phase
            and tracker.current == where.current == (where.stack[-1] if where.stack else None)
            and tracker.call == call
            and (call is None or (call.name, call.path) == (where.stack[-1], where.paths[-1]))
            and tracker.is_bw == (torch._C._current_graph_task_id() != -1)
        )
        if not agreeing:
            self.contradictions.append(f"{op}: {where}, {tracker.parents}, {tracker.phase}, {tracker.call}")
        return where.phase, " ".join(each for each in said if each)

    def at(self, *ops: str) -> list[tuple[str | None, str]]:
        """The phase and the stack at each op of these names, in order."""
        return [(phase, stack) for phase, stack, op in self.found if op in ops]

    @property
    def lines(self) -> list[tuple[str | None, str, str]]:
        """What has been seen since the last time this was asked."""
        assert not self.contradictions, self.contradictions
        found, self.found = self.found, []
        return _joined(found)


class TheirOps(TorchDispatchMode):
    """The same for one of PyTorch's: lines of phase, `parents` without "Global" in order of name, and ops."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.tracker = tracker
        self.found: list[tuple[str | None, str, str]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        phase = "backward" if self.tracker.is_bw else "forward"
        names = " ".join(sorted(self.tracker.parents - {"Global"}))
        self.found.append((phase, names, function.overloadpacket.__name__))
        return function(*args, **(kwargs or {}))

    @property
    def lines(self) -> list[tuple[str | None, str, str]]:
        """What has been seen since the last time this was asked."""
        found, self.found = self.found, []
        return _joined(found)

    def at(self, op: str, phase: str = "backward") -> list[str]:
        """The parents at each op of a name, in order."""
        return [names for when, names, each in self.found if (when, each) == (phase, op)]


def _joined(found: list[Any]) -> list[Any]:
    """Entries in a row that differ only in their last part make one."""
    lines: list[Any] = []
    for *head, last in found:
        if lines and [*lines[-1][:2]] == head:
            lines[-1] = (*head, f"{lines[-1][2]} {last}")
        else:
            lines.append((*head, last))
    return lines


@contextlib.contextmanager
def ours(**options: Any) -> Iterator[Ops]:
    """Our tracker, asked at every op."""
    with modtrace.ModuleTracker(strict=True, **options) as tracker, Ops(tracker) as ops:
        yield ops


@contextlib.contextmanager
def theirs(kind: Any) -> Iterator[TheirOps]:
    """One of PyTorch's, asked at every op; what it leaves behind is put right, its complaints are not heard."""
    with left_behind_put_right(), kind() as tracker, TheirOps(tracker) as ops:
        yield ops


@contextlib.contextmanager
def left_behind_put_right() -> Iterator[None]:
    """Takes off global module hooks, and puts back `warnings.formatwarning`, that PyTorch's trackers leave."""
    before = warnings.formatwarning
    dictionaries = (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_hooks_always_called,
    )
    hooks = [dict(each) for each in dictionaries]
    logger = logging.getLogger("torch.utils.module_tracker")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled
        warnings.formatwarning = before
        for dictionary, kept in zip(dictionaries, hooks, strict=True):
            for key in [key for key in dictionary if key not in kept]:
                del dictionary[key]


class Hooks:
    """Our user hooks: what runs when, in order, and the gradients of each module's backward by slot."""

    def __init__(self, tracker: modtrace.ModuleTracker) -> None:
        self.tracker = tracker
        self.found: list[tuple[str, str | None, str]] = []
        self.contradictions: list[str] = []
        self.outputs: dict[str, Gradients] = {}
        self.inputs: dict[str, Gradients] = {}
        tracker.register_user_hooks(self._pre_fw, self._post_fw)
        tracker.register_user_hooks(None, None, self._pre_bw, self._post_bw, with_slots=True)

    def _pre_fw(self, module: nn.Module, args: Any) -> None:
        self._event("pre_fw", module)

    def _post_fw(self, module: nn.Module, args: Any, output: Any) -> None:
        self._event("post_fw", module)

    def _pre_bw(self, module: nn.Module, gradients: "Gradients") -> None:
        self.outputs[self._event("pre_bw", module)] = gradients

    def _post_bw(self, module: nn.Module, gradients: "Gradients") -> None:
        self.inputs[self._event("post_bw", module)] = gradients

    def _event(self, kind: str, module: nn.Module) -> str:
        name = self.tracker.get_known_fqn(module)
        if name not in self.tracker.parents:
            self.contradictions.append(f"{kind} of {name} in {self.tracker.parents}")
        when, kind = kind.split("_")
        self.found.append((kind, self.tracker.phase, f"{'+' if when == 'pre' else '-'}{name}"))
        return str(name)

    @property
    def events(self) -> list[tuple[str, str | None, str]]:
        """What has run since the last time this was asked: lines of kind, phase, and `+M` and `-M` for pre and post."""
        assert not self.contradictions, self.contradictions
        found, self.found = self.found, []
        return _joined(found)

    def assert_same_gradients(self, torchs: "TorchsGradients") -> None:
        """All that we gave is bit for bit what PyTorch gives, and there is no input that we left out."""
        assert {name for name, gradients in torchs.inputs.items() if gradients} <= set(self.inputs)
        for name, gradients in self.outputs.items():
            assert gradients, name
            assert_equal(name, gradients, {slot: torchs.outputs[name].get(slot) for slot in gradients})
        for name, gradients in self.inputs.items():
            assert_equal(name, gradients, torchs.inputs[name])


Gradients = dict[str, torch.Tensor | None]


def assert_equal(name: str, ours: Gradients, torchs: Gradients) -> None:
    """The same slots, and bit for bit the same gradients; None: none has come."""
    assert list(ours) == list(torchs), name
    for slot, gradient in ours.items():
        expected = torchs[slot]
        same = gradient is expected if gradient is None or expected is None else gradient.equal(expected)
        assert same, (name, slot, gradient, expected)


class TorchsGradients:
    """The gradients of the outputs and the inputs of every module of a model, from PyTorch's own hooks.

    Args:
        model: its modules are called once each.
        full: by `register_full_backward_hook`, which knows only positional arguments, plain tensors and tuples of
            them, and no in-place work; else by hooks on the tensors, which give all of a tensor's gradient, so that
            an input which others use too has more of it.
    """

    def __init__(self, model: nn.Module, *, full: bool) -> None:
        self.outputs: dict[str, Gradients] = {}
        self.inputs: dict[str, Gradients] = {}
        self._handles: list[Any] = []
        for path, module in model.named_modules():
            name = f"{type(model).__name__}.{path}" if path else type(model).__name__
            self.outputs[name], self.inputs[name] = {}, {}
            self._handles += self._full(name, module) if full else self._on_tensors(name, module)

    def __enter__(self) -> "TorchsGradients":
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _full(self, name: str, module: nn.Module) -> list[Any]:
        outputs, inputs = self.outputs[name], self.inputs[name]

        def began(module: nn.Module, grad_output: Any) -> None:
            slots = [""] if len(grad_output) == 1 else [f"[{at}]" for at in range(len(grad_output))]
            outputs.update(zip(slots, grad_output, strict=True))

        def called(module: nn.Module, args: Any) -> None:
            inputs.update({slot: None for slot, tensor in _needing_gradient(args)})

        def ended(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            inputs.update({f"[{at}]": each for at, each in enumerate(grad_input) if f"[{at}]" in inputs})

        return [
            module.register_full_backward_pre_hook(began),
            module.register_forward_pre_hook(called),
            module.register_full_backward_hook(ended),
        ]

    def _on_tensors(self, name: str, module: nn.Module) -> list[Any]:
        outputs, inputs = self.outputs[name], self.inputs[name]

        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            for slot, tensor in [*_needing_gradient(args), *_needing_gradient(kwargs)]:
                inputs[slot] = None
                tensor.register_hook(lambda gradient, slot=slot: inputs.update({slot: gradient.clone()}))

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            for slot, tensor in _needing_gradient(output):
                tensor.register_hook(lambda gradient, slot=slot: outputs.update({slot: gradient.clone()}))

        return [
            module.register_forward_pre_hook(called, with_kwargs=True),
            module.register_forward_hook(returned),
        ]


def _needing_gradient(value: Any) -> list[tuple[str, torch.Tensor]]:
    found = find_slots(value)
    return [(slot, tensor) for slot, tensor, _ in found if tensor is not None and tensor.requires_grad]
