"""Writes and names files of whole tensors in the format safetensors, from front to back with the header last."""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..recording.raw_tensor import itemsize_of

_NAME = re.compile(r"tensors-(\d{5,100})\.safetensors")
_INDEX = re.compile(r"tensors-(\d{5,100})\.index\.jsonl")

#: Keys of the header's `__metadata__`: the end of the data, and, with this prefix, the dtype of a tensor that
#: safetensors cannot name.
DATA_BYTES = "modtrace.data_bytes"
DTYPE = "modtrace.dtype:"

#: The names of torch's dtypes in safetensors 0.8, which its releases since 0.4 can read.
FORMAT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}

#: Dtypes without such a name are stored with one more axis, and unknown ones with an axis of bytes.
_PARTS = {"complex128": ("F64", 2), "complex32": ("F16", 2)}

LENGTH_BYTES = 8  # the bytes before the header that hold its length
_MOST_VIEWS = 512  # the number of views in one `writev`, which accepts 1,024


class StoredTensor(NamedTuple):
    """The position of a tensor in a shard."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # the position in the data of the file
    stop: int


def shard_file(folder: Path, number: int) -> Path:
    """Returns the n-th file of tensors in a rank's folder."""
    return folder / f"tensors-{number:05d}.safetensors"


def index_file(shard: Path) -> Path:
    """Returns the file that lists the tensors' positions while a shard has no header; it is deleted afterwards."""
    return shard.with_suffix(".index.jsonl")


def is_shard_name(name: str) -> bool:
    """Returns whether a name is that of a file of tensors."""
    return _NAME.fullmatch(name) is not None


def shard_number(file: Path) -> int:
    """Returns the number of a file of tensors, or of its index."""
    return int(file.name.partition("-")[2].partition(".")[0])


def index_files(folder: Path) -> list[Path]:
    """Returns the indexes of all files of tensors that have no header."""
    return [file for file in folder.iterdir() if _INDEX.fullmatch(file.name)]


def shard_files(folder: Path) -> list[Path]:
    """Returns all files of tensors in a rank's folder, in order."""
    files = [file for file in folder.iterdir() if is_shard_name(file.name)]
    return sorted(files, key=lambda file: (len(file.name), file.name))


