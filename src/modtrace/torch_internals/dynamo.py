"""Wraps torch.compile: what it traces and compiles, and the modules that it makes."""

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from .call_frames import TORCH_FOLDER, file_that_calls
from .checkpoint import allow_effects_in_checkpoints
from .patches import replace

#: A constant that Dynamo folds to True while it traces, and that is False otherwise. Reading it takes 20 ns, while
#: `is_compiling`, which checks more, takes 55 ns.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling

#: Our ops live as long as this object.
_LIBRARY = torch.library.Library("modtrace", "FRAGMENT")  # type: ignore[no-untyped-call]

_COMPILER_FOLDERS = tuple(
    os.path.join(TORCH_FOLDER, folder) + os.sep
    for folder in ("_dynamo", "_functorch", "_inductor", "_higher_order_ops")
)


def keep_out_of_dynamo(*functions: Callable[..., Any], with_callees: bool = True) -> None:
    """Keeps Dynamo from compiling our functions as separate frames; functions that it inlines are still traced.

    Dynamo may skip `Module._call_impl`. Without this mark it then compiles only our hook, and folds
    `is_dynamo_compiling()` to True there, so that an eager module call is lost silently. Or it compiles functions that
    the hook calls, and the user's compilation fails because of our `sys._getframe` (torch 2.13).

    Args:
        functions: functions, with all functions that are defined inside them.
        with_callees: whether functions that they call are not compiled, either. Set False for functions that run the
            user's code.
    """
    try:
        import torch._C._dynamo.eval_frame as eval_frame

        action, set_strategy = eval_frame._FrameAction, eval_frame.set_code_exec_strategy
        skip = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    except (ImportError, AttributeError):
        return
    pending = [function.__code__ for function in functions if hasattr(function, "__code__")]
    while pending:
        code = pending.pop()
        set_strategy(code, skip)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


#: Higher-order ops whose bodies may contain ops with an effect.
_MAY_HOLD_EFFECTS = ("tag_activation_checkpoint",)


def is_in_body(left_out: Callable[[], None]) -> bool:
    """Returns whether Dynamo traces the body of an op, i.e. a function that is given to one such as `torch.cond`.

    Call it only in code that Dynamo traces, where it adds no node. It calls `left_out` in a body. Bodies of activation
    checkpoints do not count, as AOTAutograd (2.13) allows ops with an effect, such as taps, inside of them only.
    """
    from torch._dynamo.comptime import comptime  # Dynamo runs its argument while tracing

    def check(context: Any) -> None:
        from torch._dynamo.variables import ConstantVariable

        translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        tracer = translator.output.current_tracer
        while tracer.parent is not None and str(tracer.source_target) in _MAY_HOLD_EFFECTS:
            tracer = tracer.parent
        if tracer.parent is not None:
            translator.symbolic_locals["is_inside"] = ConstantVariable.create(True)
            context.get_local("left_out").as_python_constant()()

    is_inside = False  # while Dynamo traces, `check` replaces this local by its name
    comptime(check)
    return is_inside


@contextmanager
def nested_regions_traced_again() -> Iterator[None]:
    """Makes Dynamo trace each call of a `torch.compiler.nested_compile_region` in the block.

    Otherwise Dynamo reuses the graph of an earlier call, and looks for the tensors below the arguments of this one.
    This gives the tensors of the earlier call (2.13) if a module is the `__self__` of a method in its `__dict__`. Equal
    graphs are compiled once in any case.
    """
    module = sys.modules.get("torch._dynamo.variables.invoke_subgraph")
    if not hasattr(module, "save_reuse_entry"):
        yield
        return
    with ExitStack() as patches:
        replace(module, "save_reuse_entry", lambda *args, **kwargs: None, patches)
        yield


