"""Rows for the tests of `store`: typed ones of a small run, and random ones of any table."""

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.phase import PHASES
from modtrace.recording.protocols import RecordingData, Sink
from modtrace.recording.role import ROLES
from modtrace.recording.schema import schema, schemas

MS = 1_000_000
CALLS = 20  # of a step
Columns = dict[str, Any]


def calls_of(step: int, calls: int = CALLS) -> Columns:
    ids = list(range(step * calls, (step + 1) * calls))
    return {
        "call_id": ids,
        "step": [step] * calls,
        "phase": ["forward" if each % 2 else "backward" for each in ids],
        "start_ns": [each * 1000 for each in ids],
    }


def scalars_of(step: int) -> Columns:
    return {"step": [step], "name": [f"loss/{step % 7}"], "value": [1 / (step + 1)]}


def step_row(step: int) -> Columns:
    return {"step": [step], "kind": ["train"], "start_ns": [step * MS], "end_ns": [step * MS + 1]}


def write_step(sink: Sink, step: int, now_ns: int, *, force: bool = False) -> None:
    """One step of that run; `steps` comes first, for where it stands on disk is not the caller's choice."""
    sink.write("steps", step_row(step))
    sink.write("calls", calls_of(step))
    sink.write("scalars", scalars_of(step))
    sink.end_step(now_ns, force=force)


def expected(steps: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of that run's tables."""
    made = {"calls": calls_of, "scalars": scalars_of, "steps": step_row}
    return {
        table: [row for step in range(steps) for row in to_batch(table, of_step(step)).to_pylist()]
        for table, of_step in made.items()
    }


def rows(data: RecordingData) -> dict[str, list[dict[str, Any]]]:
    """The rows of all tables that have some."""
    tables = {name: data.table(name).to_pylist() for name in schemas()}
    return {name: each for name, each in tables.items() if each}


def same(one: Any, other: Any) -> bool:
    """Whether two row lists are equal, NaN being NaN and -0.0 not 0.0."""
    return repr(one) == repr(other)


#: No rows of a table lie inside each other in a circle; a reader demands it. Here no row lies in another.
_REFERENCES = {"parent_call_id", "parent_id"}
_IDS = {"call_id", "module_id", "site_id", "compilation_id"}
_FIRST_ID, _LAST_ID = (
    1000,
    2**24 - 1,
)  # a reader allows ids this far above the number of rows

_PRIMITIVES = {
    pa.bool_(): st.booleans(),
    pa.int32(): st.integers(0, 2**30 - 1),
    pa.int64(): st.integers(0, 2**62 - 1),
    pa.float64(): st.floats(),
    pa.float32(): st.floats(width=32),
    pa.string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
}
_WORDS = st.sampled_from(["", "aten.addmm.default", "output", "α", "a" * 100]) | st.text(max_size=3)


def _values(field: pa.Field) -> st.SearchStrategy[Any]:
    if pa.types.is_dictionary(field.type):
        known = {"phase": PHASES, "role": ROLES}.get(field.name)
        one = _WORDS if known is None else st.sampled_from(known)
    elif field.name == "histogram":
        one = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(
            lambda each: each + [0] * (256 - len(each))
        )
    elif field.name == "hash":
        one = st.binary(min_size=8, max_size=8)
    elif field.name == "sketch":
        one = st.lists(st.floats(width=32), min_size=1, max_size=3).map(
            lambda each: each + [0.0] * (64 - len(each))
        )
    elif field.name in _REFERENCES:
        one = st.integers(0, _FIRST_ID - 1)
    elif field.name in _IDS:
        one = st.integers(_FIRST_ID, _LAST_ID)
    elif pa.types.is_list(field.type):
        one = st.lists(_PRIMITIVES[field.type.value_type], max_size=3)
    else:
        one = _PRIMITIVES[field.type]
    return st.none() | one if field.nullable else one


@st.composite
def columns_of(draw: st.DrawFn, table: str) -> Columns:
    """Columns of a table: always those that must be given, and some of the others."""
    rows = draw(st.integers(0, 4))
    always = {"phase", "role", "call_id", "module_id"}
    fields = [each for each in schema(table) if each.name in always or draw(st.booleans())]
    fields = fields or [schema(table).field(0)]
    return {each.name: draw(st.lists(_values(each), min_size=rows, max_size=rows)) for each in fields}


@st.composite
def writes(draw: st.DrawFn) -> list[tuple[str, Columns]]:
    """What a collector might write: batches of any tables, in any order."""
    names = draw(st.lists(st.sampled_from(sorted(schemas())), max_size=8))
    return [(name, draw(columns_of(name))) for name in names]


def write_all(sink: Sink, batches: list[tuple[str, Columns]], step_ms: int) -> None:
    for at, (table, columns) in enumerate(batches):
        sink.write(table, columns)
        sink.end_step(at * step_ms * MS)


def rows_of(batches: list[tuple[str, Columns]]) -> dict[str, list[dict[str, Any]]]:
    """What a recording of those batches holds."""
    tables = {
        name: [row for table, each in batches if table == name for row in to_batch(name, each).to_pylist()]
        for name in schemas()
    }
    return {name: each for name, each in tables.items() if each}
