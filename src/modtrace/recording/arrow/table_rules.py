"""Rules that the rows of a table follow beyond their types, so that analyses can rely on them."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..phase import PHASES
from ..role import ROLES
from .arrays import to_numpy

#: Sums and differences of two numbers below this limit fit into 64 bits.
_INTEGERS_END = 2**62
_ALLOWED = {"phase": PHASES, "role": ("", *ROLES)}  # "": the column was not given
_MAGNITUDES = 256  # of a histogram

#: Lists in which -1 stands for what is not known; no other list holds a negative number.
_UNKNOWN_INSIDE = {("compiled_ops", "shape"), ("compiled_runs", "given"), ("compiled_runs", "returned")}

#: Tables with nested rows: the id column, the column that refers to the enclosing row, and which of several rows with
#: one id counts: the first or, for modules, the last.
_TREES = {"calls": ("call_id", "parent_call_id", 0), "modules": ("module_id", "parent_id", -1)}


class Fault(NamedTuple):
    """A row that breaks a rule."""

    column: str
    row: int
    why: str


def find_fault(name: str, table: pa.Table) -> Fault | None:
    """Returns a row that breaks a rule; None if there is none.

    An id that no row has breaks no rule, because a killed run lacks the last rows of some tables.

    Args:
        name: the name of the table.
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
        elif field.name in _ALLOWED:
            yield from _find_unknown_text(field.name, column)
        elif pa.types.is_list(field.type):
            yield from _find_bad_list(field.name, column, -1 if (name, field.name) in _UNKNOWN_INSIDE else 0)
    if name in _TREES:
        yield from _find_circle(table, *_TREES[name])


def _find_wild_integer(name: str, column: pa.ChunkedArray) -> Iterator[Fault]:
    """Finds counts, numbers and times that are negative."""
    ends = pc.min_max(column)
    if ends["min"].is_valid and (ends["min"].as_py() < 0 or ends["max"].as_py() >= _INTEGERS_END):
        row = _first(pc.or_(pc.less(column, 0), pc.greater_equal(column, _INTEGERS_END)))
        yield Fault(name, row, f"is {column[row].as_py()}, and it is from 0 to 2**62")


def _find_unknown_text(name: str, column: pa.ChunkedArray) -> Iterator[Fault]:
    known = _ALLOWED[name]
    for chunk in column.chunks:
        unknown = [each for each in chunk.dictionary.to_pylist() if each not in known]
        if unknown:
            row = max(_first(pc.equal(column.cast(pa.string()), unknown[0])), 0)
            yield Fault(
                name, row, f"has the word {unknown[0]!r}, and there are {', '.join(filter(None, known))}"
            )


def _find_bad_list(name: str, column: pa.ChunkedArray, least: int) -> Iterator[Fault]:
    """Finds lists that contain null or too small sizes and counts, and histograms without all of their magnitudes."""
    inside = pc.list_flatten(column)
    if inside.null_count:
        yield Fault(name, _row_of(column, pc.index(pc.is_null(inside), True)), "holds a null")
    if pa.types.is_integer(inside.type) and (pc.min(inside).as_py() or 0) < least:
        why = "holds a negative number" if least == 0 else f"holds a number below {least}"
        yield Fault(name, _row_of(column, pc.index(pc.less(inside, least), True)), why)
    if name == "histogram" and column.null_count < len(column):
        lengths = pc.not_equal(pc.list_value_length(column), _MAGNITUDES)
        if pc.any(lengths).as_py():
            yield Fault(name, _first(lengths), f"has not {_MAGNITUDES} counts")


def _row_of(lists: pa.ChunkedArray, inside: pa.Scalar) -> int:
    """Returns the row whose list contains an element, given by its index among all elements."""
    return int(pc.list_parent_indices(lists)[inside.as_py()].as_py())


def _find_circle(table: pa.Table, id_column: str, around: str, counts: int) -> Iterator[Fault]:
    """Finds a chain of nested rows that comes back to where it began."""
    ids, outer = to_numpy(table[id_column]), to_numpy(table[around])
    if not (outer >= ids).any():  # ids become smaller along every chain, as those of most calls do
        return
    order = np.argsort(ids, kind="stable")
    side: Literal["left", "right"] = "right" if counts else "left"
    at = np.clip(np.searchsorted(ids[order], outer, side) + counts, 0, len(ids) - 1)
    above = np.where(ids[order[at]] == outer, order[at], -1)
    for _ in range(len(ids).bit_length()):  # after n times those that are 2**n above
        above = np.where(above >= 0, above[above], -1)
    if (above >= 0).any():
        row = int(np.argmax(above >= 0))
        yield Fault(around, row, f"leads from {id_column} {ids[row]} into a circle")


def _first(is_fault: pa.ChunkedArray) -> int:
    """Returns the first row for which the column is true."""
    return int(pc.index(is_fault, True).as_py())