def header_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Returns the largest number of bytes that a tensor takes in a header, at any position."""
    far = StoredTensor(dtype, tuple(shape), 10**15, 10**15)
    entry = {name: _entry(far, 1), **_metadata(name, dtype)}
    return len(json.dumps(entry))


class ShardFile:
    """A file that is being written, by a single thread.

    An index is written beside it, with a line for each complete tensor, so that these can be read if the process is
    killed.
    """

    def __init__(self, folder: Path, number: int, reserve_bytes: int) -> None:
        """Creates the file, with space for a header.

        Raises:
            OSError: the file cannot be made, or there is no space for the header. No file is left behind.
        """
        self.number = number
        self.path = shard_file(folder, number)
        self._reserve_bytes = reserve_bytes + -reserve_bytes % 8
        self._base = LENGTH_BYTES + self._reserve_bytes
        self._stored: dict[str, StoredTensor] = {}
        self._whole_bytes = 0  # the bytes of complete tensors
        self._written_bytes = 0
        self._index = -1
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._index = os.open(index_file(self.path), flags, 0o666)
            _write_all(
                self._fd, [self._reserve_bytes.to_bytes(LENGTH_BYTES, "little"), b" " * self._reserve_bytes]
            )
        except BaseException:
            self.abandon()
            for file in (self.path, index_file(self.path)):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
            raise

    @property
    def size_bytes(self) -> int:
        """The bytes of the file on disk, without a tensor that is incomplete."""
        return self._base + self._whole_bytes

    def add(self, tensors: Sequence[tuple[str, str, tuple[int, ...], memoryview]]) -> None:
        """Adds whole tensors, each given by name, dtype, shape and bytes.

        Raises:
            OSError: the tensors cannot be written. None of them is in the file then.
        """
        self._rewind()
        at, stored = self._whole_bytes, {}
        for name, dtype, shape, view in tensors:
            stored[name] = StoredTensor(dtype, shape, at, at + view.nbytes)
            at += view.nbytes
        self._append([view for *_, view in tensors])
        self._note(stored)

    def add_part(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        view: memoryview,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Adds a part of a tensor after the last one. A tensor whose last part never comes is dropped.

        Raises:
            OSError: it cannot be written.
        """
        if is_first:
            self._rewind()
        self._append([view])
        if is_last:
            self._note({name: StoredTensor(dtype, shape, self._whole_bytes, self._written_bytes)})

    def finish(self) -> None:
        """Writes the header, closes the file and deletes the index.

        Raises:
            OSError: it cannot be written. The file is closed, and the index lists the positions of the tensors.
        """
        try:
            self._rewind()
            left, at = memoryview(self._header()), LENGTH_BYTES
            while left:
                written = os.pwrite(self._fd, left, at)
                left, at = left[written:], at + written
        except BaseException:
            self.abandon()
            raise
        index = index_file(self.path)
        with contextlib.suppress(OSError):  # it repeats the header; another run's index may be there
            if os.path.samestat(os.fstat(self._index), index.stat()):
                index.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Closes the files without writing."""
        for fd in (self._fd, self._index):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _append(self, views: list[memoryview]) -> None:
        self._written_bytes += sum(view.nbytes for view in views)
        _write_all(self._fd, views)

    def _note(self, stored: dict[str, StoredTensor]) -> None:
        lines = [json.dumps({"name": name, **tensor._asdict()}) + "\n" for name, tensor in stored.items()]
        _write_all(self._index, ["".join(lines).encode()])
        self._stored.update(stored)
        self._whole_bytes = self._written_bytes

    def _rewind(self) -> None:
        """Removes everything after the last complete tensor."""
        if self._written_bytes != self._whole_bytes:
            os.ftruncate(self._fd, self._base + self._whole_bytes)
            os.lseek(self._fd, self._base + self._whole_bytes, os.SEEK_SET)
            self._written_bytes = self._whole_bytes

    def _header(self) -> bytearray:
        """Returns the JSON of all entries.

        It is built entry by entry, because 8,400 entries as Python objects take 4 MB.
        """
        metadata = {DATA_BYTES: str(self._whole_bytes)}
        for name, tensor in self._stored.items():
            metadata.update(_metadata(name, tensor.dtype))
        header = bytearray(b"{" + _item("__metadata__", metadata))
        for name, tensor in self._stored.items():
            element_bytes = itemsize_of(tensor.dtype, tensor.shape, tensor.stop - tensor.start)
            header += b", " + _item(name, _entry(tensor, element_bytes))
        header += b"}"
        if len(header) > self._reserve_bytes:
            raise AssertionError(f"{self.path}: a header of {len(header)} bytes would lie over the tensors")
        header += b" " * (self._reserve_bytes - len(header))
        return header


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """Writes all parts, many in one call, because training threads may hold the interpreter between calls."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = os.writev(fd, left[:_MOST_VIEWS])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def _item(name: str, value: dict[str, Any]) -> bytes:
    """Returns a name and its value as JSON, without the braces around them."""
    return json.dumps({name: value})[1:-1].encode()


def _entry(stored: StoredTensor, element_bytes: int) -> dict[str, Any]:
    dtype, shape = FORMAT_DTYPES.get(stored.dtype), stored.shape
    if dtype is None:
        dtype, parts = _PARTS.get(stored.dtype, ("U8", element_bytes))
        shape = (*shape, parts)
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [stored.start, stored.stop]}


def _metadata(name: str, dtype: str) -> dict[str, str]:
    return {} if dtype in FORMAT_DTYPES else {DTYPE + name: dtype}
