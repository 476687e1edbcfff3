"""The committed page of a report is what the sources in viewer/ build. `make viewer` builds it anew."""

import hashlib
import re
from pathlib import Path

import pytest

from modtrace.views import html

PAGE = Path(html.__file__).parent / "page.html"
VIEWER = Path(__file__).parents[3] / "viewer"
NOT_BUILT_FROM = {"node_modules", "test"}

pytestmark = pytest.mark.skipif(not VIEWER.is_dir(), reason="the sources of the page are not here")


def hash_of(folder: Path) -> str:
    """The hash that viewer/vite.config.js puts into the page: of each path, its size and its bytes."""
    paths = (
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in NOT_BUILT_FROM
    )
    found = hashlib.sha256()
    for path in sorted(paths):
        content = (folder / path).read_bytes()
        found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def test_page_is_built_from_the_sources_that_are_there() -> None:
    found = re.search(r"<!-- built from viewer/ ([0-9a-f]{64}) -->", PAGE.read_text(encoding="utf-8"))
    assert found
    assert found[1] == hash_of(VIEWER), (
        "viewer/ has changed since the page was built. Build it with: make viewer"
    )


def test_hash_tells_each_change_of_a_file_or_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.ts").write_text("a")
    before = hash_of(tmp_path)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "main.test.ts").write_text("of no effect")
    assert hash_of(tmp_path) == before
    (tmp_path / "src" / "main.ts").rename(tmp_path / "src" / "page.ts")
    assert hash_of(tmp_path) != before


def test_page_is_smaller_than_200_kb_and_asks_no_network() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "innerHTML" not in text


def test_page_has_one_place_for_the_head_and_one_for_the_payload_before_its_script() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- modtrace:head -->") == text.count("<!-- modtrace:payload -->") == 1
    assert text.count("<script>") == text.count("</script>") == 1
    assert text.count("<style>") == text.count("</style>") == 1
    assert text.index("<!-- modtrace:payload -->") < text.index("<script>")
