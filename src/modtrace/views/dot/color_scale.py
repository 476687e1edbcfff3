"""Colours the nodes of a picture by a quantity, such as their time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...analysis.graph.columns import CALL
from ...analysis.graph_view.records import GraphView, ViewBox, ViewNode
from ..common.numbers import format_bytes, format_flops, format_number, format_time, sum_known
from .text import Html

Number = int | float
_Item = ViewNode | ViewBox

#: Nine colours from little to much, whose lightness (OKLCh) falls in equal steps from 0.975 to 0.32, so that
#: colour-blind readers and grey prints show their order.
_RAMP = (
    "#fdf8d6", "#fdd68e", "#fdae5b", "#f48647", "#e35e4c", "#c43f63", "#9d296c", "#711e6d", "#47175f",
)  # fmt: skip
_DARK, _LIGHT = "#000000", "#ffffff"  # on any background, one of the two has a contrast of at least 4.5

#: If the largest number is more than this many times the smallest, the scale is logarithmic.
_LARGE_RATIO = 50

_PLAIN = {"fillcolor": "#ffffff", "color": "#94a3b8", "fontcolor": "#475569"}


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A quantity of nodes and boxes: how it is computed and formatted. It is None where unknown."""

    name: str
    value: Callable[[_Item], Number | None]
    write: Callable[[Any], str]
    is_cost: bool = True  # whether it is a cost of what ran, which leaves do not have


def _field(name: str) -> Callable[[_Item], Number | None]:
    return lambda item: getattr(item, name, None)


_COLUMNS = (
    _Column(name="time", value=_field("duration_ns"), write=format_time),
    _Column(name="flops", value=_field("flops"), write=format_flops),
    _Column(
        name="bytes", value=lambda item: sum_known(item.bytes_read, item.bytes_written), write=format_bytes
    ),
    _Column(name="saved", value=_field("saved_bytes"), write=format_bytes),
    _Column(name="rms", value=_field("rms"), write=format_number, is_cost=False),
    _Column(name="nonfinite", value=_field("nonfinite"), write=str, is_cost=False),
    _Column(name="duration_ns", value=_field("duration_ns"), write=format_time),
    _Column(name="bytes_read", value=_field("bytes_read"), write=format_bytes),
    _Column(name="bytes_written", value=_field("bytes_written"), write=format_bytes),
    _Column(name="saved_bytes", value=_field("saved_bytes"), write=format_bytes),
    _Column(name="ops", value=_field("ops"), write=str),
    _Column(name="repeats", value=_field("repeats"), write=str),
    _Column(name="call", value=_field("call"), write=str),
    _Column(name="start_ns", value=_field("start_ns"), write=str),
)


class Overlay:
    """Shows one quantity of all nodes as colours, with a legend."""

    def __init__(self, column: _Column, view: GraphView) -> None:
        self._column = column
        known = [
            value for value in map(self._value, view.nodes) if value is not None and math.isfinite(value)
        ]
        self._scale = Scale.of(known)

    def node(self, node: ViewNode) -> dict[str, str]:
        """Returns the colours of a node, which is white if its number is not known."""
        value = self._value(node)
        if value is None:
            return _PLAIN
        fill = ramp_color(self._scale.position(value))
        return {"fillcolor": fill, "fontcolor": readable_on(fill)}

    def text(self, item: _Item) -> str:
        """Returns the formatted number of a node or box; "" if it is not known."""
        value = self._value(item)
        return "" if value is None else self._column.write(value)

    def legend(self) -> Html:
        """Returns the colour ramp between the smallest and the largest number."""
        scale, write = self._scale, self._column.write
        if scale.low is None or scale.high is None:
            return Html(f"{self._column.name}: not known of any node")
        cells = "".join(f'<td bgcolor="{color}" width="16" height="10"></td>' for color in _RAMP)
        kind = " (logarithmic)" if scale.is_log else ""
        low, high = write(scale.low), f"{write(scale.high)}{kind}"
        return Html(
            '<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr>'
            f'<td cellpadding="4"><b>{self._column.name}</b></td><td cellpadding="4" align="right">{low}</td>{cells}'
            f'<td cellpadding="4" align="left">{high}</td>'
            '</tr><tr><td height="6"></td></tr></table>'  # a gap above the picture
        )

    def _value(self, item: _Item) -> Number | None:
        if self._column.is_cost and not item.ops and item.kind != CALL:
            return None
        return self._column.value(item)


def choose_overlay(view: GraphView, name: str | None) -> Overlay | None:
    """Returns the overlay with this name; None for None.

    Raises:
        ValueError: there is no such number.
    """
    if name is None:
        return None
    columns = {column.name: column for column in _COLUMNS}
    if name not in columns:
        raise ValueError(f"color={name!r}: nodes have no such number; there are: {', '.join(columns)}")
    return Overlay(columns[name], view)


@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions between the smallest and the largest, logarithmically if their ratio is large."""

    low: Number | None  # None if there are no numbers
    high: Number | None
    is_log: bool
    least: float  # the smallest number above 0, for a logarithmic scale

    @classmethod
    def of(cls, values: Sequence[Number]) -> "Scale":
        """Returns the scale for these values."""
        if not values:
            return cls(None, None, False, 1.0)
        low, high = min(values), max(values)
        least = min((value for value in values if value > 0), default=1)
        return cls(low, high, low >= 0 and high > _LARGE_RATIO * least, float(least))

    def position(self, value: Number) -> float:
        """Returns a position from 0 to 1; NaN and infinity are at 1."""
        if self.low is None or self.high is None or self.low == self.high:
            return 0.0
        if not math.isfinite(value):
            return 1.0
        if not self.is_log:
            return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        if value <= self.least:
            return 0.0
        return min(math.log(value / self.least) / math.log(self.high / self.least), 1.0)


def ramp_color(position: float) -> str:
    """Returns the colour at a position from 0 to 1."""
    at = position * (len(_RAMP) - 1)
    first = min(int(at), len(_RAMP) - 2)
    mixed = [
        round(low + (high - low) * (at - first))
        for low, high in zip(_channels(_RAMP[first]), _channels(_RAMP[first + 1]), strict=True)
    ]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def readable_on(fill: str) -> str:
    """Returns the text colour, black or white, that has more contrast with a background."""
    ground = luminance(fill)
    return _DARK if contrast(luminance(_DARK), ground) >= contrast(1.0, ground) else _LIGHT


def luminance(color: str) -> float:
    """Returns the relative luminance as WCAG 2 defines it: 0 for black, 1 for white."""
    shares = (channel / 255 for channel in _channels(color))
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    """Returns the contrast of two luminances as WCAG 2 defines it: from 1 to 21."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def _channels(color: str) -> list[int]:
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]
