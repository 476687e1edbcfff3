"""Reports in Chromium: every view, what links them, the keys, and recordings that are hostile or broken."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import modtrace
from builders import RecordingBuilder
from helpers.browser import use_fonts
from helpers.driven import DrivenPage
from helpers.report_runs import record_gpt, record_resnet, record_transformer
from helpers.report_tables import EVIL, hostile, report
from modtrace.analysis.report.tables import Report, ReportTable
from modtrace.api.recording import Recording, open_recording
from modtrace.views.common.columns import printable
from modtrace.views.html.page import render_report

pytestmark = pytest.mark.browser

#: Whether a search has found something.
HITS = "document.querySelector('.results button') !== null"

VIEWS = ("Findings", "Modules", "Graph", "Timeline", "Values")
#: Tables without which the page says that they are missing.
NEEDED = ("modules", "nodes", "edges", "sites", "series_steps", "steps")
GALLERY = Path(__file__).parent.parent.parent.parent / "docs" / "gallery"
RUNS = ("gpt", "checkpoint", "nan", "resnet18", "llama24")
_FONTS = Path("/usr/share/fonts/truetype")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports of five recordings."""
    folder = tmp_path_factory.mktemp("reports")
    record_gpt(folder / "gpt.modtrace")
    record_gpt(folder / "checkpoint.modtrace", steps=3, checkpoint="non-reentrant")
    record_gpt(folder / "nan.modtrace", steps=4, plant=True)
    record_resnet(folder / "resnet18.modtrace")
    record_transformer(folder / "llama24.modtrace")
    for name in RUNS:
        open_recording(folder / f"{name}.modtrace").write_html(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in RUNS}


@pytest.fixture(scope="module")
def page() -> Iterator[DrivenPage]:
    with DrivenPage() as driven:
        yield driven


def shorten(text: str) -> str:
    """A text as pictures have it, without what XML does not allow."""
    short = text if len(text) <= 21 else f"{text[:10]}…{text[-10:]}"
    return re.sub("[\U00010000-\U0010ffff]", "\ufffd\ufffd", short)


def search(page: DrivenPage, text: str) -> None:
    """Types what to search for, and waits until something is found."""
    page.press("/")
    page.ask("type", text=text)
    page.ask("wait", code=HITS)


