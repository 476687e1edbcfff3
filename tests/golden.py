"""Compares a view with the file it once gave; `pytest --update-golden` renews the files, to be read then."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "views" / "golden"

#: Whether files are written instead; set by the option of pytest.
is_updating = False


def assert_golden(name: str, text: str) -> None:
    """Fails where `text` is not what stands in the golden file of that name."""
    path = _FOLDER / name
    if is_updating:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
