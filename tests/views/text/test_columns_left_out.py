"""Titles of columns that are left out of narrow tables are those of columns."""

import ast
import importlib
from pathlib import Path

import pytest

import modtrace.views.text
from modtrace.recording.phase import PHASES

FOLDER = Path(modtrace.views.text.__path__[0])
LISTS = [
    (path.stem, name)
    for path in sorted(FOLDER.glob("*.py"))
    for name in ("_DISPENSABLE", "DISPENSABLE_VALUES", "DISPENSABLE_REGIONS")
    if f"{name} = (" in path.read_text()
]


def texts_outside_of_lists(file: str) -> set[str]:
    """The texts in a file but for those in its lists of titles; of `f"{short} alloc"` the part that is written out."""
    body = ast.parse((FOLDER / f"{file}.py").read_text()).body
    kept = [
        each for each in body if not (isinstance(each, ast.Assign) and "DISPENSABLE" in ast.unparse(each))
    ]
    return {
        node.value.strip()
        for statement in kept
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_the_lists_are_found() -> None:
    assert [file for file, _ in LISTS] == [
        "comparison_tables",
        "compilations",
        "memory_table",
        "op_paths",
        "op_table",
        "show_module_tree",
        "value_columns",
    ]


@pytest.mark.parametrize(("file", "name"), LISTS)
def test_title_is_one_of_a_column(file: str, name: str) -> None:
    titles = getattr(importlib.import_module(f"modtrace.views.text.{file}"), name)
    written = texts_outside_of_lists(file) | texts_outside_of_lists("value_columns") | {*PHASES}
    assert [title for title in titles if title not in written and title.split(" ")[-1] not in written] == []