def write(found: Report, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(render_report(found), encoding="utf-8")
    return path


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_opens_without_an_error_a_request_or_a_serious_fault_of_accessibility(
    page: DrivenPage, files: dict[str, Path], run: str, scheme: str
) -> None:
    page.open(files[run], scheme=scheme)
    for view in VIEWS:
        page.go(view)
        assert page.ask("axe") == [], view
        if view in ("Graph", "Timeline", "Values"):
            assert len(page.picture()) > 10, view
    assert page.evaluate("document.querySelectorAll('[role=treegrid] .row').length") == 0
    page.go("Modules")
    assert page.evaluate("document.querySelectorAll('[role=treegrid] .row').length") > 5
    assert page.problems() == []


@pytest.mark.parametrize("size", [(1280, 720), (1920, 1080)], ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("font", ["dejavu", "liberation"])
def test_no_text_of_the_frame_around_the_views_is_cut(
    files: dict[str, Path], tmp_path: Path, size: tuple[int, int], font: str
) -> None:
    fonts = sorted((_FONTS / font).glob("*.ttf"))
    if not fonts:
        pytest.skip(f"no fonts in {_FONTS / font}")
    with DrivenPage(use_fonts(fonts, tmp_path / "fonts")) as page:
        page.open(files["gpt"], width=size[0], height=size[1])
        for view in VIEWS:
            page.go(view)
            cut = page.evaluate(
                "[...document.querySelectorAll('header button, header label, .bar button, [role=tab]')]"
                ".filter(each => each.scrollWidth > each.clientWidth + 1"
                " || each.getBoundingClientRect().right > innerWidth)"
                ".map(each => each.textContent)"
            )
            assert cut == [], view
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


@pytest.mark.parametrize("run", RUNS)
def test_pictures_of_the_views_are_in_the_gallery(
    page: DrivenPage, files: dict[str, Path], run: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    views = {"gpt": VIEWS[1:], "nan": VIEWS[:1]}.get(run, ("Graph",))
    sizes = [("light", 1280, 720), ("dark", 1920, 1080)]
    if run == "gpt":
        sizes += [("light", 390, 844), ("dark", 768, 1024)]
    for scheme, width, height in sizes:
        page.open(files[run], width=width, height=height, scheme=scheme)
        for view in views:
            page.go(view)
            name = f"report-{run}-{view.lower()}-{scheme}{f'-{width}' if width < 1000 else ''}.png"
            page.ask("screenshot", path=str(tmp_path / name))
            if request.config.getoption("--update-golden"):
                shutil.copy(tmp_path / name, GALLERY / name)
            assert (GALLERY / name).exists(), f"{name} is not in docs/gallery: run with --update-golden"


def test_a_module_that_is_selected_in_one_view_is_selected_in_all(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    page.press("/")
    page.ask("type", text="blocks.2.mlp.fc")
    page.press("Enter")
    page.ask("wait", code="/[#&]module=/.test(location.hash)")
    chosen = page.address()["module"]
    for view in VIEWS[1:]:
        page.go(view)
        assert page.evaluate("document.querySelector('aside').innerText").startswith("blocks.2.mlp.fc")
        assert page.address()["module"] == chosen


def test_a_hit_is_found_in_collapsed_groups_and_a_query_can_compare_numbers(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    search(page, "path:blocks.*.attn parameters>1k")
    names = page.evaluate("[...document.querySelectorAll('.results button')].map(each => each.textContent)")
    assert {re.split(r"\s", name)[0] for name in names} >= {f"blocks.{n}.attn" for n in range(4)}
    page.ask("wait", code="location.hash.includes('query=')")
    assert page.address()["query"] == "path:blocks.*.attn parameters>1k"


def test_the_slider_moves_modules_and_graph_from_the_medians_to_a_step_and_back(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    def cells() -> list[str]:
        found: list[str] = page.evaluate(
            "[...document.querySelectorAll('[role=gridcell].number')].map(each => each.textContent)"
        )
        return found

    page.open(files["gpt"])
    assert "Times, costs, memory: medians of 28 steps, 2 to 29. Values: step 29." in page.text()
    medians = cells()
    page.evaluate("document.querySelector('input[type=range]').focus()")
    page.press("ArrowLeft")
    assert "Times and values: step 28. Costs, memory: medians of 28 steps, 2 to 29." in page.text()
    before_last = cells()
    page.press("ArrowLeft")
    assert len({tuple(each) for each in (medians, before_last, cells())}) == 3
    page.go("Graph")
    assert "Times and values of modules: step 27, of ops none." in page.text()
    of_step = page.picture()
    page.ask("click", role="button", name="Median")
    page.settle()
    assert "Times of modules: medians of 28 steps, 2 to 29. All else: step 29." in page.text()
    assert page.picture() != of_step
    page.go("Modules")
    assert cells() == medians
    page.go("Findings")
    assert page.evaluate("document.querySelector('.steps').hidden")


def test_badges_of_the_shown_step_are_not_at_another_one(page: DrivenPage, files: dict[str, Path]) -> None:
    page.open(files["nan"], "view=modules")
    assert page.evaluate("document.querySelectorAll('.row .bad').length") > 0
    page.open(files["nan"], "view=modules&step=1")
    assert "Times and values: step 1." in page.text()
    assert page.evaluate("document.querySelectorAll('.row .bad').length") == 0
    page.go("Graph")
    assert not [each for each in page.picture() if "NaN" in each]


def test_pictures_of_the_graph_have_all_of_it_and_a_png_twice_the_pixels(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"], "view=graph", width=500, height=400)
    page.press("E")
    texts = page.picture()
    assert {"▾ 0..3  ×4", "▾ head", "▸ optimizer", "▾ optimizer"} & set(texts) >= {"▾ 0..3  ×4", "▾ head"}
    assert "log scale" in texts
    width, height = (
        float(each) for each in page.evaluate('/viewBox=.0 0 (\\S+) (\\S+)"/.exec(saved).slice(1)')
    )
    assert height > 1000
    page.evaluate(
        "(() => { const make = URL.createObjectURL; delete window.size; URL.createObjectURL = (blob) => {"
        "createImageBitmap(blob).then(({width, height}) => (window.size = [width, height]));"
        "URL.createObjectURL = make; return make.call(URL, blob); }; })()"
    )
    page.ask("click", role="button", name="PNG")
    page.ask("wait", code="window.size !== undefined")
    assert page.evaluate("size") == [2 * width, 2 * height]
    assert page.problems() == []


@pytest.mark.parametrize("width", [390, 768])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_narrow_screen_the_view_has_the_whole_width_and_the_selection_is_below_or_closed(
    page: DrivenPage, files: dict[str, Path], width: int, scheme: str
) -> None:
    page.open(files["gpt"], width=width, height=844, scheme=scheme)
    box = "document.querySelector('{}').getBoundingClientRect()"
    for view in VIEWS:
        page.go(view)
        assert page.evaluate(f"{box.format('main')}.width") == width
        assert page.evaluate(f"{box.format('main')}.height") > 400
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(f"{box.format('aside')}.height") == 0
        assert page.ask("axe") == [], view
    page.go("Modules")
    page.press("ArrowDown")
    assert page.evaluate(f"{box.format('aside')}.top >= {box.format('main')}.bottom")
    assert page.evaluate(f"{box.format('main')}.height") > 200
    page.ask("click", role="button", name="Close")
    page.settle()
    assert page.evaluate(f"{box.format('aside')}.height") == 0
    assert page.problems() == []


def test_a_drag_with_shift_sums_up_a_range_of_the_timeline(page: DrivenPage, files: dict[str, Path]) -> None:
    page.open(files["gpt"], "view=timeline")
    caption = "document.querySelector('.sums caption')?.textContent ?? ''"
    page.ask("wait", code=f"({caption}).startsWith('On the screen')")
    assert "measuring by modtrace" in page.evaluate("document.querySelector('.sums').textContent")
    page.evaluate(
        "(() => { const canvas = document.querySelector('main canvas'), {x, y} = canvas.getBoundingClientRect();"
        "canvas.setPointerCapture = () => {};"
        "const send = (type, right) => canvas.dispatchEvent(new PointerEvent(type, {pointerId: 1, bubbles: true,"
        "shiftKey: true, clientX: x + right, clientY: y + 90})); send('pointerdown', 300);"
        "send('pointermove', 500); send('pointerup', 500); send('lostpointercapture', 500); })()"
    )
    page.ask("wait", code=f"({caption}).startsWith('In the selected')")
    assert page.ask("axe") == []
    page.press(" ")
    page.ask("wait", code=f"({caption}).startsWith('On the screen')")
    assert page.problems() == []


def test_a_print_is_light_and_has_the_whole_graph_or_all_rows_of_modules(
    page: DrivenPage, files: dict[str, Path], tmp_path: Path
) -> None:
    page.open(files["gpt"], "view=graph", scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert "optimizer" in page.evaluate("document.querySelector('svg.printed').textContent")
    assert page.evaluate("document.querySelector('svg.printed rect').getAttribute('fill')") in (
        "#fff",
        "#ffffff",
    )
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.go("Modules")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.querySelectorAll('table.printed tbody tr').length") == 11
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.querySelector('.printed')") is None
    page.ask("print", path=str(tmp_path / "page.pdf"))
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert page.problems() == []


def test_escape_closes_the_list_of_columns_and_leaves_the_selection(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    page.go("Modules")
    page.press("ArrowDown")
    page.evaluate("document.querySelector('details.menu summary').click()")
    page.press("Escape")
    assert page.evaluate("document.querySelector('details.menu').open") is False
    assert "module" in page.address()
    page.press("Escape")
    assert "module" not in page.address()


def test_the_address_restores_what_is_shown_and_back_and_forward_work(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    page.go("Graph")
    page.go("Timeline")
    assert page.address()["view"] == "timeline"
    page.ask("back")
    page.settle()
    assert page.address()["view"] == "graph"
    page.ask("forward")
    page.settle()
    assert page.address()["view"] == "timeline"
    page.open(files["gpt"], "view=values&step=3")
    assert page.address() == {"view": "values", "step": "3"}
    assert "step 3" in page.text()


def test_any_column_colours_and_the_legend_has_its_range(page: DrivenPage, files: dict[str, Path]) -> None:
    page.open(files["gpt"])
    page.go("Graph")
    options = page.evaluate(
        "[...document.querySelector('select[aria-label=\"Colour\"], .legend select').options].map(each => each.label)"
    )
    assert {"time backward", "FLOPs", "saved for backward", "non-finite", "dtype"} <= set(options)
    legends, pictures = {}, {}
    for option in options:
        page.ask("choose", name="Colour", option=option)
        page.settle()
        legends[option] = page.evaluate("document.querySelector('.key').innerText").split()
        pictures[option] = page.evaluate("document.querySelector('main canvas').toDataURL()")
    assert legends["nothing"] == []
    assert legends["saved for backward"][-1].endswith("B")
    assert set(legends["dtype"]) == {"float32", "int64"}
    assert len({pictures[option] for option in ("nothing", "time backward", "FLOPs", "dtype")}) == 4
    assert page.problems() == []


def test_keys_open_groups_and_the_list_of_keys(page: DrivenPage, files: dict[str, Path]) -> None:
    page.open(files["gpt"])
    page.press("3")
    assert page.address()["view"] == "graph"
    page.press("?")
    assert "expand" in page.text()
    page.press("Escape", "E")
    opened = page.evaluate("location.hash")
    assert "graphOpen" in opened
    page.press("C")
    assert page.evaluate("location.hash") != opened
    assert page.problems() == []


def test_arrow_keys_move_the_selection_of_modules_and_on_the_slider_the_step(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    page.press("ArrowDown", "ArrowDown")
    assert page.address() == {"module": "1"}
    page.press("ArrowUp", "ArrowLeft")
    assert page.evaluate("document.querySelectorAll('[role=treegrid] .rows .row').length") == 1
    page.press("e")
    assert page.evaluate("document.querySelectorAll('[role=treegrid] .rows .row').length") > 5
    page.press("Escape")
    assert page.address() == {}
    for view in VIEWS[1:]:
        page.go(view)
        page.evaluate("document.querySelector('input[type=range]').focus()")
        before = page.evaluate("Number(document.activeElement.value)")
        page.press("ArrowLeft")
        assert page.evaluate("Number(document.activeElement.value)") == before - 1, view
        assert "module" not in page.address(), view


def test_a_selection_made_elsewhere_is_in_sight_in_the_graph_and_its_step_in_the_timeline(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    page.press("3", "C")
    assert "▸ GPT" in page.picture()
    search(page, "blocks.2.mlp.fc")
    page.press("Enter")
    page.settle()
    assert not page.evaluate("[...document.querySelectorAll('.results')].some(each => each.offsetHeight)")
    shown = page.picture()
    assert {"▾ 2", "▸ 3", "▾ mlp", "▸ fc"} <= set(shown)
    page.press("4")
    page.press("5")
    page.evaluate("document.querySelector('input[type=range]').focus()")
    page.press("ArrowLeft", "ArrowLeft")
    page.press("4")
    assert "step 27" in page.picture()


def test_a_drag_moves_the_graph_a_click_selects_and_a_double_click_opens(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"], "view=graph")
    x, y = page.find("▸ head")
    page.ask("mouse", x=x, y=y, right=60, down=-40)
    page.settle()
    assert page.find("▸ head") == (pytest.approx(x + 60), pytest.approx(y - 40))
    assert page.address() == {"view": "graph"}
    page.ask("mouse", x=x + 80, y=y - 40, clicks=1)
    page.settle()
    assert page.evaluate("document.querySelector('aside h2').innerText") == "head"
    assert page.find("▸ head") == (pytest.approx(x + 60), pytest.approx(y - 40))
    page.ask("mouse", x=x + 80, y=y - 40, clicks=2)
    page.settle()
    assert page.find("▾ head") == (pytest.approx(x + 60), pytest.approx(y - 40))


@pytest.mark.parametrize("ops", [True, False])
def test_views_are_left_out_until_they_are_asked_for_and_without_ops_arrows_are_the_order_of_calls(
    page: DrivenPage, tmp_path: Path, ops: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    with modtrace.record(model, tmp_path / "run", ops=ops):
        model(torch.ones(1, 2, 4))
    open_recording(tmp_path / "run").write_html(tmp_path / "run.html")
    page.open(tmp_path / "run.html", "view=graph")
    page.press("E", " ")
    shown = page.picture()
    button = (
        "[...document.querySelectorAll('.bar button')].find(each => each.textContent.startsWith('View ops'))"
    )
    assert page.evaluate(f"{button}.hidden") is not ops
    assert ("the order of calls" in page.text()) is not ops
    assert page.ask("axe") == []
    if ops:
        assert shown.count("addmm") == 2 and "t" not in shown
        assert shown.count("view") + shown.count("_unsafe_view") == 1  # all that Flatten does
        page.ask("click", role="button", name="View ops")
        page.settle()
        assert page.evaluate(f"{button}.getAttribute('aria-pressed')") == "true"
        page.ask("click", role="button", name="Fit")  # what lies outside of the window is not drawn
        page.settle()
        assert page.picture().count("t") == 2
    assert page.problems() == []


def test_what_has_the_focus_keeps_it_when_its_place_is_drawn_anew(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"], "view=values")
    page.ask("choose", name="Tensors", option="gradients at outputs")
    page.evaluate("document.querySelector('select[aria-label=Tensors]').focus()")
    page.ask("choose", name="Tensors", option="outputs")
    page.settle()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Tensors"
    page.go("Modules")
    page.ask("click", role="button", name="Sort by time backward")
    page.settle()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Sort by time backward"


def test_a_module_shows_its_parameters_with_what_was_measured_of_them(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    search(page, "blocks.2.mlp.fc")
    page.press("Enter")
    page.settle()
    table = page.evaluate(
        "[...document.querySelectorAll('aside section')].find(each => each.innerText.startsWith('Parameters'))"
        ".innerText"
    )
    assert re.findall(r"(weight|bias)\s+(\S+)\s+float32\s+[\d.e-]+\s+[\d.e-]+", table) == [
        ("weight", "128x32"),
        ("bias", "128"),
    ]
    page.ask("click", role="button", name="weight")
    page.settle()
    assert page.address()["view"] == "values"
    assert "blocks.2.mlp.fc.weight" in page.picture()


def test_a_page_opens_on_its_findings_and_each_selects_its_site(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["nan"])
    shown = page.text()
    assert "made by exp in blocks.3.mlp.gelu" in shown
    assert "exp overflow: exp of" in shown
    page.evaluate(
        "[...document.querySelectorAll('main button')].find(each => each.textContent.startsWith('Show')).click()"
    )
    page.settle()
    assert int(page.address()["module"]) >= 0
    assert page.evaluate("document.querySelector('aside h2').innerText") == "exp"
    assert {"exp", "★inf↓"} <= set(page.picture())


def test_the_module_that_made_nan_has_another_badge_than_those_that_got_them(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["nan"], "view=modules")
    page.press("E")
    badges = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.row .bad')].map(each => "
        "[each.closest('.row').querySelector('.label').textContent, [each.textContent, each.className]]))"
    )
    assert badges["3"][1] == badges["GPT"][1] == "bad origin"
    assert badges["token_embedding"] == ["NaN↑", "bad"]
    assert badges["gelu"][0].startswith("★")
    assert page.problems() == []


@pytest.mark.parametrize("ops", [True, False])
def test_the_op_that_failed_or_else_the_call_is_marked_and_in_sight(
    page: DrivenPage, tmp_path: Path, ops: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="shapes"), modtrace.record(model, tmp_path / "run", ops=ops):
        model(torch.ones(2, 4))
    open_recording(tmp_path / "run").write_html(tmp_path / "failed.html")
    page.open(tmp_path / "failed.html", "view=graph")
    texts = page.picture()
    assert texts[texts.index("addmm" if ops else "Linear", texts.index("▾ 1")) - 1] == "failed"
    page.go("Modules")
    badges = page.evaluate("[...document.querySelectorAll('.row .bad')].map(each => each.className)")
    assert badges == ["bad", "bad", "bad origin"]
    assert page.ask("axe") == []
    assert page.problems() == []


def test_sums_of_equal_modules_are_marked_and_a_hit_in_them_opens_the_single_ones(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"], "view=modules")
    row = "[...document.querySelectorAll('.row')].find(each => each.querySelector('.times'))"
    signs = page.evaluate(f"[...{row}.querySelectorAll('.together')].map(each => each.textContent)")
    assert {"Σ", "all"} <= set(signs)
    assert "0..3" in page.text()
    search(page, "blocks.2.mlp.fc")
    page.press("Enter")
    page.settle()
    assert page.evaluate("document.querySelector('.row.selected .label').innerText") == "fc"
    assert "show sum" in page.text()


def test_a_block_has_the_norm_of_all_gradients_inside_it_and_a_line_tells_its_nearest_point(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"], "view=modules")
    page.press("ArrowDown")
    page.ask("click", role="button", name="Gradients")
    page.settle()
    assert "L2 norm of gradients of all parameters inside: a row for each layer, a column for each step" in (
        page.picture()
    )
    page.evaluate(
        "document.querySelector('main canvas').dispatchEvent(new PointerEvent('pointermove', "
        "{clientX: document.querySelector('main canvas').getBoundingClientRect().x + 262, "
        "clientY: document.querySelector('main canvas').getBoundingClientRect().y + 40}))"
    )
    assert page.evaluate("document.querySelector('.tip').textContent").startswith("step 0\n")


def test_the_choice_of_colours_is_off_where_nothing_is_coloured_by_it(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["gpt"])
    off = {}
    for view in VIEWS:
        page.go(view)
        off[view] = page.evaluate("document.querySelector('.legend select').disabled")
    assert off == {"Findings": True, "Modules": True, "Graph": False, "Timeline": False, "Values": True}


def test_a_heat_map_has_a_scale_and_a_row_for_a_module_that_was_replaced_in_mid_run(
    page: DrivenPage, files: dict[str, Path]
) -> None:
    page.open(files["nan"], "view=values&role=output&step=3")
    texts = page.picture()
    assert texts.count("blocks.3.mlp.gelu") == 1
    assert {"log scale", "not finite"} <= set(texts)
    assert texts[-4:] == ["0", "1", "2", "3"]  # the steps, below the rows
    assert page.ask("axe") == []


def test_names_of_any_kind_are_text_and_nothing_of_them_runs(page: DrivenPage, tmp_path: Path) -> None:
    hostile().write_html(tmp_path / "evil.html")
    page.open(tmp_path / "evil.html")
    for view in VIEWS:
        page.go(view)
        page.press("e", "E")
    page.go("Values")
    shown = {shorten(printable(each)) for each in EVIL}  # what reorders a line is escaped
    assert shown <= set(page.picture())  # they are names of logged numbers too
    page.go("Modules")
    assert EVIL[0] in page.text()
    search(page, "<img")
    page.press("Enter")
    assert page.evaluate("document.querySelectorAll('img[src=x], b').length") == 0
    assert page.problems() == []


def test_a_page_without_columns_and_tables_opens_and_says_so(page: DrivenPage, tmp_path: Path) -> None:
    whole = report(hostile().data)
    for missing in whole.tables:
        page.open(
            write(replace(whole, tables={k: v for k, v in whole.tables.items() if k != missing}), tmp_path)
        )
        for view in reversed(VIEWS):
            page.go(view)
        assert (f"no table {missing}." in page.text()) == (missing in NEEDED), missing
        assert page.problems() == [], missing
    for each in range(max(len(table.columns) for table in whole.tables.values())):
        page.open(write(replace(whole, tables=without_column(whole, each)), tmp_path))
        for key in "2345":
            page.press(key)
        assert page.problems() == [], f"column {each} of each table"


def without_column(whole: Report, nth: int) -> dict[str, ReportTable]:
    """The tables without their nth columns."""
    return {
        name: replace(table, columns=(*table.columns[:nth], *table.columns[nth + 1 :]))
        for name, table in whole.tables.items()
    }


def test_an_empty_recording_and_one_that_was_cut_open(page: DrivenPage, tmp_path: Path) -> None:
    empty = RecordingBuilder(argv=("train.py",), complete=True).data()
    Recording(empty).write_html(tmp_path / "empty.html")
    page.open(tmp_path / "empty.html")
    assert "Nothing was recorded: no calls are in this recording: no module was called" in page.text()
    assert "No check has found anything" not in page.text()
    for view in VIEWS:
        page.go(view)
    assert page.problems() == []


def test_a_payload_that_cannot_be_read_is_told(page: DrivenPage, tmp_path: Path) -> None:
    text = render_report(report(hostile().data))
    broken = re.sub(r'(id="payload">)[^<]*', r"\1AAAA", text)
    (tmp_path / "broken.html").write_text(broken, encoding="utf-8")
    page.ask(
        "open", url=(tmp_path / "broken.html").as_uri(), width=1280, height=720, scheme="light", reduced=True
    )
    page.ask("wait", code="document.querySelector('[role=alert]') !== null")
    assert "cannot be shown" in page.text()


def test_the_page_works_in_the_frame_of_a_notebook(
    page: DrivenPage, files: dict[str, Path], tmp_path: Path
) -> None:
    shown = open_recording(files["gpt"].with_suffix(".modtrace")).view()
    (tmp_path / "notebook.html").write_text(f"<!doctype html>{shown._repr_html_()}", encoding="utf-8")
    page.ask(
        "open",
        url=(tmp_path / "notebook.html").as_uri(),
        width=1280,
        height=800,
        scheme="light",
        reduced=True,
    )
    assert "token_embedding" in page.ask("frame", wait="[role=tab]", click="Modules")
    assert page.problems() == []
