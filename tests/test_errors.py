"""Errors are quoted in whole words, so that a sentence can go on behind them."""

import pytest

from modtrace.errors import describe_error

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad()."
)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("Target 10 is out of bounds.", "Target 10 is out of bounds"),
        ("loading ...", "loading ..."),
        ("first line\nsecond line", "first line"),
        ("found invalid values:\ntensor([nan])", "found invalid values"),
        ("", ""),
        (_TWICE, _TWICE.partition(". Saved")[0]),
        ("word " * 100, "word " * 39 + "word …"),
        ("x" * 300, "x" * 200 + " …"),
    ],
)
def test_text_of_an_error_ends_with_a_whole_word(text: str, quoted: str) -> None:
    assert describe_error(IndexError(text)) == (f"IndexError: {quoted}" if quoted else "IndexError")


def test_error_that_cannot_describe_itself_is_named() -> None:
    class Broken(ValueError):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(Broken()) == "Broken"
