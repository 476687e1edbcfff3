"""Runs the user's hooks at module boundaries, in eager and in compiled code."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import nn

from ...torch_internals.dynamo import is_compile_wrapper, is_dynamo_compiling, keep_out_of_dynamo
from ...torch_internals.modes import is_exporting, tracing_state, unseen
from ...torch_internals.module_copies import leave_out_of_copies
from ..names.walk import named_modules
from ..names.wrappers import COMPILED_PART
from .gradients import Awaited, AwaitedInputs, gets_gradient, keep_gradients_out_of_dynamo
from .in_graphs import find_in_graph, with_fresh
from .op import HookEvent, Session, hook_op, report
from .stale import make_stale

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

    The functions run when the model runs, not when it is traced, and may do anything except change the tensors: print,
    append, `.item()`. They run under `no_grad`. What they raise reaches the caller of the model or of `backward()`;
    what they return is ignored. Under `torch.compile(..., fullgraph=True)` the model stays one graph with each of the
    backends "eager", "aot_eager" and "inductor".

    A model may be compiled before the block or inside it. Code with hooks and code without them are compiled once each,
    and later blocks with the same hooks use the former again. A backward that runs after the block calls no hook.

    Tensors and gradients:
        Tensors are found in tuples, lists, dicts and dataclasses at any depth (so also in a `ModelOutput`), in
        the order of the arguments and then of the keyword arguments. Objects of other classes are not searched.
        A tuple of gradients has one entry for each tensor of the call, which is None if the tensor gets no
        gradient (compiled code gives zeros for outputs that the loss does not use). A tensor that occurs twice
        has its whole gradient in both entries.

    When backward hooks are called:
        `pre_bw_hook` is called as soon as each output that can get a gradient has got it, `post_bw_hook` likewise
        for the inputs. If a tensor gets no gradient in this backward, the hook is called later: `pre_bw_hook`
        before `post_bw_hook` of the same call, both before the backward ends. A call without an input that needs
        a gradient has no `post_bw_hook`. A call has no `pre_bw_hook` if none of its outputs has a `grad_fn`, or
        if an output is a view (as that of nn.Linear for a three-dimensional input) that is changed in place
        afterwards. A checkpoint's recompute runs the forward hooks again, in compiled code too if it recomputes.

    What the model can notice:
        With `post_bw_hook`, a module gets views of the inputs that need gradients; their gradients are those of
        this call alone. Inputs in a list, dict or dataclass stay as they are: their gradients are those of all
        their uses, and None for leaves. The same holds for an input that the module returns, or changes in place
        (the gradient is then that of its value before).

        Inside the block, each module also has its class's `forward` as an attribute, because Dynamo checks that,
        and not hooks, to decide whether compiled code may be used. If every module has a `forward` of its own,
        and the model was compiled before, call `torch._dynamo.reset()` before the block.

        For bfloat16 and float16, "inductor" keeps intermediate values in float32 unless they are read, so hooks
        change the rounding of results. Set `torch._inductor.config.emulate_precision_casts` in both runs to
        compare them.

    Not supported: tensor subclasses in compiled code, and CUDA graphs. `torch.export`, `torch.jit.trace` and
    `torch.jit.script` trace no hooks.

    Args:
        model: its submodules get hooks; the model itself (path "") gets none. A model that `torch.compile`
            returned has the same paths.
        pre_fw_hook: called with the path and the tensors of the input before each forward.
        post_fw_hook: called with the path, the tensors of the input and those of the output after each forward.
        pre_bw_hook: called with the path and the gradients of the outputs.
        post_bw_hook: called with the path and the gradients of the inputs.
        module_filter: called once with the path, as in `named_modules()`, and the module; False leaves it out.

    Raises:
        TypeError: the model is not a module, or a hook is not callable.
    """
    hooks = (pre_fw_hook, post_fw_hook, pre_bw_hook, post_bw_hook)
    _check(model, hooks, module_filter)
    named = [
        (path, submodule)
        for path, submodule in _submodules(model)
        if module_filter is None or module_filter(path, submodule)
    ]
    _prepare_torch()
    with ExitStack() as stack:
        session = Session([path for path, _ in named], hooks)
        stack.callback(session.end)
        for index, (_, module) in enumerate(named):
            _install(session, index, module, stack)
        yield


