"""Finds where the time goes from the start of a training step to the start of the next one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import FORWARD, OPTIMIZER, PHASES, RECOMPUTE
from .columns import ArrowTable, Column, column_of, dictionary_codes, find_rows, phase_codes, take
from .ops import bare_name
from .placement import name_module, read_modules
from .sampled_steps import SampledSteps

DATA, COPY, BACKWARD, COLLECTIVE = "data", "copy", "backward", "collectives"
MEASURING, BETWEEN, REST = "measuring", "between steps", "rest"

#: What the time of a cycle goes to, each nanosecond to one. `measuring` is modtrace's own, writing included; `between
#: steps` comes behind the last module, backward and optimizer of a step, and `rest` before that.
PARTS = (DATA, COPY, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, COLLECTIVE, MEASURING, BETWEEN, REST)

#: A part that covers whatever runs in it: a data loader may call modules, and our writing waits for nothing else.
_COVERING = (DATA, MEASURING)

_KINDS = {"backward": BACKWARD, "data": DATA, "writing": MEASURING}
_PHASES = (FORWARD, RECOMPUTE, OPTIMIZER)
_COLUMNS = ("step", "thread", "start_ns", "end_ns", "overhead_ns")
_COPIES = frozenset({"to_copy", "copy"})

#: Of this many cycles the longest one is left out: one that saves a checkpoint may last longer than all others. A
#: median would leave out more: workers of a data loader deliver batches in bursts, with a long wait once in a while.
_LEAVE_OUT_ONE_OF = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Cycles:
    """The cycles of a recording's training steps: from the start of a step to the start of the next one."""

    step: Column
    start_ns: Column
    end_ns: Column
    parts_ns: Mapping[str, Column]  # for each of PARTS its time in each cycle; together they are the cycle

    @property
    def length_ns(self) -> Column:
        """The length of each cycle."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, kw_only=True)
class CycleSummary:
    """Where the time from one step's start to the next goes: the mean of several cycles."""

    cycles: int
    cycle_ns: int  # without measuring
    measuring_ns: int  # beside it
    parts_ns: Mapping[str, int]  # of PARTS but `measuring`, without those that take no time
    #: The name of the module whose calls take the most time without those inside of them, and that time in a step;
    #: None if no module was called. Its backward counts if backward times were recorded.
    slowest: str | None
    slowest_ns: int

    def share(self, part: str) -> float:
        """Returns how much of the cycle a part takes."""
        return self.parts_ns.get(part, 0) / max(self.cycle_ns, 1)


