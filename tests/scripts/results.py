"""What every script prints at its end, to be compared bit for bit."""

import hashlib
from collections.abc import Iterable
from typing import TextIO

import torch
from torch import nn


def print_results(losses: Iterable[float], *modules: nn.Module, file: TextIO | None = None) -> None:
    """Prints the losses, and a hash of all parameters and buffers and of the state of the random numbers."""
    print("losses", *(float(loss).hex() for loss in losses), file=file)
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    print("state", digest.hexdigest(), file=file)
