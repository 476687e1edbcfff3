"""Hooks of the user at module boundaries that also run inside compiled code."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cache
from itertools import count
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

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
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[no-untyped-call]


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
    append, `.item()`. They run without recording gradients, what they raise reaches the caller of the model or
    of `backward()`, and what they return is ignored. Under `torch.compile(..., fullgraph=True)` the model stays
    one graph with each of the backends "eager", "aot_eager" and "inductor".

    In the block a model is compiled once more for its hooks, also one that was compiled before, and after the
    block it runs without them, from the code it had before. A backward after the block calls nothing.

    What is passed:
        Tensors are found in tuples, lists, dicts and dataclasses, nested (so also in a `ModelOutput`), in the
        order of arguments, then keyword arguments. Objects of other classes are not looked into. A tuple of
        gradients has a place for each of the call's tensors, with None for one that gets no gradient. A tensor
        given twice is there twice, each time with its whole gradient.

    When backward is told of:
        `pre_bw_hook` is called as soon as each output that can get a gradient has got it, `post_bw_hook` likewise
        for the inputs. If one of several gets none in this backward, it is called later: `pre_bw_hook` not after
        `post_bw_hook` of the same call, both not after the end of the backward. A call with no input that needs
        a gradient has no `post_bw_hook`, one with no output that has a `grad_fn` no `pre_bw_hook`.
        A recompute of a checkpoint runs the forward hooks once more in eager, and not in compiled code.

    What the model can notice:
        Where `post_bw_hook` is given, a module gets views of the inputs that need gradients; their gradients are
        those of this call alone. An input in a list, dict or dataclass, or one that the module changes in place,
        is no view: its gradient is that of all its uses (for the latter: of its value before the change), and
        None if it is a leaf.
        In the block each module has a `forward` of its own, a copy of its class's: by it compiled code is told
        apart. Modules that have one already keep it; if all have, and the model was compiled before, call
        `torch._dynamo.reset()` before the block.
        Compiled in bfloat16 or float16, "inductor" keeps intermediate values in float32 unless somebody looks at
        them: there hooks change the rounding of results. Set `torch._inductor.config.emulate_precision_casts`
        in both runs to compare them.

    Not supported: tensor subclasses in compiled code; what `torch.export` traces has no hooks.

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
    named = [(path, each) for path, each in _submodules(model) if module_filter is None or module_filter(path, each)]
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
    """One block: the user's functions, and the calls that are running."""

    def __init__(self, paths: list[str], hooks: Sequence[Callable[..., object] | None]) -> None:
        self.number = next(_numbers)
        self.mark: Any = ModuleType("modtrace.compile_safe.session")
        self.mark.number = self.number
        self.paths = paths
        self.hooks = hooks
        self.running: dict[int, list[_Inputs]] = {}  # by the module's index, innermost last
        with unseen(), torch.inference_mode(False):
            self.keep = torch.zeros((), device="cpu")
        _sessions[self.number] = self

    def end(self) -> None:
        """Forgets the user's functions."""
        _sessions.pop(self.number, None)

    def wants(self, event: _Event) -> bool:
        """Whether the user gave a hook for it."""
        return self.hooks[event] is not None

    def call(self, event: _Event, index: int, *tensors: Any) -> None:
        """Calls the user's hook."""
        hook = self.hooks[event]
        if hook is not None:
            with torch.no_grad():
                hook(self.paths[index], *tensors)


# The hooks. Dynamo traces through them.


def _install(session: _Session, index: int, module: nn.Module, stack: ExitStack) -> None:
    """Puts our hooks on a module until the stack is closed."""
    keep, mark = session.keep, session.mark

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_dynamo_compiling() and torch.compiler.is_compiling():
            return None
        found: list[torch.Tensor] = []
        in_tuples: list[bool] = []
        _find((args, tuple(kwargs.values())), True, found, in_tuples, 0)
        if is_dynamo_compiling():
            given = _enter_in_graph(keep, mark.number, index, tuple(in_tuples), *found)
        else:
            given = _enter(None, mark.number, index, in_tuples, found)
            if given is found:
                return None
        fresh = iter([each for each, in_tuple in zip(given, in_tuples, strict=True) if in_tuple])
        new_args = tuple([_with(each, fresh) for each in args])
        return new_args, {name: _with(each, fresh) for name, each in kwargs.items()}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not is_dynamo_compiling() and torch.compiler.is_compiling():
            return
        found: list[torch.Tensor] = []
        _find((args, tuple(kwargs.values())), True, found, [], 0)
        inputs = len(found)
        _find(output, True, found, [], 0)
        if is_dynamo_compiling():
            _leave_in_graph(keep, mark.number, index, inputs, *found)
        else:
            _leave(None, mark.number, index, found[:inputs], found[inputs:])

    keep_out_of_dynamo(before, after, with_callees=False)
    if session.wants(_Event.PRE_FW) or session.wants(_Event.POST_BW):
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if any(session.wants(each) for each in (_Event.POST_FW, _Event.PRE_BW, _Event.POST_BW)):
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
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


