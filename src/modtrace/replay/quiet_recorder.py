"""Records the ops of one run of a model without warnings; the marks of the recording say the same."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..collect.ops.mode import OpKeeper
from ..collect.recorder.environment import describe_run
from ..collect.recorder.recorder import Recorder
from ..errors import ModtraceWarning
from ..recording.in_memory.recording import MemoryRecording
from ..recording.options.capture import to_captures
from ..recording.options.op_options import Ops

_NO_LIMIT = 2**62  # bytes: a proof, as a graph, needs every row


def every_row(values: str | None = None) -> MemoryRecording:
    """Returns an empty recording in memory that drops no row."""
    return MemoryRecording(describe_run({"ops": True, "values": values}), max_bytes=_NO_LIMIT)


@contextmanager
def recording_ops(
    data: MemoryRecording, model: nn.Module, *, values: object = None, keeper: OpKeeper | None = None
) -> Iterator[None]:
    """Records what the model runs inside the block.

    Args:
        values: what is measured, as for `record()`; None measures nothing.
        keeper: receives every op.
    """
    error: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModtraceWarning)
        captures = to_captures(values, ops=True)
        recorder = Recorder(data, model, values=captures, ops=Ops(saved=False))
        recorder.start()
        try:
            if keeper is not None:
                recorder.add_op_keeper(keeper)
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            recorder.stop(error)
