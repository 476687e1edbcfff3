"""Every private name of PyTorch that modtrace uses, with what happens where it is missing.

Checked on torch 2.13.0 (CPU). `modtrace doctor` prints `check_all()`.
"""

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch import nn

#: What `_sequence_nr()` says of an AccumulateGrad node: it runs as soon as it is ready, in nobody's order.
ACCUMULATE_SEQUENCE_NR = 2**64 - 1


class Check(NamedTuple):
    """One private name, and what is lost without it."""

    module: str
    attribute: str
    what_is_lost: str


CHECKS: tuple[Check, ...] = (
    Check("torch.autograd", "_get_sequence_nr", "attribution of backward: nothing can be recorded"),
    Check("torch._C", "_current_autograd_node", "attribution of backward ops"),
    Check("torch._C", "_current_graph_task_id", "telling recompute from forward: nothing can be recorded"),
    Check(
        "torch._C", "_will_engine_execute_node", "backward times where backward(inputs=...) prunes the graph"
    ),
    Check("torch.autograd.graph", "_engine_run_backward", "backward times, and steps that have no optimizer"),
    Check("torch.autograd", "_engine_run_backward", "the same"),
    Check(
        "torch.nn.modules.module",
        "_global_forward_hooks_with_kwargs",
        "one number in a list of torch's after a recording",
    ),
    Check("torch.autograd.Variable", "_execution_engine", "the last post_bw hooks come after the backward"),
    Check("torch._C._dynamo.eval_frame", "set_code_exec_strategy", "module calls at a compiled block's edge"),
    Check("torch._C._functorch", "is_functorch_wrapped_tensor", "telling torch.func transforms apart"),
    Check("torch.autograd.function", "BackwardCFunction", "telling custom Functions from checkpoints"),
    Check("torch.utils.checkpoint", "_checkpoint_hook", "telling two checkpointed regions apart"),
    Check("torch.utils.checkpoint", "_StopRecomputationError", "an early stop would be shown as raised"),
    Check(
        "torch._C", "_dispatch_keys", "telling plain tensors at a glance: each is looked at from all sides"
    ),
    Check(
        "torch._functorch.pyfunctorch",
        "temporarily_clear_interpreter_stack",
        "statistics of conjugate tensors in torch.func transforms",
    ),
    Check("torch._guards", "CompileContext", "what torch.compile traces would be shown as if it ran"),
    Check("torch.utils._python_dispatch", "_disable_current_modes", "reading a scalar unseen by user modes"),
    Check("torch._C", "_get_dispatch_mode", "telling what higher-order ops trace from calls"),
)


def check_all() -> list[tuple[str, bool, str]]:
    """For every private name: its full name, whether it is there, and what is lost without it."""
    return [
        (f"{each.module}.{each.attribute}", _find(each) is not None, each.what_is_lost) for each in CHECKS
    ]


def _find(check: Check) -> Any:
    found: Any = sys.modules.get(check.module)
    if found is None:
        found = torch
        for part in check.module.split(".")[1:]:
            found = getattr(found, part, None)
    return getattr(found, check.attribute, None)


# On the hot path: plain C functions, 30-40 ns each. torch has had all three since 2.1.
sequence_nr: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr")  # noqa: B009 (not exported, says mypy)
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Any] = torch._C._current_autograd_node

#: Folded to True by Dynamo while it traces, False otherwise. Unlike `is_compiling` it asks nothing else: 20 ns
#: instead of 55.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling

will_engine_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
StopRecomputation: type[BaseException] | tuple[()] = getattr(
    torch.utils.checkpoint, "_StopRecomputationError", ()
)
_CustomFunctionNode: type | tuple[()] = getattr(torch.autograd.function, "BackwardCFunction", ())

_ReentrantCheckpointNode: type | tuple[()] = getattr(
    torch.utils.checkpoint.CheckpointFunction, "_backward_cls", ()
)

