"""The dispatch mode that sees every operator: its inputs, writes and outputs, its time, and where it runs."""

import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...recording.phase import BACKWARD
from ...torch_internals.autograd import (
    ACCUMULATE_SEQUENCE_NR,
    CustomFunctionNode,
    current_node,
    graph_task_id,
    is_custom_function,
    sequence_nr,
)
from ...torch_internals.call_frames import is_in_module_call
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import UnwrappedMode
from ...torch_internals.saved import saved_tensors_hooks
from ...torch_internals.tensors import count_write, version_of
from ..log.thread_log import ThreadLog, ThreadLogs
from ..scopes.locate import Location
from ..scopes.tracker import ScopeTracker
from ..tensor_ids.argument_reader import new_reader
from ..tensor_ids.tensor_ids import Geometry, new_tensor_ids
from .arguments import ArgumentTexts
from .schemas import OpSchema

if TYPE_CHECKING:
    from ._op_mode import CompiledOpMode, state
else:
    try:
        from ._op_mode import CompiledOpMode, state
    except ImportError:  # it is not compiled: `record` refuses ops
        CompiledOpMode, state = object, None

#: Numbers that an op has in `OpMode.take`, one behind the other.
EVENT_WIDTH = 14
(
    OP, SCHEMA, ARGUMENTS, USES, TENSORS, START_NS, END_NS, AT, SEQUENCE, FLAGS, LIVE_BEFORE, LIVE_AFTER, NODE,
    ALLOCATED,
) = range(EVENT_WIDTH)  # fmt: skip

# Flags.
RAISED = 1
GRAD_MODE = 2
ADDING = 4  # the engine adds gradients that meet ...
NOT_ADDING = 8  # ... or not; neither: it is not known
CUSTOM_NODE = 16  # a backward op of an autograd Function of the user's
PACKS = 64  # hooks pack what autograd saves: ops of theirs may run between an op's node and the op
ACCUMULATES = 32  # the engine passes the gradient of a leaf to it

NO_NODE = -1


class OpRun(NamedTuple):
    """The location of consecutive ops of one thread, until the next run begins."""

    first: int  # index of the run's first op among the ops recorded since they were last taken
    where: Any  # a Segment; a ThreadLog, whose nodes are looked up later; a Location; None: outside
    backward: Any  # the Backward it runs in
    thread: int

    @property
    def node_thread(self) -> int:
        """The thread that has numbered the nodes for which the ops work: on a device it is not the one they run on."""
        where = self.where
        if type(where) is ThreadLog:
            return where.number
        if type(where) is Location and where.numbered_by is not None:
            return where.numbered_by
        return self.thread


class OpKeeper(Protocol):
    """Receives the tensors of each op; used by `verify`."""

    def begins(self, op: int, schema: OpSchema, args: Any, kwargs: Any) -> None:
        """Receives an op that is about to run. All tensors that it reads have numbers."""

    def ended(self, op: int, schema: OpSchema, output: Any) -> None:
        """Receives an op that has returned."""

    def met(self, tensor_id: int, tensor: torch.Tensor, log: ThreadLog) -> None:
        """Receives a tensor that no op has made (parameter, buffer, input, constant) before it is first read.

        It also receives such a tensor if an outermost call has returned it, when no op runs.
        """


