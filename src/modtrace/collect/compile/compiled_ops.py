"""Records the ops inside of compiled code, with their modules and the kernels that were made of them."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from ...recording.phase import BACKWARD, FORWARD, PHASES
from ...recording.protocols import Sink
from ...torch_internals.compiled_graphs import CompiledGraph, CompilerWatch, GraphOp, RunListener
from ...torch_internals.dynamo import is_compile_wrapper
from ..scopes.tracker import ScopeTracker

#: Columns whose values are taken from the graph unchanged.
_SHARED = [field.name for field in fields(GraphOp) if field.name != "module"]


class CompiledOpRecorder:
    """Takes the graphs that compilers received, and writes them once their compilations have rows."""

    def __init__(
        self, tracker: ScopeTracker, runs: RunListener, sink: Sink, failed: Callable[[Exception], None]
    ) -> None:
        """Creates a recorder, which takes no graphs before `watch()`."""
        self.begins, self.ended = runs.begins, runs.ended
        self._tracker = tracker
        self._sink = sink
        self._failed = failed
        self._watch = CompilerWatch(self)
        self._lock = threading.Lock()  # guards the following attributes
        #: The results of `_find_modules` by compile id.
        self._modules: dict[str, dict[int | str, int]] = {}
        self._waiting: list[CompiledGraph] = []

    def watch(self) -> None:
        """Starts taking graphs as soon as the program has called `torch.compile`."""
        self._watch.start()

    def stop(self) -> None:
        """Stops taking graphs."""
        self._watch.stop()

    def compiled(self, graph: CompiledGraph) -> None:
        """Takes a graph, on the thread that waits for the compiler."""
        try:
            with self._lock:
                if not graph.is_backward:
                    self._modules[graph.compile_id] = self._find_modules()
                self._waiting.append(graph)
        except Exception as error:
            self._failed(error)

    def _find_modules(self) -> dict[int | str, int]:
        """Returns the module_ids of the compiled module and of modules inside it, both by `id` and by path."""
        segment = self._tracker.logs.current.segment
        module = None if segment is None else segment.context_of(segment.open_calls.innermost).module
        if module is not None and is_compile_wrapper(module):
            module = module._modules["_orig_mod"]
        if not isinstance(module, nn.Module):
            return {}
        found: dict[int | str, int] = {}
        for path, inner in module.named_modules(remove_duplicate=False):
            named = self._tracker.names.get(inner)
            if named is not None:
                found[id(inner)] = found[path] = named.module_id
        return found

    def write(self, compilation_ids: Mapping[str, int]) -> None:
        """Writes the graphs whose forwards have rows, by compile id."""
        with self._lock:
            ready = [graph for graph in self._waiting if graph.compile_id in compilation_ids]
            self._waiting = [graph for graph in self._waiting if graph.compile_id not in compilation_ids]
            modules = [self._modules.get(graph.compile_id, {}) for graph in ready]
        for graph, ids in zip(ready, modules, strict=True):
            if graph.ops:
                self._sink.write("compiled_ops", _columns(graph, ids, compilation_ids[graph.compile_id]))


def _columns(graph: CompiledGraph, modules: Mapping[int | str, int], compilation_id: int) -> dict[str, Any]:
    count = len(graph.ops)
    return {
        "compilation_id": [compilation_id] * count,
        "phase": [PHASES.index(BACKWARD if graph.is_backward else FORWARD)] * count,
        "nth": list(range(count)),
        "module_id": [None if op.module is None else modules.get(op.module) for op in graph.ops],
        **{name: [getattr(op, name) for op in graph.ops] for name in _SHARED},
    }
