"""Words keep their codes, and chunks come to share one dictionary."""

import pyarrow as pa

from modtrace.recording.arrow.batches import to_columns
from modtrace.recording.arrow.dictionary_codes import TableDictionaries, share_dictionaries


def names(words: list[str]) -> dict[str, pa.Array]:
    return to_columns("scalars", {"name": words})


def chunks(*dictionaries_and_codes: tuple[list[str], list[int]]) -> pa.Table:
    arrays = [
        pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(words))
        for words, codes in dictionaries_and_codes
    ]
    return pa.table({"name": pa.chunked_array(arrays)})


def test_word_keeps_its_code() -> None:
    words = TableDictionaries("scalars")
    assert words.encode(names(["loss", "lr", "loss"])).column("name").to_pylist() == [0, 1, 0]
    assert words.encode(names(["norm", "lr"])).column("name").to_pylist() == [2, 1]
    assert len(words) == 3


def test_decoded_batch_has_all_words_in_order_of_code() -> None:
    words = TableDictionaries("scalars")
    first = words.encode(names(["loss", "lr"]))
    words.encode(names(["norm"]))
    decoded = words.decode(first).column("name")
    assert decoded.to_pylist() == ["loss", "lr"]
    assert decoded.dictionary.to_pylist() == ["loss", "lr", "norm"]


def test_null_stays_null() -> None:
    words = TableDictionaries("ops")
    given = {"name": ["a", "b"], "source": [None, "x.py:1"], "phase": [None, "backward"]}
    decoded = words.decode(words.encode(to_columns("ops", given)))
    assert decoded.select(list(given)).to_pydict() == given


def test_growing_dictionaries_are_shared_without_copying() -> None:
    table = chunks((["a"], [0, 0]), (["a", "b"], [1, 0]))
    shared = share_dictionaries(table).column("name")
    assert shared.to_pylist() == ["a", "a", "b", "a"]
    assert [each.dictionary.to_pylist() for each in shared.chunks] == [["a", "b"], ["a", "b"]]
    before = [each.indices.buffers()[1].address for each in table.column("name").chunks]
    assert [each.indices.buffers()[1].address for each in shared.chunks] == before


def test_unlike_dictionaries_are_joined() -> None:
    shared = share_dictionaries(chunks((["a", "b"], [0, 1]), (["b", "c"], [0, 1]))).column("name")
    assert shared.to_pylist() == ["a", "b", "b", "c"]
    assert [each.dictionary.to_pylist() for each in shared.chunks] == [["a", "b", "c"], ["a", "b", "c"]]
