"""Records every operator for one recorder: enters the mode, and hands over what ran since it was last asked."""

import threading
from collections.abc import Callable

from ...recording.options.op_options import Ops
from ...torch_internals import (
    count_dispatch_modes,
    is_dispatch_mode_on,
    keep_out_of_dynamo,
    leave_dispatch_mode,
    leave_function_mode,
    sequence_nr,
)
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from ..values.capture_masks import Wishes
from .batches import OpBatch
from .boundary import OpBoundary
from .leaves import OpLeaves
from .mode import OpMode
from .nodes import OpNodes
from .python_source import PythonNames, SourceLines
from .rows import OpTables
from .saved_memory import OpSavings, Savings
from .values import Measure, OpValues


class OpRecorder:
    """The ops of one recording."""

    def __init__(
        self,
        tracker: ScopeTracker,
        options: Ops,
        *,
        failed: Callable[[Exception, str], None],
        missed: Callable[[], None],
    ) -> None:
        self._tracker = tracker
        self.mode = OpMode(tracker, failed)
        thread = tracker.logs.current.number
        self.tables = OpTables(self.mode, OpNodes(thread, sequence_nr()))
        self.values: OpValues | None = None
        self._sources = SourceLines() if options.source else None
        self._python_names = PythonNames() if options.python_names else None
        self._leaves = OpLeaves(tracker)
        self._boundary = OpBoundary(tracker, self.mode, self._leaves)
        self._savings: OpSavings | None = None
        self._missed = missed
        self._has_missed = False
        if options.saved:
            self._savings = OpSavings(tracker, self._leaves, is_wanted=self._is_recording, failed=failed)
        self._thread = -1
        self._is_entered = False
        self._modes_below = 0

    def _is_recording(self) -> bool:
        return not self.mode.is_off

    def add_values(
        self, wishes: Wishes, measure: Measure, failed: Callable[[Exception, str], None]
    ) -> OpValues:
        """Has what ops return and read measured, too; to be called before `start()`."""
        self.values = OpValues(self._tracker, self.mode, wishes, measure, failed)
        return self.values

    def start(self, *, is_wanted: bool) -> None:
        """Sees ops from now on, on this thread."""
        keep_out_of_dynamo(OpMode.__torch_dispatch__)
        self._modes_below = count_dispatch_modes()
        self._thread = threading.get_ident()
        self.mode.is_off = True
        self.mode.met.append(self._leaves.name)
        if self.values is not None:
            self.mode.met.append(self.values.met)
            self.mode.after.append(self.values.ended)
        if self._sources is not None:
            self.mode.before.append(self._sources.begins)
        if self._python_names is not None:
            self.mode.before.append(self._python_names.begins)
        self._boundary.start()
        if self._savings is not None:
            self._tracker.subscribers.add(self._savings)
        self.want(is_wanted)

    def stop(self) -> str | None:
        """Sees no more, and takes its attributes off storages.

        Returns:
            what is to be said if our mode stays on the stack of another thread.
        """
        self.mode.is_off = True
        elsewhere = None
        try:
            self._boundary.stop()
            self._leaves.forget_inputs()
            if self._savings is not None:
                self._tracker.subscribers.remove(self._savings)
                self._savings.forget()
            if self._is_entered:
                self._is_entered = False
                if threading.get_ident() == self._thread:
                    self._leave()
                else:
                    elsewhere = _describe_elsewhere(self._thread)
        finally:
            self.mode.ids.forget()
        return elsewhere

    def _leave(self) -> None:
        leave_dispatch_mode(self.mode)
        if self._python_names is not None:
            leave_function_mode(self._python_names)

    def abandon(self) -> None:
        """Sees no more: this process is a fork, or writing has failed on another thread. The mode stays on."""
        self.mode.is_off = self.mode.has_failed = True

    def want(self, is_wanted: bool) -> None:
        """Whether what runs from now on is to be seen.

        A mode costs 3 us an op even if it only passes on, so it is taken off; unless it stands below one of the user's,
        who takes off what is on top.
        """
        if self.mode.has_failed or self.mode.is_running or threading.get_ident() != self._thread:
            return
        depth = count_dispatch_modes() - self._is_entered
        if depth == self._modes_below and is_wanted is not self._is_entered:
            if is_wanted:
                self.mode.__enter__()  # type: ignore[no-untyped-call]
                if self._python_names is not None:
                    self._python_names.__enter__()  # type: ignore[no-untyped-call]
            else:
                self._leave()
            self._is_entered = is_wanted
        elif is_wanted and not (self._is_entered and is_dispatch_mode_on(self.mode)):
            self._miss()
        if is_wanted and self.mode.is_off:
            self.mode.ids.forget()
        self.mode.is_off = not is_wanted

    def _miss(self) -> None:
        """Our mode cannot be on now."""
        if not self._has_missed:
            self._has_missed = True
            self._missed()

    def take(self) -> OpBatch | None:
        """The ops that have run since, with what was met with them; None: none has, and no call was noted."""
        if not (self.mode.events or self._boundary.found) or (self.mode.is_running and self._is_entered):
            return None  # the op that runs is not to be parted from what it was given
        batch = OpBatch(self.mode, self._boundary.take())
        batch.leaves = self._leaves.take()
        if self._sources is not None:
            batch.sources = self._sources.take()
        if self._python_names is not None:
            batch.python_names = self._python_names.take()
        return batch

    def take_savings(self, backward: Backward) -> Savings | None:
        """What a backward that has ended had found kept for it; None: nobody looked."""
        return None if self._savings is None else self._savings.take(backward)


def _describe_elsewhere(thread: int) -> str | None:
    """Says that our mode stays on the stack of a thread, if that still runs: no other thread can take it off."""
    entered = next((each.name for each in threading.enumerate() if each.ident == thread), None)
    if entered is None:
        return None
    return (
        f"the recording was entered on the thread {entered!r} and left on {threading.current_thread().name!r}: its "
        "dispatch mode stays on the stack of the first one, where it records nothing and costs 3 us an op. "
        "Leave the recording on the thread that entered it."
    )
