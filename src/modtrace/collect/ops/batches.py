"""Holds the consecutive ops of one step until their rows are written."""

from array import array
from collections.abc import Sequence
from copy import copy

import numpy as np

from ..backward.plan import calls_of_nodes
from ..log.nesting import Ints
from ..log.segments import Segment
from ..log.thread_log import ThreadLog
from ..steps.device_columns import EventPairs
from ..tensor_ids.tensor_ids import ROW_WIDTH
from .alive import Alive
from .arguments import Arguments
from .boundary import AtRoot
from .compiled_runs import CompiledRun
from .leaves import Leaf
from .mode import EVENT_WIDTH, NODE, OP, START_NS, TENSORS, USES, OpMode, OpRun
from .values import MeasuredOps


class OpBatch:
    """Ops with the tensors that they used, or at least the arguments and outputs of outermost calls."""

    __slots__ = (
        "alive", "arguments", "at_roots", "compiled_runs", "device_events", "events", "first_tensor", "leaves",
        "measured", "op_runs", "owners", "python_names", "sources", "start_ns", "tensors", "used",
    )  # fmt: skip

    def __init__(self, mode: OpMode, at_roots: Sequence[AtRoot]) -> None:
        """Takes the ops since the previous batch. `at_roots` has the arguments and outputs of outermost calls."""
        self.events, self.op_runs = mode.take()
        self.tensors, self.used, self.first_tensor = mode.ids.take()
        self.arguments: list[Arguments] = mode.texts.take()  # what their numbers mean
        self.at_roots = at_roots
        self.start_ns = self.events[START_NS] if self.events else int(at_roots[0].segment.times[0])
        self.owners = self._find_owners()
        self.leaves: list[Leaf] = []
        self.device_events: EventPairs = {}  # by op, as far as times of devices are taken
        self.sources: dict[int, str] = {}  # by op, as far as asked for
        self.python_names: dict[int, str] = {}
        self.compiled_runs: list[CompiledRun] = []
        self.measured: MeasuredOps | None = None
        self.alive: Alive | None = None  # what lived when an op could not have memory

    def __len__(self) -> int:
        return len(self.events) // EVENT_WIDTH

    def runs(self) -> list[tuple[int, int, OpRun]]:
        """Returns the runs of ops, each with the rows of this batch where it begins and ends."""
        begins = [run.first for run in self.op_runs]
        if not begins:
            return []
        return list(zip(begins, [*begins[1:], len(self)], self.op_runs, strict=True))

    def is_outside(self) -> bool:
        """Returns whether all its ops ran outside of calls, backwards and optimizers."""
        return bool(self.events) and all(run.where is None and run.backward is None for run in self.op_runs)

    def part_at(self, first: int) -> "OpBatch":
        """Removes the ops from `first` on, which is not 0, and returns them. All ops are outside: see `is_outside`."""
        at = first * EVENT_WIDTH
        uses, tensor = self.events[at - EVENT_WIDTH + USES], self.events[at - EVENT_WIDTH + TENSORS]
        later = copy(self)
        later.events = self.events[at:]
        later.events[USES::EVENT_WIDTH] = array("q", [end - uses for end in later.events[USES::EVENT_WIDTH]])
        later.start_ns, later.at_roots = later.events[START_NS], []
        runs = [run._replace(first=max(run.first - first, 0)) for run in self.op_runs]
        begins = [at for at, run in enumerate(self.op_runs) if run.first <= first]
        later.op_runs = runs[begins[-1] :]
        row = (tensor - self.first_tensor) * ROW_WIDTH
        later.tensors, later.used, later.first_tensor = self.tensors[row:], self.used[uses:], tensor
        later.leaves = [leaf for leaf in self.leaves if leaf.tensor_id >= tensor]
        self.leaves = [leaf for leaf in self.leaves if leaf.tensor_id < tensor]
        if self.alive is not None:
            is_later = self.alive.op >= later.events[OP]
            later.alive, self.alive = (self.alive, None) if is_later else (None, self.alive)
        if self.measured is not None:
            later.measured = self.measured.part_at(later.events[OP])
        self.events, self.tensors, self.used = self.events[:at], self.tensors[:row], self.used[:uses]
        self.op_runs = [run for run in self.op_runs if run.first < first]
        return later

    def _find_owners(self) -> "dict[ThreadLog, NodeOwners]":
        """Finds the owners of the nodes that the engine ran, by the thread that made them, while the graph lives."""
        nodes: dict[ThreadLog, list[int]] = {}
        for begin, end, run in self.runs():
            if type(run.where) is ThreadLog:
                ran = self.events[begin * EVENT_WIDTH + NODE : end * EVENT_WIDTH : EVENT_WIDTH]
                nodes.setdefault(run.where, []).extend(ran)
        return {log: owners_of(log, np.array(ran, np.int64)) for log, ran in nodes.items()}


class NodeOwners:
    """The segments that own nodes, and for each op the indices of its segment and of its call."""

    __slots__ = ("index", "of_segment", "segments")

    def __init__(self, segments: Sequence[Segment | None], of_segment: Ints, index: Ints) -> None:
        self.segments = segments
        self.of_segment = of_segment
        self.index = index  # of the call in its segment; -1: none


def owners_of(log: ThreadLog, nodes: Ints) -> NodeOwners:
    """Returns the owners of nodes in any order. A number below 0 (the node accumulates a leaf's gradient) has none."""
    ascending, at = np.unique(nodes, return_inverse=True)
    segments, of_segment, index = calls_of_nodes(log, ascending[::-1])
    back = len(ascending) - 1 - at
    return NodeOwners(segments, of_segment[back], np.where(nodes < 0, -1, index[back]))
