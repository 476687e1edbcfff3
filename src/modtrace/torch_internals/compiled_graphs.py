"""Reads the graphs of ops that AOTAutograd gives to compilers, and the kernels that inductor makes of them."""

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain, zip_longest
from typing import Any, Protocol

import torch

from .call_frames import TORCH_FOLDER
from .dynamo import current_compilation, keep_out_of_dynamo
from .patches import replace

#: The arguments of AOTAutograd that compile forwards with a backward, backwards, and forwards without one.
COMPILERS = ("fw_compiler", "bw_compiler", "inference_compiler")

_LINE = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)

#: Dynamo's name for the module whose `forward` it compiles, in paths of modules inside.
_SELF = "L['self']"


@dataclass(eq=False)
class GraphOp:
    """An op of a compiled graph."""

    name: str  # `aten.addmm.default`
    #: The module's `id`, or its path below the compiled one ("" for that); for backward ops, the forward's; or None.
    module: int | str | None
    calls: list[int]  # for each module around, outermost first, the number of its call in the graph
    inputs: list[int]  # positions of the ops that made its inputs
    given: list[int]  # positions of its inputs among the graph's own inputs
    saved: list[int]  # for a backward op, the positions of forward ops whose results it reads
    returned: list[int]  # positions of its outputs among those that the program gets
    is_view: bool
    shape: list[int] | None  # the shape of its first output; -1 for a size that varies
    dtype: str | None
    source: str | None  # `file:line` in the user's code
    kernels: list[str] = field(default_factory=list)  # the kernels into which it was fused


@dataclass(eq=False)
class CompiledGraph:
    """The graph of a forward or backward, as a compiler received it."""

    compile_id: str
    is_backward: bool
    ops: list[GraphOp]

    def __post_init__(self) -> None:
        self.given = frozenset(chain.from_iterable(op.given for op in self.ops))
        self.returned = frozenset(chain.from_iterable(op.returned for op in self.ops))


class RunListener(Protocol):
    """Receives each run of compiled graphs."""

    def begins(self, graph: CompiledGraph, given: Sequence[Any]) -> Any:
        """Receives the inputs of compiled code when a run begins; it must not keep them.

        Returns:
            an object that is passed to `ended`.
        """

    def ended(self, run: Any, returned: Any) -> None:
        """Receives the outputs of compiled code, in a list or tuple."""


class GraphListener(RunListener, Protocol):
    """Receives the graphs that compilers are given, and each run of what they compiled."""

    def compiled(self, graph: CompiledGraph) -> None:
        """Receives a graph after the compiler has returned."""


class AOTAutogradPatch:
    """Wraps the function that starts AOTAutograd."""

    def __init__(self, prepare: Callable[[Any, dict[str, Any]], AbstractContextManager[Any]]) -> None:
        """Creates a patch that does nothing before `start()`.

        Args:
            prepare: receives Dynamo's graph and the keyword arguments, which it may change, and returns a context
                manager in which AOTAutograd runs.
        """
        self._prepare = prepare
        self._patches = ExitStack()
        self.is_on = False  # True from `start()` to `stop()`

    def start(self) -> None:
        """Wraps the function, if the program has called `torch.compile`; before that it does nothing."""
        common = sys.modules.get("torch._dynamo.backends.common")
        original = getattr(common, "aot_module_simplified", None)
        if self.is_on or original is None:
            return

        @wraps(original)
        def aot_module_simplified(graph_module: Any, *args: Any, **kwargs: Any) -> Any:
            with self._prepare(graph_module, kwargs) if self.is_on else nullcontext():
                return original(graph_module, *args, **kwargs)

        self.is_on = True
        replace(common, "aot_module_simplified", aot_module_simplified, self._patches)

    def stop(self) -> None:
        """Restores the function."""
        self.is_on = False
        self._patches.close()


