"""The caches in which AOTAutograd and inductor keep what they have compiled, for graphs with ops of ours."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .compiled_graphs import COMPILERS, AOTAutogradPatch
from .dynamo import count_own_ops, keep_out_of_dynamo


class CachedGraphs:
    """Lets compilers put graphs into their caches, and find them there, that have a function and ops of ours.

    torch (2.13) has a list of functions that it keeps graphs with beside its own, and no graph with ops that have an
    effect unless the op that stands for those is on that list. The list is part of the key of each entry. So it is
    changed only while a graph of ours is compiled, and for effects only if all ops in it that have one are ours.
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        """Creates a patch that does nothing before `start()`.

        Args:
            function: the function in Dynamo's graphs. It returns the tensors that it is given behind three arguments.
            key: differs where it does something else, so that nothing is found that was compiled with another version.
        """
        self._function = function
        self._safe = {f"{function.__module__}.{function.__name__}": key}
        self._patch = AOTAutogradPatch(self._prepare)
        self.stop = self._patch.stop
        keep_out_of_dynamo(CachedGraphs._wrap)  # a backward is compiled when it first runs

    def start(self) -> None:
        """Wraps AOTAutograd, and imports Dynamo for that."""
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
    """Adds functions to those with which graphs are kept in caches."""
    import torch._inductor.config as config

    known = getattr(config, "unsafe_marked_cacheable_functions", None)
    if known is None:
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(
        unsafe_marked_cacheable_functions={**known, **functions}
    )
    return patch
