"""Rules that the rows of a table follow beyond their types, so that analyses can rely on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..phase import PHASES
from ..role import ROLES
from ..schema import schema
from .arrays import to_numpy

#: Sums and differences of two numbers below these limits fit into the type of their column, by its bits. Steps, which
#: are never added, may have any number.
_INTEGERS_END = {32: 2**30, 64: 2**62}
_STEP = "step"

#: Ids that count up from 0, by table: they are less than the number of rows, and of those that a full disk has lost.
_COUNTED = {"modules": "module_id", "sites": "site_id", "compilations": "compilation_id"}
_MOST_LOST = 2**24

_ALLOWED = {"phase": PHASES, "role": ROLES}
#: How many there are in each list or text of bytes of a column, and of what.
_SIZES = {
    "histogram": (256, "counts"),
    "hash": (8, "bytes"),
    "sketch": (64, "numbers"),
}
_FEW = 8_192  # a number of elements that numpy copies quickly

#: Lists in which -1 means unknown; other lists have no negative numbers.
_UNKNOWN_INSIDE = {
    ("tensors", "shape"),  # of a nested tensor
    ("tensors", "stride"),
    ("compiled_ops", "shape"),
    ("compiled_runs", "given"),
    ("compiled_runs", "returned"),
}

#: Tables with nested rows: the id column, the column that refers to the enclosing row, and the row that counts if
#: several have the same id: the first or, for modules, the last.
_TREES = {"calls": ("call_id", "parent_call_id", 0), "modules": ("module_id", "parent_id", -1)}


class BadRows(NamedTuple):
    """The rows of a column that break a rule, at least one."""

    column: str
    rows: npt.NDArray[np.bool_]
    describe: Callable[[int], str]  # says what is wrong with a row, as a predicate


class Fault(NamedTuple):
    """A row that breaks a rule."""

    column: str
    row: int
    why: str


def find_fault(name: str, table: pa.Table) -> Fault | None:
    """Returns a row that breaks a rule; None if there is none.

    A reference to an id that no row has breaks no rule, because a killed run lacks the last rows of some tables.

    Args:
        name: the name of the table.
        table: the rows, in the schema and valid for Arrow.
    """
    integers = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    ends = map_in_threads(_ends_of, [table[column] for column in integers], table.num_rows)
    known = dict(zip(integers, ends, strict=True))
    for bad in find_bad_rows(name, table, known):
        row = int(np.argmax(bad.rows)) if len(bad.rows) else 0
        return Fault(bad.column, row, bad.describe(row))
    if name in _COUNTED and known[_COUNTED[name]][1] >= table.num_rows + _MOST_LOST:
        why = f"is {known[_COUNTED[name]][1]}, and the table has {table.num_rows} rows"
        return Fault(_COUNTED[name], int(np.argmax(to_numpy(table[_COUNTED[name]]))), why)
    return None


def is_surely_right(name: str, columns: Mapping[str, pa.Array]) -> bool:
    """Returns whether a quick look finds no row that breaks a rule. What it finds may be a false alarm.

    It takes a sixth of the time of `find_bad_rows`, for which a program that is recorded would wait.

    Args:
        name: the name of the table.
        columns: columns of the schema.
    """
    rules = _quick_rules(name)
    for column, values in columns.items():
        missing = values.null_count
        if missing and not rules[column].nullable:
            return False
        if missing < len(values) and not rules[column].holds(values):
            return False
    ids, outer = (columns.get(column) for column in _TREES.get(name, ("", ""))[:2])
    return ids is None or outer is None or not (to_numpy(outer) >= to_numpy(ids)).any()


class _QuickRule(NamedTuple):
    nullable: bool
    holds: Callable[[pa.Array], bool]  # False may be a false alarm


@cache
def _quick_rules(name: str) -> dict[str, _QuickRule]:
    return {field.name: _QuickRule(field.nullable, _quick_rule(name, field)) for field in schema(name)}


def _quick_rule(name: str, field: pa.Field) -> Callable[[pa.Array], bool]:
    holds = _quick_rule_of_type(name, field)
    if field.name not in _SIZES:
        return holds
    return lambda column: not pc.any(_are_wrong_sizes(field.name, column)).as_py() and holds(column)


def _quick_rule_of_type(name: str, field: pa.Field) -> Callable[[pa.Array], bool]:
    if pa.types.is_integer(field.type):
        end = _end_of(field)
        return lambda column: _are_from(0, end, column)
    if field.name in _ALLOWED:
        allowed = {*_ALLOWED[field.name]}
        return lambda column: allowed.issuperset(column.dictionary.to_pylist())
    if not pa.types.is_list(field.type):
        return lambda column: True
    if not pa.types.is_integer(field.type.value_type):
        return lambda column: column.values.null_count == 0
    least = _least_inside(name, field)
    return lambda column: column.values.null_count == 0 and _are_from(least, 2**31, column.values)


def _are_from(least: int, end: int, column: pa.Array) -> bool:
    """Returns whether all numbers are from `least` to below `end`; a negative one is large without its sign."""
    numbers = to_numpy(column, null=0)
    without_sign = (numbers - least if least else numbers).view(f"u{numbers.itemsize}")
    return bool(without_sign.max(initial=0) < min(end, 2 ** (8 * numbers.itemsize - 1)))


def find_bad_rows(
    name: str, table: pa.Table, ends: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[BadRows]:
    """Yields the rows that break each rule; see `find_fault`.

    Args:
        name: the name of the table.
        table: the rows. Columns of the schema may be missing.
        ends: the minimum and maximum of each integer column, if they are known.
    """
    for field in table.schema:
        column = table[field.name]
        if column.null_count and not field.nullable:
            yield BadRows(field.name, _mask(pc.is_null(column)), lambda row: "is null, and must not be")
        if pa.types.is_integer(field.type):
            least, largest = ends[field.name] if ends else _ends_of(column)
            yield from _find_wild_integers(field.name, column, least, largest, _end_of(field))
        elif field.name in _ALLOWED:
            yield from _find_unknown_texts(field.name, column)
        elif pa.types.is_list(field.type):
            yield from _find_bad_lists(field.name, column, _least_inside(name, field))
        if field.name in _SIZES:
            yield from _find_wrong_sizes(field.name, column)
    if name in _TREES and {*_TREES[name][:2]} <= {*table.column_names}:
        yield from _find_circles(table, *_TREES[name])


def _end_of(field: pa.Field) -> int:
    return _INTEGERS_END[64 if field.name == _STEP else field.type.bit_width]


def _least_inside(name: str, field: pa.Field) -> int:
    return -1 if (name, field.name) in _UNKNOWN_INSIDE else 0


def _find_wild_integers(
    name: str, column: pa.ChunkedArray, least: int, largest: int, end: int
) -> Iterator[BadRows]:
    """Finds counts, numbers and times that are negative, judging by the minimum and maximum."""
    if least < 0 or largest >= end:
        wild = _mask(pc.or_(pc.less(column, 0), pc.greater_equal(column, end)))
        what = f"from 0 to 2**{end.bit_length() - 1}"
        yield BadRows(name, wild, lambda row: f"is {column[row].as_py()}, and it is {what}")


def _ends_of(column: pa.ChunkedArray) -> tuple[int, int]:
    """Returns the minimum and the maximum, where nulls count as 0; (0, 0) if there are no rows.

    Arrow releases Python's interpreter lock in each call, and a training that computes in Python returns it only 5 ms
    later; numpy keeps the lock for few numbers.
    """
    if len(column) > _FEW:
        ends = pc.min_max(column)
        return ends["min"].as_py() or 0, ends["max"].as_py() or 0
    numbers = to_numpy(column, null=0)
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)


def _find_unknown_texts(name: str, column: pa.ChunkedArray) -> Iterator[BadRows]:
    """Finds words that the column may not have; one that occurs only in a dictionary is attributed to the first row."""
    known = _ALLOWED[name]
    texts = dict.fromkeys(text for chunk in column.chunks for text in chunk.dictionary.to_pylist())
    unknown = [text for text in texts if text not in known]
    if unknown:
        rows = _mask(pc.equal(column.cast(pa.string()), unknown[0]))
        if not rows.any():
            rows[:1] = True
        why = f"has the word {unknown[0]!r}, and there are {', '.join(known)}"
        yield BadRows(name, rows, lambda row: why)


def _find_bad_lists(name: str, column: pa.ChunkedArray, least: int) -> Iterator[BadRows]:
    """Finds lists with nulls, and with too small sizes and counts."""
    if column.null_count == len(column):
        return
    inside = pc.list_flatten(column)
    if inside.null_count:
        yield BadRows(name, _rows_of(column, pc.is_null(inside)), lambda row: "holds a null")
    if pa.types.is_integer(inside.type) and _ends_of(inside)[0] < least:
        why = "holds a negative number" if least == 0 else f"holds a number below {least}"
        yield BadRows(name, _rows_of(column, pc.less(inside, least)), lambda row: why)


def _find_wrong_sizes(name: str, column: pa.ChunkedArray) -> Iterator[BadRows]:
    if column.null_count == len(column):
        return
    size, of_what = _SIZES[name]
    wrong = _are_wrong_sizes(name, column)
    if pc.any(wrong).as_py():
        yield BadRows(name, _mask(wrong), lambda row: f"has not {size} {of_what}")


def _are_wrong_sizes(name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns which lists or texts of bytes have another size than each in the column has."""
    count = pc.list_value_length if pa.types.is_list(column.type) else pc.binary_length
    return pc.not_equal(count(column), _SIZES[name][0])


