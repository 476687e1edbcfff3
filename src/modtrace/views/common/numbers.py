"""Formats numbers for all views."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

_Units = Sequence[tuple[int, str]]

_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
_COUNT_UNITS = ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))


def format_time(time_ns: int) -> str:
    """Returns a duration with three digits: `1.23ms`, `45.6us`, `789ns`."""
    return _in_unit(time_ns, _TIME_UNITS, _three_digits) or (f"{time_ns}ns" if time_ns else "0us")


def format_count(count: int) -> str:
    """Returns a count with three digits: `1.23M`, `45.6K`, `789`."""
    return _in_unit(count, _COUNT_UNITS, _three_digits) or str(count)


def format_share(share: float) -> str:
    """Returns a fraction as a percentage: `12.3%`."""
    return f"{100 * share:.1f}%"


def format_quartile_range(part: float | None) -> str:
    """Returns the interquartile range, as a part of the median, in whole percent: `12%`; "" for None."""
    return "" if part is None else f"{part:.0%}"


def format_number(value: float) -> str:
    """Returns a number with three digits, or two and an exponent: `0.0123`, `1.20`, `3.4e-07`, `NaN`."""
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
    """Returns a number in a form that JSON allows; "NaN", "Infinity" or "-Infinity" if it is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Any) -> Any:
    """Returns a value with all numbers inside it in a form that JSON allows."""
    if isinstance(value, dict):
        return {name: to_json(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(part) for part in value]
    return to_json_number(value)


def render_compact(value: Any) -> str:
    """Returns a value as JSON without blanks.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


_PREFIXES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def format_bytes(size_bytes: int) -> str:
    """Returns a size with three digits, in powers of 1000: `1.23MB`, `45.6kB`, `789B`."""
    return f"{_with_prefix(size_bytes)}B"


def format_flops(flops: int) -> str:
    """Returns a number of floating-point operations with three digits: `1.23G`, `45.6M`, `789`."""
    return _with_prefix(flops)


def format_gflops_rate(flops: int, time_ns: int) -> str:
    """Returns billions of floating-point operations per second, `12.3`; "" if there are none, or no time."""
    return format_number(flops / time_ns) if flops and time_ns else ""


def sum_known(*numbers: int | None) -> int | None:
    """Returns the sum of the numbers; None if one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def mark_unknown(text: str, unknown: int) -> str:
    """Returns the text of a sum that lacks `unknown` parts: `1.23G+`, or `?` if nothing is known."""
    return f"{text}+" if unknown and text else "?" if unknown else text


def _with_prefix(number: int) -> str:
    return _in_unit(number, _PREFIXES, format_number) or str(number)


def _in_unit(number: int, units: _Units, form: Callable[[float], str]) -> str:
    """Returns the number in the largest unit that it reaches; "" if it reaches none."""
    return next((form(number / size) + unit for size, unit in units if number >= 0.9995 * size), "")
