"""Finds the first NaN and infinite values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import NothingRecordedError
from ...recording.meta import HELD
from ...recording.module_path import join
from ...recording.options.schedule import ALL_STEPS
from ...recording.protocols import RecordingData
from ...recording.role import PARAMETER
from ...recording.statistics.moments import NOTHING_WRITTEN, nonfinite_rows
from ...recording.suggestions import first_few
from ...recording.triggers.trigger_kinds import THEN
from ...recording.triggers.trigger_kinds import NonFinite as NonFiniteTrigger
from ..tables.calls import read_calls
from ..tables.columns import column_of, dictionary_codes
from ..tables.missing_rows import require_rows, say_missing
from ..tables.placement import NOWHERE, Module, Placer
from ..tables.values import PlacedValues

#: A hint names at most this many parameters.
_NAMED = 3

#: What `NonFinite.kind` says: an op made the values, or a tensor that no op of the step had made held them, or
#: an op returned them that read what was not measured.
PRODUCER = "producer"
SOURCE = "source"
FIRST_SEEN = "first seen"

#: Causes: numbers that were finite and large.
OVERFLOW = "overflow"
EXP_OVERFLOW = "exp overflow"

#: In the options of a recording: the triggers that check all that was measured of modules, whatever they do then.
_WATCH_ALL = {repr(NonFiniteTrigger(then=action)) for action in (None, *THEN)}

_COLUMNS = [
    "step", "phase", "site_id", "call_id", "numel", "nan_count", "inf_count", "max", "first_index", "shape",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Numbers that grew in the steps before NaN or infinite values came up."""

    of: str  # parameter, parameter_grad: the largest element of all; else the name of a logged number
    #: Steps in order with their numbers: the first, some between, the last.
    figures: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """The spread of NaN or infinite values to the loss, the gradients and the parameters."""

    #: Whether the loss of that step was not finite; None: it is not known which tensor it is.
    loss: bool | None
    gradients: int  # parameters whose gradients were not finite in that step ...
    measured_gradients: int  # ... of this many
    #: The first step that used parameters which were not finite; None: none is known.
    parameters_step: int | None
    last_parameters_step: int | None  # the last step whose parameters were measured; None: there is none
    skipped: int = 0  # steps without an optimizer at the end of the recording, if that is too often ...
    trained: int = 0  # ... of this many


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """What made NaN or infinite values first, as far as ops were measured; else the first tensor that holds them."""

    #: The name of the root; None if no module owns the parameter, or the op ran outside of modules.
    root: str | None
    path: str | None  # of the module, at the place where it was called
    call: int | None  # which call of the module in the step, from 0; None for a parameter
    op: str | None = None  # that made the values, or read them first; None where only modules were recorded
    op_nth: int | None = None  # which op of that name in the call, from 0
    forward_op: str | None = None  # of an op in backward: the op of the forward whose derivative it computes
    phase: str | None  # None: between forward, backward and optimizer
    follows: str | None = None  # the phase that ran last before it in the step; None: none did
    step: int
    micro_batch: int | None = None  # of a step with several backwards: which it belongs to, from 0 ...
    micro_batches: int = 1  # ... of this many
    role: str | None  # what the tensor is: output, grad_output, parameter, parameter_grad, op_output, ...
    slot: str  # where the tensor is in what was returned, given or owned: "[0]", "['logits']", "weight"; "" for all
    #: producer: an op made them; source: what no op had made held them; first seen: an op returned them, and what made
    #: them is not known. None where only modules were recorded.
    kind: str | None = None
    #: Of a parameter, also one that an optimizer's op wrote, its path; else what holds them.
    source: str | None = None
    #: FILE:LINE; of an op that the engine runs in backward that of its forward op. None if it is not known.
    source_line: str | None = None
    has_lines: bool = False  # such lines were recorded
    cause: str | None = None  # overflow, fully masked row, ...; None where the numbers do not show one
    count: int  # NaN and infinite together
    nan_count: int
    inf_count: int
    #: The infinite ones are all -inf; False too where NaN beside them hides their signs.
    are_negative: bool = False
    numel: int
    first_index: tuple[int, ...] | None = None  # of the first of those elements; None where it is not known
    inputs: tuple[str, ...] = ()  # each tensor that the op read: its shape, its range, and what made it
    #: Through which the values went in that phase: the first op of each module in turn.
    chain: tuple[str, ...] = ()
    replaced_by: tuple[str, ...] = ()  # ops that read the values and returned finite ones, such as `where`
    hint: str | None = None  # what else is known about where the values came from
    remedy: str | None = None  # what helps against the cause
    others: int = 0  # further ops and tensors from which such values came in this step, apart from these
    growth: tuple[Growth, ...] = ()  # what grew in the steps before
    after: Aftermath | None = None  # where such values were seen later


@dataclass(frozen=True)
class Absorbed:
    """Values that came to no loss, gradient, parameter or returned output."""

    made: tuple[NonFinite, ...]  # by whom, each place once


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The extent of a recording's measured values."""

    tensors: int  # rows of `values` with statistics
    unmeasured: int  # rows whose note says why they have none; memory that nobody has written to is left out
    steps: int  # that have rows
    last_step: int | None  # of them; None: there are none
    nonfinite: int = 0  # rows with NaN or infinite values, meant or not
    recorded_steps: int = 0  # measured or not
    chosen_steps: str | None = None  # START:STOP[:EVERY] of those that were to be recorded; None: all
    held: str | None = None  # what became of steps that were checked as they ended, and were not written


