"""Reads and copies the bytes of tensors, and makes tensors on a given storage."""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ..measure.memory import is_held
from ..torch_internals.modes import unseen
from ..torch_internals.tensors import negated_view
from ..torch_internals.transforms import outside_transforms

_DIGEST_BYTES = 16


@contextmanager
def aside() -> Iterator[None]:
    """Hides the block from all hooks and modes, and builds no autograd graph in it."""
    with unseen(), outside_transforms(), torch.no_grad():
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disables autocast in the block, so that ops compute in the dtypes of their arguments."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def digest(tensor: torch.Tensor) -> bytes | None:
    """Returns a digest of a tensor's shape and of the bits of its elements.

    Returns None if there are no bytes to read: on the meta device, for a layout that is not strided, or if `resize_(0)`
    has freed the memory, as sharded training does. Call it inside `aside()`.
    """
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or not is_held(tensor):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    hashed = hashlib.blake2b(repr(tuple(plain.shape)).encode(), digest_size=_DIGEST_BYTES)
    hashed.update(_bytes_of(plain))
    return hashed.digest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor.

    `numpy()` is not used, because a storage that numpy has seen cannot be resized any more.
    """
    size_bytes = tensor.numel() * tensor.itemsize
    address = tensor.data_ptr() if size_bytes else None
    return memoryview((ctypes.c_char * size_bytes).from_address(address)) if address else memoryview(b"")


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns a copy of a storage, with memory of its own."""
    copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


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
    """Returns the tensor with the given geometry on a storage; `offset` and `stride` count elements."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    tensor = empty.set_(storage, offset, tuple(shape), tuple(stride))
    tensor = tensor.conj() if conj else tensor
    return negated_view(tensor) if neg else tensor
