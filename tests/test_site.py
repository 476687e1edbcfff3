"""The site that `make site` builds from docs/: nothing of it comes from the network, and its search finds pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.browser import open_once

pytestmark = pytest.mark.browser

PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; a broken link or anchor fails the build."""
    pytest.importorskip("sphinx", reason="make site installs Sphinx")
    folder = tmp_path_factory.mktemp("site")
    options = [
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "--nitpicky",
        "-c",
        "docs",
        "-d",
        folder / "trees",
    ]
    command = [sys.executable, "-m", "sphinx", *map(str, options), ".", str(folder / "site")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_first_page_is_found(site: Path) -> None:
    [address] = re.findall(r"url=(\S+)\"", (site / "index.html").read_text())
    assert "<h1>What do you want to know?" in (site / address).read_text()


def test_nothing_of_a_page_comes_from_the_network(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    parts = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(https?:[^\"]+)")
    assert len(pages) > 40
    assert {page.name: found for page, text in pages.items() if (found := parts.findall(text))} == {}
    styles = [style.read_text() for style in site.rglob("*.css")]
    assert [style for style in styles if re.search(r"@import|url\(['\"]?https?:", style)] == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("nan", "nonfinite"),
        ("cost", "costs"),
        ("rank", "ranks"),
        ("hang", "ranks"),
        ("memory", "expensive"),
        ("accelerate", "frameworks"),
        ("torchrecorder", "coming-from-torchrecorder"),
    ],
)
def test_search_finds_the_page_first(site: Path, tmp_path: Path, words: str, page: str) -> None:
    shown = open_once(f"file://{site}/search.html?q={words}", tmp_path).stdout
    found = re.findall(r"<li[^>]*><a href=\"docs/([\w-]+)\.html", shown)
    assert found[0] == page
