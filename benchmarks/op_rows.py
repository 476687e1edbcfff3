"""The rows of the benchmark of op recording: ours, PyTorch's own modes, and other tracers where they are installed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from op_works import Counted, PassingMode, PassingModeInC
from scopes import cells, repeat
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import modtrace
from measure import estimate, time_rounds

NOT_INSTALLED = ("not installed", "")


class Row(NamedTuple):
    """What is done in a round of one row."""

    counted: Counted
    run: Callable[[Counted], None]
    needs: str | None = None  # a library that the project can do without

    @property
    def is_installed(self) -> bool:
        """Whether it can be timed here."""
        return self.needs is None or find_spec(self.needs) is not None


def training_rows(step: Counted) -> dict[str, Row]:
    """Ratios are to the first of them."""
    slow = step.with_steps(fraction(step, 5))
    return {
        "plain": Row(step, plain),
        "empty mode in Python": Row(step, partial(_passed_on, PassingMode)),
        "empty mode in C": Row(step, partial(_passed_on, PassingModeInC)),
        "torch DebugMode": Row(slow, _debugged),
        "modtrace, ops, no saved": Row(step, partial(_recorded, ops=modtrace.Ops(saved=False), values=None)),
        "modtrace, ops": Row(step, partial(_recorded, ops=True, values=None)),
        "modtrace, ops and values": Row(step, partial(_recorded, ops=True)),
    }


def forward_rows(forward: Counted) -> dict[str, Row]:
    """Ratios are to the first of them."""
    slow = forward.with_steps(fraction(forward, 5))
    return {
        "plain": Row(forward, plain),
        "modtrace, ops": Row(forward, partial(_recorded, ops=True, values=None)),
        "torchview": Row(slow, _drawn_by_torchview, "torchview"),
        "torchviz": Row(slow, _drawn_by_torchviz, "torchviz"),
    }


def cells_of(names: Sequence[str], seconds: Mapping[str, np.ndarray]) -> dict[str, tuple[str, str]]:
    """The rows as ratios to the first of them, which tells its time instead, with their 95 % intervals."""
    plain, *others = names
    found = {plain: (f"({estimate(seconds[plain] * 1e3).median:.1f} ms)", "")}
    for name in others:
        is_timed = name in seconds
        found[name] = cells(estimate(seconds[name] / seconds[plain]), 3) if is_timed else NOT_INSTALLED
    return found


def measure(rows: Mapping[str, Row]) -> dict[str, np.ndarray]:
    """Times the rows, interleaved; returns the CPU seconds a step of every round for those that are installed."""
    rows = {name: row for name, row in rows.items() if row.is_installed}
    rounds = {name: partial(row.run, row.counted) for name, row in rows.items()}
    works = {name: row.counted.work for name, row in rows.items()}
    seconds = time_rounds(rounds, rounds=min(work.rounds for work in works.values()))
    return {name: seconds[name] / work.steps for name, work in works.items()}


def fraction(counted: Counted, divisor: int) -> int:
    """So many steps are enough of what takes `divisor` times longer than the other rows."""
    return max(1, counted.work.steps // divisor)


def plain(counted: Counted) -> None:
    """What the others are compared with."""
    repeat(counted.work)


def _passed_on(mode: type[TorchDispatchMode], counted: Counted) -> None:
    with mode():
        repeat(counted.work)


def _debugged(counted: Counted, **options: bool) -> None:
    """It keeps tensors, so that torch 2.13 runs 2 to 6 % fewer ops: no `detach` where a gradient is accumulated."""
    for _ in range(counted.work.steps):
        with DebugMode(**options) as mode:
            counted.work.step()
        check(len(mode.operators), int(counted.ops * 0.8), "ops")


def _recorded(counted: Counted, *, ops: bool, **options: Any) -> None:
    """Has the rows as Arrow tables; their ops must be as many as an independent count found."""
    work = counted.work
    with modtrace.record(work.model, ops=ops, **options) as recording:
        repeat(work)
    rows = {name: recording.table(name).num_rows for name in ("calls", "ops", "tensors", "uses", "values")}
    expected = counted.ops * work.steps if ops else 0
    check(rows["calls"], work.calls, "calls")
    check(rows["tensors"], expected, "tensors")
    check(rows["uses"], expected, "edges")
    if rows["ops"] != expected or (rows["values"] > work.calls) == ("values" in options):
        raise RuntimeError(
            f"{rows} were recorded where {expected} ops ran: the benchmark times something else"
        )


def _drawn_by_torchview(counted: Counted) -> None:
    from torchview import draw_graph

    for _ in range(counted.work.steps):
        graph = draw_graph(counted.work.model, input_data=counted.tokens, save_graph=False)
        check(len(graph.edge_list), counted.calls, "edges")


def _drawn_by_torchviz(counted: Counted) -> None:
    from torchviz import make_dot

    for _ in range(counted.work.steps):
        graph = make_dot(counted.work.model(counted.tokens))
        check(len(graph.body), counted.calls, "lines")


def check(found: int, expected: int, what: str) -> None:
    """Raises where a row does less than it is timed for."""
    if found < expected:
        raise RuntimeError(f"only {found} {what} were seen of {expected}: the benchmark times nothing")
