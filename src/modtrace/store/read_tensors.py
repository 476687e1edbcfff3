"""Reads whole tensors from the files of a rank, also from those that were never finished."""

import contextlib
import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DamagedRecordingError, RecordingError
from ..recording.raw_tensor import RawTensor, itemsize_of
from .shard_file import (
    DATA_BYTES,
    DTYPE,
    FORMAT_DTYPES,
    LENGTH_BYTES,
    StoredTensor,
    index_file,
    is_shard_name,
    shard_files,
)

_MOST_HEADER_BYTES = 100_000_000  # as the library safetensors has it
_TORCH_DTYPES = {name: dtype for dtype, name in FORMAT_DTYPES.items()}
_DATA_BYTES = re.compile(rf'"{re.escape(DATA_BYTES)}": ?"(\d+)"'.encode())


class TensorFiles:
    """The files of tensors in a rank's folder; each is mapped into memory when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: dict[str, _Shard] = {}
        self._are_held = False

    def get(self, blob: str) -> RawTensor:
        """The tensor of a reference: file and name, with a colon between.

        Raises:
            RecordingError: the file or the tensor is not there.
            DamagedRecordingError: the file is cut before its end, or cannot be understood.
        """
        file, _, name = blob.partition(":")
        if not is_shard_name(file):
            raise RecordingError(
                f"{blob!r}: no reference of a whole tensor. Take one from the column `blob` of `values`."
            )
        shard = self._open(self._folder / file)
        stored = shard.tensors.get(name)
        if stored is None:
            raise RecordingError(
                f"{self._folder / file}: it does not hold {name!r}: the tensor has not been written, "
                "or not yet. The marks of the recording say if writing failed."
            )
        start, stop = shard.base + stored.start, shard.base + stored.stop
        if stop > len(shard.data):
            raise DamagedRecordingError(
                f"{self._folder / file}: cut at byte {len(shard.data)}, and {name!r} ends at byte {stop}. "
                "Copy the file again; the tensors in front of it can be read."
            )
        return RawTensor(dtype=stored.dtype, shape=stored.shape, data=shard.data[start:stop])

    def hold(self) -> None:
        """Maps all files that can be read: from now on others in their places are not looked at."""
        for file in shard_files(self._folder):
            with contextlib.suppress(RecordingError):  # whoever wants a tensor is told
                self._open(file)
        self._are_held = True

    def marks(self) -> Iterator[str]:
        """What is wrong with the files of a recording that was closed."""
        for file in shard_files(self._folder):
            if index_file(file).exists():
                yield f"{file.name} has no header: modtrace can read it, other programs cannot"
            elif _is_cut(file):
                yield f"{file.name} is cut: the tensors at its end are missing"

    def _open(self, file: Path) -> "_Shard":
        known = self._shards.get(file.name)
        if self._are_held and known is not None:
            return known
        try:
            state = _state(file)
            if known is None or known.state != state:
                known = self._shards[file.name] = _read_shard(file, state)
            return known
        except FileNotFoundError as error:
            raise RecordingError(
                f"{file}: this file of whole tensors is missing. It was not copied, or not written yet."
            ) from error
        except OSError as error:
            raise RecordingError(
                f"{file}: cannot be read: {error.strerror or error}. Check that you may read it."
            ) from error


_State = tuple[int, int, int, int]


class _Shard(NamedTuple):
    state: _State
    data: memoryview  # the whole file
    base: int  # where the tensors begin in it
    tensors: Mapping[str, StoredTensor]


def _state(file: Path) -> _State:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, _index_bytes(file)


def _index_bytes(file: Path) -> int:
    """It grows when a tensor is whole, after the file did; -1 where there is none."""
    try:
        return index_file(file).stat().st_size
    except FileNotFoundError:
        return -1


def _read_shard(file: Path, state: _State) -> _Shard:
    data = _map(file)
    tensors = _read_index(index_file(file))  # it tells of all whole tensors, whether there is a header or not
    if tensors is None:
        tensors = _read_header(file, data)
    return _Shard(state, data, LENGTH_BYTES + _header_length(data), tensors)


def _header_length(front: bytes | memoryview) -> int:
    return int.from_bytes(front[:LENGTH_BYTES], "little")


def _map(file: Path) -> memoryview:
    with open(file, "rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def _read_index(file: Path) -> dict[str, StoredTensor] | None:
    """The tensors of a shard that was not finished; None for one that was. A line that is cut is left out."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    tensors = {}
    for line in lines[:-1]:
        try:
            values = json.loads(line)
            tensors[values["name"]] = _checked(
                str(values["dtype"]), values["shape"], int(values["start"]), int(values["stop"])
            )
        except (ValueError, LookupError, TypeError):
            break  # what follows is not to be trusted
    return tensors


def _read_header(file: Path, data: memoryview) -> dict[str, StoredTensor]:
    length = _header_length(data)
    try:
        if len(data) < LENGTH_BYTES + length or length > _MOST_HEADER_BYTES:
            raise LookupError(f"a header of {length} bytes in a file of {len(data)}")
        header = json.loads(bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]))
        metadata = header.pop("__metadata__", {})
        return {name: _to_stored(entry, metadata.get(DTYPE + name)) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedRecordingError(
            f"{file}: not a safetensors file ({len(data)} bytes; {error}). Copy it again."
        ) from error


def _to_stored(entry: Mapping[str, Any], true_dtype: str | None) -> StoredTensor:
    start, stop = (int(each) for each in entry["data_offsets"])
    if true_dtype is None:
        return _checked(_TORCH_DTYPES[entry["dtype"]], entry["shape"], start, stop)
    return _checked(true_dtype, entry["shape"][:-1], start, stop)


def _checked(dtype: str, given_shape: Iterable[Any], start: int, stop: int) -> StoredTensor:
    shape = tuple(int(each) for each in given_shape)
    size_bytes = stop - start
    whole_bytes = math.prod(shape) * itemsize_of(dtype, shape, size_bytes)
    if start < 0 or min(shape, default=0) < 0 or size_bytes != whole_bytes:
        raise LookupError(f"{size_bytes} bytes at {start} for {dtype} of shape {shape}")
    return StoredTensor(dtype, shape, start, stop)


def _is_cut(file: Path) -> bool:
    """Whether the file ends before its tensors do, as far as the first bytes of the header tell."""
    try:
        with open(file, "rb") as opened:
            front = opened.read(512)
    except OSError:
        return False  # whoever wants a tensor is told
    found = _DATA_BYTES.search(front)
    base = LENGTH_BYTES + _header_length(front)
    return found is None or file.stat().st_size < base + int(found[1])
