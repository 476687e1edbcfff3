"""One training step under a public tracker, and beside it what really happened, found without modtrace.

The truth's node labels come from walking the graph (`helpers.truth`); its order of execution from a hook on every node.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import modtrace
from helpers.truth import ACCUMULATE, Truth

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, nn.Module, type)


@dataclass(eq=False)
class TrueCall:
    """One execution of a module, by the module's own hooks."""

    module: nn.Module | None  # None: it is no part of the model, and not to be kept alive
    path: str  # from the root of the model; of a shared module below its caller, if it is registered there
    nth: int  # in forward; of a recompute that of the call it repeats
    parent: "TrueCall | None"
    original: "TrueCall | None"  # of a recompute
    inside: "TrueNode | None"  # a recompute: the node whose backward asked for it
    grad: bool
    entered: int
    left: int = -1
    inputs: list[tuple[str, "Key"]] = field(
        default_factory=list
    )  # that need a gradient; slot and where it arrives
    returned: list["Key"] = field(default_factory=list)
    children: list["TrueCall"] = field(default_factory=list)
    nodes: int = 0  # executed

    @property
    def phase(self) -> str:
        return "forward" if self.original is None else "recompute"

    @property
    def key(self) -> tuple[str, int, str]:
        return self.path, self.nth, self.phase

    @property
    def around(self) -> list["TrueCall"]:
        """This call and those that it runs in, innermost first; a recompute's end with the recompute."""
        return [self, *(self.parent.around if self.parent else ())]

    @property
    def stack(self) -> tuple[str, ...]:
        """The paths of its callers when it ran first, outermost first, and its own."""
        return tuple(each.path for each in reversed((self.original or self).around))

    def __repr__(self) -> str:
        return f"{self.path}@{self.nth} ({self.phase})"


@dataclass(eq=False)
class TrueNode:
    """A node of the autograd graph: who made it, and when."""

    call: TrueCall | None
    made: int
    name: str


@dataclass(frozen=True)
class Key:
    """Where a gradient arrives: an output of a node, or a leaf (kept alive, so that its id stays its own)."""

    node: TrueNode | None
    output: int
    leaf: int = 0


@dataclass(eq=False)
class Fired:
    """A node, or an op that a node runs."""

    node: TrueNode | None  # None: it accumulates a gradient in a leaf
    op: str | None
    inside: tuple[TrueNode, ...]  # the nodes that this backward runs in
    received: tuple[torch.Tensor | None, ...] = ()

    @property
    def calls(self) -> list[TrueCall]:
        nodes = (self.node, *reversed(self.inside))
        return [call for node in nodes if node is not None and node.call for call in node.call.around]


@dataclass(eq=False)
class Told:
    """A backward hook of the user's ran."""

    kind: str
    call: tuple[str, int | None, str]  # path, nth, phase
    gradients: tuple[torch.Tensor | None, ...]
    by_slot: dict[str, torch.Tensor | None]


@dataclass(eq=False)
class Sent:
    """A gradient that went along one edge of the graph."""

    source: TrueNode
    inside: tuple[TrueNode, ...]
    to: Key
    gradient: torch.Tensor


