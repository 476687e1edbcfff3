"""A new role is known wherever roles are listed."""

import re
from pathlib import Path

import pytest

from modtrace.collect.values.capture_masks import ROLE_BITS
from modtrace.recording.options.capture import Capture
from modtrace.recording.role import BY_NAME, FINITE_ROLES, OP_ROLES, ROLES, TABLE
from modtrace.recording.schema import TABLES_TEXT

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_lists_of_roles_are_parts_of_the_table() -> None:
    assert tuple(each.name for each in TABLE) == ROLES == tuple(BY_NAME)
    assert {"op_output", "leaf"} == OP_ROLES
    assert FINITE_ROLES == (
        "output", "grad_output", "grad_input", "parameter", "parameter_grad", "optimizer_state", "update",
        "loss",
    )  # fmt: skip


def test_the_code_of_each_role_fits_into_its_bits() -> None:
    assert len(ROLES) <= 1 << ROLE_BITS


def test_the_schema_lists_the_roles() -> None:
    [listed] = re.findall(r"^    role +dictionary +(.*?)\n    \w", TABLES_TEXT, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"\w+", listed)) == ROLES


@pytest.mark.parametrize("role", ROLES)
def test_each_role_is_explained(role: str) -> None:
    [row] = [
        each for each in (DOCS / "vocabulary.md").read_text().splitlines() if each.startswith("| role |")
    ]
    assert f"`{role}`" in row
    table = (DOCS / "capture.md").read_text().split("## Which tensors")[1].split("\n## ")[0]
    assert f"`{role}`" in table
    assert Capture.__doc__ is not None
    assert f"`{role}`" in Capture.__doc__.split("include:")[0]
