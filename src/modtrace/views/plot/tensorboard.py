"""Writes values over steps as a file of events for TensorBoard: few curves, a heat map of all, and histograms.

What is written is what a person looks at there: of each role the curves that move most, since a thousand are seen by
nobody and make TensorBoard slow; all of them are in the heat map, one picture a role.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...analysis.tables.columns import column_of
from ...analysis.values.exponents import LOWEST, build_exponents
from ...analysis.values.history import History, build_history
from ...analysis.values.selection import Selection, select_values
from ...optional import require
from ...recording.protocols import RecordingData
from ...recording.role import BY_NAME, LOSS, ROLES
from ...recording.statistics.moments import Numbers
from ..common.whole_file import errors_told, write_content
from .draw import draw, picture_of

#: The largest number of curves and histograms of a role, and of steps of a histogram.
_CURVES, _HISTOGRAM_STEPS = 12, 50


def write_tensorboard(data: RecordingData, folder: Path) -> Path:
    """Writes `folder/events.out.tfevents.<seconds>.modtrace`, which replaces that of an earlier export of the run.

    The numbers that the program logged keep their names; `modtrace/step_ms` is how long steps took without measuring.

    Raises:
        MissingLibraryError: tensorboard or matplotlib is not installed.
        ModtraceError: the file cannot be written.
    """
    protocol = require("tensorboard.compat.proto.event_pb2", "export to TensorBoard")
    records = require("tensorboard.summary.writer.record_writer", "export to TensorBoard")
    events, clock = io.BytesIO(), _Clock(data)
    writer = records.RecordWriter(events)
    head = protocol.Event(wall_time=clock.began, file_version="brain.Event:2")
    writer.write(head.SerializeToString())
    for step, tag, value in _list_values(data):
        event = protocol.Event(wall_time=clock.time_of(step), step=step)
        entry = event.summary.value.add(tag=tag)
        if isinstance(value, float):
            entry.simple_value = value
        elif isinstance(value, bytes):
            entry.image.encoded_image_string = value
            entry.image.width, entry.image.height = _size_of(value)
            entry.image.colorspace = 4  # RGBA
        else:
            _fill(entry.histo, value)
        writer.write(event.SerializeToString())
    path = folder / f"events.out.tfevents.{int(clock.began)}.modtrace"
    with errors_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_content(events.getvalue(), path)
    return path


class _Clock:
    """When steps ended, in seconds since 1970; a step of which that is not known has the time of the one before."""

    def __init__(self, data: RecordingData) -> None:
        steps, meta = data.table("steps"), data.meta
        since = meta.clock_time_ns - meta.clock_perf_counter_ns
        order = np.argsort(column_of(steps, "step"), kind="stable")
        self._steps = column_of(steps, "step")[order]
        ended = np.maximum.accumulate(column_of(steps, "end_ns")[order])
        self._times = (np.maximum(ended, 0) + since) / 1e9
        self.began = meta.clock_time_ns / 1e9

    def time_of(self, step: int) -> float:
        at = int(np.searchsorted(self._steps, step, side="right")) - 1
        return float(self._times[at]) if at >= 0 else self.began


def _list_values(data: RecordingData) -> Iterator[tuple[int, str, float | bytes | Numbers]]:
    """Yields steps, tags, and numbers, pictures as PNG, or the percentage of numbers by power of two."""
    scalars, steps = data.table("scalars"), data.table("steps")
    names = (scalars[name].to_pylist() for name in ("step", "name", "value"))
    for step, name, value in zip(*names, strict=True):
        yield step, name, math.nan if value is None else value
    took = (
        column_of(steps, "end_ns")
        - column_of(steps, "start_ns")
        - np.maximum(column_of(steps, "overhead_ns"), 0)
    )
    for step, ns in zip(column_of(steps, "step").tolist(), took.tolist(), strict=True):
        yield step, "modtrace/step_ms", ns / 1e6
    for role in ROLES:
        if not BY_NAME[role].of_ops:
            yield from _list_of_role(data, Selection(role=role, counters=False))


def _list_of_role(
    data: RecordingData, selection: Selection
) -> Iterator[tuple[int, str, float | bytes | Numbers]]:
    stat = "mean" if selection.role == LOSS else "rms"  # a loss is one number, with a sign
    try:
        found = build_history(data, stat, selection)
    except ValueError:  # nothing of the role was measured
        return
    if not len(found.steps):
        return
    title = BY_NAME[selection.role].of_many
    shown = _choose_sites(found, _find_bad_sites(data, selection) if found.nonfinite.any() else [])
    for column in shown:
        for row in np.flatnonzero(found.measured[:, column]).tolist():
            yield (
                int(found.steps[row]),
                f"{title}, {stat}/{found.sites[column]}",
                float(found.values[row, column]),
            )
    for row, count in enumerate(found.nonfinite.sum(axis=1).tolist()):
        if count or found.nonfinite.any():
            yield int(found.steps[row]), f"modtrace/{title} that are not finite", float(count)
    if selection.role == LOSS:
        return
    yield int(found.steps[-1]), f"{title}/{stat} of all", picture_of(draw(found, "heatmap"), ".png")
    if data.table("values")["histogram"].null_count == data.table("values").num_rows:
        return
    wanted = {found.sites[column] for column in shown}
    for step in _choose_steps(found.steps.tolist()):
        try:
            exponents = build_exponents(data, replace(selection, steps=None), step)
        except ValueError:  # it has no histograms
            continue
        for site, shares in zip(exponents.sites, exponents.shares, strict=True):
            if site in wanted:
                yield step, f"{title}, log2 of magnitudes, %/{site}", 100 * shares


def _find_bad_sites(data: RecordingData, selection: Selection) -> list[int]:
    """Returns the sites that are not finite at some time, the first to be so first."""
    selected = select_values(data, selection)
    table = selected.select("step", "order", "nan_count", "inf_count")
    step, order, nan, inf = (column_of(table, name) for name in table.column_names)
    bad = np.flatnonzero((nan > 0) | (inf > 0))
    in_time = bad[np.lexsort((order[bad], step[bad]))]
    return list(dict.fromkeys(selected.site[in_time].tolist()))


def _choose_sites(found: History, bad: Sequence[int]) -> list[int]:
    """Returns the first sites that are not finite, and else those whose statistic moves most, as a factor."""
    with np.errstate(all="ignore"):
        logs = np.log(np.where(found.measured & (found.values > 0), found.values, np.nan))
        moved = np.array([_reach(column) for column in logs.T])
    ranked = dict.fromkeys([*bad, *np.argsort(-moved, kind="stable").tolist()])
    return sorted([*ranked][:_CURVES])


def _reach(column: Numbers) -> float:
    known = column[np.isfinite(column)]
    return float(known.max() - known.min()) if len(known) else 0.0


def _choose_steps(steps: list[int]) -> list[int]:
    """Returns at most so many steps as histograms have, among them the first and the last."""
    if len(steps) <= _HISTOGRAM_STEPS:
        return steps
    return [steps[at] for at in np.linspace(0, len(steps) - 1, _HISTOGRAM_STEPS).round().astype(int).tolist()]


def _fill(histogram: Any, percent: Numbers) -> None:
    """Fills a histogram over the exponents of two: bin k reaches to `LOWEST + k`."""
    bins = np.flatnonzero(percent > 0)
    first, last = (int(bins[0]), int(bins[-1])) if len(bins) else (0, 0)
    limits = LOWEST + np.arange(first - 1, last + 1)
    histogram.min, histogram.max = float(limits[0]), float(limits[-1])
    histogram.num = float(percent.sum())
    histogram.sum = float((percent * (LOWEST + np.arange(len(percent)) - 0.5)).sum())
    histogram.sum_squares = float((percent * (LOWEST + np.arange(len(percent)) - 0.5) ** 2).sum())
    histogram.bucket_limit.extend(limits.tolist())
    histogram.bucket.extend([0.0, *percent[first : last + 1].tolist()])


def _size_of(png: bytes) -> tuple[int, int]:
    """Returns the width and height of a picture, which PNG has at bytes 16 to 24."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
