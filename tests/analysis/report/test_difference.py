"""A report of two runs: laws of the united tables over kinds of changes, and what stays unknown."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import modtrace
from builders import RecordingBuilder
from helpers.compared_runs import CHANGES, record_changed
from helpers.report_tables import ALL, column
from modtrace.analysis.divergence.compare import compare_recordings
from modtrace.analysis.report.joined_graphs import DIFFERENCES
from modtrace.analysis.report.report import build_report
from modtrace.analysis.report.tables import Report, ReportTable
from modtrace.api.recording import Recording, open_recording

#: What the first divergence is about, what is changed, and what only one of the runs has.
FOUND: Mapping[str, tuple[str | None, set[str], set[str]]] = {
    "equal": (None, set(), set()),
    "eps": ("blocks.1.ln2", {"blocks.1.ln2"}, set()),
    "added": ("blocks.2.mlp.proj", {"blocks.2.mlp.proj"}, {"blocks.2.mlp.norm"}),
    "block": ("ln_f", {"ln_f"}, {"blocks.4"}),
    "port": ("blocks.2.mlp.gelu", {"blocks.2.mlp.gelu"}, set()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of one step of a GPT before and after each change."""
    folder = tmp_path_factory.mktemp("compared")
    record_changed(folder / "before.modtrace", steps=1)
    for change in CHANGES:
        record_changed(folder / f"{change}.modtrace", change, steps=1)
    return folder


@cache
def build(folder: Path, change: str) -> tuple[Report, Report, Report]:
    """The reports of the first run, of the second, and of both."""
    first, second = (open_recording(folder / f"{name}.modtrace").data for name in ("before", change))
    comparison = compare_recordings(first, second, rules=["auto"])
    both = build_report(first, ALL, comparison=comparison, names=("before", change))
    return build_report(first, ALL, step=0), build_report(second, ALL, step=0), both


def names(table: ReportTable) -> list[str]:
    return [each.name for each in table.columns]


def other_paths(report: Report) -> list[str | None]:
    """The path of each module in the second run; None for what only the first has."""
    modules, second = report.tables["modules"], report.tables["second_modules"]
    paths, verdicts = column(modules, "path"), column(modules, "difference")
    others = column(second, "path") if "path" in names(second) else [None] * modules.rows
    return [
        None if verdict == "only in A" else other or path
        for path, other, verdict in zip(paths, others, verdicts, strict=True)
    ]


def singles(table: ReportTable) -> list[int]:
    return [row for row, count in enumerate(column(table, "count")) if count == 1]


def count_ops(nodes: ReportTable, is_counted: Callable[[str | None], bool] = lambda _: True) -> int:
    """How many ops besides views and those of optimizers a table has."""
    verdicts = column(nodes, "difference") if "difference" in names(nodes) else [None] * nodes.rows
    columns = (column(nodes, name) for name in ("kind", "is_view", "phase"))
    return sum(
        kind == "op" and not is_view and phase != "optimizer" and is_counted(verdict)
        for kind, is_view, phase, verdict in zip(*columns, verdicts, strict=True)
    )


every_change = pytest.mark.parametrize("change", [*CHANGES])


@every_change
def test_each_module_and_each_op_of_both_runs_is_there_once(folder: Path, change: str) -> None:
    first, second, both = build(folder, change)
    modules = both.tables["modules"]
    rows, others = singles(modules), other_paths(both)
    there = [
        column(modules, "path")[row] for row in rows if column(modules, "difference")[row] != "only in B"
    ]
    of_first, of_second = first.tables["modules"], second.tables["modules"]
    assert sorted(there) == sorted(column(of_first, "path")[row] for row in singles(of_first))
    assert sorted(others[row] for row in rows if others[row] is not None) == sorted(
        column(of_second, "path")[row] for row in singles(of_second)
    )
    nodes, first_nodes = both.tables["nodes"], first.tables["nodes"]
    size = first_nodes.rows
    assert column(nodes, "label")[:size] == column(first_nodes, "label")
    assert set(column(nodes, "difference")[size:]) <= {"only in B"}
    # Optimizers may run other ops, which are no difference of the models.
    counted = [
        count_ops(nodes, lambda verdict: verdict != "only in B"),
        count_ops(nodes, lambda verdict: verdict != "only in A"),
    ]
    ops = [count_ops(run.tables["nodes"]) for run in (first, second)]
    assert counted == ops


@every_change
def test_numbers_of_each_run_are_those_of_its_own_report(folder: Path, change: str) -> None:
    first, second, both = build(folder, change)
    assert both.title == f"before against {change}"
    modules, beside = both.tables["modules"], both.tables["second_modules"]
    others, rows = other_paths(both), singles(modules)
    for run, paths, table in ((first, column(modules, "path"), modules), (second, others, beside)):
        of_run = run.tables["modules"]
        at = {column(of_run, "path")[row]: row for row in singles(of_run)}
        for name in ("time", "FLOPs", "saved", "RMS", "gradient_norm"):
            own, shown = column(of_run, name), column(table, name)
            for row in rows:
                is_alone = table is modules and column(modules, "difference")[row] == "only in B"
                known = None if paths[row] is None or is_alone else own[at[paths[row]]]
                assert shown[row] == known, (name, paths[row])


