"""Searches a recording for what made NaN or infinite values: the op if ops were measured, else the module."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD, OPTIMIZER
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, LEAF, LOSS, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import nonfinite_rows
from ...recording.triggers.step_conditions import Use
from ..tables.columns import ArrowTable, RowFinder, column_of
from ..tables.indexed_tables import IndexedTables
from ..tables.inside import find_unseen
from ..tables.one_step import OneStep
from ..tables.op_rules import SHAPES_ONLY, UNSCALES
from ..tables.placement import read_modules
from ..values.nonfinite import SOURCE, NonFinite, describe_row, require_measured
from .answer import build_answer
from .earlier_steps import EarlierSteps
from .makers import Makers, is_read_later
from .memory import BAD, CLEAN
from .reach import Innocent, are_ends_finite, select_guilty
from .skipped_steps import SkippedSteps, is_expected, is_gradient, keep_if_many_skipped
from .step_counts import StepCounts
from .surroundings import add_surroundings, find_bad_losses
from .trace import trace_step
from .traced import Origin, Trace

#: What is said of a module of which no ops were recorded.
GIVEN = "this module may only have been given them"


@dataclass(frozen=True)
class LiveStep:
    """A step that has just ended, with knowledge of earlier steps, to which the search adds its own."""

    innocent: Innocent
    earlier: EarlierSteps
    use: Use
    values_before: Callable[[], ArrowTable]  # reads parameters and gradients of earlier steps


def find_first(
    data: RecordingData, selects: Callable[[str], bool] = lambda _: True, *, live: LiveStep | None = None
) -> NonFinite | None:
    """Returns what made the first NaN or infinite values; None if there are none, or only intended ones.

    Args:
        data: the recording.
        selects: for values that ops made, whether the path of their module counts.
        live: the step that has just ended, if the run still goes on.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    search = _Search(data, live)
    answers = search.find_answers()
    first = next((one for one in answers if one.op is None or selects(one.path or "")), None)
    return None if first is None else search.add_surroundings(first)


