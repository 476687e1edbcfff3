"""Limits for whole tensors that wait in memory, and what happens beyond them."""

from dataclasses import dataclass
from typing import Literal, get_args

WhenFull = Literal["block", "drop"]

_LEAST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """Options for whole tensors.

    For a folder they wait in a buffer of `max_bytes` until a thread has written them. If it is full, the training waits
    ("block"), or the tensor is left out and counted ("drop"). A tensor larger than the buffer goes through it in parts
    ("block"), or is always left out ("drop"). In memory, `max_bytes` of the newest are kept.
    """

    max_bytes: int = 256 * 2**20
    when_full: WhenFull = "block"  # for a folder; in memory the oldest are dropped
    shard_bytes: int = 2**30  # a file of the folder with this many bytes is followed by another

    def __post_init__(self) -> None:
        _check("max_bytes", self.max_bytes)
        _check("shard_bytes", self.shard_bytes)
        if self.when_full not in get_args(WhenFull):
            raise ValueError(f"TensorOptions(when_full={self.when_full!r}): give 'block' or 'drop'")


def _check(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST_BYTES:
        raise ValueError(f"TensorOptions({name}={value!r}): give a number of bytes, {_LEAST_BYTES} or more")
