"""A notebook with the cells of docs/notebooks.md, run by a kernel; and what answers display."""

import re
import warnings
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch import nn

import modtrace
from helpers.programs import needs_program

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"

START, TRAIN, STOP = re.findall(
    r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)

DISPLAYED = [
    "rec.module_tree(step=2)",
    'rec.op_table(by="op")',
    "rec.memory_table()",
    "rec.paths()",
    "rec.first_nonfinite()",
    'rec.plot("**", stat="rms")',
    "rec.graph().collapse(depth=1)",
]


def run(cells: list[str], folder: Path) -> Any:
    """Runs the cells in a new kernel, which is shut down at the end; a cell may fail."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nbclient and its event loop
        client = NotebookClient(
            notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": folder}}
        )
        client.execute()
    return notebook


def results(cell: Any) -> list[dict[str, str]]:
    return [
        each["data"] for each in cell["outputs"] if each["output_type"] in ("execute_result", "display_data")
    ]


def test_cells_of_the_page_display_what_it_says_also_after_a_cell_that_failed(tmp_path: Path) -> None:
    needs_program("dot")
    failing = "model(torch.randn(16, 8)); raise ValueError('mine')"
    kept = "again = modtrace.record(model, to='kept.modtrace')\nagain.start(); model(torch.randn(1, 8))"
    notebook = run([START, TRAIN, "rec", failing, TRAIN, STOP, *DISPLAYED, kept], tmp_path)
    start, train, running, failed, _, stopped, *displayed, last = notebook.cells

    assert [each["outputs"] for each in (start, train)] == [[], []]
    assert [each["ename"] for each in failed["outputs"]] == ["ValueError"]
    assert "2 steps recorded" in only(running)["text/html"]
    assert "7 steps recorded, 0 to 6" in only(stopped)["text/html"]
    assert "ipykernel" not in only(stopped)["text/html"]
    tree, ops, memory, paths, nonfinite, plot, graph = displayed
    for cell in (stopped, tree, ops, memory, paths):
        assert sorted(only(cell)) == ["text/html", "text/plain"]
        shown = "step " if cell in (tree, paths) else "median of "
        assert only(cell)["text/plain"].startswith(shown)
    assert nonfinite["outputs"] == []  # None
    assert "image/svg+xml" in only(plot)
    assert "image/svg+xml" in only(graph)
    for cell in notebook.cells:
        for mime, content in (pair for each in results(cell) for pair in each.items()):
            assert mime in ("text/html", "text/plain", "image/svg+xml")
            assert not re.search(r"<script|\son\w+=|javascript:", content)
    # The kernel was shut down with a recording that was not stopped.
    assert len(results(last)) == 1
    kept_run = modtrace.open_recording(tmp_path / "kept.modtrace")
    assert (kept_run.table("calls").num_rows, kept_run.meta.marks) == (4, ())
    nbformat.validate(notebook)


def only(cell: Any) -> dict[str, str]:
    [result] = results(cell)
    return result


@pytest.fixture
def nan_in_second() -> modtrace.LiveRecording:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 0 * 0

    with modtrace.record(Root()) as rec:
        nn.Sequential(nn.Linear(2, 2), Root())(torch.ones(1, 2))
    return rec


def test_nonfinite_answer_is_displayed_as_lines_and_printed_as_the_command_prints_it(
    nan_in_second: Any,
) -> None:
    found = nan_in_second.first_nonfinite()
    assert str(found) == (
        "first non-finite values: 2 NaN in step 0, forward\n"
        "  output of 1 in Sequential, 2 elements, the first at [0,0]\n"
        "  try: record(ops=True) (modtrace record --ops), on a long run with keep_last=20 (--keep-last 20), "
        "names the op that made them; this module may only "
        "have been given them\n"
    )
    assert '<span class="bold red">2 NaN</span> in step 0, forward</div>' in found._repr_html_()
    assert found._repr_mimebundle_(include=None, exclude=None) == {
        "text/html": found._repr_html_(),
        "text/plain": str(found),
    }


def test_recording_that_has_not_begun_displays_that_nothing_was_recorded() -> None:
    rec = modtrace.record(nn.Linear(2, 2))
    assert "<div>nothing was recorded</div>" in rec._repr_html_()


@pytest.mark.parametrize("answer", ["op_table", "memory_table", "paths"])
def test_tables_of_ops_say_that_none_were_recorded(answer: str) -> None:
    with modtrace.record() as rec:
        nn.Linear(2, 2)(torch.ones(1, 2))
    shown = getattr(rec, answer)()
    assert "no ops were recorded: record with ops=True\n" in str(shown)
    assert "no ops were recorded: record with ops=True</span></div>" in shown._repr_html_()


def test_table_of_many_ops_is_bounded_and_its_text_is_not() -> None:
    with modtrace.record(ops=True) as rec:
        nn.Sequential(*(nn.ReLU() for _ in range(60)))(torch.ones(2))
    paths = rec.paths()
    assert paths._repr_html_().count("<tr><td") == 50
    assert '<span class="dim">11 more ops</span>' in paths._repr_html_()
    assert str(paths).count("aten.relu.default") == 60


def test_names_of_modules_are_escaped() -> None:
    model = nn.Module()
    model.add_module("<b>", nn.Linear(2, 2))
    model.forward = lambda x: getattr(model, "<b>")(x)
    with modtrace.record(model) as rec:
        model(torch.ones(1, 2))
    assert "&lt;b&gt;" in rec._repr_html_()
    assert "<b>" not in rec._repr_html_()


def test_given_axes_keep_what_they_display() -> None:
    from matplotlib.figure import Figure

    with modtrace.record() as rec:
        nn.Linear(2, 2)(torch.ones(1, 2))
    ax = Figure().add_subplot()
    assert not hasattr(rec.plot(ax=ax), "_repr_svg_")
    assert rec.plot()._repr_svg_().startswith("<?xml")