def make_effectful_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a new op in the namespace `modtrace` that has an effect, so compiled code keeps such ops, in order.

    An op declared to change an argument would be kept, too, but backward code that calls it saves the argument, which
    raises an error if the region was called again before its backward (torch 2.13). `torch.library.custom_op` would add
    some 50 us of Python to each call.

    Args:
        schema: the op's name, arguments and results.
        run: the op's function for any tensors.
        fake: returns the results for fake tensors.
    """
    from torch._library.effects import EffectType

    allow_effects_in_checkpoints()
    name = f"modtrace::{schema.partition('(')[0]}"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    torch.library._register_effectful_op(name, EffectType.ORDERED, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.modtrace, schema.partition("(")[0]).default
    return op


@contextmanager
def never_recomputed() -> Iterator[None]:
    """Exempts ops with an effect, traced by AOTAutograd in the block, from the recompute of a surrounding checkpoint.

    A checkpoint marks each op that it traces for recomputing, which torch cannot do with a token of effects: it would
    save the token, which is no tensor (2.13). The output of an unmarked op is saved.
    """
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = None if proxies is None else proxies.get_proxy_mode()
    before = 0 if mode is None else len(mode.tracer.graph.nodes)
    yield
    if mode is not None:
        nodes = mode.tracer.graph.nodes
        for node in islice(reversed(nodes), len(nodes) - before):
            node.meta.pop("recompute", None)


def is_compile_wrapper(module: nn.Module) -> bool:
    """Returns whether a module is the result of `torch.compile(module)`, whose calls run outside of compiled code."""
    return type(module).__name__ == "OptimizedModule"


def is_compiled(module: nn.Module) -> bool:
    """Returns whether calls of the module run code of torch.compile, inside which calls are not seen."""
    return is_compile_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_compilers_own(module: nn.Module, call_frame: FrameType | None, is_unknown_in_region: bool) -> bool:
    """Returns whether torch.compile made the module, to run one of its own graphs in it.

    Such a call comes from the compiler's code, from that of a higher-order op such as `torch.cond`, or from compiled
    code (`is_unknown_in_region`: the module belongs to no known model), or the module is only traced. A graph module
    that the user made is called by the user's code.
    """
    fx = sys.modules.get("torch.fx")
    inner = module._modules.get("_orig_mod") if is_compile_wrapper(module) else module
    if fx is None or not isinstance(inner, fx.GraphModule):
        return False
    if is_unknown_in_region or is_making_graph():
        return True
    return file_that_calls(call_frame).startswith(_COMPILER_FOLDERS)


def is_compiled_function(name: str) -> bool:
    """Returns whether a node's name is that of a Function made by torch.compile, whose kernels are not seen."""
    return name.startswith("CompiledFunction")


def is_tracing() -> bool:
    """Returns whether torch.compile is tracing on this thread.

    What runs then uses fake tensors and belongs to no step of the user's.
    """
    guards = sys.modules.get("torch._guards")
    context = getattr(guards, "CompileContext", None)
    return context is not None and context.try_get() is not None


def is_making_graph() -> bool:
    """Returns whether `make_fx` traces, as it does for higher-order ops.

    torch has then replaced all modes by its own, and what runs below them belongs to no step (2.13).
    """
    get_mode: Any = getattr(torch._C, "_get_dispatch_mode", None)
    keys = getattr(torch._C, "_TorchDispatchModeKey", None)
    return get_mode is not None and keys is not None and get_mode(keys.PROXY) is not None


def rounds_less_than_eager(tensor: torch.Tensor) -> bool:
    """Returns whether inductor may keep such a tensor in float32 as long as nothing reads it."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and not config.emulate_precision_casts


def is_backend_failure(error: BaseException | None) -> bool:
    """Returns whether an error of Dynamo means that a backend did not compile a graph."""
    return type(error).__name__ == "BackendCompilerFailed"


class CompileRecord(NamedTuple):
    """Dynamo's record of one compilation."""

    compile_id: str  # in the form of `name_compilation`
    is_backward: bool  # whether it is of a backward, which has no function, ops or guards here
    function: str | None  # name and `file:line`; None if the compilation did not begin
    ops: int | None
    guards: int | None
    failed_guards: list[str] | None  # a reason for each earlier code, beginning with the code's compile id
    error: str | None
    start_ns: int  # as of `perf_counter_ns`
    end_ns: int | None
    loaded_backwards: int = 0  # the number of backwards found in caches, which have no record

    @property
    def frame(self) -> str:
        """The number of the function that was compiled: `2` of `2/1`."""
        return self.compile_id.rpartition("/")[0]


