"""What plots mark: gaps, what is not finite, ends of axes; and the scales and colours that they choose."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.plotted import NAN, exponents, history, words
from modtrace.analysis.values.exponents import LOWEST
from modtrace.errors import MissingLibraryError
from modtrace.views.plot.draw import check_picture_name, write_axes
from modtrace.views.plot.heatmap import plot_heatmap
from modtrace.views.plot.histogram import plot_histogram
from modtrace.views.plot.lines import plot_lines
from modtrace.views.plot.numbers_json import render_plotted_json
from modtrace.views.plot.style import NONFINITE_COLOR, UNMEASURED_COLOR, color_scale, drawable, linear_part

pytest.importorskip("matplotlib")


# Lines.


def test_a_line_goes_on_where_steps_are_usually_far_apart() -> None:
    ax = plot_lines(history([[1.0]] * 5, steps=[0, 1, 10, 20, 30]))
    assert ax.lines[0].get_xdata().tolist() == [0, 1, 10, 20, 30]


def test_a_value_that_no_line_leads_to_is_a_dot_among_many() -> None:
    values = [[1.0]] * 50
    assert plot_lines(history(values)).lines[0].get_marker() == ""
    values[20] = values[22] = [NAN]
    assert plot_lines(history(values)).lines[0].get_marker() == "o"


def test_a_statistic_that_is_infinite_is_crossed_although_its_tensor_is_finite() -> None:
    ax = plot_lines(history([[1.0], [np.inf]], stat="sum4", nonfinite=np.zeros((2, 1), bool)))
    assert ax.lines[1].get_xdata().tolist() == [1]


def test_crosses_of_few_sites_have_a_row_each_and_those_of_many_share_one() -> None:
    few = plot_lines(history([[NAN, 1.0, NAN]]))
    assert [line.get_ydata()[0] for line in few.lines[3:]] == pytest.approx([0.985, 0.955])
    many = plot_lines(history([[NAN] * 12]))
    assert [line.get_ydata()[0] for line in many.lines[12:]] == [0.985] * 12


def test_axes_have_whole_steps_and_two_edges() -> None:
    ax = plot_lines(history([[1.0], [2.0]]))
    assert [tick for tick in ax.get_xticks().tolist() if tick % 1] == []
    assert [name for name, edge in ax.spines.items() if edge.get_visible()] == ["left", "bottom"]


def test_a_scale_of_powers_is_linear_below_the_smallest_value() -> None:
    ax = plot_lines(history([[0.0], [1e-3], [1.0]]))
    assert (ax.get_yscale(), ax.yaxis.get_transform().linthresh) == ("symlog", 1e-3)


@pytest.mark.parametrize(("values", "expected"), [([0.0, 1e-3, 1.0, NAN], 1e-3), ([-1.0, 0.1, 1000.0], 1.0)])
def test_a_scale_with_both_signs_is_linear_up_to_the_usual_magnitude(
    values: list[float], expected: float
) -> None:
    assert linear_part(np.array(values)) == expected


def test_what_matplotlib_cannot_draw_is_infinite_or_zero() -> None:
    drawn = drawable(np.array([1e300, 1e-300, -1e-300, -2.0, 0.0, NAN]))
    np.testing.assert_array_equal(drawn, [np.inf, 0.0, 0.0, -2.0, 0.0, NAN])


# Heat maps.


def test_a_cell_of_a_tensor_with_nan_is_hatched_and_has_no_part_in_the_colours() -> None:
    ax = plot_heatmap(history([[1.0, 2.0, 1000.0]], nonfinite=np.array([[False, False, True]])))

    mesh, hatched = ax.collections
    assert mesh.get_array().mask.tolist() == [[False], [False], [True]]
    assert hatched.get_paths()[0].get_extents().bounds == (-0.5, 1.5, 1.0, 1.0)
    assert mesh.get_clim() == (1.0, 2.0)
    assert words(ax.get_legend().get_texts()) == ["NaN or infinite"]


def test_steps_that_were_left_out_are_grey_and_not_hatched() -> None:
    for last, is_hatched in ((3.0, False), (NAN, True)):
        ax = plot_heatmap(history([[1.0], [2.0], [last]], steps=[0, 1, 7]))
        mesh, *hatched = ax.collections
        assert mesh.get_array().mask.tolist() == [[False, False, True, is_hatched]]
        assert [each.get_paths()[0].get_extents().bounds for each in hatched] == [
            (6.5, -0.5, 1, 1)
        ] * is_hatched
        assert words(ax.get_legend().get_texts()) == ["NaN or infinite"] * is_hatched + ["not measured"]
        assert ax.get_facecolor()[:3] == rgb(UNMEASURED_COLOR)


def test_colours_of_a_heat_map_are_named_and_so_are_some_of_many_rows() -> None:
    ax = plot_heatmap(history([[1.0] * 100]))
    assert ax.figure.axes[1].get_ylabel() == "root mean square"
    assert words(ax.get_yticklabels()) == [f"blocks.{at}" for at in range(0, 100, 3)]


def test_states_of_optimizers_stand_state_by_state() -> None:
    sites = ("a.exp_avg", "a.exp_avg_sq", "b.exp_avg", "b.exp_avg_sq")
    measured = np.array([[True, True, True, False]])
    ax = plot_heatmap(history([[1.0, 2.0, NAN, NAN]], sites=sites, role="optimizer_state", measured=measured))

    mesh, hatched = ax.collections
    assert words(ax.get_yticklabels()) == ["a.exp_avg", "b.exp_avg", "a.exp_avg_sq", "b.exp_avg_sq"]
    assert mesh.get_array().filled(0).tolist() == [[1], [0], [2], [0]]
    assert hatched.get_paths()[0].get_extents().bounds == (-0.5, 0.5, 1.0, 1.0)  # b.exp_avg


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], ("viridis", "Normalize", 1.0, 2.0)),
        ([1e-3, 1.0], ("viridis", "LogNorm", 1e-3, 1.0)),
        ([0.0, 1e-3, 1.0], ("viridis", "SymLogNorm", 0.0, 1.0)),
        ([-1.0, *[0.01] * 40, 1000.0], ("PuOr", "SymLogNorm", -1000.0, 1000.0)),
        ([NAN], ("viridis", "Normalize", 0.0, 1.0)),
    ],
)
def test_colours_have_a_scale_of_powers_where_the_data_ask_for_it(
    values: list[float], expected: tuple[str, str, float, float]
) -> None:
    name, norm = color_scale(np.array(values))
    assert (name, type(norm).__name__, norm.vmin, norm.vmax) == expected


# Histograms.


def strips() -> dict[str, Any]:
    return {"zero": np.array([0.25, 0.25]), "nonfinite": np.array([0.25, 0.0])}


def test_strips_are_divided_from_the_powers_and_that_of_nan_is_red() -> None:
    """Powers from -1 to 2; a strip below and one above."""
    over_steps = plot_histogram(exponents([{0: 0.5}, {0: 0.75}], **strips()))
    over_sites = plot_histogram(exponents([{0: 0.5}, {0: 0.75}], sites=("a", "b"), **strips()))

    assert [(line.get_ydata()[0], line.get_color()) for line in over_steps.lines] == [
        (-1, "black"),
        (2, NONFINITE_COLOR),
    ]
    assert [(line.get_xdata()[0], line.get_color()) for line in over_sites.lines] == [
        (-1, "black"),
        (2, NONFINITE_COLOR),
    ]
    for labels in (over_steps.get_yticklabels(), over_sites.get_xticklabels()):
        assert [each.get_text() for each in labels if each.get_color() == NONFINITE_COLOR] == ["NaN, inf"]


def test_steps_of_a_histogram_that_were_left_out_are_grey() -> None:
    ax = plot_histogram(exponents([{0: 1.0}] * 3, steps=(0, 1, 7)))

    [gap] = ax.patches
    assert (gap.get_x(), gap.get_width(), gap.get_facecolor()[:3]) == (1.5, 5.0, rgb(UNMEASURED_COLOR))
    assert ax.collections[0].get_array().mask[1].tolist() == [False, False, True, False]


def test_the_first_and_the_last_power_are_shown() -> None:
    ax = plot_histogram(exponents([{LOWEST - 1: 0.5, 128: 0.5}]))
    shown = ax.collections[0].get_array().filled(0)
    assert (shown.shape, shown[0, 0], shown[-1, 0], ax.get_ylim()) == ((256, 1), 0.5, 0.5, (-127.0, 129.0))


def test_far_powers_have_a_mark_every_eighth() -> None:
    ax = plot_histogram(exponents([{-40: 0.5, 0: 0.5}]))
    assert words(ax.get_yticklabels()) == [f"$2^{{{power}}}$" for power in range(-40, 1, 8)]


def test_very_small_shares_have_the_palest_colour() -> None:
    [mesh, *_] = plot_histogram(exponents([{0: 1e-9, 1: 1.0}])).collections
    assert mesh.get_clim() == (1e-7, 1.0)


def dashed(ax: Any, axis: str) -> list[float]:
    """Where the black lines of formats' ends lie; the white ones are behind them."""
    return [getattr(line, f"get_{axis}data")()[0] for line in ax.lines if line.get_linestyle() == "--"]


