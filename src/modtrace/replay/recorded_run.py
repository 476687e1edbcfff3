"""Records one run of a model, with everything that is needed to prove the recording."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..collect.ops.schemas import name_of
from ..recording.protocols import RecordingData
from ..torch_internals.dynamo import keep_out_of_dynamo
from ..torch_internals.modes import UnwrappedMode
from .kept_ops import OpKeep
from .model_run import Results, run_model
from .quiet_recorder import every_row, recording_ops


@dataclass(frozen=True)
class RecordedRun:
    """The recording of a run, what was kept beside it, and the ops that an independent mode has counted."""

    data: RecordingData
    keep: OpKeep
    counted: Sequence[str]  # the names of the ops that an independent mode has seen, in order
    results: Results


def record_run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedRun:
    """Records one forward and one backward."""
    keep_out_of_dynamo(_Counter.__torch_dispatch__)
    data = every_row()
    keep, counter = OpKeep(), _Counter()

    @contextmanager
    def recording() -> Iterator[None]:
        with counter, recording_ops(data, model, keeper=keep):
            yield

    results = run_model(model, args, kwargs, recording)
    return RecordedRun(data, keep, counter.names, results)


class _Counter(UnwrappedMode):
    """A mode that lists the name of every op, independently of the recorder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(func))
        return func(*args, **(kwargs or {}))