@every_change
def test_what_differs_is_named_and_nothing_else(folder: Path, change: str) -> None:
    _, _, both = build(folder, change)
    modules = both.tables["modules"]
    paths, verdicts = column(modules, "path"), column(modules, "difference")
    first, changed, alone = FOUND[change]
    assert {paths[row] for row in singles(modules) if verdicts[row] == "changed"} == changed
    outermost = {
        paths[row]
        for row, (verdict, parent) in enumerate(zip(verdicts, column(modules, "parent"), strict=True))
        if verdict in ("only in A", "only in B") and verdicts[int(parent)] != verdict
    }
    assert outermost == alone
    inside = {paths[row] for row in singles(modules) if verdicts[row] == "changed inside"}
    around = {path.rpartition(".")[0] for path in changed | alone} - {""}
    assert inside >= around - {""} and all(
        any(path.startswith(each) for path in changed | alone) for each in inside
    )
    finding = both.findings[0]
    assert (paths[finding.module] if finding.module >= 0 else None) == first
    if first is not None:
        nodes = both.tables["nodes"]
        assert column(nodes, "difference")[finding.node] == "changed"
        assert column(nodes, "kind")[finding.node] == "op"
    else:
        for table in ("modules", "nodes"):
            assert set(column(both.tables[table], "difference")) <= {"equal", None}


@every_change
def test_rows_keep_the_order_and_the_nesting_of_both_runs(folder: Path, change: str) -> None:
    _, second, both = build(folder, change)
    modules, others = both.tables["modules"], other_paths(both)
    order, parent = column(modules, "order"), column(modules, "parent")

    def place(row: int) -> tuple[int, ...]:
        above = parent[row]
        return (*(place(int(above)) if above is not None else ()), order[row])

    rows = sorted((row for row in singles(modules) if others[row] is not None), key=place)
    of_second = second.tables["modules"]
    assert [others[row] for row in rows] == [column(of_second, "path")[row] for row in singles(of_second)]
    nodes = both.tables["nodes"]
    assert all(above is None or above < row for row, above in enumerate(column(nodes, "parent")))
    ops = [row for row, kind in enumerate(column(nodes, "kind")) if kind == "op"]
    assert len({column(nodes, "order")[row] for row in ops}) == len(ops)


@every_change
def test_edges_of_added_ops_lead_from_and_to_what_is_there(folder: Path, change: str) -> None:
    first, _, both = build(folder, change)
    edges, nodes = both.tables["edges"], both.tables["nodes"]
    source, target = (
        np.array(column(edges, name)[first.tables["edges"].rows :], int) for name in ("source", "target")
    )
    verdicts = np.array(column(nodes, "difference"), object)
    assert ((verdicts[source] == "only in B") | (verdicts[target] == "only in B")).all()
    assert (len(source) > 0) == ("only in B" in verdicts)
    # What both runs have may have run in another order in each.
    order, is_new = np.array(column(nodes, "order")), verdicts == "only in B"
    among_new = is_new[source] & is_new[target]
    assert (order[source] < order[target])[among_new].all()


def test_a_layer_that_another_one_stands_for_differs_as_that_does(folder: Path) -> None:
    for change in CHANGES:
        nodes = build(folder, change)[2].tables["nodes"]
        verdicts = column(nodes, "difference")
        for row, (folded, kind) in enumerate(
            zip(column(nodes, "folded"), column(nodes, "kind"), strict=True)
        ):
            if folded is not None and kind == "module":
                assert verdicts[row] == verdicts[int(folded)], change


def test_both_names_of_a_port_are_in_one_row(folder: Path) -> None:
    both = build(folder, "port")[2]
    modules, second = both.tables["modules"], both.tables["second_modules"]
    named = dict(zip(column(modules, "path"), column(second, "path"), strict=True))
    assert named["blocks.2.mlp"] == "layers.2.feed_forward"
    assert named["head"] == "lm_head"
    nodes = both.tables["nodes"]
    labels = set(zip(column(nodes, "label"), column(both.tables["second_nodes"], "label"), strict=True))
    assert ("attn", "self_attn") in labels and ("proj", "out_proj") in labels


def record_typed(measured: bool, step: int = 0, *more: str) -> Recording:
    """A run of a root with one module, of which only the output of the root may be measured, and further modules."""
    build = RecordingBuilder(complete=True)
    net = build.module("", "Net")
    build.step(step, 0, 90)
    root = build.call(net, 0, 60, nth=0)
    for at, name in enumerate(("fc", *more)):
        call = build.call(
            build.module(name, "Linear", parent=net), 10 + 5 * at, 14 + 5 * at, parent=root, nth=0
        )
        if measured:
            build.output(call, [1.0, 2.0])
    build.output(root, [1.0, 2.0])
    return Recording(build.data())


def test_what_was_not_measured_in_both_is_unknown_and_not_equal() -> None:
    one, other = record_typed(True), record_typed(False)
    report = build_report(one.data, ALL, comparison=modtrace.compare(one, other, allow_missing=True))
    modules = report.tables["modules"]
    assert column(modules, "difference") == ["equal", None]
    assert column(report.tables["second_modules"], "RMS")[1] is None


def test_a_step_that_only_the_first_run_has_shows_that_run_alone() -> None:
    one, other = record_typed(True, 0), record_typed(True, 7)
    comparison = modtrace.compare(one, other, step=(0, 7))
    assert "second_modules" in build_report(one.data, ALL, comparison=comparison).tables
    comparison = replace(comparison, pair=replace(comparison.pair, steps=np.array([[3, 7]])))
    assert "second_modules" not in build_report(one.data, ALL, comparison=comparison).tables


def test_words_of_differences_are_those_that_the_page_knows() -> None:
    page = Path(__file__).parents[3] / "viewer" / "src" / "difference.ts"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        assert all(f'"{word}":' in text or f"{word}:" in text for word in DIFFERENCES)
