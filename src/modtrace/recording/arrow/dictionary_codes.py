"""Gives the strings of a table's dictionary columns codes that stay the same from batch to batch.

Arrow makes a new dictionary for every batch. With stable codes, small batches are joined by copying integers, and a
stream contains each string only once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..schema import schema
from .arrays import absent_column, from_numpy, from_strings

_NONE = from_strings([])  # a recording has a hundred of them, most of which stay empty


class TableDictionaries:
    """The dictionaries of one table's columns, from strings to codes."""

    def __init__(self, table: str) -> None:
        self._schema = schema(table)
        self._columns = {
            field.name: _Dictionary(field) for field in self._schema if pa.types.is_dictionary(field.type)
        }

    def __len__(self) -> int:
        return sum(map(len, self._columns.values()))

    @property
    def size_bytes(self) -> int:
        """The bytes of the dictionaries in the batch that was last decoded."""
        return sum(dictionary.size_bytes for dictionary in self._columns.values())

    def encode(self, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """Returns the columns, at least one, as a batch with codes in place of strings."""
        coded = dict(columns)
        for name, dictionary in self._columns.items():
            if name in columns:
                coded[name] = dictionary.encode(columns[name])
            elif not dictionary.is_nullable:
                coded[name] = dictionary.encode_empty(len(next(iter(columns.values()))))
        return pa.RecordBatch.from_arrays(list(coded.values()), names=list(coded))

    def align(self, coded: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
        """Returns the coded batches, all with the union of their columns."""
        first = coded[0].schema
        if all(batch.schema.equals(first) for batch in coded):
            return coded
        present = {name for batch in coded for name in batch.schema.names}
        names = [name for name in self._schema.names if name in present]
        fields = [self._schema.field(name) for name in names]
        return [pa.RecordBatch.from_arrays(_fill(batch, fields), names=names) for batch in coded]

    def decode(self, coded: pa.RecordBatch) -> pa.RecordBatch:
        """Returns a batch of codes as one with dictionaries, in the table's schema.

        Each dictionary holds all strings of its column that were encoded until now, in the order of their codes.
        """
        arrays = _fill(coded, self._schema)
        for name, dictionary in self._columns.items():
            at = self._schema.get_field_index(name)
            arrays[at] = dictionary.decode(arrays[at])
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class _Dictionary:
    """The dictionary of one column."""

    def __init__(self, column: pa.Field) -> None:
        self.is_nullable = column.nullable
        self._codes: dict[Any, int] = {}
        self._code_type = column.type.index_type
        self._array = _NONE  # all strings, as an array that is made on request

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def size_bytes(self) -> int:
        return int(self._array.get_total_buffer_size())

    def encode(self, column: pa.DictionaryArray) -> pa.Array:
        codes = self._codes
        new = [codes.setdefault(text, len(codes)) for text in column.dictionary.to_pylist()]
        if new == list(range(len(new))):
            return column.indices
        return from_numpy(np.array(new), self._code_type).take(column.indices)

    def encode_empty(self, rows: int) -> pa.Array:
        """Returns the codes of a column that was not given and may not be null."""
        return from_numpy(np.full(rows, self._codes.setdefault("", len(self._codes))), self._code_type)

    def decode(self, codes: pa.Array) -> pa.DictionaryArray:
        if len(self._array) < len(self._codes):
            self._array = from_strings(list(self._codes))
        return pa.DictionaryArray.from_arrays(codes, self._array, safe=False)


def _fill(coded: pa.RecordBatch, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Returns the columns of a coded batch for the given fields; missing ones have default values."""
    columns = dict(zip(coded.schema.names, coded.columns, strict=True))
    for field in fields:
        if field.name not in columns:
            column = absent_column(field, coded.num_rows)
            columns[field.name] = column.indices if pa.types.is_dictionary(field.type) else column
    return [columns[field.name] for field in fields]


def share_dictionaries(table: pa.Table) -> pa.Table:
    """Returns the table with one dictionary for each dictionary column.

    Nothing is copied if each chunk's dictionary is a prefix of the last chunk's.
    """
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) and table.column(at).num_chunks > 1:
            table = table.set_column(at, field, _share(table.column(at)))
    return table


def _share(column: pa.ChunkedArray) -> pa.ChunkedArray:
    chunks = column.chunks
    last = chunks[-1].dictionary
    if not _all_begin(chunks, last):
        return column.unify_dictionaries()
    if all(len(chunk.dictionary) == len(last) for chunk in chunks):
        return column
    return pa.chunked_array(
        [pa.DictionaryArray.from_arrays(chunk.indices, last, safe=False) for chunk in chunks]
    )


def _all_begin(chunks: list[pa.DictionaryArray], last: pa.Array) -> bool:
    """Returns whether every chunk's dictionary is a prefix of `last`. Equal neighbours are compared once."""
    before = None
    for chunk in chunks:
        dictionary = chunk.dictionary
        same = (len(dictionary), *(buffer and buffer.address for buffer in dictionary.buffers()))
        if same != before and not dictionary.equals(last.slice(0, len(dictionary))):
            return False
        before = same
    return True