def _check(model: Any, hooks: Sequence[Any], module_filter: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile_safe_hooks needs a torch.nn.Module, not {model!r}")
    names = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook", "module_filter")
    for name, function in zip(names, (*hooks, module_filter), strict=True):
        if function is not None and not callable(function):
            raise TypeError(f"compile_safe_hooks: {name} must be a function or None, not {function!r}")


def _submodules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the path and the module of each module below the model, without the wrappers of `torch.compile`."""
    for raw_path, module in named_modules(model):
        path = ".".join(part for part in raw_path.split(".") if part != COMPILED_PART)
        if path and not is_compile_wrapper(module):
            yield path, module


# The hooks, through which Dynamo traces.


def _install(session: Session, index: int, module: nn.Module, stack: ExitStack) -> None:
    """Registers our hooks on a module until the stack is closed.

    A tensor holds the module's number, so that compiled code takes it as an input. Thus the layers of a model, and
    later blocks, share the code with hooks as they share the code without.
    """
    with unseen(), torch.inference_mode(False):
        place = torch.tensor([session.number, index], device="cpu")
    events = session.events

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _is_traced_without_hooks():
            return None
        found: list[torch.Tensor] = []
        in_tuples: list[bool] = []
        find_in_graph((args, tuple(kwargs.values())), True, found, in_tuples, 0)
        if is_dynamo_compiling():
            given = _enter_in_graph(place, events, tuple(in_tuples), *found)
        else:
            given = _enter(place, events, in_tuples, found)
            if given is found:
                return None
        fresh = iter([tensor for tensor, in_tuple in zip(given, in_tuples, strict=True) if in_tuple])
        new_args = tuple([with_fresh(arg, fresh) for arg in args])
        return new_args, {name: with_fresh(kwarg, fresh) for name, kwarg in kwargs.items()}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if _is_traced_without_hooks():
            return None
        given: list[torch.Tensor] = []
        find_in_graph((args, tuple(kwargs.values())), True, given, [], 0)
        found: list[torch.Tensor] = []
        in_tuples: list[bool] = []
        find_in_graph(output, True, found, in_tuples, 0)
        if is_dynamo_compiling():
            returned = _leave_in_graph(place, events, len(given), *given, *found)
        else:
            returned = _leave(place, events, given, found)
            if returned is found:
                return None
        return with_fresh(
            output, iter([tensor for tensor, fits in zip(returned, in_tuples, strict=True) if fits])
        )

    keep_out_of_dynamo(before, after, with_callees=False)
    handles = []
    if events[HookEvent.PRE_FW] or events[HookEvent.POST_BW]:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if events[HookEvent.POST_FW] or events[HookEvent.PRE_BW] or events[HookEvent.POST_BW]:
        handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
    for handle in handles:
        stack.callback(handle.remove)
    stack.callback(leave_out_of_copies(module, hooks=handles))
    make_stale(module, stack)


def _is_traced_without_hooks() -> bool:
    """Returns whether something other than Dynamo traces the call for a compiler, or exports the model."""
    if is_dynamo_compiling():
        return is_exporting()
    return torch.compiler.is_compiling() or tracing_state() is not None


# The work of the hooks. In compiled code these calls are nodes of Dynamo's graph. AOTAutograd runs them when it traces,
# and keeps only the views and the op's calls in its graph, so everything here is plain Python.

_Events: TypeAlias = tuple[bool, ...]


#: The running calls, innermost last, by the `id` of the module's number tensor (which cannot be read while it is
#: traced) and by thread. Each holds its inputs, or None if these await no gradient.
_running: dict[tuple[int, int], list["AwaitedInputs | None"]] = {}


def _enter_in_graph(place: torch.Tensor, events: _Events, in_tuples: tuple[bool, ...], *found: Any) -> Any:
    return tuple(_enter(place, events, in_tuples, list(found)))


def _leave_in_graph(place: torch.Tensor, events: _Events, inputs: int, *found: Any) -> Any:
    return tuple(_leave(place, events, list(found[:inputs]), list(found[inputs:])))


def _enter(
    place: torch.Tensor, events: _Events, in_tuples: Sequence[bool], found: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Reports a call's inputs, and returns the tensors that the module is given in their place."""
    if events[HookEvent.PRE_FW]:
        report(place, HookEvent.PRE_FW, found, [])
    if not events[HookEvent.POST_BW]:
        return found
    calls = _running.setdefault((id(place), get_ident()), [])
    if not any(gets_gradient(tensor) for tensor in found):
        calls.append(None)
        return found
    inputs = AwaitedInputs(place, HookEvent.POST_BW, found)
    calls.append(inputs)
    return inputs.replace(found, in_tuples)


def _leave(
    place: torch.Tensor, events: _Events, given: list[torch.Tensor], found: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Reports a call's inputs and outputs, and returns the tensors that the module returns in place of the outputs."""
    if events[HookEvent.POST_FW]:
        report(place, HookEvent.POST_FW, given, found)
    inputs = _end_call(place) if events[HookEvent.POST_BW] else None
    if inputs is not None:
        found = inputs.end(given, found)
    if events[HookEvent.PRE_BW] and torch.is_grad_enabled():
        outputs = Awaited(place, HookEvent.PRE_BW, found)
        for number, tensor in enumerate(outputs.tensors(found)):
            outputs.listen(tensor, number)
        if inputs is not None:
            inputs.before = outputs
    return found


def _end_call(place: torch.Tensor) -> "AwaitedInputs | None":
    calls = _running.get((id(place), get_ident()))
    inputs = calls.pop() if calls else None
    if not calls:
        _running.pop((id(place), get_ident()), None)
    return inputs


@cache
def _prepare_torch() -> None:
    """Creates the op, and keeps Dynamo out of functions that are nodes of its graph or run in eager code."""
    hook_op()
    keep_out_of_dynamo(_enter, _leave, find_in_graph, with_fresh)
    keep_gradients_out_of_dynamo()
    torch.compiler.allow_in_graph(_enter_in_graph)  # type: ignore[no-untyped-call]
    torch.compiler.allow_in_graph(_leave_in_graph)  # type: ignore[no-untyped-call]
