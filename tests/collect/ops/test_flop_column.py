"""FLOPs of many ops, counted once for each set of arguments and shapes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modtrace.collect.ops import flop_column
from modtrace.collect.ops.flop_column import OpFlops
from modtrace.collect.ops.mode import EVENT_WIDTH

SCHEMAS: Any = [SimpleNamespace(func=None)]


def ops_with(*arguments: str) -> Any:
    events = np.zeros((len(arguments), EVENT_WIDTH), np.int64)
    return SimpleNamespace(events=events, keys_of=lambda ops: [(given, b"", b"") for given in arguments])


def test_dump_of_a_signal_handler_takes_away_no_count_that_is_being_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flops, asked = OpFlops(), list[str]()

    def count(arguments: str, *_: object) -> int:
        asked.append(arguments)
        if arguments != "dumped":
            flops.of(ops_with("dumped"), SCHEMAS, [])
        return len(arguments)

    monkeypatch.setattr(flop_column, "_KEPT", 1)
    monkeypatch.setattr(flop_column, "_count", count)
    monkeypatch.setattr(flop_column, "is_counted", lambda func: True)
    assert flops.of(ops_with("a", "bc", "a"), SCHEMAS, []).tolist() == [1, 2, 1]
    assert asked.count("a") == 1
