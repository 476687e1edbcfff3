"""A report opens in Chromium: a sample of test_report_in_chromium.py that needs no Node."""

import re
from pathlib import Path

import pytest

from helpers.browser import open_once
from helpers.report_tables import EVIL, hostile


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report, in a folder that keeps Chromium's profile too: making one takes longer than a view."""
    path = tmp_path_factory.mktemp("report") / "evil.html"
    hostile().write_html(path)
    return path


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ("modules", "&lt;img src=x onerror=alert(1)&gt;"),
        ("graph", "Double click opens."),
    ],
)
def test_view_opens_in_chromium_and_says_nothing_on_the_console(page: Path, view: str, shown: str) -> None:
    found = open_once(f"{page.as_uri()}#view={view}", page.parent)
    [main] = re.findall(r'<div id="main".*?</main>', found.stdout, re.DOTALL)
    assert re.findall(r'<section class="view (\w+)', main) == [view]
    assert shown in main
    assert EVIL[0] not in found.stdout
    assert [line for line in found.stderr.splitlines() if "CONSOLE" in line] == []
