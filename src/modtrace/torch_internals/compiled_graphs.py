"""The graphs of ops that AOTAutograd gives to compilers, and the kernels that inductor makes of them."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

_GRAPHS = "the ops and kernels inside of compiled code"

PRIVATE_NAMES = {
    "torch._dynamo.backends.common.aot_module_simplified": _GRAPHS,
    "torch._guards.CompileContext.current_compile_id": _GRAPHS,
    "torch._inductor.compile_fx.compile_fx": "the kernels inside of compiled code",
    "torch._inductor.codegen.cpp.CppScheduling.define_kernel": "the kernels inside of compiled code",
    "torch._inductor.config.patch": "the kernels of what inductor has in its cache",
}

#: Compilers of forwards with a backward, of backwards, and of forwards without.
_COMPILERS = ("fw_compiler", "bw_compiler", "inference_compiler")

_LINE = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)

#: How Dynamo calls the module whose `forward` it compiles, in paths of modules inside.
_SELF = "L['self']"


@dataclass(eq=False)
class GraphOp:
    """An op of a graph."""

    name: str  # `aten.addmm.default`
    #: Its `id`, or its path below the compiled one, "" for that; of a backward op that of its forward; None: not known.
    module: int | str | None
    inputs: list[int]  # the positions of the ops that made what it reads
    is_view: bool
    shape: list[int] | None  # of the first tensor that it returns; -1 for a size that varies
    dtype: str | None
    source: str | None  # `file:line` of the user's code
    kernels: list[str] = field(default_factory=list)  # into which it was fused


@dataclass(eq=False)
class CompiledGraph:
    """The graph of a forward or of a backward, as a compiler was given it."""

    compile_id: str
    is_backward: bool
    ops: list[GraphOp]


class CompilerWatch:
    """Tells a function of each graph that a compiler was given, after it has returned.

    Compilers are wrapped as long as something watches. For wrapped ones AOTAutograd does not ask its cache, and
    inductor not that of its graphs, because what is in there has no graph any more. What inductor has built of C++ or
    Triton is found again.
    """

    def __init__(self, told: Callable[[CompiledGraph], None]) -> None:
        self._told = told
        self._common: Any = None
        self._original: Any = None
        self._wrapper: Any = None

    def start(self) -> None:
        """Begins to watch as soon as the program has called `torch.compile`; until then it does nothing."""
        common = sys.modules.get("torch._dynamo.backends.common")
        original = getattr(common, "aot_module_simplified", None)
        if self._common is not None or original is None:
            return

        @wraps(original)
        def aot_module_simplified(*args: Any, **kwargs: Any) -> Any:
            for name in _COMPILERS:
                if self._wrapper is not None and kwargs.get(name) is not None:
                    kwargs[name] = self._wrap(kwargs[name], is_backward=name == "bw_compiler")
            return original(*args, **kwargs)

        self._common, self._original, self._wrapper = common, original, aot_module_simplified
        self._common.aot_module_simplified = aot_module_simplified

    def stop(self) -> None:
        """Ends watching. If other code has wrapped our wrapper since, that stays and passes calls on."""
        if self._common is not None and self._common.aot_module_simplified is self._wrapper:
            self._common.aot_module_simplified = self._original
        self._common = self._wrapper = None

    def _wrap(self, compiler: Callable[..., Any], *, is_backward: bool) -> Callable[..., Any]:
        def compile_graph(graph_module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wrapper is None:  # a backward may be compiled after the end
                return compiler(graph_module, *args, **kwargs)
            nodes = [node for node in graph_module.graph.nodes if _is_op(node)]
            ops = _read(nodes)
            with _naming_kernels(nodes, ops):
                compiled = compiler(graph_module, *args, **kwargs)
            context: Any = sys.modules["torch._guards"].CompileContext
            self._told(CompiledGraph(str(context.current_compile_id()), is_backward, ops))
            return compiled

        return compile_graph


def _is_op(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "modtrace"


def _read(nodes: list[Any]) -> list[GraphOp]:
    positions = {id(each): at for at, each in enumerate(nodes)}
    found = []
    for node in nodes:
        first = _first_tensor(node.meta.get("val"))
        lines = _LINE.findall(node.meta.get("stack_trace") or "")
        returns = node.target._schema.returns
        op = GraphOp(
            name=str(node.target),
            module=None if node.meta.get("is_gradient_acc") else _module_of(node.meta),
            inputs=sorted({positions[id(each)] for each in _makers_of(node) if id(each) in positions}),
            is_view=any(each.alias_info and not each.alias_info.is_write for each in returns),
            shape=None if first is None else [_to_number(size) for size in first.shape],
            dtype=None if first is None else str(first.dtype).removeprefix("torch."),
            source=f"{lines[-1][0]}:{lines[-1][1]}" if lines else None,
        )
        found.append(op)
    return found


def _to_number(size: Any) -> int:
    return size if type(size) is int else -1


def _first_tensor(value: Any) -> torch.Tensor | None:
    values = value if isinstance(value, (list, tuple)) else [value]
    return next((each for each in values if isinstance(each, torch.Tensor)), None)


def _makers_of(node: Any) -> Iterator[Any]:
    for each in node.all_input_nodes:
        if _is_op(each) or each.op != "call_function":
            yield each
        else:  # what takes a part of what an op returned
            yield from _makers_of(each)


def _module_of(meta: dict[str, Any]) -> int | str | None:
    """Returns the innermost module, as `nn_module_stack` has it: `{"140251": ("L['self'].blocks.0", Block)}`.

    The key is the module's `id`, with `@1` behind it in its second call, or a name.
    """
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {"": (_SELF, None)}
    key, (path, *_) = next(reversed(stack.items()))
    number = key.partition("@")[0]
    if number.isdecimal():
        return int(number)
    if path == _SELF:
        return ""
    return path.removeprefix(_SELF + ".") if path.startswith(_SELF + ".") else None


@contextmanager
def _naming_kernels(nodes: list[Any], ops: list[GraphOp]) -> Iterator[None]:
    """Adds to ops the kernels that inductor fuses them into while the block runs; on a CPU alone."""
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
                origins = {origin.name for each in scheduled for origin in getattr(each.node, "origins", ())}
                for name in origins & by_name.keys():
                    by_name[name].kernels.append(use)
                return kernel

            setattr(CppScheduling, "define_kernel", define_kernel)  # noqa: B010 (mypy)
            stack.callback(setattr, CppScheduling, "define_kernel", define)
        yield
