"""Records one run of a model with everything that its proof needs."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..collect.environment import describe_run
from ..collect.op_plans import name_of
from ..collect.recorder import Recorder
from ..errors import ModtraceWarning
from ..recording.memory import MemoryRecording
from ..recording.op_options import Ops
from ..recording.protocols import RecordingData
from ..torch_internals import keep_out_of_dynamo
from .kept_ops import OpKeep
from .model_run import Results, run_model

_NO_LIMIT = 2**62  # bytes: a proof needs every row


@dataclass(frozen=True)
class RecordedRun:
    """A recording, what was kept beside it, and what another counter has seen."""

    data: RecordingData
    keep: OpKeep
    counted: Sequence[str]  # the names of the ops that an independent mode has seen, in order
    results: Results


def record_run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedRun:
    """One forward and backward under the recorder."""
    keep_out_of_dynamo(_Counter.__torch_dispatch__)
    data = MemoryRecording(describe_run({"ops": True}), max_bytes=_NO_LIMIT)
    keep, counter = OpKeep(), _Counter()

    @contextmanager
    def recording() -> Iterator[None]:
        with counter, warnings.catch_warnings():
            warnings.simplefilter("ignore", ModtraceWarning)  # the mark in the recording says the same
            recorder = Recorder(data, model, ops=Ops(saved=False))
            recorder.start()
            error: BaseException | None = None
            try:
                recorder.add_op_keeper(keep)
                yield
            except BaseException as raised:
                error = raised
                raise
            finally:
                recorder.stop(error)

    results = run_model(model, args, kwargs, recording)
    return RecordedRun(data, keep, counter.names, results)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Stands below the recorder and writes down every op, knowing nothing of it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """With True compiled code stays compiled while the mode is on."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """With True torch wraps `__torch_dispatch__` and imports its compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(func))
        return func(*args, **(kwargs or {}))
