"""Hooks of the user at module boundaries that also run inside compiled code."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cache
from itertools import count
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..torch_internals import (
    graph_task_id,
    is_dynamo_compiling,
    is_functorch_tensor,
    keep_out_of_dynamo,
    unseen,
)

# For torch_internals: the private names that this file needs.


def is_compile_wrapper(module: nn.Module) -> bool:
    """Whether the module is what `torch.compile(module)` returns: its calls run outside of the compiled code."""
    return type(module).__name__ == "OptimizedModule"


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of; None if it is none's."""
    base: torch.Tensor | None = tensor._base
    return base


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls the function when the running backward has ended. To be called inside one."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# End of what is for torch_internals.

_Tensors: TypeAlias = tuple[torch.Tensor, ...]
_Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


@contextmanager
def compile_safe_hooks(
    model: nn.Module,
    pre_fw_hook: Callable[[str, _Tensors], object] | None = None,
    post_fw_hook: Callable[[str, _Tensors, _Tensors], object] | None = None,
    pre_bw_hook: Callable[[str, _Gradients], object] | None = None,
    post_bw_hook: Callable[[str, _Gradients], object] | None = None,
    module_filter: Callable[[str, nn.Module], bool] | None = None,
) -> Iterator[None]:
    """Calls Python functions at the boundaries of all submodules, in eager and in compiled code alike.

    The functions run when the model runs, not when it is traced, and may do anything but change the tensors: print,
    append, `.item()`. They run without recording gradients; what they raise reaches the caller of the model or
    of `backward()`, and what they return is ignored. Under `torch.compile(..., fullgraph=True)` the model stays
    one graph with each of the backends "eager", "aot_eager" and "inductor".

    A model may be compiled before the block or in it: its code with hooks and its code without are told apart, each
    is compiled once, and later blocks with the same hooks use it again. What backward runs after the block calls
    nothing.

    What is passed:
        Tensors are found in tuples, lists, dicts and dataclasses, nested (so also in a `ModelOutput`), in the
        order of arguments, then keyword arguments. Objects of other classes are not looked into. A tuple of
        gradients has a place for each of the call's tensors, with None for one that gets no gradient (compiled
        code gives zeros for what it returns and the loss does not use). A tensor that is there twice has its whole
        gradient at both places.

    When backward is told of:
        `pre_bw_hook` is called as soon as each output that can get a gradient has got it, `post_bw_hook` likewise
        for the inputs. If one of several gets none in this backward, the call comes later: `pre_bw_hook` not after
        `post_bw_hook` of the same call, both not after the end of the backward. A call with no input that needs
        a gradient has no `post_bw_hook`, one with no output that has a `grad_fn` no `pre_bw_hook`, nor one whose
        output is a view (as that of nn.Linear of a three-dimensional input) that is changed in place after it.
        A recompute of a checkpoint runs the forward hooks once more, but not in code of AOTAutograd.

    What the model can notice:
        Where `post_bw_hook` is given, a module gets views of the inputs that need gradients; their gradients are
        those of this call alone. Inputs in a list, dict or dataclass stay as they are: their gradients are those
        of all their uses, and None for leaves. So are those of an input that the module returns, or changes in
        place (then of its value before).
        In the block each module has its class's `forward` as an attribute too: Dynamo asks for that, not for
        hooks, when it asks whether compiled code may be used. If all modules have one of their own, and the model
        was compiled before, call `torch._dynamo.reset()` before the block.
        Compiled in bfloat16 or float16, "inductor" keeps intermediate values in float32 unless somebody looks at
        them: there hooks change the rounding of results. Set `torch._inductor.config.emulate_precision_casts`
        in both runs to compare them.

    Not supported: tensor subclasses in compiled code, CUDA graphs; what `torch.export` traces has no hooks.

    Args:
        model: its submodules get hooks; it itself (path "") gets none. What `torch.compile(model)` returned may
            be given too, with the same paths.
        pre_fw_hook: called with the path and the tensors of the input before each forward.
        post_fw_hook: called with the path, the tensors of the input and those of the output after each forward.
        pre_bw_hook: called with the path and the gradients of the outputs.
        post_bw_hook: called with the path and the gradients of the inputs.
        module_filter: called once with the path, as in `named_modules()`, and the module; False leaves it out.

    Raises:
        TypeError: the model is no module, or a hook cannot be called.
    """
    hooks = (pre_fw_hook, post_fw_hook, pre_bw_hook, post_bw_hook)
    _check(model, hooks, module_filter)
    named = [
        (path, each)
        for path, each in _submodules(model)
        if module_filter is None or module_filter(path, each)
    ]
    _prepare_torch()
    with ExitStack() as stack:
        session = _Session([path for path, _ in named], hooks)
        stack.callback(session.end)
        for index, (_, module) in enumerate(named):
            _install(session, index, module, stack)
        yield


