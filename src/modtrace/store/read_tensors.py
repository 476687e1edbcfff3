"""Reads whole tensors from the files of a rank, including files that were never finished."""

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RecordingError
from ..recording.json_text import parse_json
from ..recording.raw_tensor import RawTensor, itemsize_of
from .damage import cut_tensor, not_safetensors, unreadable
from .regular_file import file_state, map_regular, open_regular, read_range, read_regular, reading
from .shard_file import (
    DATA_BYTES,
    DTYPE,
    FORMAT_DTYPES,
    LENGTH_BYTES,
    StoredTensor,
    index_file,
    index_files,
    is_shard_name,
    shard_file,
    shard_files,
    shard_number,
)

_MOST_HEADER_BYTES = 100_000_000  # the limit of the library safetensors
_MOST_DIMENSIONS = 64  # the limit of numpy
_MOST_BYTES = 2**63 - 1
_MOST_NAMED = 10
_TORCH_DTYPES = {name: dtype for dtype, name in FORMAT_DTYPES.items()}
_DATA_BYTES = re.compile(rf'"{re.escape(DATA_BYTES)}": ?"(\d+)"'.encode())


class TensorFiles:
    """The files of whole tensors in a rank's folder, each of which is opened when it is first needed.

    A finished file is memory-mapped. An unfinished one may become shorter while its run continues, and reading a mapped
    byte that no longer exists kills the process (SIGBUS), so its tensors are read one by one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: dict[str, _Shard] = {}
        self._are_held = False

    def get(self, blob: str) -> RawTensor:
        """Returns the tensor with a reference, which is a file and a name separated by a colon.

        Raises:
            RecordingError: the file or the tensor does not exist.
            DamagedRecordingError: the file is truncated, or cannot be understood.
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
        data = shard.content.read(start, stop) if stop <= shard.content.size_bytes else memoryview(b"")
        if len(data) < stop - start:
            raise cut_tensor(self._folder / file, size=shard.content.size_bytes, name=name, stop=stop)
        return RawTensor(dtype=stored.dtype, shape=stored.shape, data=data)

    def hold(self) -> None:
        """Opens all files that can be read. Files that replace them later are not read."""
        for file in shard_files(self._folder):
            with contextlib.suppress(RecordingError):  # reading a tensor will raise the error
                self._open(file)
        self._are_held = True

    def missing(self, files: int | None) -> Iterator[str]:
        """Yields a description of each file that is missing.

        Args:
            files: the number of files that were made. None if it is not known; then files up to the last existing one
                are checked.
        """
        numbers = {shard_number(file) for file in shard_files(self._folder)}
        if files is None:
            files = max((*numbers, *map(shard_number, index_files(self._folder))), default=-1) + 1
        gone = (number for number in range(files) if number not in numbers)
        named = list(islice(gone, _MOST_NAMED))
        yield from (f"{shard_file(self._folder, number).name} is missing" for number in named)
        more = files - sum(number < files for number in numbers) - len(named)
        if more:
            yield f"{more} more files of whole tensors are missing"

    def marks(self) -> Iterator[str]:
        """Yields what is wrong with the tensor files of a closed recording."""
        for file in shard_files(self._folder):
            try:
                if _index_bytes(file) >= 0:
                    yield f"{file.name} has no header: modtrace can read it, other programs cannot"
                elif _is_cut(file):
                    yield f"{file.name} is cut: the tensors at its end are missing"
            except RecordingError as error:
                yield f"{file.name} cannot be read ({error})"
            except OSError as error:
                yield f"{file.name} cannot be read ({unreadable(file, error)})"

    def _open(self, file: Path) -> "_Shard":
        known = self._shards.get(file.name)
        if self._are_held and known is not None:
            return known
        try:
            with reading(file, FileNotFoundError):
                state = *file_state(file), _index_bytes(file)
                if known is None or known.state != state:
                    known = self._shards[file.name] = _read_shard(file, state)
                return known
        except FileNotFoundError as error:
            raise RecordingError(
                f"{file}: this file of whole tensors is missing. It was not copied, or not written yet."
            ) from error


class _Mapped:
    """A file to which no process writes."""

    def __init__(self, path: Path) -> None:
        self._data = map_regular(path)
        self.size_bytes = len(self._data)

    def read(self, start: int, stop: int) -> memoryview:
        """Returns the bytes from `start` to `stop`, or fewer if the file ends before."""
        return self._data[start:stop]


