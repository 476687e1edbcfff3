"""What plots show, read from matplotlib's own objects."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.plotted import NAN, exponents, history, words
from helpers.typed_runs import typed_run
from modtrace.api.recording import Recording
from modtrace.errors import ModtraceError
from modtrace.views.plot.draw import draw, write_axes
from modtrace.views.plot.heatmap import cells_of, plot_heatmap
from modtrace.views.plot.histogram import plot_histogram
from modtrace.views.plot.lines import plot_lines
from modtrace.views.plot.style import NONFINITE_COLOR, choose_scale

pytest.importorskip("matplotlib")


def points(line: Any) -> list[tuple[float, float]]:
    return [tuple(each) for each in line.get_xydata().tolist()]


def pixels(ax: Any) -> Any:
    ax.figure.canvas.draw()
    return np.asarray(ax.figure.canvas.buffer_rgba())


# Lines.


def test_each_site_is_a_line_over_the_steps_with_its_name_at_the_end() -> None:
    ax = plot_lines(history([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], steps=[10, 20, 30]))

    assert [points(line) for line in ax.lines] == [
        [(10, 1), (20, 2), (30, 3)],
        [(10, 4), (20, 5), (30, 6)],
    ]
    assert words(ax.texts) == ["blocks.0", "blocks.1"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "root mean square")
    assert ax.get_title("left") == "gradients at outputs"


def test_names_that_would_overlap_are_moved_apart() -> None:
    ax = plot_lines(history([[1.0, 1.0, 1.0, 9.0]]))
    heights = [each.xy[1] for each in ax.texts]
    assert all(abs(one - other) > 0.02 for at, one in enumerate(heights) for other in heights[:at])
    assert min(heights) >= 0 and max(heights) <= 1


def test_many_lines_are_named_by_a_colour_bar_in_layer_order() -> None:
    ax = plot_lines(history([list(range(1, 13))]))
    assert words(ax.texts) == []
    _, bar = ax.figure.axes
    assert words(bar.get_yticklabels()) == [f"blocks.{at}" for at in range(0, 12, 2)]
    assert bar.get_ylim() == (11.5, -0.5)  # the first layer is on top
    assert bar.get_ylabel() == "site, in the order of the model"


def test_a_line_is_broken_at_what_is_not_finite_and_crossed_there() -> None:
    ax = plot_lines(history([[1.0], [NAN], [3.0], [np.inf]], steps=[0, 1, 2, 3]))

    line, crosses = ax.lines
    np.testing.assert_array_equal(line.get_ydata(), [1.0, NAN, 3.0, NAN])
    assert crosses.get_marker() == "x" and crosses.get_xdata().tolist() == [1, 3]
    assert ax.get_title("right") == "× NaN or infinite, first in step 1"


def test_a_tensor_with_nan_is_crossed_although_its_statistic_is_finite() -> None:
    nonfinite = np.array([[False], [True]])
    ax = plot_lines(history([[1.0], [2.0]], stat="nan_count", nonfinite=nonfinite))
    assert ax.lines[1].get_xdata().tolist() == [1]


def test_a_line_is_broken_where_steps_were_left_out() -> None:
    ax = plot_lines(history([[1.0], [2.0], [3.0], [4.0]], steps=[0, 1, 2, 50]))
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 1, 2, NAN, 50])


def test_steps_of_another_kind_do_not_break_a_line_and_steps_that_were_not_recorded_do() -> None:
    """Evaluations are in steps 2 and 5, and steps 8 to 49 were not recorded."""
    ax = plot_lines(
        history([[1.0]] * 6, steps=[0, 1, 3, 4, 6, 50], others_before=np.array([0, 0, 1, 1, 2, 2]))
    )
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 1, 3, 4, 6, NAN, 50])
    assert ax.get_title("left") == "gradients at outputs"


def test_training_and_evaluation_have_a_line_each_of_one_color() -> None:
    kinds = ("train", "train", "eval", "train", "eval")
    values = [[1.0], [2.0], [5.0], [3.0], [6.0]]
    ax = plot_lines(history(values, kinds=kinds, others_before=np.array([0, 0, 2, 1, 3]), role="output"))

    training, evaluation = ax.lines
    assert training.get_xdata().tolist() == [0, 1, 3] and training.get_ydata().tolist() == [1, 2, 3]
    assert evaluation.get_xdata().tolist() == [2, 4] and evaluation.get_ydata().tolist() == [5, 6]
    assert (training.get_linestyle(), evaluation.get_linestyle()) == ("-", ":")
    assert training.get_color() == evaluation.get_color()
    assert ax.get_title("left") == "outputs (dotted: evaluation)"


def test_a_site_that_is_measured_every_tenth_step_has_a_whole_line() -> None:
    values = np.full((21, 2), 1.0)
    measured = np.ones((21, 2), bool)
    measured[:, 1] = np.arange(21) % 10 == 0
    ax = plot_lines(history(values.tolist(), measured=measured))
    assert ax.lines[1].get_xdata().tolist() == [0, 10, 20]


def test_values_that_are_nowhere_finite_still_give_a_picture() -> None:
    ax = plot_lines(history([[NAN], [NAN]]))
    assert ax.lines[1].get_xdata().tolist() == [0, 1]
    assert pixels(ax).std() > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], "linear"),
        ([1e-3, 1.0], "log"),
        ([0.0, 1e-3, 1.0], "symlog"),
        ([-1.0, 1e-6, 1.0], "linear"),
        ([-1.0, 0.1, -0.3, *[0.01] * 40, 1000.0], "symlog"),
        ([0.0, 0.0], "linear"),
        ([NAN, np.inf], "linear"),
        ([], "linear"),
    ],
)
def test_the_scale_is_one_of_powers_where_the_data_ask_for_it(values: list[float], expected: str) -> None:
    assert choose_scale(np.array(values)) == expected


def test_a_plot_can_be_drawn_on_axes_that_are_there_and_added_to() -> None:
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    assert plot_lines(history([[1.0], [2.0]]), ax) is ax
    ax.set_ylabel("mine")
    plot_lines(history([[1000.0], [1.0]]), ax)
    assert len(ax.lines) == 2
    assert (ax.get_ylabel(), ax.get_yscale()) == ("mine", "linear")


# Heat maps.


def test_a_heat_map_has_a_row_a_site_the_first_layer_on_top() -> None:
    ax = plot_heatmap(history([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]))

    [mesh] = ax.collections
    np.testing.assert_array_equal(mesh.get_array(), [[1, 2, 3], [4, 5, 6]])
    assert [each.get_text() for each in ax.get_yticklabels()] == ["blocks.0", "blocks.1"]
    bottom, top = ax.get_ylim()
    assert bottom > top
    assert ax.get_legend() is None


def test_cells_without_finite_values_are_hatched_and_unmeasured_ones_are_grey() -> None:
    measured = np.array([[True, True], [True, False], [True, True]])
    ax = plot_heatmap(history([[1.0, 4.0], [NAN, NAN], [NAN, 6.0]], measured=measured))

    mesh, *hatched = ax.collections
    assert mesh.get_array().mask.tolist() == [[False, True, True], [False, True, False]]
    [piece] = hatched  # steps 1 and 2 of blocks.0 are one piece
    [path] = piece.get_paths()
    assert path.get_extents().bounds == (0.5, -0.5, 2.0, 1.0)
    assert piece.get_hatch() and piece.get_edgecolor()[0].tolist()[:3] == pytest.approx(
        [int(NONFINITE_COLOR[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    )
    assert [each.get_text() for each in ax.get_legend().get_texts()] == ["NaN or infinite", "not measured"]


def test_columns_are_as_wide_as_steps_are_apart_and_gaps_stay_gaps() -> None:
    for steps, edges, columns in (
        ([5], [4.5, 5.5], [0]),
        ([0, 1, 2], [-0.5, 0.5, 1.5, 2.5], [0, 1, 2]),
        ([0, 10, 20], [-5, 5, 15, 25], [0, 1, 2]),
        ([0, 1, 7], [-0.5, 0.5, 1.5, 6.5, 7.5], [0, 1, -1, 2]),
    ):
        found = cells_of(np.array(steps))
        assert (found[0].tolist(), found[1].tolist()) == (edges, columns)


def test_values_of_both_signs_have_two_colours_about_zero() -> None:
    [mesh] = plot_heatmap(history([[-1.0, 3.0]], stat="mean")).collections
    assert mesh.get_cmap().name == "PuOr"
    assert mesh.get_clim() == (-3.0, 3.0)


@pytest.mark.parametrize(
    "values", [[[NAN, NAN]], [[0.0, 0.0]], [[0.0, 1e-30]], [[1e300, 1e-300]], [[-1.0, -1.0]]]
)
def test_hard_values_give_pictures(values: list[list[float]]) -> None:
    for kind in ("lines", "heatmap"):
        assert pixels(draw(history(values), kind)).std() > 0


# Histograms.


def test_magnitudes_of_one_site_are_powers_of_two_over_steps() -> None:
    ax = plot_histogram(exponents([{0: 0.5, 1: 0.5}, {1: 1.0}]))

    mesh = ax.collections[0]
    shown = mesh.get_array().filled(0)
    assert shown[1:-1].tolist() == [[0.5, 0.0], [0.5, 1.0]]
    assert shown[[0, -1]].tolist() == [[0, 0], [0, 0]]  # an empty power at each end
    assert [each.get_text() for each in ax.get_yticklabels()] == [
        "$2^{-1}$",
        "$2^{0}$",
        "$2^{1}$",
        "$2^{2}$",
        "$2^{3}$",
    ]
    assert ax.get_title("left") == "outputs: fc"


def test_zeros_and_what_is_not_finite_have_strips_of_their_own() -> None:
    found = exponents([{0: 0.5}, {0: 0.5}], zero=np.array([0.25, 0.5]), nonfinite=np.array([0.25, 0.0]))
    ax = plot_histogram(found)

    shown = ax.collections[0].get_array().filled(0)
    assert shown[0].tolist() == [0.25, 0.5] and shown[-1].tolist() == [0.25, 0.0]
    labels = [each.get_text() for each in ax.get_yticklabels()]
    assert labels[-2:] == ["zero", "NaN, inf"]


def test_magnitudes_of_many_sites_have_a_row_a_site() -> None:
    ax = plot_histogram(exponents([{0: 1.0}, {3: 1.0}], sites=("a", "b"), steps=(7, 7)))
    assert [each.get_text() for each in ax.get_yticklabels()] == ["a", "b"]
    assert ax.collections[0].get_array().shape == (2, 6)
    assert ax.get_title("left") == "outputs, step 7"


def test_where_formats_end_is_marked_if_it_is_in_sight() -> None:
    ax = plot_histogram(exponents([{-20: 0.5, -1: 0.5}]))
    assert words(ax.texts) == ["smallest normal fp16", "smallest normal e4m3"]


def test_a_site_of_zeros_alone_and_one_without_numbers_give_pictures() -> None:
    assert pixels(plot_histogram(exponents([{}], zero=np.array([1.0])))).std() > 0
    assert pixels(plot_histogram(exponents([{}], zero=np.array([NAN]), nonfinite=np.array([NAN])))).std() > 0


# States of optimizers.


def optimizer_run() -> TypedRecording:
    """A weight of two elements and a bias of one, each with a counter and a moment, in one step."""
    build = RecordingBuilder()
    fc = build.module("fc", "Linear", parent=build.module("", "Net"))
    build.step(0, 0, 100)
    for parameter, moment in (("weight", [1.0, 2.0]), ("bias", [3.0])):
        for state, numbers in (("step", [1.0]), ("exp_avg", moment)):
            build.value(build.site(fc, "optimizer_state", f"{parameter}.{state}"), numbers, phase="optimizer")
    return build.data()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, ["fc.weight.exp_avg", "fc.bias.exp_avg"]),
        ({"slot": "weight.step"}, ["fc.weight.step"]),
        ({"path": "fc.*.step"}, ["fc.weight.step", "fc.bias.step"]),
        ({"path": "fc.bias"}, ["fc.bias.step", "fc.bias.exp_avg"]),
    ],
)
def test_counters_are_left_out_of_a_heat_map_of_states_that_has_others(
    how: dict[str, Any], expected: list[str]
) -> None:
    recording = Recording(optimizer_run())
    ax = recording.plot(role="optimizer_state", kind="heatmap", stat="max", **how)
    assert words(ax.get_yticklabels()) == expected


def test_counters_have_lines_and_histories() -> None:
    recording = Recording(optimizer_run())
    assert len(recording.plot(role="optimizer_state", stat="max").lines) == 4
    assert len(recording.history(role="optimizer_state", stat="max").sites) == 4


# The whole way.


def test_a_recording_draws_and_writes_its_plots(tmp_path: Path) -> None:
    recording = Recording(typed_run(histogram=[0] * 127 + [2] + [0] * 128, zero_count=0))
    for kind, path in (("lines", "blocks.*"), ("heatmap", "blocks.*"), ("histogram", "blocks.1")):
        ax = recording.plot(path, stat="max", kind=kind)
        assert ax.has_data()
        for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
            file = tmp_path / f"{kind}{suffix}"
            recording.write_plot(file, path, stat="max", kind=kind)
            assert file.read_bytes().startswith(start)
    assert recording.plot("blocks.*", kind="histogram", step=1).get_title("left") == "outputs, step 1"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"kind": "bars"}, "kind='bars': give one of lines, heatmap, histogram"),
        (
            {"kind": "lines", "step": 3},
            "step=3 is for kind='histogram'. Give steps= (--steps) to choose the steps of lines.",
        ),
        ({"to": "plot.gif"}, "plot.gif: a plot's name ends in .png, .svg, .pdf"),
        ({"to": "plot"}, "plot: a plot's name ends in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_said(how: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        Recording(typed_run()).write_plot(how.pop("to", "plot.png"), **how)
    assert str(raised.value) == text


def test_a_file_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ModtraceError, match=r"cannot be written: "):
        write_axes(plot_lines(history([[1.0]])), tmp_path / "none" / "plot.png")


def test_matplotlibs_settings_and_backend_stay_as_they_were(tmp_path: Path) -> None:
    script = """
import json, sys, matplotlib
before = dict(matplotlib.rcParams.copy())
from modtrace.api.recording import open_recording
recording = open_recording(sys.argv[1])
for kind in ("lines", "heatmap"):
    recording.write_plot(sys.argv[1] + ".svg", kind=kind)
after = dict(matplotlib.rcParams.copy())
print(json.dumps([before == after, "matplotlib.pyplot" in sys.modules]))
"""
    Recording(typed_run()).write(tmp_path / "run.modtrace")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run.modtrace")], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [True, False]