def find_all(data: RecordingData) -> Iterator[NonFinite]:
    """Yields what made NaN or infinite values, in the order in which they came up.

    Left out are intended values, such as the `-inf` of masks, values that the model itself looks for and replaces, and
    gradients that overflow before a GradScaler skips the step. If no op of a module was measured, the first such module
    in each step is named. The first answer also has its growth and aftermath.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    search = _Search(data)
    answers = search.find_answers()
    first = next(answers, None)
    if first is not None:
        yield search.add_surroundings(first)
        yield from answers


def find_absorbed(data: RecordingData, most: int) -> list[NonFinite]:
    """Returns what made absorbed values, each place in its first step; `most` answers at most."""
    search = _Search(data)
    known, absorbed = set[bytes](), dict[object, NonFinite]()
    for number, sites in _find_suspicious_steps(data):
        if sites in known:
            continue
        known.add(sites)
        for answer in search.search_step(number).absorbed():
            place = (answer.root, answer.path, answer.phase, answer.op, answer.op_nth, answer.slot)
            absorbed.setdefault(place, answer)
            if len(absorbed) >= most:
                return list(absorbed.values())
    return list(absorbed.values())


class _Searched(NamedTuple):
    """The result of searching one step."""

    answers: Iterable[NonFinite]  # each is made when it is asked for
    total: int  # the number of answers
    is_innocent: bool  # whether later steps with the same key need no search
    absorbed: Callable[[], Iterable[NonFinite]] = tuple


_NOTHING = _Searched((), 0, is_innocent=True)


class _Search:
    """Searches the steps of a recording."""

    def __init__(self, data: RecordingData, live: LiveStep | None = None) -> None:
        self._run = IndexedTables(data)
        self._live = live
        self._innocent = live.innocent if live else Innocent()
        if live and live.use.is_used:
            # The step is still open: values that did not matter so far may still matter.
            self._innocent = Innocent(set(live.innocent.steps), set(live.innocent.places))
        self._earlier = live.earlier if live else EarlierSteps()
        self._skipped = SkippedSteps(self._run, live.use if live else None)
        self._makers = Makers(self._run, self._earlier)

    def add_surroundings(self, answer: NonFinite) -> NonFinite:
        """Returns the first answer with what grew in the steps before, and with the aftermath."""
        before = [self._live.values_before()] if self._live else []
        return add_surroundings(self._run, self._skipped, before, answer)

    def find_answers(self) -> Iterator[NonFinite]:
        """Yields what made values that matter, step by step."""
        suspicious = _find_suspicious_steps(self._run.data)
        if not suspicious:
            require_measured(self._run.data)
        for number, sites in suspicious:
            if sites in self._innocent.steps:
                self._keep_unsearched(number)
                continue
            searched = self.search_step(number)
            if searched.is_innocent:
                self._innocent.steps.add(sites)
            yield from (replace(answer, others=searched.total - 1) for answer in searched.answers)

    def search_step(self, number: int) -> _Searched:
        """Returns what made values in a step: those that matter as answers, and the absorbed ones."""
        step = OneStep(self._run, number)
        if not step.is_of(OP_OUTPUT).any():
            return self._search_modules(step)
        if not step.table("ops").num_rows or (step.meta.marks and not step.table("uses").num_rows):
            return _describe_partly_lost(step, unscales=False)
        counts = StepCounts(step, self._earlier)
        if counts.has_lost_rows:
            return _describe_partly_lost(step, unscales=UNSCALES in step.bare_names)
        trace = trace_step(step, counts)
        self._keep_held(trace)
        are_finite = are_ends_finite(step, find_bad_losses(step), returns_meant=trace.returns_meant)
        suspects = select_guilty(trace, are_finite, self._innocent)
        guilty = _drop_unseen(trace, suspects) if suspects else suspects
        answers: Iterable[NonFinite] = (self._answer(trace, event) for event in guilty)
        count = len(guilty)
        rows = _find_unjudged(trace) if len(guilty) == len(suspects) else _find_rows_of_modules(step)
        is_leaf = step.is_of(LEAF)
        row = None if are_finite else next((one for one in rows if not is_leaf[one]), None)
        if row is not None and not (guilty and guilty[0].counts.order <= _order_of(step, row)):
            answers, count = chain([_describe_module(step, row)], answers), count + 1
        if trace.unscales:
            made = list(answers)
            matter = [answer for answer in made if not is_expected(answer)]
            answers = matter or keep_if_many_skipped(made, self._skipped)
            count = len(answers)

        def answer_absorbed() -> Iterator[NonFinite]:
            others = (event for event in trace.events if event not in known)
            return (self._answer(trace, event) for event in others if not is_read_later(trace, event))

        known = set(suspects)
        return _Searched(answers, count, not guilty and row is None, answer_absorbed)

    def _keep_held(self, trace: Trace) -> None:
        """Remembers, while the run goes on, which tensors of a step hold non-finite values at its end."""
        if not self._earlier.is_complete:
            return
        held: dict[int, str | None] = {}
        for tensor in trace.memory.written:
            state, tensor_id = trace.memory.read(tensor), int(trace.step.tensors.tensor_id[tensor])
            if state.kind == BAD:
                maker = trace.step.describe_op(trace.select(state.events)[0].op)
                held[tensor_id] = f"{maker} made it in step {trace.step.number}"
            elif state.kind != CLEAN:
                held[tensor_id] = None
        self._earlier.add(held)

    def _keep_unsearched(self, number: int) -> None:
        """Remembers for later steps which tensors were made in a step that is not searched."""
        if not self._earlier.is_complete:
            return
        ops = column_of(OneStep(self._run, number).table("ops"), "op_id")
        made = column_of(self._run.find("tensors", ["tensor_id"], producer_op=ops), "tensor_id")
        if len(made):
            self._earlier.add_unsearched(int(made.min()), int(made.max()))

    def _search_modules(self, step: OneStep) -> _Searched:
        """Returns the first non-finite tensor of a module, for a step without measured ops."""
        row = next(_find_rows_of_modules(step), None)
        if row is None:
            return _NOTHING
        answers = [_describe_module(step, row)]
        if are_ends_finite(step):
            return _NOTHING._replace(absorbed=lambda: answers)
        if step.number in self._skipped and is_gradient(answers[0]):
            answers = keep_if_many_skipped(answers, self._skipped)
        return _Searched(answers, len(answers), is_innocent=False)

    def _answer(self, trace: Trace, event: Origin) -> NonFinite:
        first = int(trace.counts.first_order[event.op])
        order = event.counts.order if first < 0 else first
        return _add_micro_batch(trace.step, build_answer(trace, event, self._makers), order)


def _add_micro_batch(step: OneStep, answer: NonFinite, order: int) -> NonFinite:
    """Returns the answer with the number of its micro-batch, from how many backwards began before the measurement."""
    began = step.backwards_began
    if len(began) < 2 or answer.phase == OPTIMIZER:
        return answer
    begun = int((began < order).sum())
    # In backward, the last begun backward is the micro-batch's own; otherwise its own has not begun.
    number = begun - 1 if answer.phase == BACKWARD else begun
    return replace(answer, micro_batch=min(max(number, 0), len(began) - 1), micro_batches=len(began))


def _find_suspicious_steps(data: RecordingData) -> list[tuple[int, bytes]]:
    """Returns the steps with NaN or infinite values, in order, each with a key.

    Steps with NaN and infinities at the same sites have equal keys. The function reads four columns of `values`, one
    batch at a time, so that of a memory-mapped table only the pages of these are loaded.
    """
    parts = [np.empty((3, 0), np.int64)]
    columns = ["nan_count", "inf_count", "step", "site_id"]
    for batch in data.table("values").select(columns).to_batches():
        nan_count, inf_count, step, site = (to_numpy(column) for column in batch.columns)
        rows = np.flatnonzero((nan_count | inf_count) > 0)
        kind = (nan_count[rows] > 0) + 2 * (inf_count[rows] > 0)
        parts.append(np.stack([step[rows], site[rows], kind]).astype(np.int64))
    keys = np.concatenate(parts, axis=1)
    keys = keys[:, np.lexsort(keys[::-1])]
    is_new = np.ones(keys.shape[1], bool)
    is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    keys = keys[:, is_new]
    steps, starts = np.unique(keys[0], return_index=True)
    of_steps = np.split(keys[1:], starts, axis=1)[1:]
    return [(step, rows.tobytes()) for step, rows in zip(steps.tolist(), of_steps, strict=True)]


def _drop_unseen(trace: Trace, events: list[Origin]) -> list[Origin]:
    """Leaves out events in compiled code with unrecorded kernels, since these may have written what its ops read."""
    step = trace.step
    unseen = find_unseen(step, step.number)
    call_ids = np.append(step.calls.call_id, -1)
    return [
        event
        for event in events
        if int(call_ids[step.ops.call[event.op]]) not in unseen.calls
        and (event.kind != SOURCE or int(step.tensors.tensor_id[event.tensor]) not in unseen.tensors)
    ]


def _describe_partly_lost(step: OneStep, *, unscales: bool) -> _Searched:
    """Returns the first non-finite tensor of a module, or else the first NaN, for a step that has lost rows.

    Without these rows it is not known which values are intended.
    """
    values = step.table("values")
    with_nan = np.flatnonzero(column_of(values, "nan_count") > 0)
    with_nan = with_nan[np.argsort(column_of(values, "order")[with_nan], kind="stable")]
    row = next(iter([*_find_rows_of_modules(step), *with_nan.tolist()]), None)
    if row is None:
        return _NOTHING
    answer = replace(
        describe_row(step, row),
        hint="what made them, and whether they are intended, is not known: rows of this step are missing",
        remedy="copy the recording again, or record again",
    )
    answers = [] if unscales and is_expected(answer) else [answer]
    return _Searched(answers, len(answers), is_innocent=False)


def _find_rows_of_modules(step: OneStep) -> Iterator[int]:
    """Yields the rows of a step's `values` that are of modules and not finite, in the order of measuring.

    If a loss comes first, parameters are put before it: they are measured late, but were used early.
    """
    values = step.table("values")
    rows = nonfinite_rows(values, step.table("sites"))
    rows = rows[np.argsort(column_of(values, "order")[rows], kind="stable")]
    if step.is_of(LOSS)[rows[:1]].any():
        rows = rows[np.argsort(~step.is_of(PARAMETER)[rows], kind="stable")]
    yield from rows.tolist()


def _find_unjudged(trace: Trace) -> Iterator[int]:
    """Yields such rows of modules with an unmeasured op inside, unless a measured op returned the tensor."""
    step, partly = trace.step, _find_partly_measured(trace)
    rows = np.array([*_find_rows_of_modules(step)], np.int64)
    orders = column_of(step.table("values"), "order")[rows]
    for row in rows[~np.isin(orders, trace.counts.output_orders)].tolist():
        site = step.find_site(row)
        if site is not None and site.module_id in partly:
            yield row


def _order_of(step: OneStep, row: int) -> int:
    return int(step.table("values")["order"][row].as_py())


_WITH_OPS = "record(ops=True) (modtrace record --ops)"


def _describe_module(step: OneStep, row: int) -> NonFinite:
    answer = _add_micro_batch(step, describe_row(step, row), _order_of(step, row))
    is_inside = column_of(step.table("values"), "call_id")[row] < 0  # compiled code has no calls inside
    if _is_of_region(step, row):
        remedy = (
            'record(compiled="inside") (modtrace record --compiled inside) '
            "names the module inside of this compiled one"
        )
    elif is_inside and answer.role in (OUTPUT, GRAD_OUTPUT):
        remedy = (
            f'{_WITH_OPS} names the op that made them where torch.compile has backend="aot_eager"; {GIVEN}'
        )
    elif step.run.data.table("ops").num_rows:
        return answer
    else:
        remedy = f"{_WITH_OPS}, on a long run with keep_last=20 (--keep-last 20), names the op that made them"
        remedy += "" if answer.role == LOSS else f"; {GIVEN}"
    return replace(answer, remedy=remedy)


def _is_of_region(step: OneStep, row: int) -> bool:
    """Returns whether a row of `values` is of a module that ran as a compiled region, or that wraps one."""
    calls = step.table("calls")
    compiled, parent = column_of(calls, "compiled") == 1, column_of(calls, "parent_call_id")
    if not compiled.any():
        return False
    modules = read_modules(step)
    of_call = [modules.get(number) for number in column_of(calls, "module_id").tolist()]
    find_call, module = RowFinder(column_of(calls, "call_id")), None
    [call] = find_call(column_of(step.table("values"), "call_id")[[row]])
    while call >= 0 and (module is None or of_call[call] is module):
        if compiled[call]:
            return True
        module = of_call[call]
        [call] = find_call(parent[[call]])
    return False


def _find_partly_measured(trace: Trace) -> set[int]:
    """Returns the modules in which an op ran without being measured, and all modules around them."""
    step, calls = trace.step, trace.step.calls
    may_be = step.tensors.holds_numbers & ~trace.counts.is_measured & ~step.shows_first_read
    ops = np.unique(step.tensors.producer[may_be])
    partly: set[int] = set()
    for call in {int(step.ops.call[op]) for op in ops[ops >= 0].tolist() if _is_unmeasured(trace, op)}:
        while call >= 0 and int(calls.module[call]) not in partly:
            partly.add(int(calls.module[call]))
            call = int(calls.parent[call])
    return partly


def _is_unmeasured(trace: Trace, op: int) -> bool:
    """Returns whether an op wrote numbers of which none was measured."""
    step = trace.step
    written = [tensor for _, tensor in step.returns[op] if step.find_shown(tensor) is None]
    if step.bare_names[op] in SHAPES_ONLY or trace.counts.is_measured[written].any():
        return False
    return bool(step.tensors.holds_numbers[written].any())