def box_of(text: Any) -> Any:
    """Where a text lies, with its white ground, without the line that leads to it."""
    from matplotlib.text import Text

    ground = text.get_bbox_patch()
    return Text.get_window_extent(text) if ground is None else ground.get_window_extent()


def test_a_spread_below_fp16_reaches_the_line_where_its_normal_numbers_begin() -> None:
    """Powers from -40 to -30: one is free below, 16 are above, up to the first of fp16."""
    for sites in (("fc", "fc"), ("a", "b")):
        ax = plot_histogram(exponents([{-40: 0.5, -30: 0.5}] * 2, sites=sites, zero=np.array([0.25, 0.0])))
        (axis, ends) = ("y", ax.get_ylim()) if sites == ("fc", "fc") else ("x", ax.get_xlim())
        assert ends[1] == -13
        assert dashed(ax, axis) == [-14]
        assert words(ax.texts) == ["smallest normal fp16"]


def test_a_spread_above_fp16_reaches_the_line_where_its_normal_numbers_end() -> None:
    ax = plot_histogram(exponents([{30: 0.5, 40: 0.5}]))
    assert ax.get_ylim() == (15, 42)
    assert (dashed(ax, "y"), words(ax.texts)) == ([16], ["largest normal fp16"])


def test_a_spread_within_the_formats_has_no_lines() -> None:
    ax = plot_histogram(exponents([{-4: 0.5, 4: 0.5}]))
    assert (ax.get_ylim(), dashed(ax, "y"), words(ax.texts)) == ((-5, 6), [], [])