class WatchedStep(Truth):
    """Labels every node, hooks every node, and writes one log of nodes, ops and user hooks, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        self.root = type(model).__name__
        self.calls: list[TrueCall] = []
        self.log: list[Fired | Told] = []
        self.sent: list[Sent] = []
        self.forward_truth: list[tuple[str, str, str]] = []
        self.inside: tuple[TrueNode, ...] = ()
        self._clock = 0
        self._kept: list[Any] = []
        self._frames: list[Any] = []  # of what a checkpoint repeats, one for each of the calls in there
        self._everywhere: list[Any] = []
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)

    def name(self, path: str) -> str:
        return f"{self.root}.{path}" if path else self.root

    def path(self, module: nn.Module) -> str:
        """Below what runs, if it is registered there; of no part of the model, the one of its class there."""
        caller = self.stack[-1].path if self.stack else ""
        prefix = f"{caller}." if caller else ""
        paths = self._paths.get(id(module), [f"{prefix}({type(module).__name__}#0)"])
        return next((path for path in paths if prefix and path.startswith(prefix)), paths[0])

    def __enter__(self):
        self._everywhere = [
            register_module_forward_pre_hook(self._enter_unregistered),
            register_module_forward_hook(self._leave_unregistered, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        for handle in self._everywhere:
            handle.remove()
        return super().__exit__(*error)

    # The truth.

    def _enter_unregistered(self, module, args):
        """A module that is no part of the model, as a loss made on the spot: `(CrossEntropyLoss#0)`."""
        if id(module) not in self.names:
            self._enter(module, args, {})

    def _leave_unregistered(self, module, args, output):
        if id(module) not in self.names:
            self._leave(module, args, output)

    def _enter(self, module, args, kwargs):
        self._label(self._tensors((args, kwargs)))
        parent = self.stack[-1] if self.stack else None
        again, path = None, self.path(module)
        if torch._C._current_graph_task_id() >= 0:
            again = self._repeated(module, parent)
            path = again.path
        earlier = [each for each in self.calls if each.path == path]
        nth = len(earlier) if again is None else again.nth
        node = torch._C._current_autograd_node()
        inside = None if node is None else node.metadata.get("truth")
        kept = module if id(module) in self.names else None
        call = TrueCall(kept, path, nth, parent, again, inside, torch.is_grad_enabled(), self._tick())
        if call.grad:
            found = [*tensors_by_slot(args), *tensors_by_slot(kwargs)]
            call.inputs = [(slot, self._key(each)) for slot, each in found if each.requires_grad]
            self._kept.append(found)
        if parent is not None:
            parent.children.append(call)
        self.calls.append(call)
        self.stack.append(call)
        self.forward_truth.append(("pre", path, call.phase))

    def _repeated(self, module: nn.Module, parent: TrueCall | None) -> TrueCall:
        """What a recompute repeats: the calls inside a call come again in their order."""
        if parent is not None:
            assert parent.original is not None
            original = parent.original.children[len(parent.children)]
        else:
            original = self._repeated_outermost(module)
        registered = id(module) in self.names
        assert original.module is (module if registered else None)
        assert registered or f"({type(module).__name__}#0)" in original.path
        return original

    def _repeated_outermost(self, module: nn.Module) -> TrueCall:
        """The same where the checkpoint has called the `forward` around it without hooks: Python's stack says whose."""
        caller, of_caller = None, None
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            owner = frame.f_locals.get("self")
            known = isinstance(owner, nn.Module) and id(owner) in self.names
            if known and owner is not module and caller in (None, owner):
                caller, of_caller = owner, frame  # in the end its outermost frame
            frame = frame.f_back
        if caller is None:
            assert id(module) in self.names
            return self.only_call(module)
        before = sum(each is of_caller for each in self._frames)
        self._frames.append(of_caller)
        return self.only_call(caller).children[before]

    def only_call(self, module: Any) -> TrueCall:
        """The one call in forward of a module that is called once."""
        (call,) = [each for each in self.calls if each.module is module and each.original is None]
        return call

    def _leave(self, module, args, output):
        self._label(self._tensors(output))
        call = self.stack.pop()
        call.left = self._tick()
        self.forward_truth.append(("post", call.path, call.phase))
        if call.grad:
            returned = [each for _, each in tensors_by_slot(output) if each.requires_grad]
            call.returned = [self._key(each) for each in returned]
            self._kept.append(returned)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _key(self, tensor: torch.Tensor) -> Key:
        with torch._C.DisableTorchFunction():
            node = tensor.grad_fn
            return Key(None, 0, id(tensor)) if node is None else Key(node.metadata["truth"], tensor.output_nr)

    def _label(self, tensors) -> None:
        call = self.stack[-1] if self.stack else self._call_of_checkpoint()
        made = self._tick()
        with torch._C.DisableTorchFunction():
            pending = [each.grad_fn for each in tensors if each.grad_fn is not None]
        while pending:
            node = pending.pop()
            if "truth" in node.metadata or node._sequence_nr() == ACCUMULATE:
                continue
            node.metadata["truth"] = TrueNode(call, made, node.name())
            node.register_hook(self._ran)
            pending.extend(below for below, _ in node.next_functions if below is not None)

    @staticmethod
    def _call_of_checkpoint() -> TrueCall | None:
        node = torch._C._current_autograd_node()
        truth = None if node is None else node.metadata.get("truth")
        return None if truth is None else truth.call

    def _label_and_run(self, tensors, *args, **kwargs):
        node = torch._C._current_autograd_node()
        before = self.inside
        if node is not None:
            self.inside = (*before, node.metadata["truth"])
        try:
            return super()._label_and_run(tensors, *args, **kwargs)
        finally:
            self.inside = before

    def _ran(self, grad_inputs, grad_outputs) -> None:
        node = torch._C._current_autograd_node()
        truth = node.metadata["truth"]
        self.log.append(Fired(truth, None, self.inside, grad_outputs))
        if truth.call is not None:
            for call in truth.call.around:
                call.nodes += 1
        for (target, output), gradient in zip(node.next_functions, grad_inputs, strict=True):
            if target is None or gradient is None:
                continue
            leaf = target._sequence_nr() == ACCUMULATE
            to = Key(None, 0, id(target.variable)) if leaf else Key(target.metadata["truth"], output)
            self.sent.append(Sent(truth, self.inside, to, gradient))

    # What follows from it.

    def gradients_of(self, call: TrueCall) -> dict[str, torch.Tensor | None]:
        """For each input the sum over the edges that leave the call for it, in the order in which they ran."""
        found: dict[str, torch.Tensor | None] = {}
        for slot, key in call.inputs:
            total = None
            for sent in self.sent:
                if sent.to == key and sent.source.call is not None and call in sent.source.call.around:
                    total = sent.gradient if total is None else total + sent.gradient
            found[slot] = total
        return found

    def told_of(self) -> list[tuple[int, Told, TrueCall]]:
        """The user hooks of the log, with their places there and their calls.

        Backward goes in reverse, so where the tracker does not know a call's number it is the latest not yet told.
        """
        ran: dict[Any, list[TrueCall]] = {}
        for call in self.calls:
            if self.runs(call):
                ran.setdefault(call.key, []).append(call)
                ran.setdefault((call.path, None, call.phase), []).append(call)
        found: list[tuple[int, Told, TrueCall]] = []
        running: dict[Any, TrueCall] = {}
        for at, told in enumerate(self.log):
            if isinstance(told, Told) and told.kind == "pre":
                running[told.call] = ran[told.call].pop()
                found.append((at, told, running[told.call]))
            elif isinstance(told, Told):
                found.append((at, told, running.pop(told.call)))
        return found

    def runs(self, call: TrueCall) -> bool:
        """Whether there is a backward of the call."""
        return bool(call.nodes) or self.passes(call)

    def passes(self, call: TrueCall) -> bool:
        """Whether no node is its own, and a gradient arrives for what it has returned, from what was made later."""
        return not call.nodes and any(
            sent.to == key and sent.source.made > call.left
            for key in call.returned
            if key.node is None or key.node.made < call.entered
            for sent in self.sent
        )


