"""The page of two runs in Chromium: what it opens with, its colours and their legend, and its pictures."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.compared_runs import CHANGES, record_changed
from helpers.driven import DrivenPage
from modtrace.analysis.divergence.compare import compare_recordings
from modtrace.api.recording import open_recording
from modtrace.api.report import make_report

pytestmark = pytest.mark.browser

GALLERY = Path(__file__).parent.parent.parent.parent / "docs" / "gallery"
SIZES = [(1440, 900), (768, 1024), (390, 844)]
SCHEMES = ("light", "dark")
#: What each page opens with: the answer, the selected op, and the modules that are named above the views.
OPENS: dict[str, tuple[str, str, list[str]]] = {
    "eps": (
        "the runs part at native_layer_norm in blocks.1.ln2, step 0, forward: eps 1e-05 against 0.01",
        "native_layer_norm",
        ["≠ blocks.1.ln2 changed"],
    ),
    "added": (
        "only the second run has blocks.2.mlp.norm (LayerNorm); "
        "behind it the runs part at addmm in blocks.2.mlp.proj, step 0, forward",
        "addmm",
        ["+ blocks.2.mlp.norm only in B", "≠ blocks.2.mlp.proj changed"],
    ),
    "block": (
        "only the second run has blocks.4 (Block); "
        "behind it the runs part at native_layer_norm in ln_f, step 0, forward",
        "native_layer_norm",
        ["+ blocks.4 only in B", "≠ ln_f changed"],
    ),
    "port": (
        "the runs part at gelu in blocks.2.mlp.gelu, step 0, forward: approximate (default) against tanh",
        "gelu",
        ["≠ blocks.2.mlp.gelu changed, in B layers.2.feed_forward.gelu"],
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a run and each changed one."""
    folder = tmp_path_factory.mktemp("compared")
    record_changed(folder / "before.modtrace")
    first = open_recording(folder / "before.modtrace").data
    for change in CHANGES:
        record_changed(folder / f"{change}.modtrace", change)
        second = open_recording(folder / f"{change}.modtrace").data
        comparison = compare_recordings(first, second, rules=["auto"])
        page = make_report(first, comparison=comparison, names=("before.modtrace", f"{change}.modtrace"))
        (folder / f"{change}.html").write_text(page, encoding="utf-8")
    return {change: folder / f"{change}.html" for change in CHANGES}


@pytest.fixture(scope="module")
def page() -> Iterator[DrivenPage]:
    with DrivenPage() as driven:
        yield driven


def texts(page: DrivenPage, selector: str) -> list[str]:
    found: list[str] = page.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(each => each.textContent.trim())"
    )
    return found


@pytest.mark.parametrize("change", OPENS)
def test_page_opens_at_the_place_where_the_runs_part_and_names_what_is_changed(
    page: DrivenPage, files: dict[str, Path], change: str
) -> None:
    answer, op, named = OPENS[change]
    page.open(files[change], width=1440, height=900)
    assert texts(page, ".compared strong") == [answer]
    assert texts(page, ".compared .runs span") == ["before.modtrace", f"{change}.modtrace"]
    assert texts(page, ".compared li") == named
    assert texts(page, "aside h2") == [op]
    assert texts(page, "aside .verdict") == ["changed"]
    assert texts(page, "[role=tab][aria-selected=true]") == ["Graph"]
    drawn = set(page.picture())
    assert f"≠ {op}" in drawn
    if change == "added":
        assert "▸ + norm" in drawn
    if change == "port":
        assert {"▾ mlp = feed_forward", "▸ ln_f = norm"} <= drawn
    assert page.problems() == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
