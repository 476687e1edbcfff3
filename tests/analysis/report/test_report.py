"""Reports of recordings that were typed by hand: the tables, what they refer to, and what is left out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import modtrace
from builders import RecordingBuilder, TypedRecording
from helpers.report_tables import ALL, column, report, rows
from helpers.typed_steps import typed_net
from modtrace.analysis.provenance.recompute import RecomputeCheck
from modtrace.analysis.report.limits import Limits, choose_window, thin
from modtrace.analysis.report.tables import round_to_show
from modtrace.analysis.values.nonfinite import NonFinite
from modtrace.views.html.findings import describe_finding


def two_blocks(*, steps: int = 1, **meta: object) -> TypedRecording:
    """A root with two equal blocks, each with an op that reads what the last one returned."""
    build = RecordingBuilder(argv=("train.py", "--lr=1"), options={"ops": True}, complete=True, **meta)
    net = build.module("", "Net", parameters=8)
    blocks = build.module("blocks", "ModuleList", parent=net, parameters=8)
    each = [build.module(f"blocks.{n}", "Block", parent=blocks, parameters=4) for n in range(2)]
    inside = [
        build.module(f"blocks.{n}.fc", "Linear", parent=block, parameters=4) for n, block in enumerate(each)
    ]
    for step in range(steps):
        zero = 1000 * step
        build.step(step, zero, zero + 900)
        build.scalar("loss", 3.0 - step)
        root = build.call(net, zero, zero + 500, nth=0)
        read = build.tensor([2, 4], site=build.site(net, "input", "[0]"))
        for n, (block, fc) in enumerate(zip(each, inside, strict=True)):
            start = zero + 100 + 200 * n
            outer = build.call(block, start, start + 150, parent=root, nth=0)
            inner = build.call(fc, start + 10, start + 110, parent=outer, nth=0)
            op = build.op(
                inner,
                "aten.addmm.default",
                start + 20,
                start + 100,
                flops=10 * (n + 1),
                bytes_read=100,
                bytes_written=50,
                saved_bytes=32 * (n + 1),
            )
            build.use(read, op=op, slot="mat1")
            read = build.tensor([2, 4], producer=op)
            build.output(inner, [1.0, 2.0 + n + step])
    return build.data()


def test_equal_blocks_are_one_row_with_their_sums_and_a_row_for_each_below() -> None:
    modules = report(two_blocks()).tables["modules"]
    assert rows(modules, "path", "role", "parent", "folded", "count", "FLOPs", "saved", "RMS", "dtype") == [
        ("", "module", None, None, 1, 30, 96, None, None),
        ("blocks", "module", 0, None, 1, 30, 96, None, None),
        ("blocks.0..1", "folded", 1, None, 2, 30, 96, None, None),
        ("blocks.0..1.fc", "module", 2, None, 2, 30, 96, 1.93649, "float32"),
        ("blocks.0", "member", 2, 2, 1, 10, 32, None, None),
        ("blocks.0.fc", "module", 4, 3, 1, 10, 32, 1.58114, "float32"),
        ("blocks.1", "member", 2, 2, 1, 20, 64, None, None),
        ("blocks.1.fc", "module", 6, 3, 1, 20, 64, 2.23607, "float32"),
    ]


def test_times_are_seconds_for_each_phase_that_was_recorded() -> None:
    modules = report(two_blocks()).tables["modules"]
    assert rows(modules, "path", "time.forward", "self_time.forward")[:3] == [
        ("", pytest.approx(500e-9), pytest.approx(200e-9)),
        ("blocks", pytest.approx(300e-9), 0.0),
        ("blocks.0..1", pytest.approx(300e-9), pytest.approx(100e-9)),
    ]
    assert "time.backward" not in [each.name for each in modules.columns]


def test_what_is_not_known_is_empty_and_never_zero() -> None:
    build, net = typed_net(complete=True)
    build.step(0, 0, 90)
    build.call(net, 0, 80, nth=0)
    found = report(build.data()).tables  # without ops
    assert "saved" not in [each.name for each in found["modules"].columns]
    for name in ("FLOPs", "bytes_read", "bytes_written", "saved"):
        assert set(column(found["nodes"], name)) == {None}, name
    build = RecordingBuilder(options={"ops": True}, complete=True)
    net = build.module("", "Net")
    parts = [build.module(name, "Part", parent=net) for name in ("a", "b")]
    build.step(0, 0, 90)
    root = build.call(net, 0, 80, nth=0)
    for n, (module, cost) in enumerate(zip(parts, (None, 8), strict=True)):
        call = build.call(module, 10 * n, 10 * n + 9, parent=root, nth=0)
        build.op(
            call, "aten.relu.default", 10 * n + 1, 10 * n + 2, saved_bytes=cost, flops=cost, bytes_read=cost
        )
    found = report(build.data()).tables
    assert rows(found["modules"], "path", "saved", "saved_own", "FLOPs", "bytes") == [
        ("", 8, 0, 8, 8),
        ("a", None, None, None, None),
        ("b", 8, 8, 8, 8),
    ]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fc(inputs).relu()


def test_costs_of_ops_inside_of_compiled_code_count_for_the_module_around_them() -> None:
    model = Scaled()
    model.compile(backend="aot_eager")
    with modtrace.record(model, ops=True) as rec:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    torch.compiler.reset()
    [(path, flops, saved)] = rows(report(rec.data).tables["modules"], "path", "FLOPs.forward", "saved")
    assert (path, flops) == ("", 128)
    assert saved > 0


def test_nodes_are_layers_and_then_ops_and_refer_to_modules_and_to_what_they_are_shown_as() -> None:
    found = report(two_blocks()).tables
    assert rows(found["nodes"], "kind", "label", "parent", "module", "count") == [
        ("phase", "forward", None, None, 1),
        ("module", "Net", 0, 0, 1),
        ("container", "blocks", 1, 1, 1),
        ("module", "0", 2, 4, 2),
        ("module", "fc", 3, 5, 2),
        ("module", "1", 2, 6, 0),
        ("module", "fc", 5, 7, 0),
        ("input", "input[0]", 0, None, 1),
        ("op", "addmm", 4, 5, 2),
        ("op", "addmm", 6, 7, 0),
    ]
    assert rows(found["edges"], "source", "target", "slot", "shape", "dtype", "bytes") == [
        (7, 8, "mat1", "2x4", "float32", 32.0),
        (8, 9, "mat1", "2x4", "float32", 32.0),
    ]


def test_spans_refer_to_modules_and_to_nodes_of_the_shown_step_alone() -> None:
    found = report(two_blocks(steps=2))
    spans = found.tables["spans"]
    assert found.shown_step == 1
    assert [each.label for each in found.lanes] == ["steps", "forward"]
    assert rows(spans, "lane", "label", "start", "depth", "step", "module", "node")[8:12] == [
        (0, "step 1", 1e-6, 0, 1, None, None),
        (1, "Net", 1e-6, 0, 1, 0, 1),
        (1, "blocks.0", 1.1e-6, 1, 1, 4, 3),
        (1, "blocks.0.fc", 1.11e-6, 2, 1, 5, 4),
    ]
    assert {each for each, step in rows(spans, "node", "step") if step == 0} == {None}


def test_spans_have_the_measuring_at_their_end_without_that_of_what_is_inside() -> None:
    build, net = typed_net(complete=True)
    inner = build.module("fc", "Linear", parent=net)
    build.step(0, 0, 900_000, overhead_ns=300_000)
    root = build.call(net, 0, 800_000, nth=0, overhead_ns=300_000)
    build.call(inner, 100_000, 500_000, parent=root, nth=0, overhead_ns=200_000)
    spans = report(build.data()).tables["spans"]
    assert rows(spans, "label", "measuring") == [
        ("step 0", None),
        ("Net", pytest.approx(1e-4, rel=2**-15)),
        ("fc", pytest.approx(2e-4, rel=2**-15)),
    ]


def test_series_have_all_steps_of_a_site_after_each_other() -> None:
    found = report(two_blocks(steps=3)).tables
    assert rows(found["sites"], "label", "module", "role") == [
        ("blocks.0.fc", 5, "output"),
        ("blocks.1.fc", 7, "output"),
    ]
    assert column(found["series"], "max") == [2.0, 3.0, 4.0, 3.0, 4.0, 5.0]
    assert column(found["series"], "nonfinite") == [0] * 6
    assert column(found["series_steps"], "step") == [0, 1, 2]
    assert rows(found["steps"], "number", "kind", "duration", "scalar.loss") == [
        (0, "train", 9e-7, 3.0),
        (1, "train", 9e-7, 2.0),
        (2, "train", 9e-7, 1.0),
    ]


def test_a_module_that_was_replaced_has_one_row_with_the_one_that_replaced_it() -> None:
    build, net = typed_net(complete=True)
    parts = [build.module("act", type_name, parent=net) for type_name in ("GELU", "ReLU")]
    last = build.module("head", "Linear", parent=net)
    for step in range(4):
        build.step(step, 10 * step, 10 * step + 9)
        root = build.call(net, 10 * step, 10 * step + 8, nth=0)
        build.output(
            build.call(parts[step // 2], 10 * step + 1, 10 * step + 2, parent=root, nth=0), [1.0 + step]
        )
        build.output(build.call(last, 10 * step + 3, 10 * step + 4, parent=root, nth=0), [0.5])
    found = report(build.data()).tables
    assert rows(found["sites"], "label", "role") == [("act", "output"), ("head", "output")]
    assert column(found["series"], "max") == [1.0, 2.0, 3.0, 4.0, 0.5, 0.5, 0.5, 0.5]


def test_medians_of_modules_stand_beside_how_far_their_steps_lie_apart_and_how_many_there_are() -> None:
    build, net = typed_net(complete=True)
    part = build.module("fc", "Linear", parent=net)
    for step, time in enumerate([0, 0, 40, 80, 120, 160, 200]):  # the first two are left out
        build.step(step, 1000 * step, 1000 * step + 900)
        root = build.call(net, 1000 * step, 1000 * step + 500 + time, nth=0)
        if step < 6:
            build.call(part, 1000 * step, 1000 * step + time, parent=root, nth=0)
    table = report(build.data()).tables["modules"]
    names = ("time.forward", "time_range.forward", "self_time.forward", "self_time_range.forward")
    found = [tuple(round(value * 1e9) for value in row) for row in rows(table, *names)]
    assert found == [(620, 80, 500, 0), (100, 60, 100, 60)]
    assert column(table, "steps") == [5, 4]


def test_what_was_not_measured_in_a_step_is_not_a_number_and_its_count_is_unknown() -> None:
    build, net = typed_net(complete=True)
    for step, numbers in enumerate(([1.0], None, [float("nan")])):
        build.step(step, 10 * step, 10 * step + 9)
        build.output(build.call(net, 10 * step, 10 * step + 5, nth=0), numbers)
    found = report(build.data()).tables
    assert rows(found["series"], "rms", "nonfinite") == [(1.0, 0), (None, 1)]
    assert column(found["series_steps"], "step") == [0, 2]


def test_a_page_opens_on_the_step_of_the_first_nan_and_the_finding_refers_to_its_module_and_call() -> None:
    build, net = typed_net(complete=True)
    for step, numbers in enumerate(([1.0], [float("inf")], [float("nan")])):
        build.step(step, 10 * step, 10 * step + 9)
        build.output(build.call(net, 10 * step, 10 * step + 5, nth=0), numbers)
    found = report(build.data())
    assert found.shown_step == 1
    [finding] = found.findings
    assert isinstance(finding.answer, NonFinite)
    assert (finding.answer.step, finding.module, finding.step) == (1, 0, 1)
    assert column(found.tables["nodes"], "name")[finding.node] == "Net"
    assert report(build.data(), step=2).shown_step == 2


@pytest.mark.parametrize("ops", [True, False])
def test_a_page_opens_on_the_step_that_failed_and_its_finding_refers_to_the_op_or_else_the_call(
    ops: bool,
) -> None:
    build = RecordingBuilder(marks=("the run ended by RuntimeError: no",), options={"ops": ops})
    net = build.module("", "Net")
    parts = [build.module(name, "Part", parent=net) for name in ("a", "b", "c")]
    for step in range(2):
        zero, failed = 100 * step, bool(step)
        build.step(step, zero, zero + 90)
        root = build.call(net, zero, zero + 80, nth=0, raised=failed)
        for n, part in enumerate(parts[: 2 if failed else 3]):
            is_last = failed and n == 1
            call = build.call(part, zero + 10 * n, zero + 10 * n + 9, parent=root, nth=0, raised=is_last)
            if ops:
                op = build.op(call, "aten.mm.default", zero + 10 * n + 1, zero + 10 * n + 2, raised=is_last)
                build.use(build.tensor([2], site=build.site(net, "input", "[0]")), op=op, slot="mat2")
    found = report(build.data())
    assert found.shown_step == 1
    finding = found.findings[0]
    nodes = found.tables["nodes"]
    assert (finding.module, finding.step) == (2, 1)
    assert column(nodes, "kind")[finding.node] == ("op" if ops else "call")
    assert column(nodes, "raised")[finding.node] == 1
    assert report(build.data(), step=0).findings[0].node == -1


def test_modules_say_where_nan_came_up_which_they_are_and_in_which_phase() -> None:
    build = RecordingBuilder(complete=True)
    build.step(0, 0, 100)
    net = build.module("", "Net")
    maker, reached = (build.module(each, "Linear", parent=net) for each in ("maker", "reached"))
    root = build.call(net, 0, 50, nth=0)
    build.output(build.call(maker, 1, 10, parent=root, nth=0), [1.0, float("inf")])
    build.output(build.call(reached, 11, 20, parent=root, nth=0), [float("nan"), float("nan")])
    modules = report(build.data()).tables["modules"]
    assert rows(modules, "path", "origin", "NaN.forward", "inf.forward", "NaN.backward") == [
        ("", 0, 2, 1, 0),
        ("maker", 1, 0, 1, 0),
        ("reached", 0, 2, 0, 0),
    ]


def test_a_block_has_the_norm_of_the_gradients_of_all_parameters_inside_it_in_each_step() -> None:
    build = RecordingBuilder(complete=True)
    net = build.module("", "Net", parameters=2)
    inside = [build.module(each, "Linear", parent=net, parameters=1) for each in "ab"]
    for step in range(2):
        build.step(step, 10 * step, 10 * step + 9)
        root = build.call(net, 10 * step, 10 * step + 5, nth=0)
        for module, number in zip(inside, (3.0, 4.0 + step), strict=True):
            build.call(module, 10 * step, 10 * step + 5, parent=root, nth=0)
            build.parameter_grad(module, "weight", [number])
    tables = report(build.data()).tables
    assert rows(tables["sites"], "label", "module", "role") == [
        ("a.weight", 1, "parameter_grad"),
        ("b.weight", 2, "parameter_grad"),
        ("Net", 0, "parameter_grad_inside"),
    ]
    assert column(tables["series"], "l2") == [3.0, 3.0, 4.0, 5.0, 5.0, 5.83095]


def test_recomputes_that_agree_and_marks_are_findings() -> None:
    build, net = typed_net(100, marks=("the recording ended early",))
    call = build.call(net, 0, 10, nth=0)
    again = build.recompute(call, 50, 60, nth=0)
    build.output(call, [1.0])
    build.output(again, [1.0])
    check, mark = report(build.data()).findings
    assert isinstance(check.answer, RecomputeCheck)
    assert check.answer.differences == ()
    assert mark.answer == "the recording ended early"


def test_what_torch_compile_compiled_again_is_a_finding_of_its_module_and_step() -> None:
    build, net = typed_net()
    head = build.module("head", "Linear", parent=net)
    for step in range(2):
        build.step(step, 100 * step, 100 * step + 100)
        outer = build.call(net, 100 * step, 100 * step + 20)
        call = build.call(head, 100 * step, 100 * step + 10, parent=outer)
    guard = "0/0: self.n == 1"
    build.compilation(head, "forward m.py:7", "0/1", call=call, failed_guards=[guard], graph_breaks=["Why"])
    again, broken = report(build.data()).findings
    assert (again.answer.reason, again.module, again.step) == ("self.n changed", 1, 1)  # type: ignore[union-attr]
    assert (broken.answer.reason, broken.module, broken.step) == ("Why", 1, 1)  # type: ignore[union-attr]
    assert [describe_finding(each)["severity"] for each in (again, broken)] == ["warning", "warning"]
    assert describe_finding(again)["title"] == "compiled again 1x in step 1: head, m.py:7 in forward"


def test_an_empty_recording_has_a_report_that_says_what_is_missing() -> None:
    found = report(RecordingBuilder(argv=("train.py",), complete=True).data())
    assert {name: each.rows for name, each in found.tables.items() if each.rows} == {}
    assert found.shown_step == -1
    assert [each.answer for each in found.findings] == [
        "Nothing was recorded: no calls are in this recording: no module was called in its steps. "
        "Record a program that calls a torch.nn.Module in its steps."
    ]


def test_a_step_without_an_end_has_a_report() -> None:
    build, net = typed_net()
    build.begin_step(0)
    build.call(net, 0, None, nth=0)
    found = report(build.data()).tables
    assert rows(found["steps"], "number", "duration") == [(0, None)]
    assert rows(found["modules"], "label", "calls") == [("Net", 1)]


def test_a_large_graph_is_cut_at_a_depth_and_its_edges_lead_to_the_closed_modules() -> None:
    found = report(two_blocks(), Limits(nodes=7, spans=100, values=100, histograms=100))
    nodes, edges = found.tables["nodes"], found.tables["edges"]
    assert column(nodes, "label") == ["forward", "Net", "blocks", "0", "1", "input[0]"]
    assert rows(edges, "source", "target") == [(5, 3), (3, 4)]
    assert set(column(found.tables["spans"], "node")) <= {None, 1, 3, 4}
    assert tuple(note for note in found.notes if not note.startswith("not checked: ")) == (
        "The graph has 10 calls and ops. What is deeper than 2 levels below the root is left out.",
    )
    assert found.notes[-1].startswith("not checked: ")


def test_a_long_run_keeps_values_of_evenly_chosen_steps_and_spans_around_the_shown_one() -> None:
    found = report(two_blocks(steps=9), Limits(nodes=100, spans=30, values=70, histograms=100))
    assert column(found.tables["series_steps"], "step") == [0, 2, 4, 6, 8]
    spans, steps = found.tables["spans"], found.tables["steps"]
    assert sorted(set(column(spans, "step"))) == [6, 7, 8]
    of_steps = [(start, step) for kind, start, step in rows(spans, "kind", "start", "step") if kind == "step"]
    assert of_steps == rows(steps, "start", "number")[6:]
    assert tuple(note for note in found.notes if not note.startswith("not checked: ")) == (
        "Times, costs and memory of modules are medians of 7 steps, 2 to 8; all else is of step 8.",
        "The timeline has 3 steps of 9, those around the shown one.",
        "Of the values, 5 of 9 steps are here, evenly chosen.",
    )


def test_steps_are_chosen_evenly_with_the_shown_one() -> None:
    steps = np.arange(10)
    assert thin(steps, 5, 50, 4).tolist() == list(range(10))
    assert thin(steps, 5, 20, 4).tolist() == [0, 3, 4, 6, 9]
    assert thin(steps[:0], 5, 20, None).tolist() == []


def test_steps_around_the_shown_one_are_chosen_until_there_is_no_room() -> None:
    steps, spans = np.array([2, 3, 5, 8]), np.array([10, 10, 10, 10])
    assert choose_window(steps, spans, 30, 5) == (3, 8)
    assert choose_window(steps, spans, 10, 5) == (5, 5)
    assert choose_window(steps, spans, 9, 5) is None
    assert choose_window(steps, spans, 100, None) is None


def test_parameters_have_the_sites_of_their_values_and_gradients_and_what_ops_read_none() -> None:
    build, net = typed_net(100, options={"ops": True}, complete=True)
    fc = build.module("fc", "Linear", parent=net)
    call = build.call(fc, 10, 50, parent=build.call(net, 0, 60, nth=0), nth=0)
    op = build.op(call, "aten.addmm.default", 20, 40)
    for name, shape in (("weight", [4, 2]), ("bias", [4])):
        build.use(build.tensor(shape, site=build.site(fc, "parameter", name)), op=op, slot=name)
    build.value(build.site(fc, "parameter", "weight"), [1.0, 2.0], phase="optimizer")
    build.value(build.site(fc, "parameter_grad", "weight"), [0.5, 0.5], phase="optimizer")
    found = report(build.data()).tables
    assert rows(found["parameters"], "module", "label", "shape", "dtype", "site", "gradient") == [
        (1, "weight", "2", "float32", 0, 1),
        (1, "bias", "4", "float32", None, None),
    ]


def test_histograms_have_no_empty_bins_at_their_ends() -> None:
    build, net = typed_net(100, complete=True)
    counts = np.zeros(256, np.int64)
    counts[[127, 129]] = 3, 1  # three from 1 to 2, one from 4 to 8
    call = build.call(net, 0, 10, nth=0)
    build.output(
        call, [1.0, 1.0, 1.5, 5.0], histogram=counts.tolist(), zero_count=2, sumabs=8.5, sum4=632.0625
    )
    found = report(build.data(), ALL).tables
    names = ("site", "step", "first", "length", "exponent", "zeros")
    assert rows(found["histograms"], *names) == [(0, 0, 0, 3, 0.0, 2)]
    assert column(found["bins"], "count") == [3, 0, 1]


@given(st.lists(st.floats(width=32)))
def test_statistics_are_rounded_below_the_fourth_digit(given_values: list[float]) -> None:
    values = np.array(given_values, np.float32)
    rounded = round_to_show(values)
    is_finite = np.isfinite(values)
    assert np.array_equal(rounded[~is_finite], values[~is_finite], equal_nan=True)
    assert np.isfinite(rounded[is_finite]).all()
    wide, exact = rounded[is_finite].astype(np.float64), values[is_finite].astype(np.float64)
    assert (np.abs(wide - exact) <= np.abs(exact) * 2.0**-16).all()
    assert round_to_show(np.float64([0.1]))[0] == 0.1
