"""Texts of plots: with long names and large steps, none leaves the picture or runs into another."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from helpers.plotted import NAN, exponents, history

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from modtrace.views.plot.draw import draw

LONGER = "model.decoder.layers.{}.self_attention.query_key_value_projection.lora_adapters.default.original.exp_avg_sq"
SHORT = "blocks.{}.mlp"


def rising(count: int, name: str, step: int) -> Any:
    values = [[10.0 ** (each % 5) * (1 + at) for at in range(count)] for each in range(40)]
    values[20][0] = NAN
    measured = np.ones((40, count), bool)
    measured[5, -1] = False
    sites = tuple(name.format(at) for at in range(count))
    return history(values, steps=list(range(step, step + 40)), sites=sites, measured=measured)


def magnitudes(sites: tuple[str, ...], step: int) -> Any:
    rows = [dict.fromkeys(range(-30, 5), 0.02) for _ in sites]
    some = np.full(len(sites), 0.1)
    steps = tuple(range(step, step + len(sites)))
    return exponents(rows, steps=steps, sites=sites, zero=some, nonfinite=some, role="optimizer_state")


@pytest.mark.parametrize(
    ("kind", "name", "step"),
    [
        *(
            (kind, LONGER, 123_000)
            for kind in ("few lines", "lines", "heatmap", "one histogram", "histograms")
        ),
        *((kind, SHORT, 2_000_000_000) for kind in ("few lines", "heatmap", "one histogram")),
    ],
)
def test_no_text_of_a_plot_leaves_it_or_runs_into_another(kind: str, name: str, step: int) -> None:
    if "histogram" in kind:
        names = [name.format(at if kind == "histograms" else 0) for at in range(12)]
        ax = draw(magnitudes(tuple(names), step), "histogram")
    else:
        count = 6 if kind == "few lines" else 60
        ax = draw(rising(count, name, step), "heatmap" if kind == "heatmap" else "lines")
    places = places_of_texts(ax)
    whole = ax.figure.bbox.padded(1)
    outside = [text for text, place in places if not (whole.x0 <= place.x0 and place.x1 <= whole.x1)]
    apart = [
        (one[0], other[0]) for one, other in combinations(places, 2) if one[1].padded(-1).overlaps(other[1])
    ]
    assert (outside, apart) == ([], [])
    assert ax.get_window_extent().width / ax.figure.dpi > 4


@pytest.mark.parametrize("kind", ["lines", "heatmap", "histogram"])
def test_odd_names_neither_reorder_nor_widen_a_picture(kind: Any) -> None:
    sites = ("a\u202eb", "b" * 5000)
    found = magnitudes(sites, 0) if kind == "histogram" else history([[1.0, 2.0]], sites=sites)
    ax = draw(found, kind)
    svg = vars(ax)["_repr_svg_"]()
    assert "\u202e" not in svg and "a\\u202eb" in svg
    assert ax.figure.get_size_inches()[0] < 15


def places_of_texts(ax: Any) -> list[tuple[str, Any]]:
    """The texts that are seen, and where they stand; names of marks beyond the ends of an axis are not seen."""
    ax.figure.draw_without_rendering()
    beyond = {
        id(label) for one in ax.figure.axes for axis in (one.xaxis, one.yaxis) for label in hidden(axis)
    }
    return [
        (each.get_text(), Text.get_window_extent(each))
        for each in ax.figure.findobj(Text)
        if each.get_visible() and each.get_text().strip() and id(each) not in beyond
    ]


def hidden(axis: Any) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [
        label for tick in ticks for label in (tick.label1, tick.label2) if not low <= tick.get_loc() <= high
    ]