def test_every_view_of_two_runs_is_accessible_and_no_wider_than_the_screen(
    page: DrivenPage, files: dict[str, Path], size: tuple[int, int], scheme: str
) -> None:
    page.open(files["added"], width=size[0], height=size[1], scheme=scheme)
    for view in ("Graph", "Modules", "Findings", "Timeline", "Values"):
        page.go(view)
        assert page.ask("axe") == [], view
        assert page.evaluate("document.documentElement.scrollWidth") == size[0], view
    page.go("Graph")
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().height") > 200
    assert page.problems() == []


@pytest.mark.parametrize("width", [width for width, _ in SIZES])
def test_colours_have_their_legend_at_every_width(
    page: DrivenPage, files: dict[str, Path], width: int
) -> None:
    page.open(files["added"], width=width, height=900)
    shown = (
        "[...document.querySelectorAll('.key > span')].filter(each => each.getClientRects().length)"
        ".map(each => each.textContent)"
    )
    legend = page.evaluate(shown)
    assert legend == [
        "equal",
        "gradients differ",
        "inputs differ",
        "≠ changed",
        "changed inside",
        "+ only in B",
    ]
    page.ask("choose", name="Colour", option="RMS of output B/A")
    page.settle()
    low, high = page.evaluate(shown)
    assert low.startswith("B less ") and high.endswith(" B more")
    assert any(text.endswith("×1.00") for text in page.picture())


def test_equal_runs_are_told_so_and_nothing_is_coloured(page: DrivenPage, files: dict[str, Path]) -> None:
    page.open(files["equal"], width=1440, height=900)
    assert texts(page, ".compared strong") == ["equal: nothing that was compared differs"]
    assert texts(page, ".compared li, .compared button") == []
    assert texts(page, ".key > span") == ["nothing differs"]
    page.picture()
    box = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--box').trim()")
    fills = page.evaluate(
        "[...new Set([...new DOMParser().parseFromString(saved, 'image/svg+xml').querySelectorAll('rect')]"
        ".map(each => each.getAttribute('fill')))]"
    )
    assert box in fills and len(fills) <= 3  # that of boxes, and two of the ground
    page.go("Modules")
    colours = page.evaluate(
        "[...document.querySelectorAll('.row > :nth-child(2)')].map(each => each.style.backgroundColor)"
    )
    assert set(colours) == {""}
    assert page.problems() == []


def test_an_added_row_has_the_numbers_of_the_second_run_alone(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["added"], width=1440, height=900)
    page.evaluate("document.querySelector('.compared li button').click()")
    page.settle()
    assert texts(page, "aside h2") == ["blocks.2.mlp.norm"]
    assert texts(page, "aside .verdict") == ["only in B"]
    facts = page.evaluate("document.querySelector('aside').innerText")
    assert "A –\nB 256" in facts.replace("\n\n", "\n")
    page.go("Modules")
    row = texts(page, ".row.selected > div")
    assert row[0].startswith("norm") and row[1] == "+ only in B" and row[2] == ""


def test_numbers_of_another_step_have_no_ratio(page: DrivenPage, files: dict[str, Path]) -> None:
    page.open(files["eps"], "view=modules&step=1&columns=ratio:time", width=1440, height=900)
    head = texts(page, "[role=columnheader]")
    at = head.index("time B/A")
    assert set(texts(page, f".rows .row > :nth-child({at + 1})")) == {""}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("change", ["eps", "added", "port"])
def test_pictures_of_two_runs_are_in_the_gallery(
    page: DrivenPage,
    files: dict[str, Path],
    change: str,
    scheme: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    for width, height in SIZES if change == "added" else SIZES[:1]:
        page.open(files[change], width=width, height=height, scheme=scheme)
        for view in ("Graph", "Modules"):
            page.go(view)
            name = f"compared-{change}-{view.lower()}-{scheme}{f'-{width}' if width < 1000 else ''}.png"
            page.ask("screenshot", path=str(tmp_path / name))
            if request.config.getoption("--update-golden"):
                shutil.copy(tmp_path / name, GALLERY / name)
            assert (GALLERY / name).exists(), f"{name} is not in docs/gallery: run with --update-golden"