_CALL_IMPL: CodeType = nn.Module._call_impl.__code__
_MODULE_FILE = _CALL_IMPL.co_filename
_FUNCTION_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_TORCH_FOLDER = os.path.dirname(torch.__file__)
_CALLING_FILES = (
    _CALL_IMPL.co_filename,
    os.path.join(_TORCH_FOLDER, "fx") + os.sep,
)  # around a graph module's call
_COMPILER_FOLDERS = tuple(
    os.path.join(_TORCH_FOLDER, folder) + os.sep
    for folder in ("_dynamo", "_functorch", "_inductor", "_higher_order_ops")
)
_UNPACK_NAME = "unpack_hook"
_CHECKPOINT_FILE = torch.utils.checkpoint.CheckpointFunction.forward.__code__.co_filename
_LOADER_FILE = os.path.join(_TORCH_FOLDER, "utils", "data", "dataloader.py")
_OPTIMIZER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def is_custom_function(node: Any) -> bool:
    """Whether the autograd node runs a Python `torch.autograd.Function`."""
    return isinstance(node, _CustomFunctionNode)


def is_function(node: Any) -> bool:
    """Whether the autograd node is of a Function, in Python or in C++, rather than of an op.

    Of a node in C++ that torch has no class for it cannot be told (2.13: those of `_foreach` ops are such, too).
    """
    kind: Any = type(node)
    if issubclass(kind, _CustomFunctionNode):
        return True
    return _saved_names(kind) is None and kind.__name__ not in _HIDING_NODES


def is_compiled_function(name: str) -> bool:
    """Whether a node of this name is of a Function that torch.compile has made; kernels that it runs are not seen."""
    return name.startswith("CompiledFunction")


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether the autograd node is torch's own reentrant checkpoint: what it runs is a recompute for sure."""
    return isinstance(node, _ReentrantCheckpointNode)


def keep_out_of_dynamo(*functions: Callable[..., Any], with_callees: bool = True) -> None:
    """Keeps Dynamo from compiling our functions as frames of their own; where it inlines one it traces it still.

    Without the mark Dynamo, when it skips `Module._call_impl`, compiles our hook alone, folds
    `is_dynamo_compiling()` to True in it, and an eager module call is lost without a word; or it compiles
    what the hook calls, and the user's compilation fails over our `sys._getframe` (torch 2.13).

    Args:
        functions: functions with all that is defined inside them.
        with_callees: nothing that they call is compiled either. Not for those that run code of the user's.
    """
    try:
        import torch._C._dynamo.eval_frame as eval_frame

        action = eval_frame._FrameAction
        skip = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
        pending = [function.__code__ for function in functions]
        while pending:
            code = pending.pop()
            eval_frame.set_code_exec_strategy(code, skip)
            pending.extend(each for each in code.co_consts if isinstance(each, CodeType))
    except (ImportError, AttributeError):
        return


def is_compile_wrapper(module: nn.Module) -> bool:
    """Whether the module is what `torch.compile(module)` returns: its calls run outside of the compiled code."""
    return type(module).__name__ == "OptimizedModule"


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run code of torch.compile: nothing inside is seen."""
    return is_compile_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_compilers_own(module: nn.Module, call_frame: FrameType | None, is_unknown_in_region: bool) -> bool:
    """Whether torch.compile has made the module, to run a graph of its own in it: it is none of the user's.

    Such a call comes from the compiler's code, from that of a higher-order op such as `torch.cond`, or from compiled
    code (`is_unknown_in_region`: the module belongs to no model that is known), or the module is only traced; a graph
    module that the user made is called by the user's.
    """
    fx = sys.modules.get("torch.fx")
    inner = module._modules.get("_orig_mod") if is_compile_wrapper(module) else module
    if fx is None or not isinstance(inner, fx.GraphModule):
        return False
    if is_unknown_in_region or is_making_graph():
        return True
    outside = (each.f_code.co_filename for each in frames(call_frame))
    caller = next((name for name in outside if not name.startswith(_CALLING_FILES)), "")
    return caller.startswith(_COMPILER_FOLDERS)


def is_replica(module: nn.Module) -> bool:
    """Whether `torch.nn.parallel.replicate` has made it, as DataParallel does for each device."""
    return bool(module.__dict__.get("_is_replica", False))  # `getattr` may run a `__getattr__` of the user's


def is_tracing() -> bool:
    """Whether torch.compile is tracing: what runs then runs on fake tensors, for no step of the user's."""
    guards = sys.modules.get("torch._guards")
    context = getattr(guards, "CompileContext", None)
    return context is not None and context.try_get() is not None