def _check(model: Any, hooks: Sequence[Any], module_filter: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile_safe_hooks needs a torch.nn.Module, not {model!r}")
    names = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook", "module_filter")
    for name, each in zip(names, (*hooks, module_filter), strict=True):
        if each is not None and not callable(each):
            raise TypeError(f"compile_safe_hooks: {name} must be a function or None, not {each!r}")


def _submodules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules below the model by path, without the wrappers that torch.compile makes."""
    for raw_path, module in model.named_modules():
        path = ".".join(part for part in raw_path.split(".") if part != "_orig_mod")
        if path and not is_compile_wrapper(module):
            yield path, module


class _Event(IntEnum):
    PRE_FW = 0
    POST_FW = 1
    PRE_BW = 2
    POST_BW = 3


#: The blocks that are open. All else knows a session by its number, so that compiled code and autograd graphs
#: that outlive a block hold none of the user's functions.
_sessions: dict[int, "_Session"] = {}
_numbers = count()


class _Session:
    """One block: its paths, and the user's functions."""

    def __init__(self, paths: list[str], hooks: Sequence[Callable[..., object] | None]) -> None:
        self.number = next(_numbers)
        self.paths = paths
        self.hooks = hooks
        self.events = tuple(hook is not None for hook in hooks)
        _sessions[self.number] = self

    def end(self) -> None:
        """Forgets the user's functions."""
        _sessions.pop(self.number, None)


# The hooks. Dynamo traces through them.


def _install(session: _Session, index: int, module: nn.Module, stack: ExitStack) -> None:
    """Puts our hooks on a module until the stack is closed.

    The module's place stands in a tensor: compiled code takes that as an input, and so the layers of a model share
    their code with hooks as without, and so does the next block with this one.
    """
    with unseen(), torch.inference_mode(False):
        place = torch.tensor([session.number, index], device="cpu")
    events = session.events

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_dynamo_compiling() and torch.compiler.is_compiling():
            return None
        found: list[torch.Tensor] = []
        in_tuples: list[bool] = []
        _find((args, tuple(kwargs.values())), True, found, in_tuples, 0)
        if is_dynamo_compiling():
            given = _enter_in_graph(place, events, tuple(in_tuples), *found)
        else:
            given = _enter(place, events, in_tuples, found)
            if given is found:
                return None
        fresh = iter([each for each, in_tuple in zip(given, in_tuples, strict=True) if in_tuple])
        new_args = tuple([_with(each, fresh) for each in args])
        return new_args, {name: _with(each, fresh) for name, each in kwargs.items()}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not is_dynamo_compiling() and torch.compiler.is_compiling():
            return None
        given: list[torch.Tensor] = []
        _find((args, tuple(kwargs.values())), True, given, [], 0)
        found: list[torch.Tensor] = []
        in_tuples: list[bool] = []
        _find(output, True, found, in_tuples, 0)
        if is_dynamo_compiling():
            returned = _leave_in_graph(place, events, len(given), *given, *found)
        else:
            returned = _leave(place, events, given, found)
            if returned is found:
                return None
        return _with(output, iter([each for each, fits in zip(returned, in_tuples, strict=True) if fits]))

    keep_out_of_dynamo(before, after, with_callees=False)
    if events[_Event.PRE_FW] or events[_Event.POST_BW]:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if events[_Event.POST_FW] or events[_Event.PRE_BW] or events[_Event.POST_BW]:
        stack.callback(module.register_forward_hook(after, with_kwargs=True, prepend=True).remove)
    _make_stale(module, stack)


#: Containers lie in each other no deeper than this: a list may contain itself.
_MAX_DEPTH = 32


def _find(value: Any, in_tuple: bool, found: list[torch.Tensor], in_tuples: list[bool], depth: int) -> None:
    """Adds the tensors in a value, and whether nothing but tuples is around each. Dynamo cannot trace `find_slots`."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        in_tuples.append(in_tuple)
        return
    parts: Any = ()
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for each in parts:
        _find(each, in_tuple and type(value) is tuple, found, in_tuples, depth + 1)


def _with(value: Any, fresh: Iterator[torch.Tensor]) -> Any:
    """The value with fresh tensors. Lists and dicts stay the very ones: the module may change them."""
    if isinstance(value, torch.Tensor):
        return next(fresh)
    if type(value) is tuple:
        return tuple([_with(each, fresh) for each in value])
    return value


# What the hooks do. In compiled code these calls are nodes of Dynamo's graph; AOTAutograd runs them when it traces,
# and what is left in its graph are the views and the calls of the op. So all here is plain Python in each case.

_Events: TypeAlias = tuple[bool, ...]


#: The calls that are running, innermost last: their inputs, or None if these await no gradient. By the `id` of the
#: module's place, which cannot be read while this is traced, and by thread.
_running: dict[tuple[int, int], list["_Inputs | None"]] = {}


def _enter_in_graph(place: torch.Tensor, events: _Events, in_tuples: tuple[bool, ...], *found: Any) -> Any:
    return tuple(_enter(place, events, in_tuples, list(found)))


def _leave_in_graph(place: torch.Tensor, events: _Events, inputs: int, *found: Any) -> Any:
    return tuple(_leave(place, events, list(found[:inputs]), list(found[inputs:])))


def _enter(
    place: torch.Tensor, events: _Events, in_tuples: Sequence[bool], found: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Tells of a call's inputs; returns what the module shall get instead of them."""
    if events[_Event.PRE_FW]:
        _report(place, _Event.PRE_FW, found, [])
    if not events[_Event.POST_BW]:
        return found
    calls = _running.setdefault((id(place), get_ident()), [])
    if not any(_gets_gradient(each) for each in found):
        calls.append(None)
        return found
    inputs = _Inputs(place, _Event.POST_BW, found)
    calls.append(inputs)
    return inputs.replace(found, in_tuples)


def _leave(
    place: torch.Tensor, events: _Events, given: list[torch.Tensor], found: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Tells of a call's inputs and outputs; returns what the module shall return instead of the latter."""
    if events[_Event.POST_FW]:
        _report(place, _Event.POST_FW, given, found)
    inputs = _end_call(place) if events[_Event.POST_BW] else None
    if inputs is not None:
        found = inputs.end(given, found)
    if events[_Event.PRE_BW] and torch.is_grad_enabled():
        outputs = _Awaited(place, _Event.PRE_BW, found)
        for number, each in enumerate(outputs.tensors(found)):
            outputs.listen(each, number)
        if inputs is not None:
            inputs.before = outputs
    return found


def _end_call(place: torch.Tensor) -> "_Inputs | None":
    calls = _running.get((id(place), get_ident()))
    inputs = calls.pop() if calls else None
    if not calls:
        _running.pop((id(place), get_ident()), None)
    return inputs


def _gets_gradient(tensor: torch.Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_functorch_tensor(tensor)
    )


# Gradients.

#: Under this key a node's `metadata` has who awaits its gradients.
_KEY = "modtrace.compile_safe"


class _Awaited:
    """The gradients of one call's inputs, or of its outputs, gathered until all are there.

    It hangs on autograd nodes and so must not hold one: such a ring is never freed (torch 2.13).
    """

    def __init__(self, place: torch.Tensor, event: _Event, tensors: list[torch.Tensor]) -> None:
        self.place = place
        self.event = event
        ids = [id(each) for each in tensors]
        self.firsts = [ids.index(each) for each in ids]  # where each tensor is for the first time
        self.expected: set[int] = set()
        self.arrived: dict[int, dict[int, torch.Tensor | None]] = {}  # by backward
        self.before: _Awaited | None = None
        self.paths: dict[int, _Path] = {}

    def tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The tensors that get a gradient, at their places; None for others and for repetitions."""
        return [
            each if self.firsts[number] == number and _gets_gradient(each) else None
            for number, each in enumerate(tensors)
        ]

    def listen(self, tensor: torch.Tensor | None, number: int, path: "_Path | None" = None) -> "list[_Entry]":
        """Awaits the gradient of a tensor, beside the others returned; does nothing if it is a leaf."""
        if tensor is None or tensor.grad_fn is None:
            return []
        entries = _entries_of(tensor)
        entries.append(_Entry(self, number, path or _Path.VIEW))
        if not path:
            self.expected.add(number)
        return entries

    def arrive(self, number: int, gradient: torch.Tensor | None) -> None:
        """Takes a gradient; with the last one the hook is called."""
        task = graph_task_id()
        arrived = self.arrived.get(task)
        if arrived is None:
            arrived = self.arrived[task] = {}
            if len(self.expected) > 1:
                at_end_of_backward(lambda: self.report(task))
        arrived[number] = gradient
        if self.expected.issubset(arrived):
            self.report(task)

    def report(self, task: int) -> None:
        """Calls the hook with what has arrived, once."""
        arrived = self.arrived.pop(task, None)
        if arrived is None:
            return
        if self.before is not None:
            self.before.report(task)
        _report(self.place, self.event, [arrived.get(number) for number in self.firsts], [])


class _Inputs(_Awaited):
    """The gradients of one call's inputs."""

    def replace(self, found: list[torch.Tensor], in_tuples: Sequence[bool]) -> list[torch.Tensor]:
        """Views of the inputs: their gradients are those of this call alone. What cannot be replaced stays."""
        stay = {id(each) for each, in_tuple in zip(found, in_tuples, strict=True) if not in_tuple}
        given = list(found)
        self.views: dict[int, _View] = {}
        for number, each in enumerate(self.tensors(found)):
            if each is None:
                continue
            if id(each) not in stay:
                given[number] = each.view_as(each)
                base_entries = self.listen(_whole_base(each), number, _Path.BASE)
                self.listen(each, number, _Path.CALLER)
                entries = self.listen(given[number], number)
                self.views[number] = _View(_ref(given[number]), _ref(each), entries, base_entries)
            else:
                self.listen(each, number)
        return [given[number] for number in self.firsts]

    def end(self, given: list[torch.Tensor], found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ends the call; returns what it shall return: the caller's tensors instead of our views of them.

        nn.Identity returns its input, and others that work in place: the caller would change our view, and so the
        gradient would go past all that listens to it.
        """
        returned = found
        for number, view in self.views.items():
            if number < len(given) and not self._is_below(given[number].grad_fn, given[number].output_nr):
                self.paths[number] = _Path.BASE
                self._lead_others(view.entries, view.base_entries)
            made, caller = view.made(), view.caller()
            if made is None or caller is None or caller.grad_fn is None:
                continue
            if any(each is made for each in found):
                self.paths.setdefault(number, _Path.CALLER)
                self._lead_others(_entries_of(made), _entries_of(caller))
                returned = [caller if each is made else each for each in returned]
        self.views = {}  # it knows the entries, and these know us
        return returned

    def _lead_others(self, past: "list[_Entry]", along: "list[_Entry]") -> None:
        """Leads what else listens to a view, as parts of this module do, where its gradient comes along now."""
        along += [entry for entry in past if entry.awaited is not self]
        past[:] = [entry for entry in past if entry.awaited is self]

    def _is_below(self, node: Any, output: int) -> bool:
        """Whether a view's node is at this one, or a little below it: there are hooks that make views of views."""
        for _ in range(_MAX_HOOKS):
            if node is None:
                return False
            if any(entry.awaited is self and entry.path is _Path.VIEW for entry in _entries_at(node, output)):
                return True
            node, output = node.next_functions[0] if node.next_functions else (None, 0)
        return False


#: Blocks and hooks of the user at one module, at most, that are looked through.
_MAX_HOOKS = 8


class _Path(IntEnum):
    """Where the gradient of an input comes along."""

    VIEW = 0  # from the view that the module got
    BASE = 1  # past it, as it was changed in place
    CALLER = 2  # from the caller's tensor, as the module returned it as it is


class _Entry(NamedTuple):
    """One gradient that is awaited somewhere: by whom, which of theirs it is, and if it comes along which path."""

    awaited: _Awaited
    number: int
    path: _Path

    def is_due(self) -> bool:
        """Whether the gradient comes along this path."""
        return self.awaited.paths.get(self.number, _Path.VIEW) is self.path


def _entries_at(node: Any, output: int) -> list[_Entry]:
    """Who awaits this output's gradient at an autograd node, in the order in which they came."""
    entries: list[_Entry] = node.metadata.get((_KEY, output), [])
    return entries


def _entries_of(tensor: torch.Tensor) -> list[_Entry]:
    """Who awaits the gradient of a tensor that is no leaf; who is added will get it."""
    node: Any = tensor.grad_fn
    output = tensor.output_nr
    entries: list[_Entry] | None = node.metadata.get((_KEY, output))
    if entries is None:
        entries = node.metadata[_KEY, output] = []
        _listen_at(tensor, entries)
    return entries


def _listen_at(tensor: torch.Tensor, entries: list[_Entry]) -> None:
    """Hangs entries on the node that made a tensor."""
    node: Any = tensor.grad_fn
    output = tensor.output_nr

    def run(gradient: torch.Tensor | None) -> None:
        # The last one first: a module before its parts, and what uses a tensor before what made it.
        for entry in reversed(entries):
            if entry.is_due():
                entry.awaited.arrive(entry.number, gradient)

    if type(tensor) is torch.Tensor:
        node.register_prehook(lambda gradients: run(gradients[output]))
    else:
        # AOTAutograd ends its backward at the inputs of the graph, which are no leaves to it: their nodes do not run.
        tensor.register_hook(run)  # type: ignore[no-untyped-call]


_Ref: TypeAlias = Callable[[], torch.Tensor | None]


class _View(NamedTuple):
    """A view that a module got, what it is a view of, and what listens to the view and to its base."""

    made: _Ref
    caller: _Ref
    entries: list[_Entry]
    base_entries: list[_Entry]


def _ref(tensor: torch.Tensor) -> _Ref:
    """A weak reference; while this is traced a strong one, as the tracer drops what later nodes do not name."""
    return weakref.ref(tensor) if type(tensor) is torch.Tensor else lambda: tensor


def _whole_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """What gets the gradient of a view of the tensor that is changed in place; None if it is larger."""
    base = base_of(tensor)
    if base is None:
        return tensor
    return base if base.shape == tensor.shape and base.stride() == tensor.stride() else None


# The op: what compiled code calls.


def _report(
    place: torch.Tensor,
    event: _Event,
    first: Sequence[torch.Tensor | None],
    second: Sequence[torch.Tensor | None],
) -> None:
    """Calls the user's hook: now; if this is traced, so that no tensor is a plain one, when the traced code runs."""
    if type(place) is torch.Tensor:
        _run(place, event, first, second)
    else:
        _op()(list(first), list(second), place, int(event))


def _run(
    place: torch.Tensor,
    event: int,
    first: Sequence[torch.Tensor | None],
    second: Sequence[torch.Tensor | None],
) -> None:
    with unseen():
        number, index = place.tolist()
    session = _sessions.get(number)
    hook = None if session is None else session.hooks[event]
    if session is not None and hook is not None:
        tensors = (tuple(first), tuple(second)) if event == _Event.POST_FW else (tuple(first),)
        with torch.no_grad():
            hook(session.paths[index], *tensors)


@cache
def _op() -> Callable[..., None]:
    """The op. It says that it changes `place`: an op that changes nothing and returns nothing is dropped."""

    def call_hook(
        first: list[torch.Tensor | None], second: list[torch.Tensor | None], place: torch.Tensor, event: int
    ) -> None:
        _run(place, event, first, second)

    op = torch.library.custom_op("modtrace::call_hook", call_hook, mutates_args={"place"})
    op.register_fake(lambda first, second, place, event: None)
    return op


@cache
def _prepare_torch() -> None:
    """Makes the op, and tells Dynamo what to leave alone: as a call in a graph, or where a hook runs in eager."""
    _op()
    keep_out_of_dynamo(_enter, _leave, _find, _with, _listen_at)
    torch.compiler.allow_in_graph(_enter_in_graph)  # type: ignore[no-untyped-call]
    torch.compiler.allow_in_graph(_leave_in_graph)  # type: ignore[no-untyped-call]


# Telling compiled code with our hooks from code without them.

#: How many blocks have put their `forward` on a module.
_stale: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _make_stale(module: nn.Module, stack: ExitStack) -> None:
    """Gives the module its class's `forward` as an attribute: code compiled without hooks is not used for it then.

    Dynamo does not look for hooks when it asks whether such code may be used (`skip_nnmodule_hook_guards`), and
    code is kept per class: hooks on a model of a class compiled before would not run. But it asks whether the
    module has no `forward` in its `__dict__`. Code with hooks asks for these hooks, so it is not used after the
    block, and is used again in the next (torch 2.13, measured).
    """
    if module not in _stale:
        if "forward" in module.__dict__ or type(getattr(type(module), "forward", None)) is not FunctionType:
            return
        module.__dict__["forward"] = MethodType(type(module).forward, module)
    _stale[module] = _stale.get(module, 0) + 1
    stack.callback(_make_fresh, module)


def _make_fresh(module: nn.Module) -> None:
    _stale[module] -= 1
    if not _stale[module]:
        del _stale[module]
        module.__dict__.pop("forward", None)
