"""Writes a golden recording, with which later runs are compared, as one small file, and reads it.

It holds the rows that a comparison reads, without times and costs, so that equal runs have equal rows. The file is a
ZIP archive with a Parquet file for each table.
"""

import io
import json
import lzma
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DamagedRecordingError, NewerSchemaError, RecordingError, system_errors
from ..recording.arrow.arrays import to_numpy
from ..recording.arrow.table_rules import find_fault
from ..recording.in_memory.recording import MemoryRecording
from ..recording.meta import RunMeta
from ..recording.protocols import RecordingData
from ..recording.schema import SCHEMA_VERSION, schema
from .read_stream import ARROW_ERRORS

#: The columns of each table that are kept; of the tables without an entry no row is.
_KEPT: Mapping[str, Sequence[str]] = {
    "modules": ("module_id", "root_id", "path", "raw_path", "aliases", "name", "type", "parent_id"),
    "sites": ("site_id", "module_id", "nth", "role", "slot", "op", "op_nth"),
    "calls": (
        "call_id", "step", "module_id", "nth", "parent_call_id", "phase", "forward_call_id", "recompute_of",
        "triggered_by", "thread", "start_ns", "end_ns", "raised", "compiled",
    ),
    "ops": (
        "op_id", "step", "call_id", "phase", "name", "nth", "args", "thread", "is_view", "start_ns", "end_ns", "raised",
    ),
    "tensors": (
        "tensor_id", "site_id", "shape", "stride", "offset", "conj", "neg", "dtype", "layout", "storage", "version",
        "producer_op", "slot",
    ),
    "uses": ("consumer_op", "consumer_call", "slot", "tensor_id"),
    "values": (
        "step", "phase", "site_id", "call_id", "op_id", "order", "shape", "dtype", "numel", "count", "min", "max",
        "sum", "sumsq", "nan_count", "inf_count", "hash", "sketch", "note",
    ),
    "steps": ("step", "kind", "start_ns", "end_ns"),
}  # fmt: skip

#: Times are replaced by their order, which is the same in equal runs.
_TIMES = ("start_ns", "end_ns")

#: Numbers that other kernels round otherwise, while the hash beside them says whether a tensor is equal.
_ROUNDED = ("sum", "sumsq", "sketch")

#: The low bits that are rounded away, as they do not compress. A sum keeps the precision of a float32. Two sketches
#: that are equal but for float32 sums are then 1.6e-7 apart, and at most 3.3e-7, less than `SKETCH_FLOOR`.
_BITS_OF_SUM, _BITS_OF_SKETCH = 29, 2

#: The columns of floating-point numbers, whose first bytes compress if they are stored apart from the others.
_SPLIT = ("min", "max", "sum", "sumsq", "sketch.list.element")

_VERSION, _SUFFIX = "golden.json", ".parquet"
_UNCHANGING = (1980, 1, 1, 0, 0, 0)  # the date of each file in the archive
_MOST_BYTES = 2**30  # of a table


def to_golden(data: RecordingData, meta: RunMeta) -> MemoryRecording:
    """Returns the rows of a recording that a golden one has, with another description of the run."""
    tables = {name: data.table(name).select(kept) for name, kept in _KEPT.items()}
    times = np.unique(
        np.concatenate([to_numpy(table[name], null=0) for name, table, _ in _find_times(tables)])
    )
    for name, table, place in list(_find_times(tables)):
        ranks = np.searchsorted(times, to_numpy(table[name], null=0))
        column = pa.array(ranks, pa.int64(), mask=to_numpy(table[name].is_null()))
        _replace(tables, place, name, column)
    for name in ("sum", "sumsq"):
        column = tables["values"][name]
        numbers = np.array(to_numpy(column, null=0.0), np.float64)
        numbers = _round(numbers.view(np.int64), _BITS_OF_SUM).view(np.float64)
        _replace(tables, "values", name, pa.array(numbers, mask=to_numpy(column.is_null())))
    sketches = tables["values"]["sketch"].combine_chunks()
    numbers = _round(np.array(to_numpy(sketches.values)).view(np.int32), _BITS_OF_SKETCH).view(np.float32)
    mask = sketches.is_null()
    _replace(tables, "values", "sketch", pa.ListArray.from_arrays(sketches.offsets, numbers, mask=mask))
    return _hold(tables, meta)