def is_making_graph() -> bool:
    """Whether `make_fx` traces, as higher-order ops have it do: torch has put its own modes in place of all others.

    What runs below them is part of no step (2.13).
    """
    get_mode: Any = getattr(torch._C, "_get_dispatch_mode", None)
    keys = getattr(torch._C, "_TorchDispatchModeKey", None)
    return get_mode is not None and keys is not None and get_mode(keys.PROXY) is not None


def _never(tensor: torch.Tensor) -> bool:
    return False


#: Whether a tensor belongs to a running `torch.func` transform and must not be touched. 60 ns.
is_functorch_tensor: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", _never
)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, what we do with tensors is seen by no mode, no tensor subclass and no `torch.jit.trace`."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        disable = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
        if disable is not None:
            stack.enter_context(disable())
        tracing = torch._C._get_tracing_state()
        set_tracing: Any = getattr(torch._C, "_set_tracing_state", None)
        if tracing is not None and set_tracing is not None:
            stack.callback(set_tracing, tracing)
            set_tracing(None)
        yield


def frames(start: FrameType | None) -> Iterator[FrameType]:
    """The Python frames from `start` outwards."""
    frame = start
    while frame is not None:
        yield frame
        frame = frame.f_back


def around_call(start: FrameType | None) -> FrameType | None:
    """The frames around the innermost module call."""
    for frame in frames(start):
        if frame.f_code is _CALL_IMPL:
            return frame.f_back
    return None


def caller_of_module(start: FrameType | None) -> FrameType | None:
    """The frame of the code that calls the module whose call is the innermost one."""
    frame = around_call(start)
    while frame is not None and frame.f_code.co_filename == _MODULE_FILE:
        frame = frame.f_back
    return frame


def is_in_module_call(start: FrameType | None) -> bool:
    """Whether the call of a module is among the frames. It is near where one runs: 0.5 us."""
    frame = start
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE:
            return True
        frame = frame.f_back
    return False


def running_modules(start: FrameType | None) -> list[int]:
    """The `id` of each module whose call is among the Python frames, outermost first."""
    calls = [frame for frame in frames(start) if frame.f_code is _CALL_IMPL]
    return [id(frame_local(frame, "self")) for frame in reversed(calls)]


def is_in_custom_function(start: FrameType | None) -> bool:
    """Whether the forward of a custom Function that a backward may reach is among the frames; it turns grad mode off.

    So does the first forward of a reentrant checkpoint. Where grad mode was off before, its node leads nowhere (2.13).
    """
    called = None
    for frame in frames(start):
        if frame.f_code is _FUNCTION_APPLY and called is not None:
            names = called.f_code.co_varnames[: called.f_code.co_argcount]
            node: Any = frame_local(called, names[0]) if names else None
            if not is_custom_function(node) or node.next_functions:  # without `ctx`: it is set up later
                return True
        called = frame
    return False


def is_in_data_loader(start: FrameType | None) -> bool:
    """Whether a `DataLoader` fetches a batch in these frames, with `num_workers=0`."""
    return any(frame.f_code.co_filename == _LOADER_FILE for frame in frames(start))


def is_in_optimizer_step(start: FrameType | None) -> bool:
    """Whether an `Optimizer.step` is among the frames: its post hook does not run when it raises."""
    return any(
        frame.f_code.co_filename == _OPTIMIZER_FILE and frame.f_code.co_name == "wrapper"
        for frame in frames(start)
    )


def checkpoint_being_recomputed(start: FrameType | None) -> Any:
    """The region that a non-reentrant checkpoint is recomputing in these frames, or None.

    Returned is torch's own record of the region (`_CheckpointFrame`): one object a region, weakly referable.
    Looks no further out than the running backward.
    """
    for frame in frames(start):
        code = frame.f_code
        if code.co_name == _UNPACK_NAME and code.co_filename == _CHECKPOINT_FILE:
            return frame_local(frame, "frame")
        if code.co_name == "_engine_run_backward":
            return None
    return None