#: When a reset of Dynamo was last noticed, in microseconds of wall time.
_resets: list[int] = []


def name_compilation(compile_id: Any, time_us: int) -> str:
    """Returns the id of a compilation that began at this time.

    `2/1` is the second compilation of the third function. Dynamo counts from 0 again after a reset, so `1:2/1` is used
    then. `CompileRecord.frame` and `analysis.compile.compilations` read this form.
    """
    resets = sum(reset <= time_us for reset in _resets)
    return f"{resets}:{compile_id}" if resets else str(compile_id)


def current_compilation() -> str:
    """Returns the id of the compilation that runs on this thread."""
    context: Any = sys.modules["torch._guards"].CompileContext
    return name_compilation(context.current_compile_id(), time.time_ns() // 1000)


#: The number of our ops in recent graphs, with compile id and time, as ids repeat after a reset.
_own_ops: deque[tuple[str, int, int]] = deque(maxlen=1000)


def count_own_ops(count: int) -> None:
    """Counts our ops in the graph being compiled, because Dynamo's record does not distinguish them."""
    context: Any = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    if context is not None:
        _own_ops.append((str(context.current_compile_id()), time.time_ns() // 1000, count))


def _own_ops_of(metrics: Any) -> int:
    compile_id, start_us, end_us = str(metrics.compile_id), metrics.start_time_us, metrics.end_time_us
    found = [
        counted
        for counted in _own_ops
        if counted[0] == compile_id and start_us <= counted[1] <= (end_us or counted[1])
    ]
    return sum(count for *_, count in found)


def last_compilations() -> Sequence[Any]:
    """Returns Dynamo's records of the last compilations (64 in 2.13), the newest last."""
    read = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    return () if read is None else read()


def read_compilation(metrics: Any) -> CompileRecord | None:
    """Returns an entry of `last_compilations()` as our record; None if it is about tuning or replaying a kernel."""
    if getattr(metrics, "is_runtime", False) or metrics.compile_id is None:
        return None
    name, file, line = metrics.co_name, metrics.co_filename, metrics.co_firstlineno
    start_ns, end_us = _to_perf_counter(metrics.start_time_us), metrics.end_time_us
    return CompileRecord(
        compile_id=name_compilation(metrics.compile_id, metrics.start_time_us),
        is_backward=metrics.is_forward is False,
        function=None if name is None else f"{name} {file}:{line}",
        ops=None if metrics.graph_op_count is None else metrics.graph_op_count - _own_ops_of(metrics),
        guards=metrics.guard_count,
        failed_guards=_read_failed_guards(str(metrics.compile_id), metrics.recompile_reason),
        error=_read_error(metrics),
        start_ns=start_ns,
        end_ns=None if end_us is None else max(_to_perf_counter(end_us), start_ns),
        loaded_backwards=_count_loaded_backwards(metrics),
    )


_FOUND = ("aotautograd_local_cache_hit_count", "aotautograd_remote_cache_hit_count")
_FOUND_GRAPHS = ("inductor_fx_local_cache_hit_count", "inductor_fx_remote_cache_hit_count")


def _count_loaded_backwards(metrics: Any) -> int:
    """Returns how many backwards came from AOTAutograd's cache, each of which queries inductor's once more (2.13)."""
    found = sum(getattr(metrics, name, 0) or 0 for name in _FOUND)
    return max(sum(getattr(metrics, name, 0) or 0 for name in _FOUND_GRAPHS) - found, 0) if found else 0


def loaded_backward(forward: CompileRecord) -> CompileRecord:
    """Returns the record that Dynamo lacks of a backward that was loaded with its forward, taking no time."""
    end_ns = forward.start_ns if forward.end_ns is None else forward.end_ns
    return CompileRecord(forward.compile_id, True, None, None, None, None, None, end_ns, end_ns)


def _to_perf_counter(wall_time_us: int) -> int:
    """Returns a recent wall time in nanoseconds of `perf_counter_ns`; 0 if the wall clock was set forward since."""
    return max(wall_time_us * 1000 + time.perf_counter_ns() - time.time_ns(), 0)


def _read_failed_guards(compile_id: str, first: str | None) -> list[str] | None:
    """Returns why each earlier code could not be used, while Dynamo's record has only the first reason."""
    if first is None:
        return None
    found: dict[str, str] = {}
    for kept in getattr(sys.modules.get("torch._dynamo.utils"), "guard_failures", {}).values():
        at = next((at for at, failure in enumerate(kept) if failure is first), len(kept))
        for failure in kept[at:]:
            code = failure.partition(": ")[0]
            if code in found or code == compile_id:  # further texts are of a later compilation
                break
            found[code] = failure
    return list(found.values()) or [first]


def _read_error(metrics: Any) -> str | None:
    if metrics.fail_type is None:
        return None
    text = f"{metrics.fail_type}: {metrics.fail_reason}"
    if metrics.fail_user_frame_filename is None:
        return text
    place = traceback.FrameSummary(
        metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno, metrics.co_name
    )
    return _with_stack(text, [place])


def last_graph_breaks() -> Sequence[Any]:
    """Returns the graph breaks since Dynamo's last reset, the newest last."""
    return getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", ())


def describe_graph_break(kept: Any) -> str:
    """Returns Dynamo's reason for a graph break, followed by the stack of the user's code."""
    return _with_stack(kept.reason, kept.user_stack)


def _with_stack(text: str, stack: Sequence[traceback.FrameSummary]) -> str:
    """Returns a text followed by the stack, in the form in which Dynamo adds one to a failed guard (2.13)."""
    # With the source lines.
    frames = [traceback.FrameSummary(frame.filename, frame.lineno, frame.name) for frame in stack]
    return f"{text.rstrip()}\nUser stack trace:\n{''.join(traceback.format_list(frames))}".rstrip()


#: Functions that Dynamo calls after compilations.
_callbacks: list[Callable[[Any], None]] = []


def call_after_compilations(callback: Callable[[Any], None]) -> None:
    """Makes Dynamo call a function at the end of each compilation, before it stores the record.

    Nothing happens if Dynamo is not imported (which would take a second), or already calls the function, which
    `torch._dynamo.reset()` makes it forget.
    """
    listed = getattr(_callback_handler(), "end_callbacks", None)
    if listed is not None and callback not in listed:
        listed.append(callback)
        if callback in _callbacks:
            _resets.append(time.time_ns() // 1000)
        _callbacks.append(callback)


def no_more_calls_after_compilations(callback: Callable[[Any], None]) -> None:
    """Removes a function that was registered by `call_after_compilations`."""
    listed = getattr(_callback_handler(), "end_callbacks", None)
    if listed is not None and callback in listed:
        listed.remove(callback)
    _callbacks[:] = [other for other in _callbacks if other != callback]
    if not _callbacks:
        _resets.clear()


def _callback_handler() -> Any:
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def ended_compilation(event: Any) -> tuple[str, bool]:
    """Returns the compilation's id from the event that Dynamo passes to the function, and whether it is a backward."""
    compile_id = name_compilation(event.compile_id, time.time_ns() // 1000)
    return compile_id, getattr(event.callback_trigger, "name", "") == "LAZY_BACKWARD"
