"""The bytes of tensors: fingerprints, copies, and tensors put together again from storages."""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..measure.memory import is_held
from ..torch_internals.modes import unseen
from ..torch_internals.tensors import negated_view
from ..torch_internals.transforms import outside_transforms

_DIGEST_BYTES = 16


@contextmanager
def aside() -> Iterator[None]:
    """Inside, tensors are looked at without anybody seeing it, and without a graph."""
    with unseen(), outside_transforms(), torch.no_grad():
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, ops work in the dtypes of what they are given."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def digest(tensor: torch.Tensor) -> bytes | None:
    """A fingerprint of the elements, bit by bit, and of their shape.

    None where there are no bytes to read: on the meta device, in a tensor that is not strided, or where `resize_(0)`
    has taken the memory away, as sharded training does. Call it inside of `aside()`.
    """
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or not is_held(tensor):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    found = hashlib.blake2b(repr(tuple(plain.shape)).encode(), digest_size=_DIGEST_BYTES)
    found.update(_bytes_of(plain))
    return found.digest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor. Not by `numpy()`: after that its storage could not be resized any more."""
    size_bytes = tensor.numel() * tensor.itemsize
    address = tensor.data_ptr() if size_bytes else None
    return memoryview((ctypes.c_char * size_bytes).from_address(address)) if address else memoryview(b"")


def copy_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The whole storage behind a tensor, once more."""
    return copy_of(tensor.untyped_storage())


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes in memory of their own."""
    copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that goes on to show what this one shows now, whatever becomes of its shape."""
    return tensor.detach()


def tensor_in(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    conj: bool = False,
    neg: bool = False,
) -> torch.Tensor:
    """The tensor that shows a storage so."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    tensor = empty.set_(storage, offset, tuple(shape), tuple(stride))
    tensor = tensor.conj() if conj else tensor
    return negated_view(tensor) if neg else tensor


def same_value(one: Any, other: Any) -> bool:
    """Whether two numbers are equal; NaN is equal to itself."""
    return type(one) is type(other) and (one == other or (one != one and other != other))
