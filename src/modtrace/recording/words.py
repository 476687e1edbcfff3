"""Gives the words of a table's dictionary columns codes that stay the same from batch to batch.

Arrow makes a new dictionary for every batch. With codes that stay, small batches join by copying integers,
and a stream needs to carry each word only once.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from .arrays import from_numpy, from_strings
from .schema import schema


class TableWords:
    """The words of one table's dictionary columns, each with its code."""

    def __init__(self, table: str) -> None:
        self._schema = schema(table)
        self._columns = {
            at: _Words(each.type) for at, each in enumerate(self._schema) if pa.types.is_dictionary(each.type)
        }

    def __len__(self) -> int:
        return sum(map(len, self._columns.values()))

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with codes in place of words."""
        arrays = batch.columns
        for at, words in self._columns.items():
            arrays[at] = words.encode(arrays[at])
        return pa.RecordBatch.from_arrays(arrays, names=self._schema.names)

    def decode(self, coded: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in the table's schema; its dictionaries hold every word seen so far, in order of code."""
        arrays = coded.columns
        for at, words in self._columns.items():
            arrays[at] = words.decode(arrays[at])
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class _Words:
    """The words of one column."""

    def __init__(self, column_type: pa.DictionaryType) -> None:
        self._codes: dict[Any, int] = {}
        self._code_type = column_type.index_type
        self._array = from_strings([])  # of all words, made when asked for

    def __len__(self) -> int:
        return len(self._codes)

    def encode(self, column: pa.DictionaryArray) -> pa.Array:
        codes = self._codes
        new = [codes.setdefault(word, len(codes)) for word in column.dictionary.to_pylist()]
        if new == list(range(len(new))):
            return column.indices
        return from_numpy(np.array(new, np.int64), self._code_type).take(column.indices)

    def decode(self, codes: pa.Array) -> pa.DictionaryArray:
        if len(self._array) < len(self._codes):
            self._array = from_strings(list(self._codes))
        return pa.DictionaryArray.from_arrays(codes, self._array)


def share_dictionaries(table: pa.Table) -> pa.Table:
    """The table with one dictionary a column, without copying where each chunk's begins the last one's."""
    for at, each in enumerate(table.schema):
        if pa.types.is_dictionary(each.type) and table.column(at).num_chunks > 1:
            table = table.set_column(at, each, _share(table.column(at)))
    return table


def _share(column: pa.ChunkedArray) -> pa.ChunkedArray:
    chunks = column.chunks
    last = chunks[-1].dictionary
    if not _all_begin(chunks, last):
        return column.unify_dictionaries()
    if all(len(each.dictionary) == len(last) for each in chunks):
        return column
    return pa.chunked_array(
        [pa.DictionaryArray.from_arrays(each.indices, last, safe=False) for each in chunks]
    )


def _all_begin(chunks: list[pa.DictionaryArray], last: pa.Array) -> bool:
    """Whether every chunk's dictionary is the start of `last`; one that follows itself is compared once."""
    before = None
    for chunk in chunks:
        dictionary = chunk.dictionary
        same = (len(dictionary), *(buffer and buffer.address for buffer in dictionary.buffers()))
        if same != before and not dictionary.equals(last.slice(0, len(dictionary))):
            return False
        before = same
    return True