class OpMode(CompiledOpMode, UnwrappedMode):
    """Appends one event per op. Exceptions of the op propagate; our own are reported and end op recording.

    `__torch_dispatch__` is in C. It calls the methods below for what is rare: a new operator, leaves, a place where no
    op has run before.
    """

    def __init__(self, tracker: ScopeTracker, failed: Callable[[Exception, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids = new_tensor_ids()
        self.texts = ArgumentTexts()
        self.schemas: list[OpSchema] = []
        self.op_runs: list[OpRun] = []
        # The methods of keepers; see `OpKeeper`. There is a list for each, because an empty one costs nothing.
        self.before: list[Callable[[int, OpSchema, Any, Any], None]] = []
        self.after: list[Callable[[int, OpSchema, Any], None]] = []
        self.met: list[Callable[[int, torch.Tensor, ThreadLog], None]] = []
        self.raised: Callable[[int, RuntimeError], None] | None = None  # receives what an op has raised
        self.only_written: Collection[int] = ()  # see `report_leaves`; while keepers are notified
        self.has_failed = False
        self._tracker = tracker
        self._failed = failed
        self._where = self  # no op has run yet
        logs = tracker.logs
        self.set_up(
            state,
            (
                self.ids, new_reader(self.ids), self.texts.numbers, self.texts.add, self.before, self.after, logs,
                logs.threads, torch.Tensor, CustomFunctionNode, torch.is_grad_enabled, saved_tensors_hooks,
                graph_task_id, current_node, sequence_nr, time.perf_counter_ns, tracker.optimizers.starts,
            ),
        )  # fmt: skip

    @property
    def is_inside(self) -> bool:
        """True if the last op ran in a module call or in a backward."""
        return self._where is not None

    def add_keeper(self, keeper: OpKeeper) -> None:
        """Calls a keeper with every op and its tensors from now on."""
        self.before.append(keeper.begins)
        self.after.append(keeper.ended)
        self.met.append(keeper.met)
        self.keep_out_of_dynamo()

    def keep_out_of_dynamo(self) -> None:
        """Keeps Dynamo from compiling what C code calls, keepers included: no frame of ours is around them."""
        keep_out_of_dynamo(
            self.report_leaves, self.fail, self._add_schema, self.texts.add, self._start_run, self._check_frames,
            self._locate_elsewhere, self._versions_of_written, self._raised, self._recount, OpSchema.is_ours,
            OpSchema.only_written, Geometry.of, Geometry.of_unreadable, vars(ThreadLogs)["current"].fget,
            *self.before, *self.after, *self.met,
        )  # fmt: skip

    def take(self) -> "tuple[array[int], list[OpRun]]":
        """Returns the ops that have run since the last call of this method."""
        op_runs, self.op_runs = self.op_runs, []
        self._where = self  # the next op records again where it is
        return self.take_events(), op_runs

    def report_leaves(self, log: ThreadLog, only_written: Collection[int] = ()) -> None:
        """Passes the leaves seen since the last call to the keepers.

        Args:
            only_written: those by `id` that the op does not read, because it writes to all of them (`out=`).
        """
        self.only_written = only_written
        leaves, self.ids.leaves = self.ids.leaves, []
        for met in self.met:
            for number, tensor in leaves:
                met(number, tensor, log)

    def resized(self, stored: torch.UntypedStorage) -> None:
        """Receives a storage that Python code has resized."""
        if not self.is_off:
            self.ids.resized(stored)

    def fail(self, error: Exception, where: str) -> None:
        """Reports an internal error, and stops recording ops."""
        self.is_off = self.has_failed = True
        self.is_running = False
        self._failed(error, where)

    def mark(self, func: Any, log: ThreadLog) -> int:
        """Appends an event that reads and makes nothing, and returns its number. `func` has a `name()`, as ops have."""
        schema = self.schema_of(func)
        key = (schema.index, 0)
        arguments = self.texts.numbers.get(key)
        if arguments is None:
            arguments = self.texts.add(schema, key)
        op, ids, live, now = self.next, self.ids, self.ids.lowest_bytes, time.perf_counter_ns()
        self.next = op + 1
        at, node, flags = self.locate(log)
        self.append_event(
            op, schema.index, arguments, ids.used_count, ids.next, now, now, at, sequence_nr(), flags,
            live, ids.live_bytes, node, ids.take_allocated(),
        )  # fmt: skip
        return op

    # What is called from C.

    def _add_schema(self, func: Any) -> OpSchema:
        schema = OpSchema(func, len(self.schemas))
        self.schemas.append(schema)
        return schema

    def _start_run(self, where: Any, backward: Any, log: ThreadLog) -> None:
        """Begins another run of ops, unless the location is the same as before."""
        is_same = where is self._where or (type(where) is Location and where == self._where)
        if not (is_same and backward is self._backward and log is self._log):
            self._where, self._backward, self._log = where, backward, log
            self.op_runs.append(OpRun(self.event_count, where, backward, log.number))

    def _check_frames(self, log: ThreadLog, frame: FrameType) -> Any:
        """Returns what runs at the first op of a function in this context, because hooks miss a KeyboardInterrupt."""
        if is_in_module_call(frame):
            log.context.codes.add(frame.f_code)
        else:
            self._tracker.close_dead_calls(log, frame)
        return log.segment

    def _locate_elsewhere(self, log: ThreadLog, task: int, flags: int) -> tuple[Any, Any, int, int]:
        """Returns location, backward, node number and flags of an op that runs outside of modules or in a backward."""
        tracker = self._tracker
        if task < 0:
            return (tracker.where() if tracker.optimizers.has_begun() else None), None, NO_NODE, NOT_ADDING
        if task != self._task:
            self._task, self._task_backward = task, tracker.backwards.running(log, task)
            self._maker = tracker.backwards.threads.sole(log, self._task_backward)
        backward = self._task_backward
        node = current_node()
        if node is None or backward is None or log.hooked is not None:
            return _without_tensor(tracker.where()), backward, NO_NODE, NOT_ADDING
        number = node._sequence_nr()
        if tracker.optimizers.has_begun():
            return _without_tensor(tracker.where()), backward, NO_NODE, NOT_ADDING
        if number == ACCUMULATE_SEQUENCE_NR:
            return self._maker or log, backward, NO_NODE, ACCUMULATES
        maker = self._maker
        if maker is None or backward.inside is not None or (flags & GRAD_MODE and not backward.create_graph):
            found = tracker.where()
            is_its_own = found.phase == BACKWARD and found.parameter is None
            more = _flags_of_node(node, found.accumulation)
            return _without_tensor(found), backward, number if is_its_own else NO_NODE, more
        return maker, backward, number, _flags_of_node(node, backward.is_adding(number))

    def _versions_of_written(
        self, schema: OpSchema, args: Any, kwargs: Any
    ) -> Sequence[tuple[torch.Tensor, int | None]]:
        """Returns what an op is going to write to, with its version."""
        try:
            return [(tensor, version_of(tensor)) for tensor in schema.find_written(args, kwargs)]
        except Exception as error:
            self.fail(error, f"the op {schema.name}")
            return ()

    def _raised(self, op: int, error: RuntimeError) -> None:
        """Receives an error that an op has raised."""
        if self.raised is not None:
            self.raised(op, error)

    @staticmethod
    def _recount(unseen: Sequence[tuple[torch.Tensor, int | None]]) -> None:
        """Counts the writes of a foreach op that torch has not counted.

        Inside of a mode torch counts none on a CPU (2.13), and outside of modes it does.
        """
        for tensor, _ in [written for written in unseen if version_of(written[0]) == written[1]]:
            count_write(tensor)


def tensors_in(value: Any, slot: str) -> Iterator[tuple[torch.Tensor, str]]:
    """Yields the tensors of an argument or an output, with their slots."""
    if isinstance(value, torch.Tensor):
        yield value, slot
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from tensors_in(item, f"{slot}[{at}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors_in(item, f"{slot}[{name!r}]")


def _without_tensor(found: Location) -> Location:
    """Returns the location without its parameter, which must not be kept alive."""
    return found if found.parameter is None else found._replace(parameter=None)


def _flags_of_node(node: Any, is_adding: bool | None) -> int:
    flags = 0 if is_adding is None else ADDING if is_adding else NOT_ADDING
    return flags | CUSTOM_NODE if is_custom_function(node) else flags