def running_module(start: FrameType | None) -> nn.Module | None:
    """The module whose method runs innermost in these frames, looking no further out than the running backward."""
    for frame in frames(start):
        if frame.f_code.co_name == "_engine_run_backward":
            return None
        owner = module_of_method(frame)
        owner = _module_of_closure(frame) if owner is None else owner
        if owner is not None:
            return owner
    return None


def is_repeating_forward(start: FrameType | None) -> bool:
    """Whether a checkpoint runs the whole `forward` of a module again, and that is innermost in these frames."""
    for frame in frames(start):
        code = frame.f_code
        if code.co_name in ("_engine_run_backward", _UNPACK_NAME):
            return False
        if _has_self(code) or module_of_method(frame) is not None:
            return code.co_name == "forward"
    return False


def module_given_first(frame: FrameType) -> nn.Module | None:
    """The first positional argument of the function that a frame runs, if it is a module. 1 us."""
    code = frame.f_code
    if code.co_argcount:
        return _to_module(frame_local(frame, code.co_varnames[0]))
    if code.co_flags & _CO_VARARGS:
        given = frame_local(frame, code.co_varnames[code.co_kwonlyargcount])
        return _to_module(given[0]) if isinstance(given, tuple) and given else None
    return None


def module_of_method(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs: its first argument, if it is called `self` or its class holds the code.

    Python 3.10 does not tell where code was written: there only `self` counts. 1 us for a method, else 0.5 us.
    """
    code = frame.f_code
    has_self = _has_self(code)
    if not has_self and "." not in _qualname(code):
        return None
    owner = module_given_first(frame)
    return owner if owner is not None and (has_self or _is_written_in_class(frame, owner)) else None


def _module_of_closure(frame: FrameType) -> nn.Module | None:
    """The module in whose method the function of a frame was made: checkpoints are given such functions."""
    modules = {name: _to_module(frame_local(frame, name)) for name in frame.f_code.co_freevars}
    if modules.get("self") is not None:
        return modules["self"]
    own = [each for each in modules.values() if each is not None and _is_written_in_class(frame, each)]
    return own[0] if len(own) == 1 else None


def _has_self(code: CodeType) -> bool:
    return code.co_argcount > 0 and code.co_varnames[0] == "self"


def _qualname(code: CodeType) -> str:
    return getattr(code, "co_qualname", "")  # new in Python 3.11


def _is_written_in_class(frame: FrameType, owner: nn.Module) -> bool:
    """Whether the code of a frame stands in the body of a class of the module's, perhaps in a function there."""
    name, file = _qualname(frame.f_code), frame.f_globals.get("__name__")
    kinds = type(owner).__mro__
    return any(kind.__module__ == file and name.startswith(f"{kind.__qualname__}.") for kind in kinds)


def _to_module(value: Any) -> nn.Module | None:
    return (
        value if issubclass(type(value), nn.Module) else None
    )  # `isinstance` would run a `__class__` of the user's


def frame_local(frame: FrameType, name: str) -> Any:
    """A local of a running frame, read so that nothing in the frame lives longer for it.

    Before Python 3.13 `f_locals` leaves a copy of all locals in the frame until it ends, which would keep
    activations alive that the frame has let go; so the copy is emptied again, unless the function has asked for
    its `locals()` and keeps them: it is the same dictionary.
    """
    values = frame.f_locals
    value = values.get(name)
    if (
        sys.version_info < (3, 13)
        and frame.f_code.co_flags & _CO_OPTIMIZED
        and sys.getrefcount(values) <= _UNSHARED
    ):
        values.clear()
    return value


def register_leave_hook(hook: Callable[..., None]) -> Any:
    """A global forward hook that is given keyword arguments, and is called when the call raises, without them then.

    Removing torch's own handle (2.13) leaves the hook's number in the list of those that take keyword arguments.
    """
    handle = torch.nn.modules.module.register_module_forward_hook(hook, with_kwargs=True, always_call=True)
    return _LeaveHook(handle)


class _LeaveHook:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        with_kwargs = getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {})
        with_kwargs.pop(self._handle.id, None)


