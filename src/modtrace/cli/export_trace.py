"""Exports the timeline for `modtrace export`."""

from pathlib import Path

from ..analysis.timeline.timeline import build_timeline
from ..recording.options.step_range import ALL_STEPS, StepRange
from ..recording.protocols import RecordingData
from ..views.formats.perfetto import write_perfetto
from .export_formats import ExportOptions


def write_trace(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """Writes all steps, or the one that was requested."""
    step = options.step
    steps = ALL_STEPS if step is None else StepRange(step, step + 1)
    write_perfetto(build_timeline(data, steps=steps), path)