class UserHooks:
    """All four user hooks of a tracker; what they are told goes into the log of a step, if there is one."""

    def __init__(self, tracker: modtrace.ModuleTracker, step: WatchedStep | None = None) -> None:
        self.tracker = tracker
        self.step = step
        self.log: list[Any] = [] if step is None else step.log
        self.forward: list[tuple[str, str, str]] = []
        self.unnamed: list[str] = []
        self._open: list[tuple[int, tuple[str, int | None, str]]] = []
        self._plain: tuple[Any, ...] = ()
        tracker.register_user_hooks(self._pre_fw, self._post_fw, self._pre_bw, self._post_bw)
        tracker.register_user_hooks(
            pre_bw_hook=self._pre_bw_slots, post_bw_hook=self._post_bw_slots, with_slots=True, several=True
        )

    def _pre_fw(self, module, args):
        self._forward("pre", module)

    def _post_fw(self, module, args, output):
        self._forward("post", module)

    def _forward(self, kind, module):
        self._check_name(kind, module)
        where = self.tracker.where()
        assert where.current in self.tracker.parents
        self.forward.append((kind, where.paths[-1], where.phase))

    def _check_name(self, kind, module):
        if self.step is None:
            return
        paths = self.step._paths.get(id(module))
        if paths is not None:
            names = set(map(self.step.name, paths))
        elif module is not None:
            names = {self.tracker.get_known_fqn(module)}
        else:  # it was made on the spot, and is dead
            names = {name for name in self.tracker.stack if name.endswith("#0)")}
        if not names & self.tracker.parents:
            self.unnamed.append(f"{kind} of {names}: {self.tracker.parents}")

    def _pre_bw(self, module, gradients):
        self._check_name("pre_bw", module)
        self._plain = gradients

    def _post_bw(self, module, gradients):
        self._check_name("post_bw", module)
        self._plain = gradients

    def _pre_bw_slots(self, module, gradients):
        call = self.tracker.call
        phase = "forward" if self.tracker.where().trigger is None else "recompute"
        key = call.path, call.nth, phase
        self._open.append((id(module), key))
        self.log.append(Told("pre", key, self._plain, gradients))

    def _post_bw_slots(self, module, gradients):
        at = max(at for at, (of, _) in enumerate(self._open) if of == id(module))
        _, key = self._open.pop(at)
        kept = gradients
        if self.step is None:  # who holds a gradient keeps the engine from writing into it: not here
            kept = {slot: None if each is None else each.clone() for slot, each in gradients.items()}
        assert all(a is b for a, b in zip(gradients.values(), self._plain, strict=True))
        self.log.append(Told("post", key, self._plain, kept))


