"""What the rows of a table keep to beyond their types, so that an analysis can rely on it."""

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from .phase import PHASES
from .role import ROLES

#: Sums and differences of two numbers below it fit into 64 bits.
_INTEGERS_END = 2**62
_WORDS = {"phase": PHASES, "role": ("", *ROLES)}  # "": a column that nobody gave
_MAGNITUDES = 256  # of a histogram

#: Columns that refer to an earlier row of their own table: no chain of them comes back to where it began.
_EARLIER = {
    "calls": ("call_id", ("parent_call_id", "forward_call_id", "recompute_of")),
    "ops": ("op_id", ("forward_op_id",)),
}


class Fault(NamedTuple):
    """A row that breaks a rule."""

    column: str
    row: int
    why: str


def find_fault(name: str, table: pa.Table) -> Fault | None:
    """A row that breaks a rule; None if all keep to them.

    Ids that no row has are no fault: of a killed run the last rows of some tables are missing.

    Args:
        name: of the table.
        table: the rows, in the schema and valid for Arrow.
    """
    return next(_find_faults(name, table), None)


def _find_faults(name: str, table: pa.Table) -> Iterator[Fault]:
    for field in table.schema:
        column = table[field.name]
        if column.null_count and not field.nullable:
            yield Fault(field.name, _first(pc.is_null(column)), "is null, and must not be")
        if pa.types.is_integer(field.type):
            yield from _find_wild_integer(field.name, column)
        elif field.name in _WORDS:
            yield from _find_unknown_word(field.name, column)
        elif pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type):
            yield from _find_bad_list(field.name, column)
    if name in _EARLIER:
        own, references = _EARLIER[name]
        for each in references:
            yield from _find_later_reference(table, own, each)
    if name == "modules":
        yield from _find_cycle(table)


def _find_wild_integer(name: str, column: pa.ChunkedArray) -> Iterator[Fault]:
    """Nothing that is counted, numbered or timed is negative."""
    ends = pc.min_max(column)
    if ends["min"].is_valid and (ends["min"].as_py() < 0 or ends["max"].as_py() >= _INTEGERS_END):
        row = _first(pc.or_(pc.less(column, 0), pc.greater_equal(column, _INTEGERS_END)))
        yield Fault(name, row, f"is {column[row].as_py()}, and it is from 0 to 2**62")


def _find_unknown_word(name: str, column: pa.ChunkedArray) -> Iterator[Fault]:
    known = _WORDS[name]
    for chunk in column.chunks:
        unknown = [each for each in chunk.dictionary.to_pylist() if each not in known]
        if unknown:
            yield Fault(name, 0, f"has the word {unknown[0]!r}, and there are {', '.join(known)}")


def _find_bad_list(name: str, column: pa.ChunkedArray) -> Iterator[Fault]:
    """Sizes and counts are not negative; a histogram has all of its magnitudes."""
    lowest = pc.min(pc.list_flatten(column)).as_py()
    if lowest is not None and lowest < 0:
        yield Fault(name, _first(_any_below_zero(column)), "holds a negative number")
    if name == "histogram" and column.null_count < len(column):
        lengths = pc.not_equal(pc.list_value_length(column), _MAGNITUDES)
        if pc.any(lengths).as_py():
            yield Fault(name, _first(lengths), f"has not {_MAGNITUDES} counts")


def _find_later_reference(table: pa.Table, own: str, reference: str) -> Iterator[Fault]:
    """What is referred to was there before, so that no chain of references comes back to where it began."""
    later = pc.greater_equal(table[reference], table[own])
    if pc.any(later).as_py():
        row = _first(later)
        referred, at = table[reference][row].as_py(), table[own][row].as_py()
        yield Fault(reference, row, f"is {referred} where {own} is {at}, and it refers to an earlier one")


def _find_cycle(modules: pa.Table) -> Iterator[Fault]:
    """Modules may be named after those that they hold, so their chains are walked; the last row of a module counts."""
    ids, parents = modules["module_id"].to_pylist(), modules["parent_id"].to_pylist()
    above = dict(zip(ids, parents, strict=True))
    seen: set[int] = set()
    for row, module in enumerate(ids):
        chain: dict[int | None, None] = {}
        at: int | None = module
        while at in above and at not in seen and at not in chain:
            chain[at] = None
            at = above[at]
        if at in chain:
            yield Fault("parent_id", row, f"leads from module {module} back to module {at}")
        seen.update(each for each in chain if each is not None)


def _any_below_zero(lists: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether each list holds a negative number."""
    return pa.chunked_array([pa.array([min(each or [0]) < 0 for each in lists.to_pylist()], pa.bool_())])


def _first(is_fault: pa.ChunkedArray) -> int:
    """The first row of which it is true."""
    return int(pc.index(is_fault, True).as_py())