class CompilerWatch:
    """Notifies a listener of each graph that a compiler received, and of each run of the compiled code.

    Compilers are wrapped as long as something watches. With wrapped ones, AOTAutograd does not use its cache, nor does
    inductor use that of its graphs, because entries there no longer have a graph. What inductor has built with C++ or
    Triton is still reused.
    """

    def __init__(self, listener: GraphListener) -> None:
        self._listener = listener
        self._saved: dict[str, dict[str, int]] = {}  # by compile id, the result of `_find_saved`
        self._patch = AOTAutogradPatch(self._prepare)
        self.start, self.stop = self._patch.start, self._patch.stop
        keep_out_of_dynamo(CompilerWatch._wrap)  # a backward is compiled when it first runs
        keep_out_of_dynamo(CompilerWatch._wrap_compiled, with_callees=False)

    def _prepare(self, graph_module: Any, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        for name in COMPILERS:
            if kwargs.get(name) is not None:
                kwargs[name] = self._wrap(kwargs[name], is_backward=name == "bw_compiler")
        return nullcontext()

    def _wrap(self, compiler: Callable[..., Any], *, is_backward: bool) -> Callable[..., Any]:
        def compile_graph(graph_module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._patch.is_on:  # a backward may be compiled after the end
                return compiler(graph_module, *args, **kwargs)
            compile_id = current_compilation()
            nodes = [node for node in graph_module.graph.nodes if _is_op(node)]
            saved = self._saved.get(compile_id, {}) if is_backward else {}
            ops = _read(nodes, graph_module.graph, saved)
            if not is_backward:
                self._saved[compile_id] = _find_saved(nodes, graph_module.graph)
            with _naming_kernels(nodes, ops):
                compiled = compiler(graph_module, *args, **kwargs)
            graph = CompiledGraph(compile_id, is_backward, ops)
            self._listener.compiled(graph)
            return self._wrap_compiled(compiled, graph)

        return compile_graph

    def _wrap_compiled(self, compiled: Callable[..., Any], graph: CompiledGraph) -> Callable[..., Any]:
        is_boxed = getattr(compiled, "_boxed_call", False)  # it receives a single list, and empties it

        def run(*args: Any) -> Any:
            if not self._patch.is_on:
                return compiled(*args)
            begun = self._listener.begins(graph, args[0] if is_boxed else args)
            returned = compiled(*args)
            self._listener.ended(begun, returned)
            return returned

        run._boxed_call = is_boxed  # type: ignore[attr-defined]
        return run


def _is_op(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "modtrace"


def _read(nodes: list[Any], graph: Any, saved: Mapping[str, int]) -> list[GraphOp]:
    """Reads the ops of a graph; `saved` maps names of the graph's inputs to forward ops whose results they are."""
    positions = {id(node): at for at, node in enumerate(nodes)}
    given = {
        id(node): at for at, node in enumerate(graph.find_nodes(op="placeholder")) if node.name not in saved
    }
    returned: dict[int, list[int]] = defaultdict(list)
    for at, (output, is_saved) in enumerate(_outputs_of(graph)):
        for maker in () if is_saved else _makers_of_value(output):
            returned[id(maker)].append(at)
    found = []
    for node in nodes:
        first = _first_tensor(node.meta.get("val"))
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        returns = node.target._schema.returns
        op = GraphOp(
            name=str(node.target),
            module=None if node.meta.get("is_gradient_acc") else _module_of(stack),
            calls=[int(key.partition("@")[2] or 0) for key in stack],
            inputs=sorted({positions[id(maker)] for maker in _makers_of(node) if id(maker) in positions}),
            given=sorted({given[id(maker)] for maker in _makers_of(node) if id(maker) in given}),
            saved=sorted({saved[maker.name] for maker in _makers_of(node) if maker.name in saved}),
            returned=returned[id(node)],
            is_view=any(value.alias_info and not value.alias_info.is_write for value in returns),
            shape=None if first is None else [_to_number(size) for size in first.shape],
            dtype=None if first is None else str(first.dtype).removeprefix("torch."),
            source=_line_of_user(node.meta.get("stack_trace") or ""),
        )
        found.append(op)
    return found


def _line_of_user(stack: str) -> str | None:
    """Returns the innermost line outside of torch, which has lines of its own if a default device is set."""
    lines = [line for line in _LINE.findall(stack) if not line[0].startswith(TORCH_FOLDER + os.sep)]
    return ":".join(lines[-1]) if lines else None


def _to_number(size: Any) -> int:
    return size if type(size) is int else -1


def _first_tensor(value: Any) -> torch.Tensor | None:
    values = value if isinstance(value, (list, tuple)) else [value]
    return next((item for item in values if isinstance(item, torch.Tensor)), None)


def _makers_of(node: Any) -> Iterator[Any]:
    for given in node.all_input_nodes:
        yield from _makers_of_value(given)


def _makers_of_value(node: Any) -> Iterator[Any]:
    if not isinstance(node, torch.fx.Node):  # a number, or None
        return
    if _is_op(node) or node.op != "call_function":
        yield node
    else:  # the node takes a part of an op's output
        yield from _makers_of(node)


def _outputs_of(graph: Any) -> Iterator[tuple[Any, bool]]:
    """Yields the outputs of a graph, and whether each is kept only for its backward."""
    [output] = graph.find_nodes(op="output")
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
    for value, about in zip_longest(values, output.meta.get("desc") or ()):
        yield value, type(about).__name__ == "SavedForBackwardsAOTOutput"


def _find_saved(nodes: list[Any], graph: Any) -> dict[str, int]:
    """Returns the positions of ops whose results a forward keeps for its backward, by the names they have there."""
    positions = {id(node): at for at, node in enumerate(nodes)}
    outputs = [value for value, is_saved in _outputs_of(graph) if is_saved]
    makers = ((output.name, maker) for output in outputs for maker in _makers_of_value(output))
    return {name: positions[id(maker)] for name, maker in makers if id(maker) in positions}


def _module_of(stack: dict[str, Any]) -> int | str | None:
    """Returns the innermost module of a `nn_module_stack`, as `{"140251": ("L['self'].blocks.0", Block)}`.

    The key is the module's `id`, followed by `@1` in its second call, or a name.
    """
    key, (path, *_) = next(reversed(stack.items()), ("", (_SELF, None)))
    number = key.partition("@")[0]
    if number.isdecimal():
        return int(number)
    if path == _SELF:
        return ""
    return path.removeprefix(_SELF + ".") if path.startswith(_SELF + ".") else None


@contextmanager
def _naming_kernels(nodes: list[Any], ops: list[GraphOp]) -> Iterator[None]:
    """Adds to ops the kernels into which inductor fuses them in the block; this works only on the CPU."""
    with ExitStack() as stack:
        if "torch._inductor.compile_fx" in sys.modules:
            import torch._inductor.config
            from torch._inductor.codegen.cpp import CppScheduling

            stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
            define: Any = CppScheduling.define_kernel
            uses: Counter[str] = Counter()
            by_name = {node.name: op for node, op in zip(nodes, ops, strict=True)}

            def define_kernel(scheduling: Any, code: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                kernel = define(scheduling, code, scheduled, *args, **kwargs)
                use = f"{kernel}@{uses[kernel]}" if uses[kernel] else kernel
                uses[kernel] += 1
                origins = {origin.name for part in scheduled for origin in getattr(part.node, "origins", ())}
                for name in origins & by_name.keys():
                    by_name[name].kernels.append(use)
                return kernel

            replace(CppScheduling, "define_kernel", define_kernel, stack)
        yield