def count_measured(data: RecordingData) -> Measured:
    """Returns how many tensors were measured, whatever their values."""
    values = data.table("values")
    unmeasured = values["count"].null_count
    note, notes = dictionary_codes(values["note"])
    unwritten = int(np.isin(note, [code for code, text in enumerate(notes) if text == NOTHING_WRITTEN]).sum())
    steps = np.unique(column_of(values, "step")).tolist()
    chosen = str(data.meta.options.get("steps", ALL_STEPS))
    is_bad = (column_of(values, "nan_count") > 0) | (column_of(values, "inf_count") > 0)
    return Measured(
        tensors=values.num_rows - unmeasured,
        unmeasured=unmeasured - unwritten,
        steps=len(steps),
        last_step=steps[-1] if steps else None,
        nonfinite=int(is_bad.sum()),
        recorded_steps=len(np.unique(column_of(data.table("steps"), "step"))),
        chosen_steps=None if chosen == str(ALL_STEPS) else chosen,
        held=_find_held(data),
    )


def _find_held(data: RecordingData) -> str | None:
    """Returns what became of the steps of a run in which no step was written, as none held such values.

    A recording with `keep_last` checks each step when it ends. None if it did not, or if steps were written.
    """
    meta = data.meta
    watched = bool(meta.options.get("values")) and not _WATCH_ALL.isdisjoint(meta.options.get("triggers", ()))
    if data.table("values").num_rows or meta.marks or not watched:
        return None
    return next((note.reason for note in reversed(meta.notes) if note.kind == HELD), None)


def describe_row(data: RecordingData, number: int) -> NonFinite:
    """Returns what is known of the values of one row of `values`, and of the parameters of its module in its step."""
    value = PlacedValues(data=data, table=data.table("values").select(_COLUMNS).slice(number, 1))
    [row] = value.table.to_pylist()
    sites = data.table("sites").slice(int(value.site[0]), 1).to_pylist() if value.site[0] >= 0 else []
    site = sites[0] if sites else {}
    placer = Placer(data)
    [place] = value.find_places(read_calls(data.table("calls"), placer, row["step"], also=value.call_id))
    root, path = (None, None) if place == NOWHERE else placer.name_modules()[place][:2]
    role, slot = site.get("role"), site.get("slot", "")
    is_parameter = role == PARAMETER
    return NonFinite(
        root=root,
        path=path,
        call=site.get("nth"),
        phase=row["phase"],
        step=row["step"],
        role=role,
        slot=slot,
        source=join(path or "", slot) if is_parameter else None,
        count=row["nan_count"] + row["inf_count"],
        nan_count=row["nan_count"],
        inf_count=row["inf_count"],
        are_negative=not row["nan_count"] and row["max"] != math.inf,
        numel=row["numel"],
        first_index=read_first_index(row),
        hint=None
        if is_parameter
        else _describe_weights(site.get("module_id"), row["step"], data, placer.modules),
    )


def require_measured(data: RecordingData) -> None:
    """Refuses a recording in which no tensor has statistics, and none was checked and dropped.

    Raises:
        NothingRecordedError: there is none; the message says why.
    """
    if _find_held(data) is not None:
        return
    require_rows(data, "values")
    values = data.table("values").select(["count", "note"])
    if values["count"].null_count == values.num_rows:
        notes = values["note"].drop_null().unique().to_pylist() or ["no statistics were asked for"]
        raise NothingRecordedError(
            f"none of the {values.num_rows} tensors in this recording could be measured: {first_few(notes, 3)}."
            + say_missing(data.meta.marks)
        )


def read_first_index(row: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns where the first NaN or infinite element is, by dimension, from a row of `values`."""
    index, shape = row["first_index"], row["shape"]
    if index is None or index >= math.prod(shape):
        return None
    return tuple(int(number) for number in np.unravel_index(index, shape))


def describe_counts(nan_count: int, inf_count: int, *, are_negative: bool = False) -> str:
    """Returns a description of the counts: `3 NaN, 1 inf`."""
    inf = "-inf" if are_negative else "inf"
    counts = [f"{nan_count} NaN" if nan_count else "", f"{inf_count} {inf}" if inf_count else ""]
    return ", ".join(filter(None, counts))


def _describe_weights(
    module_id: int | None, step: int, data: RecordingData, modules: Mapping[int, Module]
) -> str | None:
    """Returns a sentence that names parameters of the module which were not finite either; None if there are none."""
    if module_id is None or module_id not in modules:
        return None
    module, values = modules[module_id], data.table("values")
    slots = {
        site["site_id"]: site["slot"]
        for site in data.table("sites").select(["site_id", "module_id", "role", "slot"]).to_pylist()
        if site["role"] == PARAMETER and modules.get(site["module_id"]) is module
    }
    rows = nonfinite_rows(values)
    is_own = np.isin(column_of(values, "site_id"), list(slots)) & (column_of(values, "step") == step)
    bad = [
        f"{join(module.path, slots[row['site_id']])} ({describe_counts(row['nan_count'], row['inf_count'])})"
        for row in values.select(["site_id", "nan_count", "inf_count"]).take(rows[is_own[rows]]).to_pylist()
    ]
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f"the weights it used hold non-finite values: {', '.join(bad[:_NAMED])}{more}" if bad else None
