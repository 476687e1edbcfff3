"""Compares a view with the file it once gave; MODTRACE_UPDATE_GOLDEN=1 renews the files, to be read then."""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "views" / "golden"


def assert_golden(name: str, text: str) -> None:
    """Fails where `text` is not what stands in the golden file of that name."""
    path = _FOLDER / name
    if os.environ.get("MODTRACE_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
