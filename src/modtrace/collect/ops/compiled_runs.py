"""Records what compiled code was given and has returned, each time that it runs."""

import time
from collections.abc import Container, Sequence
from typing import Any

import torch

from ...torch_internals.compiled_graphs import CompiledGraph
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import is_dispatch_mode_on
from ..log.thread_log import ThreadLog
from ..scopes.tracker import ScopeTracker
from ..tensor_ids.tensor_ids import NO_TENSOR
from .mode import OpMode


class CompiledRun:
    """One run of a graph's compiled code, with the numbers of tensors; NO_TENSOR where no op reads or makes one."""

    __slots__ = ("end_ns", "given", "graph", "op", "returned")

    def __init__(self, op: int, graph: CompiledGraph, given: Sequence[int]) -> None:
        self.op = op  # its number among the ops
        self.graph = graph
        self.given = given
        self.returned: Sequence[int] = ()
        self.end_ns: int | None = None  # None: it has not returned


class _RunMark:
    """Stands for the run of compiled code in the place of an op."""

    def name(self) -> str:
        return "compiled"


_MARK = _RunMark()


class CompiledRuns:
    """Records the runs of one recording. Each takes the number of an op, to be placed in calls and backwards as one."""

    def __init__(self, tracker: ScopeTracker, mode: OpMode) -> None:
        self._tracker = tracker
        self._mode = mode
        self._found: list[CompiledRun] = []
        keep_out_of_dynamo(CompiledRuns.begins, CompiledRuns.ended)

    def take(self) -> list[CompiledRun]:
        """Returns the runs since the last call."""
        found, self._found = self._found, []
        return found

    def begins(self, graph: CompiledGraph, given: Sequence[Any]) -> CompiledRun | None:
        """Records a run that begins on this thread; None if its ops are not recorded."""
        mode = self._mode
        if mode.is_off or mode.is_running or not is_dispatch_mode_on(mode):
            return None
        try:
            log = self._tracker.logs.current
            numbers = self._identify(given, graph.given, log)
            run = CompiledRun(mode.mark(_MARK, log), graph, numbers)
            self._found.append(run)
        except Exception as error:
            mode.fail(error, "what compiled code was given")
            return None
        return run

    def ended(self, run: CompiledRun | None, returned: Sequence[Any]) -> None:
        """Records what a run has returned."""
        if run is None or self._mode.is_off:
            return
        try:
            run.end_ns = time.perf_counter_ns()
            run.returned = self._identify(returned, run.graph.returned, self._tracker.logs.current)
        except Exception as error:
            self._mode.fail(error, "what compiled code has returned")

    def _identify(self, values: Sequence[Any], wanted: Container[int], log: ThreadLog) -> list[int]:
        numbers = [self._number_of(value) if at in wanted else NO_TENSOR for at, value in enumerate(values)]
        self._mode.report_leaves(log)
        return numbers

    def _number_of(self, value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            return NO_TENSOR
        try:
            return self._mode.ids.identify(value)
        except Exception:  # it has no storage
            return NO_TENSOR