def _enter_in_graph(keep: torch.Tensor, number: int, index: int, in_tuples: tuple[bool, ...], *found: Any) -> Any:
    return tuple(_enter(keep, number, index, in_tuples, list(found)))


def _leave_in_graph(keep: torch.Tensor, number: int, index: int, inputs: int, *found: Any) -> None:
    _leave(keep, number, index, list(found[:inputs]), list(found[inputs:]))


def _enter(
    keep: torch.Tensor | None, number: int, index: int, in_tuples: Sequence[bool], found: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Tells of a call's inputs; returns what the module shall get instead of them."""
    session = _sessions.get(number)
    if session is None:
        return found
    _report(keep, session, _Event.PRE_FW, index, found, [])
    if not session.wants(_Event.POST_BW) or not any(_gets_gradient(each) for each in found):
        return found
    inputs = _Inputs(keep, number, _Event.POST_BW, index, found)
    session.running.setdefault(index, []).append(inputs)
    return inputs.replace(found, in_tuples)


def _leave(
    keep: torch.Tensor | None, number: int, index: int, given: list[torch.Tensor], output: list[torch.Tensor]
) -> None:
    """Tells of a call's inputs and outputs."""
    session = _sessions.get(number)
    if session is None:
        return
    _report(keep, session, _Event.POST_FW, index, given, output)
    inputs = _end_call(session, index, given)
    if inputs is not None:
        inputs.find_moved()
    if session.wants(_Event.PRE_BW) and torch.is_grad_enabled():
        outputs = _Awaited(keep, number, _Event.PRE_BW, index, output)
        for place, each in enumerate(outputs.tensors(output)):
            outputs.listen(each, place)
        if inputs is not None:
            inputs.before = outputs


def _end_call(session: _Session, index: int, given: list[torch.Tensor]) -> "_Inputs | None":
    """The inputs of the call that ends, found by the tensors: calls that raised have not ended."""
    running = session.running.get(index, [])
    for place in range(len(running) - 1, -1, -1):
        if running[place].is_of(given):
            inputs = running[place]
            del running[place:]
            return inputs
    return None


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

    def __init__(
        self, keep: torch.Tensor | None, number: int, event: _Event, index: int, tensors: list[torch.Tensor]
    ) -> None:
        self.keep = keep
        self.number = number
        self.event = event
        self.index = index
        ids = [id(each) for each in tensors]
        self.places = [ids.index(each) for each in ids]  # of a tensor that is there twice: the first one
        self.expected: set[int] = set()
        self.arrived: dict[int, dict[int, torch.Tensor | None]] = {}  # by backward
        self.before: _Awaited | None = None

    def tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The tensors that get a gradient, at their places; None for others and for repetitions."""
        return [
            each if self.places[place] == place and _gets_gradient(each) else None
            for place, each in enumerate(tensors)
        ]

    def listen(self, tensor: torch.Tensor | None, place: int, only_if_moved: bool = False) -> None:
        """Awaits the gradient of a tensor; nothing if it is a leaf."""
        node = None if tensor is None else tensor.grad_fn
        if tensor is None or node is None:
            return
        awaiting = node.metadata.get(_KEY)
        if awaiting is None:
            awaiting = node.metadata[_KEY] = []
            node.register_prehook(_prehook(awaiting))
        awaiting.append((tensor.output_nr, self, place, only_if_moved))
        if not only_if_moved:
            self.expected.add(place)

    def arrive(self, place: int, gradient: torch.Tensor | None, only_if_moved: bool) -> None:
        """Takes a gradient; with the last one the hook is called."""
        if only_if_moved:
            return
        task = graph_task_id()
        arrived = self.arrived.get(task)
        if arrived is None:
            arrived = self.arrived[task] = {}
            if len(self.expected) > 1:
                at_end_of_backward(lambda: self.report(task))
        arrived[place] = gradient
        if self.expected.issubset(arrived):
            self.report(task)

    def report(self, task: int) -> None:
        """Calls the hook with what has arrived, once."""
        arrived = self.arrived.pop(task, None)
        if arrived is None:
            return
        if self.before is not None:
            self.before.report(task)
        session = _sessions.get(self.number)
        if session is not None:
            gradients = [arrived.get(place) for place in self.places]
            _report(self.keep, session, self.event, self.index, gradients, [])


class _Inputs(_Awaited):
    """The gradients of one call's inputs."""

    def replace(self, found: list[torch.Tensor], in_tuples: Sequence[bool]) -> list[torch.Tensor]:
        """Views of the inputs: their gradients are those of this call alone. What cannot be replaced stays."""
        stays = {id(each) for each, in_tuple in zip(found, in_tuples, strict=True) if not in_tuple}
        given = list(found)
        self.views: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self.stay: list[weakref.ref[torch.Tensor]] = []
        self.moved: set[int] = set()
        for place, each in enumerate(self.tensors(found)):
            if each is None:
                continue
            if id(each) in stays:
                self.listen(each, place)
                self.stay.append(weakref.ref(each))
                continue
            given[place] = each.view_as(each)
            self.views.append((place, weakref.ref(given[place])))
            self.listen(_whole_base(each), place, only_if_moved=True)
            self.listen(given[place], place)
        return [given[place] for place in self.places]

    def is_of(self, given: list[torch.Tensor]) -> bool:
        """Whether these are the inputs of this call."""
        ids = {id(each) for each in given}
        views = [view() for _, view in self.views] + [each() for each in self.stay]
        return any(each is not None and id(each) in ids for each in views)

    def find_moved(self) -> None:
        """Finds the views that were changed in place: they hang elsewhere in the graph now, without our hooks."""
        for place, ref in self.views:
            view = ref()
            node = None if view is None else view.grad_fn
            if node is not None and all(entry[1] is not self for entry in node.metadata.get(_KEY, ())):
                self.moved.add(place)

    def arrive(self, place: int, gradient: torch.Tensor | None, only_if_moved: bool) -> None:
        """Takes a gradient from a view, or from what it was made of if it was changed in place."""
        super().arrive(place, gradient, only_if_moved and place not in self.moved)


def _whole_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """What gets the gradient of a view of the tensor that is changed in place; None if it is larger."""
    base = base_of(tensor)
    if base is None:
        return tensor
    return base if base.shape == tensor.shape and base.stride() == tensor.stride() else None


def _prehook(awaiting: list[tuple[int, _Awaited, int, bool]]) -> Callable[[Sequence[torch.Tensor | None]], None]:
    def run(gradients: Sequence[torch.Tensor | None]) -> None:
        # The last one first: a module before its parts, and what uses a tensor before what made it.
        for output, awaited, place, only_if_moved in reversed(awaiting):
            awaited.arrive(place, gradients[output], only_if_moved)

    return run


# The op: what compiled code calls.


def _report(
    keep: torch.Tensor | None,
    session: _Session,
    event: _Event,
    index: int,
    first: Sequence[torch.Tensor | None],
    second: Sequence[torch.Tensor | None],
) -> None:
    """Calls the user's hook: now, or where this is traced (then there is `keep`) each time the traced code runs."""
    if not session.wants(event):
        return
    if keep is not None:
        _op()(list(first), list(second), keep, session.number, int(event), index)
    else:
        _run(first, second, session.number, event, index)


def _run(
    first: Sequence[torch.Tensor | None],
    second: Sequence[torch.Tensor | None],
    number: int,
    event: int,
    index: int,
) -> None:
    session = _sessions.get(number)
    if session is not None:
        tensors = (tuple(first), tuple(second)) if event == _Event.POST_FW else (tuple(first),)
        session.call(_Event(event), index, *tensors)


@cache
def _op() -> Callable[..., None]:
    """The op. It says that it changes `keep`: an op that changes nothing and returns nothing is dropped."""

    def call_hook(
        first: list[torch.Tensor | None],
        second: list[torch.Tensor | None],
        keep: torch.Tensor,
        number: int,
        event: int,
        index: int,
    ) -> None:
        _run(first, second, number, event, index)

    op = torch.library.custom_op("modtrace::call_hook", call_hook, mutates_args={"keep"})
    op.register_fake(lambda first, second, keep, number, event, index: None)
    return op


@cache
def _prepare_torch() -> None:
    """Makes the op, and tells Dynamo not to trace into what the hooks call."""
    _op()
    torch.compiler.allow_in_graph(_enter_in_graph)  # type: ignore[no-untyped-call]
    torch.compiler.allow_in_graph(_leave_in_graph)  # type: ignore[no-untyped-call]


# Telling compiled code with our hooks from code without them.


def _make_stale(module: nn.Module, stack: ExitStack) -> None:
    """Gives the module its class's `forward` as an attribute: code compiled before is not used for it then.

    Dynamo does not look for hooks when it asks whether compiled code may be used (`skip_nnmodule_hook_guards`), and
    code is kept per class: hooks on a model of a class compiled before would not run. But it does ask whether
    a module has no `forward` in its `__dict__` (torch 2.13; where it does not, this is without effect).
    """
    if "forward" in module.__dict__ or type(getattr(type(module), "forward", None)) is not FunctionType:
        return
    forward = MethodType(type(module).forward, module)
    module.__dict__["forward"] = forward
    stack.callback(_take_away, module, forward)


def _take_away(module: nn.Module, forward: MethodType) -> None:
    if module.__dict__.get("forward") is forward:
        del module.__dict__["forward"]