def test_lines_of_formats_stand_upright_among_sites_and_are_named_above_them() -> None:
    ax = plot_histogram(exponents([{-30: 0.5, 30: 0.5}] * 2, sites=("a", "b")))
    assert dashed(ax, "x") == [-14, 16, -6, 9]
    assert words(ax.texts) == [
        "smallest normal fp16",
        "largest normal fp16",
        "smallest normal e4m3",
        "largest normal e4m3",
    ]
    assert [(each.xy, each.get_ha()) for each in ax.texts] == [
        ((-14, 1), "right"),
        ((16, 1), "left"),
        ((-6, 1), "right"),
        ((9, 1), "left"),
    ]


@pytest.mark.parametrize("sites", [("fc", "fc"), ("a", "b")])
@pytest.mark.parametrize("most", [15, 20, 126])
def test_names_of_formats_lie_neither_on_each_other_nor_on_the_title(
    sites: tuple[str, str], most: int
) -> None:
    ax = plot_histogram(exponents([{-most: 0.5, most: 0.5}] * 2, sites=sites))
    ax.figure.canvas.draw()
    boxes = [box_of(each) for each in [*ax.texts, ax._left_title]]
    assert len(boxes) == 5
    assert [one for at, one in enumerate(boxes) for other in boxes[:at] if one.overlaps(other)] == []


# Numbers and files.


def test_numbers_of_a_picture_tell_what_was_not_measured_from_what_is_nan() -> None:
    found = history([[1.0, NAN], [NAN, 4.0]], measured=np.array([[True, False], [True, True]]))
    assert json.loads(render_plotted_json(found))["values"] == [[1.0, None], ["NaN", 4.0]]


def test_numbers_of_a_histogram_are_json_although_some_are_nan() -> None:
    text = render_plotted_json(exponents([{0: 1.0}], zero=np.array([NAN])))
    found = json.loads(text, parse_constant=lambda name: f"no JSON: {name}")
    assert (found["zero"], found["shares"][0][127], found["sites"]) == (["NaN"], 1.0, ["fc"])


def test_a_file_has_no_date_and_its_name_may_be_in_capitals(tmp_path: Path) -> None:
    ax = plot_lines(history([[1.0]]))
    for name, date in (("a.PNG", b"date"), ("a.SVG", b"dc:date"), ("a.PDF", b"CreationDate")):
        check_picture_name(name)
        write_axes(ax, tmp_path / name)
        assert date not in (tmp_path / name).read_bytes()


def test_a_file_has_the_resolution_that_is_asked_for(tmp_path: Path) -> None:
    write_axes(plot_lines(history([[1.0]])), tmp_path / "a.png", dpi=50)
    header = (tmp_path / "a.png").read_bytes()[16:24]
    assert (int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) == (370, 210)


def test_without_matplotlib_it_is_said_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingLibraryError, match=r"^drawing a plot needs matplotlib"):
        plot_lines(history([[1.0]]))


def rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
