"""Adds a page to the debug server of torch.distributed: what each rank runs now, also while its program hangs."""

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..api.live import LiveRecording
from ..collect.recorder.launch import find_launch
from ..collect.recorder.running import list_recordings
from ..collect.scopes import process
from ..collect.scopes.all_threads import RunningWork, list_running
from ..errors import ModtraceWarning
from ..recording.phase import BACKWARD
from ..recording.protocols import LAST
from ..store.collective_ring import read_ring
from ..store.layout import rank_folders, rank_of
from ..torch_internals.debug_server import (
    answer_requests,
    append_handler,
    fetch_from_ranks,
    find_missing_part,
    make_link,
    make_route,
)
from ..views.common.numbers import format_time

_NAME = "modtrace"
_TITLE = "Running modules (modtrace)"

_patches: ExitStack | None = None  # what `remove_handler` undoes; None if the page is not added
_answers = False  # whether this process answers requests, for as long as it lives


def add_handler() -> bool:
    """Adds a page with the modules that run on each rank to torch's debug server, which it does not start.

    Call it on every rank, before `torch.distributed.debug.start_debug_server()`. The page is there until
    `remove_handler()`. A second call changes nothing.

    Returns:
        True if the page is added. False, after a warning that says why, if torch or a library of it lacks a part.
    """
    global _patches, _answers
    missing = find_missing_part()
    if missing is not None:
        warnings.warn(
            f"torch's debug server gets no page of modtrace: {missing}. The run goes on without it.",
            ModtraceWarning,
            stacklevel=2,
        )
        return False
    if not _answers:
        answer_requests(_NAME, describe_running)
        _answers = True
    if _patches is None:
        _patches = ExitStack()
        append_handler(RunningModules(), _patches)
    return True


def remove_handler() -> None:
    """Leaves the page out of servers that are started from now on."""
    global _patches
    patches, _patches = _patches, None
    if patches is not None:
        patches.close()


class RunningModules:
    """The page, with the interface of `torch.distributed.debug._frontend.DebugHandler`."""

    fetch_timeout: float | None = None  # seconds, which the server sets

    def routes(self) -> list[Any]:
        """Returns the address of the page."""
        return [make_route(f"/{_NAME}", self._handle)]

    def nav_links(self) -> list[Any]:
        """Returns the link on all pages of the server."""
        return [make_link(f"/{_NAME}", _TITLE)]

    def templates(self) -> dict[str, str]:
        """Returns no templates: the page is one of torch's."""
        return {}

    def dump(self) -> str:
        """Returns the page as text, for the files that the server writes with `enabled_dumps={"modtrace"}`."""
        addresses, responses = fetch_from_ranks(_NAME, self.fetch_timeout)
        return "\n".join(
            f"=== Rank {rank}: {address} ===\n{response.text}"
            for rank, (address, response) in enumerate(zip(addresses, responses, strict=True))
        )

    def dump_filename(self) -> str:
        """Returns the beginning of the names of these files."""
        return _NAME

    def _handle(self, request: Any) -> bytes:
        addresses, responses = fetch_from_ranks(_NAME, self.fetch_timeout)
        page: bytes = request.frontend.render_template(
            "raw_resp.html", title=_TITLE, addrs=addresses, resps=responses
        )
        return page


def describe_running() -> str:
    """Returns what runs in this process now, as lines of text.

    It takes no lock, so that it answers on any thread whatever the others wait for.
    """
    tracker = process.current()
    if tracker is None:
        return "nothing is recorded in this process: modtrace.record(), or modtrace record, begins it\n"
    lines: list[str] = []
    now_ns = time.perf_counter_ns()
    for recording, steps in list_recordings():
        lines += _describe_recording(recording, steps, now_ns)
    running = list_running(tracker)
    for thread, found in groupby(running, attrgetter("thread")):
        lines += _describe_thread(thread, [*found], now_ns)
    if not running:
        lines.append("no module, backward or optimizer runs")
    return "\n".join([*lines, ""])


def _describe_recording(recording: object, steps: int, now_ns: int) -> Iterator[str]:
    path = recording.path if isinstance(recording, LiveRecording) else None
    yield f"{'recording in memory' if path is None else path}: step {steps}"
    if path is not None:
        yield from _describe_collective(path, now_ns)


def _describe_collective(path: Path, now_ns: int) -> Iterator[str]:
    """Yields a line on the newest collective of this rank, which a recording on disk has in a file of its own."""
    rank = find_launch().rank
    folders = [folder for folder in rank_folders(path) if rank_of(folder) == rank]
    rows = [row for row in read_ring(folders[-1]) if row["name"] != LAST] if folders else []
    if rows:
        row = rows[-1]
        number = "" if row["seq_id"] is None else f" {row['seq_id']}"
        where = ", ".join(filter(None, (f"step {row['step']}", row["path"], row["phase"])))
        if row["end_ns"] is None:
            ended = "and was not seen to end"
        else:
            ended = f"and ended {format_time(max(now_ns - row['end_ns'], 0))} ago"
        began = format_time(max(now_ns - row["start_ns"], 0))
        yield f"last collective: {row['name']}{number} of group {row['group']} ({where}) began {began} ago, {ended}"


def _describe_thread(thread: int | None, running: list[RunningWork], now_ns: int) -> Iterator[str]:
    quiet = format_time(max(now_ns - max(found.changed_ns for found in running), 0))
    yield (
        "an optimizer steps" if thread is None else f"thread {thread}: no call has begun or ended for {quiet}"
    )
    for found in running:
        name = found.path or f"({found.phase})"
        yield f"  {found.phase}  {name}  for {format_time(max(now_ns - found.since_ns, 0))}"
    if running[-1].phase == BACKWARD and running[-1].path is None:
        yield "  the modules in a backward are known with backward_times=True (--backward-times) or ops=True (--ops)"