class Asker(TorchDispatchMode):
    """Asks the tracker at every op, compares with the truth at once, and notes the op in the log."""

    def __init__(self, tracker: modtrace.ModuleTracker, step: WatchedStep) -> None:
        super().__init__()
        self.tracker = tracker
        self.step = step
        self.wrong: list[tuple[Any, ...]] = []
        self.asked: dict[str | None, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        where = self.tracker.where()
        call = where.call
        true = self._truth()
        said = (
            where.phase,
            None if call is None else (call.name, call.path, call.nth, call.step),
            where.stack,
            where.parameter,
            where.known,
        )
        self.asked[where.phase] = self.asked.get(where.phase, 0) + 1
        if said != true:
            self.wrong.append((str(function), true, said))
        node = torch._C._current_autograd_node()
        if node is not None:
            self.step.log.append(Fired(node.metadata.get("truth"), str(function), self.step.inside))
        return function(*args, **(kwargs or {}))

    def _truth(self) -> tuple[Any, ...]:
        step, node = self.step, torch._C._current_autograd_node()
        top = step.stack[-1] if step.stack else None
        if torch._C._current_graph_task_id() < 0:
            return self._of("forward" if step.stack else None, top)
        if step.stack:
            return self._of("recompute", top)
        if node is None:
            return self._of("backward", None)
        if node._sequence_nr() == ACCUMULATE:
            return self._of_parameter(node.variable)
        if torch.is_grad_enabled():
            return self._of("recompute", self._repeated_forward(node))
        return self._of("backward", node.metadata["truth"].call)

    def _repeated_forward(self, node: Any) -> TrueCall | None:
        """The call whose `forward` a checkpoint repeats without the module's hooks.

        A reentrant one is itself a node of that call; else it is the module whose `forward` runs innermost.
        """
        if "Checkpoint" in node.name():
            return node.metadata["truth"].call
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.step.names:
                return self.step.only_call(owner)
            frame = frame.f_back
        return None

    def _of(self, phase: str | None, call: TrueCall | None) -> tuple[Any, ...]:
        if call is None:
            return phase, None, (), None, True
        stack = tuple(self.step.name(path) for path in call.stack)
        return phase, (stack[-1], call.path, call.nth, 0), stack, None, True

    def _of_parameter(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """Where a gradient is accumulated: in all modules that are around the parameter's owners in every call."""
        step = self.step
        path = step.parameters.get(id(parameter))
        if path is None:  # an input that a reentrant checkpoint has detached: what asked for it still runs
            around = step.inside[-1].call if step.inside else None
            return "backward", None, () if around is None else self._of(None, around)[2], None, True
        owners = {
            name
            for module in step.model.modules()
            if any(each is parameter for each in module._parameters.values())
            for name in step._paths[id(module)]
        }
        stacks = [call.stack for call in step.calls if call.path in owners and call.original is None]
        if not stacks:  # the weights are used without the module: it stands there alone
            return "backward", None, tuple(step.name(owner) for owner in owners), path, True
        first = stacks[0]
        common = tuple(step.name(each) for each in first if all(each in other for other in stacks))
        return "backward", None, common, path, True


def tensors_by_slot(
    value: Any, slot: str = "", seen: frozenset[int] = frozenset()
) -> list[tuple[str, torch.Tensor]]:
    """The tensors in tuples, lists, dicts and the attributes of objects, such as a cache, depth first."""
    if isinstance(value, torch.Tensor):
        return [(slot, value)]
    if isinstance(value, _PLAIN) or callable(value) or id(value) in seen:
        return []
    if isinstance(value, (tuple, list)):
        parts = [(f"[{at}]", each) for at, each in enumerate(value)]
    elif isinstance(value, dict):
        is_record = hasattr(type(value), "__dataclass_fields__")
        parts = [(f".{key}" if is_record else f"[{key!r}]", each) for key, each in value.items()]
    else:
        parts = [(f".{key}", each) for key, each in getattr(value, "__dict__", {}).items()]
    inner = seen | {id(value)}
    return [found for name, each in parts for found in tensors_by_slot(each, slot + name, inner)]
