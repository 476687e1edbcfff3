"""Any thread may ask which call ran at a time, while the segment's own thread goes on."""

from types import SimpleNamespace
from typing import Any

import pytest

from modtrace.collect.log.nesting import OpenCalls
from modtrace.collect.log.segments import EXIT, CallRef, Segment, call_at


def test_another_thread_finds_a_call_of_a_segment_that_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context: Any = SimpleNamespace()
    segment = Segment(SimpleNamespace(), context, 0, -1, with_grad=True)
    segment.times.extend([10, 20, 30])
    segment.contexts.extend([0, 1, EXIT])
    known = segment.open_calls
    follow = OpenCalls.follow

    def end_meanwhile(self: OpenCalls, contexts: list[int]) -> None:
        follow(self, contexts)
        segment._open_calls = None  # as `close` does

    monkeypatch.setattr(OpenCalls, "follow", end_meanwhile)
    assert [call_at([segment], now_ns) for now_ns in (5, 15, 25, 35)] == [
        None,
        CallRef(segment, 0),
        CallRef(segment, 1),
        CallRef(segment, 0),
    ]
    assert known.after == [0, 1, 0]
