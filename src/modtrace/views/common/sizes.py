"""How bytes and floating point operations are written."""

from .numbers import format_number

_PREFIXES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def format_bytes(size_bytes: int) -> str:
    """A size with three digits, in powers of 1000: `1.23MB`, `45.6kB`, `789B`."""
    return f"{_with_prefix(size_bytes)}B"


def format_flops(flops: int) -> str:
    """A number of floating point operations with three digits: `1.23G`, `45.6M`, `789`."""
    return _with_prefix(flops)


def format_gflops_rate(flops: int, time_ns: int) -> str:
    """Billions of floating point operations per second, `12.3`; empty where there are none, or no time."""
    return format_number(flops / time_ns) if flops and time_ns else ""


def mark_unknown(text: str, unknown: int) -> str:
    """The text of a sum that leaves out `unknown` of its parts: `1.23G+`, or `?` where it would be empty."""
    return f"{text}+" if unknown and text else "?" if unknown else text


def _with_prefix(number: int) -> str:
    for size, prefix in _PREFIXES:
        if number >= 0.9995 * size:
            return format_number(number / size) + prefix
    return str(number)
