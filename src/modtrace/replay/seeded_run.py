"""Records one run of a model from a seed, so that the same run of another model can be compared with it."""

import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..recording.options.capture import Capture
from ..recording.protocols import RecordingData
from ..recording.role import INPUT, LEAF, OP_OUTPUT, OUTPUT, PARAMETER
from .model_run import run_model
from .quiet_recorder import every_row, recording_ops

_ROLES = (INPUT, OUTPUT, OP_OUTPUT, LEAF, PARAMETER)


def record_from_seed(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, seed: int, gradients: bool
) -> RecordingData:
    """Returns a recording of one call of a model, with ops, statistics, hashes and sketches of all tensors.

    The model, its arguments and the random generators are restored afterwards, also if it raises.

    Args:
        model: the model.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        seed: that all random generators are set to before the call.
        gradients: whether a backward runs too, from `output.loss` if there is one, else from the sum of the outputs.
    """
    data = every_row("stats")
    capture = Capture(roles=_ROLES, hash=True, sketch=True)

    def recording() -> AbstractContextManager[None]:
        _set_seed(seed)
        return recording_ops(data, model, values=capture)

    run_model(model, args, kwargs, recording, backward=gradients)
    return data


def _set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