def _rows_of(lists: pa.ChunkedArray, inside: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Returns the rows whose lists contain an element for which `inside` is true."""
    rows = np.zeros(len(lists), bool)
    rows[to_numpy(pc.list_parent_indices(lists))[_mask(inside)]] = True
    return rows


def _find_circles(table: pa.Table, id_column: str, around: str, counts: int) -> Iterator[BadRows]:
    """Finds the rows from which a chain of nested rows leads into a circle."""
    ids, outer = to_numpy(table[id_column]), to_numpy(table[around])
    if not (outer >= ids).any():  # ids decrease along every chain, as those of most calls do
        return
    order = np.argsort(ids, kind="stable")
    side: Literal["left", "right"] = "right" if counts else "left"
    at = np.clip(np.searchsorted(ids[order], outer, side) + counts, 0, len(ids) - 1)
    above = np.where(ids[order[at]] == outer, order[at], -1)
    for _ in range(len(ids).bit_length()):  # after n rounds, each row refers 2**n rows up
        above = np.where(above >= 0, above[above], -1)
    if (above >= 0).any():
        yield BadRows(around, above >= 0, lambda row: f"leads from {id_column} {ids[row]} into a circle")


def _mask(is_bad: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Returns the rows for which the column is true."""
    return to_numpy(is_bad, null=False).astype(bool)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: The number of rows from which threads are started, which takes half a millisecond; 10,000,000 rows take 0.7 s in one
#: thread.
_FEWEST_ROWS = 100_000


def map_in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item], rows: int) -> list[_Result]:
    """Returns the results of a function for all items, computed in threads, or in this one if none can be started.

    Args:
        function: a function that spends its time in Arrow and never raises.
        items: the arguments for the calls.
        rows: the number of rows in all of them.
    """
    if rows < _FEWEST_ROWS:
        return [function(item) for item in items]
    try:
        # inside of `try`, because its first import fails while the interpreter ends
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(pa.cpu_count()) as pool:
            return list(pool.map(function, items))
    except RuntimeError:  # the interpreter ends, or the process may have no more threads
        return [function(item) for item in items]
