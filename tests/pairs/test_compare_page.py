"""The examples of the page on comparing print what stands below them."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def blocks() -> list[tuple[str, str]]:
    """The programs of the page, and what each prints."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)


def test_each_example_prints_what_stands_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {}
    assert len(blocks()) == 2
    for program, expected in blocks():
        exec(program, names)
        printed = capsys.readouterr().out
        assert NUMBER.sub("0", printed.strip()) == NUMBER.sub("0", expected.strip()), printed
        found, told = (list(map(float, NUMBER.findall(text))) for text in (printed, expected))
        assert found == pytest.approx(told, rel=0.05, abs=1e-6)