def call_arguments(call_frame: FrameType | None) -> tuple[Any, Any]:
    """The arguments of the module call whose pre-hooks run in this frame; none where a method is called."""
    if call_frame is None or call_frame.f_code.co_filename != _MODULE_FILE:
        return (), {}
    args, kwargs = frame_local(call_frame, "args"), frame_local(call_frame, "kwargs")
    return args if isinstance(args, tuple) else (), kwargs if isinstance(kwargs, dict) else {}


def call_kwargs(call_frame: FrameType) -> dict[str, Any] | None:
    """The keyword arguments of the module call whose hooks run in this frame; a global hook is not given them."""
    kwargs = frame_local(call_frame, "kwargs")
    return kwargs if isinstance(kwargs, dict) else None


_UNSHARED = 3  # references to a dictionary that the frame, a local of ours and the call of `getrefcount` hold
_CO_VARARGS = 0x4
_CO_OPTIMIZED = 0x1  # a function: its f_locals is a copy. A module's is its very namespace.


class EngineEntry:
    """Wraps the one Python function through which every backward enters the autograd engine.

    `torch.autograd.backward`, `torch.autograd.grad` and `Tensor.backward` all go through
    `_engine_run_backward`, which stands under two names; torch.compiler itself replaces these two.
    """

    _HOLDERS: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)

    def __init__(self) -> None:
        self._original: Callable[..., Any] | None = None

    def replace(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Puts `wrap(original)` in the function's place. Does nothing where the function is missing."""
        original = getattr(torch.autograd.graph, "_engine_run_backward", None)
        if original is None or self._original is not None:
            return
        self._original = original
        self._wrapper = wrap(original)
        for holder in self._HOLDERS:
            holder._engine_run_backward = self._wrapper

    def restore(self) -> None:
        """Puts the original back, unless somebody else has wrapped ours since: then ours stays, and passes on."""
        for holder in self._HOLDERS:
            if self._original is not None and getattr(holder, "_engine_run_backward", None) is self._wrapper:
                holder._engine_run_backward = self._original
        self._original = None


# Tensors.

# What autograd knows of a tensor, whatever a subclass makes of these names: a property of the user's may raise, which
# must not end a recording. 50 ns more than the attribute.
_Own: Any = torch.Tensor
grad_fn_of: Callable[[torch.Tensor], Any] = _Own.grad_fn.__get__
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _Own.grad.__get__
output_nr_of: Callable[[torch.Tensor], int] = _Own.output_nr.__get__
requires_grad_of: Callable[[torch.Tensor], bool] = _Own.requires_grad.__get__
is_leaf: Callable[[torch.Tensor], bool] = _Own.is_leaf.__get__
#: The tensor that this one is a view of; None if it is none's.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _Own._base.__get__


#: The set of dispatch keys of a tensor as one number (`DispatchKeySet.raw_repr`): 0.4 us say whether a tensor is
#: anything else than a strided one in CPU memory. None where torch lacks it.
_dispatch_keys: Callable[[Any], Any] | None = getattr(torch._C, "_dispatch_keys", None)


def kind_of(tensor: torch.Tensor) -> int:
    """What the dispatcher takes the tensor for, as a number; -1 where torch does not say."""
    return -1 if _dispatch_keys is None else int(_dispatch_keys(tensor).raw_repr())


def plain_kinds() -> tuple[int, int] | None:
    """`kind_of` strided tensors in CPU memory: of ordinary ones, and of those made in inference mode."""
    if _dispatch_keys is None:
        return None
    with unseen():
        with torch.inference_mode(False):
            ordinary = torch.empty(0, device="cpu")
        with torch.inference_mode(True):
            inference = torch.empty(0, device="cpu")
    return kind_of(ordinary), kind_of(inference)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Inside, ops on plain tensors are not part of a running `torch.func` transform."""
    pyfunctorch = sys.modules.get("torch._functorch.pyfunctorch")
    clear = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", None)
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    if clear is None or peek is None or peek() is None:
        yield
    else:
        with clear():
            yield


def wrapped_by_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrapper of a running `torch.func` transform."""
    inner: torch.Tensor = torch._C._functorch.get_unwrapped(tensor)
    return inner


def batched_below(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of all examples that `vmap` shows one of; None if the wrapper is another transform's."""
    return wrapped_by_functorch(tensor) if torch._C._functorch.is_batchedtensor(tensor) else None


def functional_below(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `torch.func.functionalize` has wrapped; None if it has not."""
    is_functional = getattr(torch, "_is_functional_tensor", None)
    if is_functional is None or not is_functional(tensor):
        return None
    inner: torch.Tensor = getattr(torch, "_from_functional_tensor")(tensor)  # noqa: B009 (unknown to mypy)
    return inner


def is_batched_tensor(tensor: torch.Tensor) -> bool:
    """Whether `vmap` shows this tensor as one of many."""
    return is_functorch_tensor(tensor) and batched_below(tensor) is not None


#: How many function modes would hear of it when an attribute of a tensor is read. 30 ns.
has_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def queue_callback(callback: Callable[[], None]) -> bool:
    """Has the engine call back at the end of the backward that runs; False where torch cannot."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        return False
    engine.queue_callback(callback)
    return True


#: Inside, no function mode and no `__torch_function__` of a subclass hears of what is done. 0.2 us.
DisableTorchFunction: Any = torch._C.DisableTorchFunction

#: While `torch.jit.trace` runs, what it has traced so far; reading a shape would become part of it.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state


def was_hooked(tensor: torch.Tensor) -> bool:
    """Whether somebody has registered a hook on it, even if it has been removed since."""
    return tensor._backward_hooks is not None


def insides_of(tensor: torch.Tensor) -> int:
    """Where its C++ half stands, which has its hooks: `swap_tensors` exchanges those of two tensors."""
    return tensor._cdata


def forget_removed_hooks(tensor: torch.Tensor) -> None:
    """Makes a tensor whose hooks have all been removed one that was never hooked.

    The empty dict that torch (2.13) leaves makes it take the tensor for hooked. When `swap_tensors` has given it other
    insides, which are not, no hook of the user's would ever be called again.
    """
    hooks = tensor._backward_hooks
    if hooks is not None and not hooks:
        tensor._backward_hooks = None


# Ops.


def _no_hooks(ignore_is_tracing: bool) -> None:
    return None


#: The hooks that pack and unpack what autograd saves now (`saved_tensors_hooks`), or None. 60 ns.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", _no_hooks
)


def callable_of(func: Any) -> Any:
    """What runs an op: of an `OpOverload` the C++ function behind it, which its `__call__` calls. Saves 0.3 us."""
    call = getattr(func, "_op", None) if type(func) is torch._ops.OpOverload else None
    return func if call is None else call


def is_random_op(func: Any) -> bool:
    """Whether an op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


# What a graph keeps for backward. `_raw_saved_x` of a node is what it has saved as x, still packed: reading it runs
# no hook. What it gives points into the node's own memory: keep none of it longer than the node.

_RAW_SAVED = "_raw_saved_"
_CUSTOM_SAVED = ("_raw_saved_tensors",)
_ALREADY_FREED = "already been freed"  # some nodes say so after backward; others have empty variables then
_HIDING_NODES = ("CopySlices",)  # holds the node of an in-place op on a view, and shows none of it
_SavedVariable: type | tuple[()] = getattr(torch._C._autograd, "SavedTensor", ())
_SelectiveContext: Any = getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", ())


def saved_variables(node: Any) -> tuple[list[Any], bool]:
    """What a node has saved, still packed, and whether it may have saved more that torch does not show."""
    kind: Any = type(node)
    names = _CUSTOM_SAVED if issubclass(kind, _CustomFunctionNode) else _saved_names(kind)
    found: list[Any] = []
    is_unknown = names is None
    for name in names or ():
        try:
            value = getattr(node, name)
            found.extend(value if isinstance(value, (list, tuple)) else [value])
        except Exception as error:
            is_unknown |= _ALREADY_FREED not in str(error)
    return found, is_unknown


@functools.cache  # torch's own classes: they live anyway
def _saved_names(kind: type) -> tuple[str, ...] | None:
    """The attributes with what nodes of a kind have saved; None: torch shows nothing of such nodes (C++ extensions)."""
    shown = getattr(getattr(torch._C, "_functions", None), kind.__name__, None)
    if shown is not kind or kind.__name__ in _HIDING_NODES:
        return None
    return tuple(name for name in dir(kind) if name.startswith(_RAW_SAVED))


def is_saved_variable(value: Any) -> bool:
    """Whether it is a tensor as a graph saves it."""
    return issubclass(type(value), _SavedVariable)  # `isinstance` would run a `__class__` of the user's


def packed_content(saved: Any) -> tuple[Any, Any]:
    """What a saved variable holds, and the hook that would unpack it; without a hook it holds a tensor or None."""
    return saved.data, saved.unpack_hook


def checkpoint_of_hook(unpack_hook: Any) -> Any:
    """The region (`_CheckpointFrame`) whose non-reentrant checkpoint has packed a tensor; None: another hook has.

    What it packs is a placeholder without memory.
    """
    code = getattr(unpack_hook, "__code__", None)
    if code is None or code.co_filename != _CHECKPOINT_FILE:
        return None
    return _captured(unpack_hook, "frame")


def held_by_checkpoint(region: Any) -> tuple[list[Any], bool]:
    """What a non-reentrant checkpoint keeps for the recompute of a region, and whether it may keep more.

    Raises:
        AttributeError: another version of torch (2.13) keeps it elsewhere.

    Those are its arguments as saved variables, its keyword arguments, those of a `functools.partial`, the outputs
    that a selective checkpoint keeps, and what a recompute has brought back for a backward that took only a part.
    Not the state of the random generators.
    """
    again = region.recompute_fn
    held = [*region.saved_args, _captured(again, "kwargs"), *_bound_arguments(_captured(again, "fn"))]
    held += [tensor for each in region.recomputed.values() for tensor in each.values()]
    context = _captured(again, "recompute_context")
    if isinstance(context, _SelectiveContext):
        wrapped = torch.utils._pytree.tree_leaves(list(context.storage.values()))
        return held + [getattr(each, "val", None) for each in wrapped], False
    return held, not isinstance(context, nullcontext)


def held_by_custom_function(node: Any) -> list[Any]:
    """What lies on the `ctx` of a custom Function; of a reentrant checkpoint what the user has given it."""
    own: dict[str, Any] = vars(node)
    if not is_reentrant_checkpoint(node):
        return [own]
    return [own.get("inputs"), *_bound_arguments(own.get("run_function"))]


def attributes_of(value: Any) -> list[Any]:
    """What an object has as attributes, and a function in its closure; [] of modules, classes and objects of torch's.

    Code of the user's class is not run for it.
    """
    kind = type(value)
    if issubclass(kind, (nn.Module, type, ModuleType)) or kind.__module__.startswith("torch."):
        return []
    if kind is FunctionType:
        empty = CellType()  # asking for its content would raise
        return [cell.cell_contents for cell in value.__closure__ or () if cell != empty]
    if kind is MethodType:
        return [value.__self__, value.__func__]
    own = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else {}
    return [*_bound_arguments(value), *(own.values() if type(own) is dict else ())]


def _bound_arguments(function: Any) -> list[Any]:
    return [function.args, function.keywords] if isinstance(function, functools.partial) else []


def _captured(function: Any, name: str) -> Any:
    """A variable that a function has from the one around it; None if it has none of that name, or it is not set."""
    names = function.__code__.co_freevars
    try:
        return function.__closure__[names.index(name)].cell_contents if name in names else None
    except ValueError:
        return None


def storage_of(tensor: torch.Tensor) -> tuple[int, int, Any]:
    """A number that no other living storage has, its size in bytes, and a weak reference that tells when it is dead.

    Raises:
        Exception: the tensor has no storage of its own (sparse, functorch's ...).
    """
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), weakref.ref(storage)


#: How many dispatch modes stand on the stack of this thread. 30 ns.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def leave_function_mode(mode: Any) -> None:
    """Takes a function mode off the stack of this thread, wherever in it it stands."""
    above: list[Any] = []
    while has_function_modes() and torch._C._get_function_stack_at(has_function_modes() - 1) is not mode:
        above.append(torch._C._pop_torch_function_stack())
    if has_function_modes():
        mode.__exit__(None, None, None)
    for each in reversed(above):
        torch._C._push_on_torch_function_stack(each)


#: What torch keeps of whether a mode is on, beside the stack.
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


#: Where a mode keeps what those were when it was entered.
_SAVED_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


def is_dispatch_mode_on(mode: Any) -> bool:
    """Whether a dispatch mode stands on the stack of this thread."""
    return any(torch._C._get_dispatch_stack_at(at) is mode for at in range(count_dispatch_modes()))


def leave_dispatch_mode(mode: Any) -> None:
    """Takes a dispatch mode off the stack of this thread, wherever in it it stands.

    A mode that a user has entered since and not left stands above ours, and `__exit__` takes off what is on top.
    """
    size = count_dispatch_modes
    above: list[Any] = []
    while size() and torch._C._get_dispatch_stack_at(size() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    for name in _SAVED_FLAGS if above else ():  # it has saved that ours was on, and will put that back
        ours, theirs = getattr(mode, name, None), getattr(above[-1], name, None)
        if ours and theirs:
            theirs[-1] = ours[-1]
    flags = vars(torch.utils._python_dispatch)
    before = {name: flags[name] for name in _MODE_FLAGS if name in flags}
    if size():
        mode.__exit__(None, None, None)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)
    if above:
        # `__exit__` says what it was when ours came, and a mode of the user's is on now.
        flags.update(before)
        tell: Any = flags.get("set_is_in_mode_without_ignore_compile_internals", lambda is_on: None)
        tell(before.get(_MODE_FLAGS[-1], True))


# Replay.


def schema_arguments(func: Any) -> list[tuple[str, bool, bool]] | None:
    """Of each argument of an op: its name, whether it is given by name alone, and whether the op says it writes to it.

    None: it has no schema (a higher-order operator).
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    return [
        (each.name, each.kwarg_only, each.alias_info is not None and each.alias_info.is_write)
        for each in schema.arguments
    ]


#: Types of arguments in schemas. For a tensor a number may be given.
_NUMBER_TYPES = frozenset({"Tensor", "number", "float", "Optional[number]", "List[number]"})


def number_arguments(func: Any) -> frozenset[str]:
    """The names of the arguments of an op that may be plain numbers: a factor, an exponent, a limit; never a size."""
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return frozenset(each.name for each in arguments if str(each.type) in _NUMBER_TYPES)


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the storage whose elements read as their negatives: what `x.conj().imag` is."""
    negated: torch.Tensor = getattr(torch, "_neg_view")(tensor)  # noqa: B009 (unknown to mypy)
    return negated


def has_own_dispatch(kind: type) -> bool:
    """Whether a class of tensors answers to ops in Python."""
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def hooks_and_modes() -> dict[str, Any]:
    """What torch holds for the whole process and a recording must give back; compares by equality."""
    module, optimizer = torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__]
    hooks = {
        f"{holder.__name__}.{name}": [*vars(holder)[name]]
        for holder in (module, optimizer)
        for name in sorted(vars(holder))
        if name.startswith("_global_") and isinstance(vars(holder)[name], dict)
    }
    entries = [getattr(each, "_engine_run_backward", None) for each in EngineEntry._HOLDERS]
    return {
        **hooks,
        "the entry of the autograd engine": entries,
        "the number of dispatch modes": count_dispatch_modes(),
        "the number of function modes": has_function_modes(),
    }


#: What a module or a tensor holds hooks in.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def version_of(tensor: torch.Tensor) -> int | None:
    """How often autograd has seen a tensor written to; None if it does not count (one made in inference mode)."""
    try:
        return tensor._version
    except Exception:  # a RuntimeError of torch's, or whatever a subclass of the user's raises
        return None


def set_version(tensor: torch.Tensor, version: int | None) -> None:
    """Makes autograd take a tensor whose content has been put back for one that was not written to (2.13).

    Without it, or without `_unsafe_set_version_counter`: a graph that holds the tensor refuses to go backward.
    """
    set_counters: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if set_counters is None or version is None or version_of(tensor) in (None, version):
        return
    with suppress(RuntimeError, TypeError):  # it is private: what it takes has changed before
        set_counters((tensor,), (version,))
