"""Makes the page that a browser shows of a recording, within a size."""

from ..analysis.divergence.answer import Comparison
from ..analysis.report.limits import Limits
from ..analysis.report.report import build_report
from ..recording.protocols import RecordingData
from ..views.html.page import render_report, size_without_data

#: The default limit of a report's file, in MB.
MAX_MB = 20.0

#: A size beyond what any browser opens, to which `inf` is reduced.
_ALL_MB = 1e6

#: A report that is too large is made again with limits reduced by this additional factor, at most this many times.
_SPARE = 0.9
_TRIES = 6


def make_report(
    data: RecordingData,
    *,
    step: int | None = None,
    max_mb: float = MAX_MB,
    comparison: Comparison | None = None,
    names: tuple[str, str] = ("first run", "second run"),
) -> str:
    """Returns the page of a recording.

    Args:
        data: the recording.
        step: the number of the step whose calls and ops are shown; None chooses one.
        max_mb: the size that the file may have at most, in MB. What there is no room for is left out, evenly, and the
            page says so.
        comparison: that of the recording with another one, whose difference the page then shows.
        names: the names of the two recordings.

    Raises:
        ValueError: there is no such step, or `max_mb` is too small.
    """
    allowed = min(max_mb, _ALL_MB) * 1e6
    of_page = size_without_data()
    room = allowed_data = max(allowed - of_page, 1.0)
    size = 0
    for _ in range(_TRIES if max_mb > 0 else 0):
        report = build_report(data, Limits.of(room), step=step, comparison=comparison, names=names)
        page = render_report(report)
        size = len(page.encode("utf-8"))
        if size <= allowed:
            return page
        room *= _SPARE * min(allowed_data / max(size - of_page, 1), 1)
    least = f" The smallest report of this recording has {size / 1e6:.1f}." if size else ""
    raise ValueError(f"max_mb={max_mb!r}: give more megabytes.{least}")
