"""Adapts the caches of AOTAutograd and inductor, so that they accept graphs with ops of ours."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .compiled_graphs import COMPILERS, AOTAutogradPatch
from .dynamo import count_own_ops, keep_out_of_dynamo


class CachedGraphs:
    """Lets compilers store graphs with our function and ops in their caches, and find them there.

    torch (2.13) caches graphs only with functions that are on a list, and graphs with effects only if the op that
    stands for effects is on it. The list is part of each entry's key. So it is changed only while a graph of ours is
    compiled, and for effects only if all ops with effects in the graph are ours.
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        """Creates a patch that does nothing before `start()`.

        Args:
            function: the function in Dynamo's graphs. It returns the tensors that it is given after three arguments.
            key: differs between versions of the function, so that nothing compiled with another version is found.
        """
        self._function = function
        self._safe = {f"{function.__module__}.{function.__name__}": key}
        self._patch = AOTAutogradPatch(self._prepare)
        self.stop = self._patch.stop
        keep_out_of_dynamo(CachedGraphs._wrap)  # a backward is compiled when it first runs

    def start(self) -> None:
        """Wraps AOTAutograd, for which it imports Dynamo."""
        importlib.import_module("torch._dynamo.backends.common")
        self._patch.start()

    def _prepare(self, graph_module: Any, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        ours = [node for node in graph_module.graph.nodes if node.target is self._function]
        if not ours:
            return nullcontext()
        count_own_ops(len(ours) + sum(len(node.users) for node in ours))
        with_caches: dict[int, Any] = {
            id(compiler): compiler
            for compiler in map(kwargs.get, COMPILERS)
            if hasattr(compiler, "compiler_fn")
        }
        for compiler in with_caches.values():
            compiler.compiler_fn = self._wrap(compiler.compiler_fn)
        return _marked_as_safe(self._safe) if with_caches else nullcontext()

    def _wrap(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        def compile_graph(graph_module: Any, *args: Any, **kwargs: Any) -> Any:
            from torch._higher_order_ops.effects import with_effects

            effects = [node for node in graph_module.graph.nodes if node.target is with_effects]
            are_ours = all(getattr(effect.args[1], "namespace", "") == "modtrace" for effect in effects)
            name = f"{with_effects.__module__}.{with_effects.__name__}"
            safe = self._safe | {name: "only ops of modtrace"} if are_ours else self._safe
            with _marked_as_safe(safe):
                return compiler(graph_module, *args, **kwargs)

        return compile_graph


def _marked_as_safe(functions: dict[str, str]) -> AbstractContextManager[Any]:
    """Adds functions to those with which graphs may be cached."""
    import torch._inductor.config as config

    known = getattr(config, "unsafe_marked_cacheable_functions", None)
    if known is None:
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(
        unsafe_marked_cacheable_functions={**known, **functions}
    )
    return patch
