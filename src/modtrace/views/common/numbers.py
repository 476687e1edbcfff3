"""How numbers are written in every view."""

import math
from typing import Any

_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
_COUNT_UNITS = ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))


def format_time(time_ns: int) -> str:
    """A duration with three digits: `1.23ms`, `45.6us`, `789ns`."""
    for size, unit in _TIME_UNITS:
        if time_ns >= 0.9995 * size:
            return _three_digits(time_ns / size) + unit
    return f"{time_ns}ns" if time_ns else "0us"


def format_count(count: int) -> str:
    """A count with three digits: `1.23M`, `45.6K`, `789`."""
    for size, unit in _COUNT_UNITS:
        if count >= 0.9995 * size:
            return _three_digits(count / size) + unit
    return str(count)


def format_share(share: float) -> str:
    """A part of a whole: `12.3%`."""
    return f"{100 * share:.1f}%"


def format_number(value: float) -> str:
    """Any number with three digits, or two and an exponent: `0.0123`, `1.20`, `3.4e-07`, `NaN`."""
    magnitude = abs(value)
    if math.isnan(value):
        return "NaN"
    if not magnitude or math.isinf(value):
        return f"{value:.0f}"
    if not 0.0009995 <= magnitude < 9999.5:
        return f"{value:.1e}"
    if magnitude >= 0.9995:
        return _three_digits(value)
    return f"{value:.{2 - math.floor(math.log10(magnitude * 1.0005))}f}"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def to_json_number(value: Any) -> Any:
    """A number as JSON can hold it: "NaN", "Infinity" or "-Infinity" for one that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