class _Open:
    """A file that may change. It stays open, so that it can be read even after it was deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_regular(path) as fd:
            self.size_bytes = os.fstat(fd).st_size
            self._fd = os.dup(fd)

    def read(self, start: int, stop: int) -> memoryview:
        """Returns the bytes from `start` to `stop`, or fewer if the file has become shorter."""
        with reading(self._path):
            return read_range(self._path, self._fd, start, stop)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # opening it had failed
            os.close(self._fd)


class _Shard(NamedTuple):
    state: tuple[int, ...]
    content: _Mapped | _Open
    base: int  # the position in the file at which the tensors begin
    tensors: Mapping[str, StoredTensor]


def _index_bytes(file: Path) -> int:
    """Returns the size of the index, which grows when a tensor in the file is complete; -1 if there is none."""
    try:
        return index_file(file).stat().st_size
    except FileNotFoundError:
        return -1


def _read_shard(file: Path, state: tuple[int, ...]) -> _Shard:
    tensors = _read_index(index_file(file))  # an unfinished shard has an index of its complete tensors
    content = _Mapped(file) if tensors is None else _Open(file)
    length = int.from_bytes(content.read(0, LENGTH_BYTES), "little")
    if tensors is None:
        tensors = _read_header(file, content, length)
    return _Shard(state, content, LENGTH_BYTES + length, tensors)


def _read_index(file: Path) -> dict[str, StoredTensor] | None:
    """Returns the tensors of an unfinished shard; None for a finished one. A truncated line is left out."""
    try:
        lines = bytes(read_regular(file, _MOST_HEADER_BYTES)).split(b"\n")
    except FileNotFoundError:
        return None
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for line in lines[:-1]:
        try:
            values = parse_json(line)
            stored = _checked(values["dtype"], values["shape"], values["start"], values["stop"])
            if values["name"] in tensors or stored.start < end:
                raise LookupError(f"{values['name']!r} lies over another")
            tensors[values["name"]] = stored
        except (ValueError, LookupError, TypeError):
            break  # the following lines may be wrong, too
        end = stored.stop
    return tensors


def _read_header(file: Path, content: _Mapped | _Open, length: int) -> dict[str, StoredTensor]:
    size = content.size_bytes
    try:
        if size < LENGTH_BYTES + length or length > _MOST_HEADER_BYTES:
            raise LookupError(f"a header of {length} bytes in a file of {size}")
        header = parse_json(bytes(content.read(LENGTH_BYTES, LENGTH_BYTES + length)))
        metadata = header.pop("__metadata__", {})
        stored = {name: _to_stored(entry, metadata.get(DTYPE + name)) for name, entry in header.items()}
        end = 0
        for name, tensor in sorted(stored.items(), key=lambda item: (item[1].start, item[1].stop)):
            if tensor.start < end:
                raise LookupError(f"{name!r} lies over another")
            end = tensor.stop
        return stored
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise not_safetensors(file, size=size, why=error) from error


def _to_stored(entry: Mapping[str, Any], true_dtype: str | None) -> StoredTensor:
    start, stop = entry["data_offsets"]
    if true_dtype is None:
        return _checked(_TORCH_DTYPES[entry["dtype"]], entry["shape"], start, stop)
    return _checked(true_dtype, entry["shape"][:-1], start, stop)


def _checked(dtype: Any, given_shape: Iterable[Any], start: Any, stop: Any) -> StoredTensor:
    shape = tuple(given_shape)
    if not isinstance(dtype, str) or any(type(number) is not int for number in (start, stop, *shape)):
        raise LookupError(f"{dtype!r} of shape {shape} from {start!r} to {stop!r}")
    size_bytes = stop - start
    whole_bytes = math.prod(shape) * itemsize_of(dtype, shape, size_bytes)
    if start < 0 or min(shape, default=0) < 0 or size_bytes != whole_bytes:
        raise LookupError(f"{size_bytes} bytes at {start} for {dtype} of shape {shape}")
    if len(shape) > _MOST_DIMENSIONS or 16 * math.prod(filter(None, shape)) > _MOST_BYTES:
        raise LookupError(f"no array has the shape {shape}")
    return StoredTensor(dtype, shape, start, stop)


def _is_cut(file: Path) -> bool:
    """Returns whether the file is shorter than its tensors, as far as the start of the header shows."""
    with open_regular(file) as fd:
        size, front = os.fstat(fd).st_size, bytes(read_range(file, fd, 0, 512))
    match = _DATA_BYTES.search(front)
    base = LENGTH_BYTES + int.from_bytes(front[:LENGTH_BYTES], "little")
    return match is None or size < base + int(match[1])