def summarize_cycles(run: SampledSteps) -> CycleSummary | None:
    """Returns the mean of the cycles, of 20 without the longest; None if there are none."""
    cycles = read_cycles(run)
    count = len(cycles.step)
    if not count:
        return None
    kept = np.argsort(cycles.length_ns - cycles.parts_ns[MEASURING], kind="stable")
    kept = kept[: count - count // _LEAVE_OUT_ONE_OF]
    means = {part: int(times[kept].sum()) // len(kept) for part, times in cycles.parts_ns.items()}
    measuring_ns = means.pop(MEASURING)
    slowest, slowest_ns = _find_slowest(run)
    return CycleSummary(
        cycles=len(kept),
        measuring_ns=measuring_ns,
        cycle_ns=sum(means.values()),
        parts_ns={part: time_ns for part, time_ns in means.items() if time_ns},
        slowest=slowest,
        slowest_ns=slowest_ns,
    )


def _find_slowest(run: SampledSteps) -> tuple[str | None, int]:
    """Returns the name of the module with the most time of its own in the sampled steps, and that time in a step."""
    names = ["call_id", "module_id", "parent_call_id", "start_ns", "end_ns", "overhead_ns"]
    steps = _limit(run)
    table = run.find("calls", names, step=steps)
    call, module, parent, start_ns, end_ns, overhead_ns = (column_of(table, name) for name in names)
    own_ns = np.where(end_ns >= 0, end_ns - start_ns - np.maximum(overhead_ns, 0), 0).astype(np.int64)
    above, took_ns = find_rows(call, parent), own_ns.copy()
    np.subtract.at(own_ns, above[above >= 0], took_ns[above >= 0])
    modules, which = np.unique(module, return_inverse=True)
    sums = np.zeros(len(modules), np.int64)
    np.add.at(sums, which.reshape(-1), np.maximum(own_ns, 0))
    sums[modules < 0] = 0  # an optimizer
    if not sums.any():
        return None, 0
    slowest = int(sums.argmax())
    named = read_modules(run.data).get(int(modules[slowest]))
    name = None if named is None else name_module(run.data, named)
    return name, int(sums[slowest]) // len(steps)


class _Intervals(NamedTuple):
    """Stretches of time on threads, each with the step to which it belongs."""

    step: Column
    thread: Column
    start_ns: Column
    end_ns: Column
    overhead_ns: Column
    part: Column  # codes of PARTS

    def where(self, kept: Column) -> "_Intervals":
        return _Intervals(*(column[kept] for column in self))


def read_cycles(run: SampledSteps) -> Cycles:
    """Returns the cycles of the sampled steps, without those whose end is not known.

    They are empty in a recording of a version that recorded no intervals.
    """
    number, start_ns, end_ns, next_ns = (
        column_of(run.steps, name).astype(np.int64)
        for name in ("step", "start_ns", "end_ns", "next_start_ns")
    )
    # A step begins where the rows of the step before have been written, which is a part of the cycle before.
    reached = np.maximum(next_ns, take(start_ns, find_rows(number, number + 1)))
    # An evaluation may run inside of a training step.
    stop_ns = np.where(reached >= 0, np.maximum(reached, end_ns), -1)
    return _divide_all(run, np.isin(number, _limit(run)) & (stop_ns > start_ns), stop_ns)


def _limit(run: SampledSteps) -> Column:
    """Returns the sampled steps, of a large model the newest of them."""
    return run.limit(run.numbers, "calls", "ops")


def find_own_times(run: SampledSteps, steps: Column) -> Column | None:
    """Returns the time of each step's optimizers without what closures run in them; None if it is not known."""
    is_wanted = np.isin(column_of(run.steps, "step"), steps)
    found = _divide_all(run, is_wanted, column_of(run.steps, "end_ns"))
    return found.parts_ns[OPTIMIZER] if np.array_equal(found.step, steps) else None


def _divide_all(run: SampledSteps, is_wanted: Column, stop_ns: Column) -> Cycles:
    """Returns some of the steps, each from its start up to `stop_ns`."""
    wanted = np.flatnonzero(is_wanted & bool(run.data.table("intervals").num_rows))
    step, start_ns, worked_ns, overhead_ns = (
        column_of(run.steps, name)[wanted].astype(np.int64)
        for name in ("step", "start_ns", "end_ns", "overhead_ns")
    )
    found = _join(
        *(read(run, step) for read in (_read_calls, _read_intervals, _read_collectives, _read_copies))
    )
    found = found.where(found.thread == _find_thread(found))
    end_ns, cycle = stop_ns[wanted], find_rows(step, found.step)
    times = [np.zeros((0, len(PARTS)), np.int64)]
    for number, facts in enumerate(zip(start_ns, end_ns, worked_ns, overhead_ns, strict=True)):
        times.append(_divide(found.where(cycle == number), *map(int, facts))[None])
    parts = np.concatenate(times).T
    return Cycles(step=step, start_ns=start_ns, end_ns=end_ns, parts_ns=dict(zip(PARTS, parts, strict=True)))


def _divide(found: _Intervals, begin: int, end: int, worked_ns: int, overhead_ns: int) -> Column:
    """Returns the time of each of PARTS in one cycle: at each time the interval that began last counts."""
    start, stop = (np.clip(times, begin, end) for times in (found.start_ns, found.end_ns))
    covering = np.isin(found.part, [PARTS.index(part) for part in _COVERING])
    worked = min(max(worked_ns, begin), end)
    bounds = np.unique(np.concatenate([[begin, worked, end], start, stop]))
    first, last = np.searchsorted(bounds, start), np.searchsorted(bounds, stop)
    owner = np.full(
        len(bounds) - 1, -1, np.int64
    )  # the interval of each stretch between two bounds; -1 for none
    #: What modtrace measured in the intervals inside each; the last element is of those inside none.
    inside_ns = np.zeros(len(start) + 1, np.int64)
    measured_ns = np.where(found.part == PARTS.index(MEASURING), 0, np.maximum(found.overhead_ns, 0))
    for row in np.lexsort((-stop, start, covering)).tolist():
        if first[row] < last[row]:
            inside_ns[owner[first[row]]] += measured_ns[row]
            owner[first[row] : last[row]] = row
    owner[_find_losses(np.append(found.part, -1)[owner], owner)] = -1
    lengths = np.diff(bounds)
    own_ns = np.zeros(len(start) + 1, np.int64)
    np.add.at(own_ns, owner, lengths)
    between_ns = int(lengths[(owner < 0) & (bounds[:-1] >= worked)].sum())
    times = np.zeros(len(PARTS), np.int64)
    own_measured = np.clip(measured_ns - inside_ns[:-1], 0, own_ns[:-1])
    np.add.at(times, found.part, own_ns[:-1] - own_measured)
    rest_ns = int(own_ns[-1]) - between_ns
    of_rest = min(max(overhead_ns - int(inside_ns[-1]), 0), rest_ns)
    times[PARTS.index(MEASURING)] += int(own_measured.sum()) + of_rest
    times[PARTS.index(BETWEEN)] += between_ns
    times[PARTS.index(REST)] += rest_ns - of_rest
    return times


def _find_losses(part: Column, owner: Column) -> Column:
    """Returns the stretches in which the closure of an optimizer computes its loss: between forward and backward."""
    runs = np.flatnonzero(np.diff(owner, prepend=owner[:1] - 1))
    forward, optimizer, backward = map(PARTS.index, (FORWARD, OPTIMIZER, BACKWARD))
    of_run = part[runs]
    is_loss = np.zeros(len(runs), bool)
    is_loss[1:-1] = (of_run[:-2] == forward) & (of_run[1:-1] == optimizer) & (of_run[2:] == backward)
    return np.repeat(is_loss, np.diff(np.append(runs, len(owner))))


def _join(*parts: _Intervals) -> _Intervals:
    return _Intervals(*map(np.concatenate, zip(*parts, strict=True)))


def _find_thread(found: _Intervals) -> int:
    """Returns the thread that trains: on which most backwards and optimizers run."""
    trains = np.isin(found.part, [PARTS.index(part) for part in (BACKWARD, OPTIMIZER)])
    threads, counts = np.unique(found.thread[trains], return_counts=True)
    return int(threads[counts.argmax()]) if len(threads) else 0


def _read_calls(run: SampledSteps, steps: Column) -> _Intervals:
    """Returns the outermost calls of each phase; what runs backward is in `intervals`."""
    calls = run.find("calls", [*_COLUMNS, "phase", "parent_call_id"], step=steps)
    parts = np.array([PARTS.index(phase) if phase in _PHASES else -1 for phase in PHASES] + [-1], np.int64)
    part = parts[phase_codes(calls["phase"])]
    return _to_intervals(calls, part, (column_of(calls, "parent_call_id") < 0) & (part >= 0))


def _read_intervals(run: SampledSteps, steps: Column) -> _Intervals:
    table = run.find("intervals", [*_COLUMNS, "kind"], step=steps)
    code, kinds = dictionary_codes(table["kind"])
    part = np.array([PARTS.index(_KINDS.get(kind, REST)) for kind in kinds] + [-1], np.int64)[code]
    return _to_intervals(table, part, part >= 0)


def _read_collectives(run: SampledSteps, steps: Column) -> _Intervals:
    """Returns when the program waited for collectives: up to when these were complete."""
    table = run.find("collectives", [*_COLUMNS[:4], "wait_ns"], step=steps)
    wait_ns, part = column_of(table, "wait_ns"), np.full(len(table), PARTS.index(COLLECTIVE))
    is_wait = (wait_ns > 0) & (column_of(table, "thread") >= 0)
    found = _to_intervals(table, part, is_wait)
    return found._replace(start_ns=found.end_ns - wait_ns[is_wait & (column_of(table, "end_ns") >= 0)])


def _read_copies(run: SampledSteps, steps: Column) -> _Intervals:
    """Returns the ops that copy from the CPU to a device, if ops were recorded."""
    ops = run.find("ops", [*_COLUMNS[:4], "op_id", "name"], step=steps)
    code, names = dictionary_codes(ops["name"])
    is_copy = np.array([*(bare_name(name) in _COPIES for name in names), False], bool)[code]
    ops = ops.filter(from_numpy(is_copy))
    op = column_of(ops, "op_id")
    made = run.find("tensors", ["producer_op", "device"], producer_op=op)
    uses = run.find("uses", ["consumer_op", "tensor_id"], consumer_op=op)
    read = run.find("tensors", ["tensor_id", "device"], tensor_id=column_of(uses, "tensor_id"))
    row = find_rows(column_of(read, "tensor_id"), column_of(uses, "tensor_id"))
    from_cpu = column_of(uses, "consumer_op")[_are_on_cpu(read)[row]]
    to_device = column_of(made, "producer_op")[~_are_on_cpu(made)[:-1]]
    part = np.full(len(op), PARTS.index(COPY))
    return _to_intervals(ops, part, np.isin(op, to_device) & np.isin(op, from_cpu))


def _to_intervals(table: ArrowTable, part: Column, kept: Column) -> _Intervals:
    """Returns those of the rows that are `kept` and whose end was seen."""
    columns = dict.fromkeys(_COLUMNS, np.zeros(len(part), np.int64))
    columns |= {
        name: column_of(table, name).astype(np.int64) for name in _COLUMNS if name in table.column_names
    }
    return _Intervals(**columns, part=part).where(kept & (columns["end_ns"] >= 0))


def _are_on_cpu(tensors: ArrowTable) -> Column:
    """Returns which tensors are on the CPU, and False at the end, for no tensor."""
    code, names = dictionary_codes(tensors["device"])
    return np.append(np.array([*(name == "cpu" for name in names), False], bool)[code], False)
