"""Records one run of a model: to prove the recording, or from a seed, to compare it with another model's run."""

import copy
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..collect.ops.mode import OpKeeper
from ..collect.ops.schemas import name_of
from ..collect.recorder.environment import describe_run
from ..collect.recorder.recorder import Recorder
from ..errors import ModtraceWarning
from ..recording.in_memory.recording import MemoryRecording
from ..recording.options.capture import Capture, to_captures
from ..recording.options.op_options import Ops
from ..recording.protocols import RecordingData
from ..recording.role import INPUT, LEAF, OP_OUTPUT, OUTPUT, PARAMETER
from ..torch_internals.dynamo import keep_out_of_dynamo
from ..torch_internals.modes import UnwrappedMode
from .kept_ops import OpKeep
from .model_run import Results, run_model
from .model_state import tensors_in

_ROLES = (INPUT, OUTPUT, OP_OUTPUT, LEAF, PARAMETER)


@dataclass(frozen=True)
class RecordedRun:
    """The recording of a run, with everything that was kept beside it."""

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


def record_from_seed(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    seed: int,
    gradients: bool,
    ops: bool = True,
    roles: Sequence[str] = _ROLES,
) -> RecordingData:
    """Returns a recording of one call of a model, with ops, statistics, hashes and sketches of all tensors.

    The model, its arguments and the random generators are restored afterwards, even if the model raises.

    Args:
        model: the model.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        seed: the seed of all random generators before the call.
        gradients: whether a backward runs too, from `output.loss` if there is one, else from the sum of the outputs.
        ops: whether ops are recorded.
        roles: which tensors are measured.
    """
    data = every_row("stats")
    capture = Capture(roles=roles, hash=True, sketch=True)

    def recording() -> AbstractContextManager[None]:
        _set_seed(seed)
        return recording_ops(data, model, values=capture, ops=ops)

    run_model(model, args, kwargs, recording, backward=gradients)
    return data


def record_in_float64(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, seed: int, roles: Sequence[str]
) -> RecordingData | None:
    """Returns a recording of one call of a copy of the model, all of whose numbers have 64 bits.

    It is None if the model or its arguments cannot be copied, or if the copy raises, as one that names a dtype may.
    """
    arguments: Any = [list(args), dict(kwargs)]
    try:
        wide: dict[int, Any] = {
            id(tensor): tensor.detach().double()
            for _, tensor in tensors_in(arguments)
            if tensor.is_floating_point()
        }
        own_args, own_kwargs = copy.deepcopy(arguments, wide)
        twin = copy.deepcopy(model).double()
        return record_from_seed(
            twin, own_args, own_kwargs, seed=seed, gradients=False, ops=False, roles=roles
        )
    except Exception:
        return None


class _Counter(UnwrappedMode):
    """A mode that lists the name of every op, independently of the recorder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(func))
        return func(*args, **(kwargs or {}))


def _set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


_NO_LIMIT = 2**62  # in bytes, as a proof or a graph needs every row


def every_row(values: str | None = None) -> MemoryRecording:
    """Returns an empty recording in memory that drops no row."""
    return MemoryRecording(describe_run({"ops": True, "values": values}), max_bytes=_NO_LIMIT)


@contextmanager
def recording_ops(
    data: MemoryRecording,
    model: nn.Module,
    *,
    values: object = None,
    ops: bool = True,
    keeper: OpKeeper | None = None,
) -> Iterator[None]:
    """Records what the model runs inside the block.

    Args:
        values: the values to measure, as for `record()`; None measures nothing.
        ops: whether ops are recorded.
        keeper: receives every op.
    """
    error: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModtraceWarning)
        captures = to_captures(values, ops=ops)
        recorder = Recorder(data, model, values=captures, ops=Ops(saved=False) if ops else None)
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
