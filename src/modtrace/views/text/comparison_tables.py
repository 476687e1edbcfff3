"""Renders how the difference of two recordings grows, as a chart, and the places that made one, as tables."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial

from ...analysis.divergence.answer import (
    AMPLIFIED,
    GROWN,
    INHERITED,
    MADE,
    SEEN,
    SOURCE,
    Comparison,
    Divergence,
    GrowthPoint,
)
from ...analysis.divergence.errors import NONFINITE
from ...recording.suggestions import count_of
from ..common.columns import (
    Color,
    Column,
    Text,
    explain_columns,
    fit_columns,
    render_columns,
    render_fitted,
    render_lines,
)

#: The default number of rows shown of the chart.
_CHARTED = 12

#: The length of the longest bar of the chart.
_BAR = 24

_DISPENSABLE = ("noise", "inputs")

_LEGEND = [
    [
        ({"error"}, "error: relative, of the L2 norm"),
        ({"inputs"}, "inputs: the largest of what it was computed from"),
        ({"noise"}, "noise: up to which it is rounding"),
    ]
]
_KINDS = {
    SOURCE: "nothing was computed",
    MADE: "its inputs are equal or apart by noise",
    SEEN: "its inputs were not compared",
    AMPLIFIED: "much farther apart than its inputs",
    GROWN: "small differences have added up",
    INHERITED: "about as far apart as its inputs",
}


def format_error(value: float, unknown: str = "unequal") -> str:
    """Returns a relative error with two digits; `unknown` if two tensors differ by an unknown amount."""
    return unknown if not math.isfinite(value) else "0" if not value else f"{value:.1e}"


def _name_unknown(found: Comparison) -> str:
    return "NaN/inf" if NONFINITE in dict(found.metrics) else "unequal"


def render_growth_and_places(
    found: Comparison,
    name: Callable[[Divergence], str],
    *,
    top: int,
    width: int | None = None,
    color: Color = False,
) -> Iterator[str]:
    """Yields the chart, and the tables of places that made a difference.

    Args:
        found: the answer.
        name: returns the op or tensor of a difference, with its module.
        top: rows of each table to show.
        width: the width of the terminal, in characters. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    if any(growth.error for growth in found.growth):
        yield _render_growth(found, max(top, _CHARTED), width=width, color=color)
    tables = {
        "places that made a difference": found.divergences,
        "first difference of each step and phase": found.firsts,
    }
    titled = {title: places for title, places in tables.items() if len(places) > 1}
    number = partial(format_error, unknown=_name_unknown(found))
    shown: set[str] = set()
    for title, places in titled.items():
        text, titles = _render_places(title, places, name, number, top=top, width=width, color=color)
        shown |= titles | {place.kind for place in places[:top]}
        yield text
    if titled:
        yield render_lines(_explain(shown), color=color, width=width)


# The growth chart.


def _render_growth(found: Comparison, most: int, *, width: int | None, color: Color) -> str:
    shown, unknown = _choose_points(found.growth, most), _name_unknown(found)
    finite = [growth.error for growth in found.growth if 0 < growth.error < math.inf]
    low = math.floor(
        math.log10(min([*finite, *(point.noise for point in shown if point.noise)], default=1e-7))
    )
    high = max(math.ceil(math.log10(max(finite, default=1.0))), low + 1)
    columns = [
        Column("error", [Text(format_error(point.error, unknown)) for point in shown]),
        Column(f"1e{low:+03d} .. 1e{high:+03d}", [_bar(point, low, high) for point in shown], right=False),
    ]
    places = Column("growth", [Text(point.name) for point in shown], right=False)
    chart = render_columns(fit_columns([places, *columns], width, ()).shown, color=color)
    every = len(found.growth)
    rest = f"{every - len(shown):,} of {every:,} are left out: --top {every} shows all, as does .growth"
    return chart + render_lines([Text(rest, "dim")] if every > len(shown) else [], color=color, width=width)


def _choose_points(growth: Sequence[GrowthPoint], most: int) -> list[GrowthPoint]:
    """Returns at most `most` points: both ends, the first beyond noise, the one before, blocks, then others."""
    if len(growth) <= most:
        return list(growth)
    beyond = next((at for at, point in enumerate(growth) if point.error > point.noise), 0)
    chosen = {0, max(beyond - 1, 0), beyond, len(growth) - 1}
    blocks = [at for at, point in enumerate(growth) if point.name.rpartition(".")[2].isdigit()]
    for points in (blocks, range(len(growth))):
        left = [at for at in points if at not in chosen]
        room = min(most - len(chosen), len(left))
        chosen |= {left[round(at * (len(left) - 1) / max(room - 1, 1))] for at in range(room)}
    return [growth[at] for at in sorted(chosen)]


def _bar(point: GrowthPoint, low: int, high: int) -> Text:
    if not point.error:
        return Text()
    share = 1.0 if math.isinf(point.error) else (math.log10(point.error) - low) / (high - low)
    return Text(
        "#" * max(1, round(_BAR * min(max(share, 0.0), 1.0))), "red" if point.error > point.noise else "dim"
    )


# The tables of places.


def _render_places(
    title: str,
    places: Sequence[Divergence],
    name: Callable[[Divergence], str],
    number: Callable[[float], str],
    *,
    top: int,
    width: int | None,
    color: Color,
) -> tuple[str, Set[str]]:
    """Returns a table, and the titles of its columns."""
    shown = places[:top]
    columns = [
        Column("step", [Text(str(diff.step)) for diff in shown]),
        Column("phase", [Text(diff.phase or "") for diff in shown], right=False),
        Column("error", [Text(number(diff.error), "red") for diff in shown]),
        Column("inputs", [Text("?" if diff.kind == SEEN else number(diff.input_error)) for diff in shown]),
        Column("noise", [Text(number(diff.noise), "dim") for diff in shown]),
        Column("", [Text(diff.kind) for diff in shown], right=False),
    ]
    place = Column("place", [Text(name(diff)) for diff in shown], right=False)
    fitted = fit_columns([place, *columns], width, _DISPENSABLE)
    table = render_fitted(fitted, width=width, color=color)
    head = render_lines([Text(title, "bold")], color=color, width=width)
    rest = [Text(count_of(len(places) - top, "more place"), "dim")] if len(places) > top else []
    return head + table + render_lines(rest, color=color), fitted.titles


def _explain(shown: Set[str]) -> list[Text]:
    """Returns explanations of the visible columns and kinds."""
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in _KINDS.items() if kind in shown)
    return [*explain_columns(_LEGEND, shown), Text(kinds, "dim")]
