"""Records every operator for one recorder: enters the mode, and hands over what ran since it was last asked."""

import threading
from collections.abc import Callable

from ..torch_internals import count_dispatch_modes, keep_out_of_dynamo, leave_dispatch_mode, sequence_nr
from .op_batches import OpBatch
from .op_mode import OpMode
from .op_nodes import OpNodes
from .op_rows import OpTables
from .scopes import ScopeTracker


class OpRecorder:
    """The ops of one recording."""

    def __init__(self, tracker: ScopeTracker, failed: Callable[[Exception, str], None]) -> None:
        self.mode = OpMode(tracker, failed)
        self._thread = -1
        self.tables = OpTables(self.mode, OpNodes(tracker.log.number, sequence_nr()))
        self._is_entered = False
        self._modes_below = 0

    def start(self, *, is_wanted: bool) -> None:
        """Sees ops from now on, on this thread."""
        keep_out_of_dynamo(OpMode.__torch_dispatch__)
        self._modes_below = count_dispatch_modes()
        self._thread = threading.get_ident()
        self.mode.is_off = True
        self.want(is_wanted)

    def stop(self) -> None:
        """Sees no more."""
        self.mode.is_off = True
        if self._is_entered:
            self._is_entered = False
            leave_dispatch_mode(self.mode)

    def abandon(self) -> None:
        """Sees no more: this process is a fork."""
        self.mode.is_off = True

    def want(self, is_wanted: bool) -> None:
        """Whether what runs from now on is to be seen.

        A mode costs 3 us an op even if it only passes on, so it is taken off; unless it stands below one of the user's,
        who takes off what is on top.
        """
        if is_wanted is not self.mode.is_off or self.mode.has_failed:
            return
        depth = count_dispatch_modes() - self._is_entered
        if (
            threading.get_ident() == self._thread
            and depth == self._modes_below
            and is_wanted is not self._is_entered
        ):
            if is_wanted:
                self.mode.__enter__()  # type: ignore[no-untyped-call]
            else:
                leave_dispatch_mode(self.mode)
            self._is_entered = is_wanted
        if is_wanted:
            self.mode.ids.forget()
        self.mode.is_off = not is_wanted

    def take(self) -> OpBatch | None:
        """The ops that have run since, with what was met with them; None: none has."""
        return OpBatch(self.mode) if self.mode.events else None