def _round(bits: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Returns floating-point numbers, given as integers, with the last `count` bits rounded to 0."""
    return bits + (1 << count - 1) >> count << count


def _find_times(tables: Mapping[str, pa.Table]) -> Iterator[tuple[str, pa.Table, str]]:
    """Yields each column of times, with its table and the table's name."""
    for place, table in tables.items():
        yield from ((name, table, place) for name in _TIMES if name in table.column_names)


def _replace(tables: dict[str, pa.Table], place: str, name: str, column: pa.Array) -> None:
    table = tables[place]
    at = table.schema.get_field_index(name)
    tables[place] = table.set_column(at, table.schema.field(at), column)


def _hold(tables: Mapping[str, pa.Table], meta: RunMeta) -> MemoryRecording:
    held = MemoryRecording(meta, max_bytes=2**62)
    for name, table in tables.items():
        if table.num_rows:
            columns = table.combine_chunks().to_batches()[0].columns
            held.write(name, dict(zip(table.column_names, columns, strict=True)))
    held.close()
    return held


def are_same(a: RecordingData, b: RecordingData) -> bool:
    """Returns whether two golden recordings have the same rows. Where tensors have hashes, these decide."""
    return all(_table_of(a, name).equals(_table_of(b, name)) for name in _KEPT)


def _table_of(data: RecordingData, name: str) -> pa.Table:
    table = data.table(name).select(_KEPT[name])
    if name == "values" and not table["hash"].null_count:
        table = table.drop_columns(list(_ROUNDED))
    texts = [pa.string() if pa.types.is_dictionary(kind) else kind for kind in table.schema.types]
    return table.cast(pa.schema(list(zip(table.column_names, texts, strict=True)))).combine_chunks()


def write_golden(golden: RecordingData, path: Path) -> None:
    """Writes what `to_golden` returned, atomically: a reader sees the old file or the new one.

    Raises:
        RecordingError: it cannot be written.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        _add(archive, _VERSION, json.dumps({"schema_version": SCHEMA_VERSION}).encode())
        for name in _KEPT:
            table = golden.table(name)
            if table.num_rows:
                _add(archive, name + _SUFFIX, _encode(table))
    write_whole(path, content.getvalue())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, and the folders around it, so that a reader sees all of it or none.

    Raises:
        RecordingError: it cannot be written.
    """

    def cannot_write(error: OSError) -> RecordingError:
        return RecordingError(f"{path}: cannot write a golden recording here: {error.strerror or error}")

    with system_errors(cannot_write):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            whole.write_bytes(content)
            os.replace(whole, path)
        finally:
            whole.unlink(missing_ok=True)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _UNCHANGING), content, zipfile.ZIP_LZMA)


def _encode(table: pa.Table) -> bytes:
    """Returns a table as a Parquet file, without columns that are null throughout."""
    fields = [field for field in table.schema if table[field.name].null_count < table.num_rows]
    content = io.BytesIO()
    pq.write_table(
        table.select([field.name for field in fields]),
        content,
        compression="none",  # the archive compresses it, with what its columns have in common
        use_dictionary=[field.name for field in fields if pa.types.is_dictionary(field.type)],
        use_byte_stream_split=[name for name in _SPLIT if name.partition(".")[0] in table.column_names],
        write_statistics=False,
        store_schema=False,
    )
    return content.getvalue()


def read_golden(path: Path, meta: RunMeta) -> MemoryRecording:
    """Returns the golden recording of a file, with a description of its run.

    Raises:
        FileNotFoundError: there is no file.
        NewerSchemaError: a newer modtrace wrote it.
        DamagedRecordingError: it cannot be understood.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            version = json.loads(_read(archive, _VERSION))["schema_version"]
            if version > SCHEMA_VERSION:
                raise NewerSchemaError(
                    f"{path} was written by modtrace (a newer version) with schema {version}; this modtrace reads "
                    f"up to {SCHEMA_VERSION}. Upgrade: pip install -U modtrace"
                )
            present = set(archive.namelist())
            tables = {
                name: _decode(name, _read(archive, name + _SUFFIX))
                for name in _KEPT
                if name + _SUFFIX in present
            }
        golden = _hold(tables, meta)
        for name in tables:
            fault = find_fault(name, golden.table(name))
            if fault is not None:
                raise LookupError(f"column {fault.column!r} of {name} {fault.why} (row {fault.row})")
        return golden
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, lzma.LZMAError, RuntimeError, *ARROW_ERRORS) as error:
        raise DamagedRecordingError(
            f"{path}: this is no golden recording, or a damaged one ({error}). "
            "Restore it, or run pytest --modtrace-update to record it again."
        ) from error


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MOST_BYTES:
        raise LookupError(f"{name} is larger than {_MOST_BYTES} bytes")
    return archive.read(name)


def _decode(name: str, content: bytes) -> pa.Table:
    """Returns the rows of a table, without columns that the present schema lacks."""
    table = pq.read_table(io.BytesIO(content))
    return table.select([column for column in table.column_names if column in schema(name).names])
