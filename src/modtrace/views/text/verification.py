"""Renders the result of proving a recording, as text for a terminal or as JSON."""

import json
from dataclasses import asdict

from ...recording.verification import Verification
from ..common.columns import Column, Text, render_columns, render_lines

_STYLES = {"ok": "green", "FAILED": "bold red", "exempt": "dim", "unchecked": "yellow"}


def render_verification(verification: Verification, *, color: bool = False) -> str:
    """Returns the result in one line, then lines for all checks, exemption rules and unchecked items."""
    rows = verification.rows()
    head = render_lines([Text(verification.headline, "bold")], color=color)
    states = Column("", [Text(state, _STYLES[state]) for state, _, _ in rows], right=False)
    what = Column("", [Text(check) for _, check, _ in rows], right=False)
    details = Column("", [Text(detail) for _, _, detail in rows], right=False)
    return head + render_columns([states, what, details], color=color)


def render_verification_json(verification: Verification) -> str:
    """Returns the fields as JSON, with `ok` and the number of exempt parents by rule."""
    return json.dumps({"ok": verification.ok, **asdict(verification)}) + "\n"
