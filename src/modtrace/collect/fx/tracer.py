"""Traces a model with torch.fx, and records for each node the module that it comes from."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch.fx
from torch import nn
from torch.fx.node import Argument, Node, Target
from torch.fx.proxy import TraceError

from ...errors import ModtraceError
from ...recording.module_path import path_below
from ..names.walk import walk
from .leaves import Leaves, to_leaf_choice


class UntraceableError(ModtraceError, TraceError):
    """Raised for a model that torch.fx cannot trace; `__cause__` is the original error.

    It is also a `torch.fx.proxy.TraceError`.
    """


class NodeNames(dict[Node, str | None]):
    """A mapping from the nodes of a graph to names.

    A node without a name, such as `output`, maps to None and is not listed.
    """

    def __missing__(self, node: Node) -> None:
        return None


class ModulePathTracer(torch.fx.Tracer):
    """A `torch.fx.Tracer` that records which module each node of its graph comes from.

    `trace(model)` returns the graph, as `torch.fx.Tracer` does. Each trace creates new mappings:

        tracer = ModulePathTracer()
        graph = tracer.trace(model)
        for node in graph.nodes:
            print(node, tracer.node_to_originating_module[node])

    Attributes:
        node_to_originating_module: the path of the module whose code made the node; for the node of a leaf module,
            the path of the leaf. `""` is the root. Paths are as in `state_dict`, without the parts of wrappers; a
            module that is registered twice has the path below its caller. None if the node comes from no module,
            as `output`, or was added after the trace. torch.fx makes one node per parameter, which has the module
            that reads it first.
        node_to_call: the call in which the node was made: `path` for the first call of its module in the trace,
            `path@1` for the second.
    """

    node_to_originating_module: NodeNames
    node_to_call: NodeNames
    _failure: tuple[Exception, str] | None  # an error raised inside a module, and the module's path

    def __init__(
        self,
        autowrap_modules: tuple[ModuleType, ...] = (math,),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        param_shapes_constant: bool = False,
        *,
        leaves: Leaves = None,
    ) -> None:
        """Takes the arguments of `torch.fx.Tracer`, and `leaves`.

        Args:
            autowrap_modules: Python modules whose functions become nodes and are not traced through.
            autowrap_functions: functions that become nodes and are not traced through.
            param_shapes_constant: makes the shapes of parameters numbers in the graph, not nodes.
            leaves: which modules stay one node. None: those of `torch.nn` except `Sequential`, as in torch.fx.
                A class of modules, a path pattern (`"layers.*"`, `"re:attn$"`), or a list of those: these in
                addition. `()`: none, every module is traced through. A function `(module, path) -> bool`: it alone
                decides.

        Raises:
            TypeError: `leaves` is something else.
            ValueError: a pattern in `leaves` cannot be read.
        """
        # torch declares a tuple of exactly one module, and takes any number of them
        super().__init__(autowrap_modules, autowrap_functions, param_shapes_constant)  # type: ignore[arg-type]
        self._leaves = to_leaf_choice(leaves)
        self._begin({})

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> torch.fx.Graph:
        """Traces a model or a function. The results of an earlier trace are replaced.

        Args:
            root: the model, or a function of tensors.
            concrete_args: values of arguments that are not traced, by name, as in `torch.fx.Tracer.trace`.

        Raises:
            UntraceableError: torch.fx cannot trace it. The message says where, and what else to do.
            ValueError: a pattern in `leaves` matches no module of the model.
        """
        self._begin(_paths_by_target(root) if isinstance(root, nn.Module) else {})
        if isinstance(root, nn.Module):
            self._leaves.check([path for paths in self._paths.values() for path in paths])
        try:
            return super().trace(root, concrete_args)
        except Exception as error:
            raise UntraceableError(_describe(root, self._place_of(error), error)) from error
        finally:
            self._failure = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Returns whether the module is one node in the graph, and is not traced through."""
        if self._leaves.beside_fx and super().is_leaf_module(m, module_qualified_name):
            return True
        names = self._paths.get(module_qualified_name, [module_qualified_name])
        return self._leaves.chooses(m, self._path_of(module_qualified_name), names)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Traces a call of a module, as torch.fx does, and attributes the nodes inside to the module."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(self._next_call(self.path_of_module(m)), lambda: forward(*args, **kwargs))

        depth = len(self.module_stack)
        try:
            return super().call_module(m, run, args, kwargs)
        except Exception:  # torch.fx (2.13) then remains inside the module, so a caller that continues fails
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            raise

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> Node:
        """Makes a node, as torch.fx does, and records the module that it comes from."""
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind != "output":
            call = self._next_call(str(target)) if kind == "call_module" else self._running
            self.node_to_originating_module[node] = call.path
            self.node_to_call[node] = call.shown
        return node

    def _begin(self, paths: dict[str, list[str]]) -> None:
        """Resets the tracer. Results that the user already has stay as they are."""
        self.node_to_originating_module = NodeNames()
        self.node_to_call = NodeNames()
        self._paths = paths
        self._calls = Counter({"": 1})  # by target; the traced call is the root's first
        self._running = _Call("", 0)
        self._failure = None
        # torch.fx (2.13) makes these only once, and keeps them after an exception
        self.module_stack = OrderedDict()
        self.num_calls = {}
        self.node_name_to_scope = {}
        self.submodule_paths = None

    def _next_call(self, target: str) -> "_Call":
        nth = self._calls[target]
        self._calls[target] += 1
        return _Call(self._path_of(target), nth)

    def _path_of(self, target: str) -> str:
        """Returns the path of the module that torch.fx calls `target`, as seen from the running module."""
        path, *aliases = self._paths.get(target, [target])
        return path_below(self._running.path, path, aliases)

    def _run(self, call: "_Call", forward: Callable[[], Any]) -> Any:
        caller, self._running = self._running, call
        try:
            return forward()
        except Exception as error:
            if self._failure is None or self._failure[0] is not error:
                self._failure = (error, call.path)
            raise
        finally:
            self._running = caller

    def _place_of(self, error: Exception) -> str:
        return self._failure[1] if self._failure is not None and self._failure[0] is error else ""


class _Call(NamedTuple):
    """One call of a module in a trace; `nth` counts from 0."""

    path: str
    nth: int

    @property
    def shown(self) -> str:
        return f"{self.path}@{self.nth}" if self.nth else self.path


def _paths_by_target(root: nn.Module) -> dict[str, list[str]]:
    """Returns all paths of each module by its name in torch.fx, which is its first raw path."""
    targets = {root: ""}
    paths = {"": [""]}
    for module, _, path, raw_path in walk(root, "", ""):
        paths.setdefault(targets.setdefault(module, raw_path), []).append(path)
    return paths


def _describe(root: nn.Module | Callable[..., Any], path: str, error: Exception) -> str:
    named = type(root) if isinstance(root, nn.Module) else root
    where = path or getattr(named, "__name__", repr(named))
    why = f"{type(error).__name__}: {error}".rstrip(".")
    leaf = f"Add {path!r} to leaves=, so that it stays one node, or record" if path else "Record"
    return (
        f"{where}: torch.fx cannot trace it: {why}. "
        f"{leaf} a run instead: rec.paths() and `modtrace paths` give the module of everything that ran."
    )
