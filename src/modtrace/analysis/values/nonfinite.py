"""Defines the answers about NaN and infinite values, and describes single rows that hold some."""

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

#: The largest number of parameters that a hint names.
_NAMED = 3

#: The kinds of `NonFinite.kind`: an op made the values; a tensor that no op of the step made held them; an op returned
#: them after reading tensors that were not measured.
PRODUCER = "producer"
SOURCE = "source"
FIRST_SEEN = "first seen"

#: Causes in which numbers were finite, but too large.
OVERFLOW = "overflow"
EXP_OVERFLOW = "exp overflow"

#: The options of triggers that check all measured tensors of modules, whatever they do when they fire.
_WATCH_ALL = {repr(NonFiniteTrigger(then=action)) for action in (None, *THEN)}

_COLUMNS = [
    "step", "phase", "site_id", "call_id", "numel", "nan_count", "inf_count", "max", "first_index", "shape",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Numbers that grew in the steps before NaN or infinite values came up."""

    of: str  # "parameter" or "parameter_grad" for their largest element; else the name of a scalar
    #: The first step, some between and the last, each with its number.
    figures: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """The spread of NaN or infinite values to the loss, the gradients and the parameters."""

    #: Whether the loss of that step was not finite; None if the loss is not known.
    loss: bool | None
    gradients: int  # how many parameters had non-finite gradients in that step
    measured_gradients: int  # how many parameters' gradients were measured in that step
    #: The first step that used non-finite parameters; None if none is known.
    parameters_step: int | None
    last_parameters_step: int | None  # the last step whose parameters were measured; None if there is none
    skipped: int = 0  # how many of the last steps had no optimizer; 0 if few
    trained: int = 0  # how many steps `skipped` is counted among


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """What made the first NaN or infinite values, if ops were measured; else the first tensor that holds some."""

    #: The name of the root; None if no module owns the parameter, or if the op ran outside of modules.
    root: str | None
    path: str | None  # the path at which the module was called
    call: int | None  # the number of the module's call in the step, from 0; None for a parameter
    op: str | None = None  # the op that made the values, or read them first; None without ops
    op_nth: int | None = None  # the number of the op among those of its name in the call, from 0
    forward_op: str | None = None  # for an op in backward, the forward op whose derivative it computes
    phase: str | None  # None if the op ran between forward, backward and optimizer
    follows: str | None = None  # the phase that ran before it in the step; None if none did
    step: int
    micro_batch: int | None = None  # the number of its backward, of several in the step
    micro_batches: int = 1  # the number of backwards in the step
    role: str | None  # the role of the tensor: output, grad_output, parameter, parameter_grad, op_output, ...
    slot: str  # the slot of the tensor: "[0]", "['logits']", "weight"; "" for a single tensor
    #: "producer": an op made the values; "source": a tensor that no op had made held them; "first seen": an op returned
    #: them, and what made them is not known. None if only modules were recorded.
    kind: str | None = None
    #: The path of a parameter, even for an op of the optimizer that wrote it; else what held the values.
    source: str | None = None
    #: FILE:LINE of the op; for an op in backward that the engine runs, of its forward op. None if not known.
    source_line: str | None = None
    has_lines: bool = False  # whether source lines were recorded
    cause: str | None = None  # such as "overflow" or "fully masked row"; None if the numbers show none
    count: int  # NaN and infinite elements together
    nan_count: int
    inf_count: int
    #: Whether all infinite elements are -inf; False if NaN elements hide the signs.
    are_negative: bool = False
    numel: int
    first_index: tuple[int, ...] | None = None  # the index of the first non-finite element; None if not known
    inputs: tuple[str, ...] = ()  # each tensor that the op read: its shape, its range, and what made it
    #: The modules through which the values went in that phase, each by its first op.
    chain: tuple[str, ...] = ()
    replaced_by: tuple[str, ...] = ()  # ops that read the values and returned finite ones, such as `where`
    hint: str | None = None  # more about the origin of the values
    remedy: str | None = None  # a remedy against the cause
    others: int = 0  # how many other ops and tensors made such values in this step
    growth: tuple[Growth, ...] = ()  # what grew in the steps before
    after: Aftermath | None = None  # where such values were seen later


@dataclass(frozen=True)
class Absorbed:
    """Values that came to no loss, gradient, parameter or returned output."""

    made: tuple[NonFinite, ...]  # what made the values, with one entry a place


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The extent of a recording's measured values."""

    tensors: int  # rows of `values` with statistics
    unmeasured: int  # rows with a note in place of statistics, except of memory that was never written
    steps: int  # the number of steps with rows
    last_step: int | None  # the last of these steps; None if there are none
    nonfinite: int = 0  # rows with NaN or infinite values, even intended ones
    recorded_steps: int = 0  # the number of recorded steps, even without measurements
    chosen_steps: str | None = None  # START:STOP[:EVERY] of the steps to record; None for all
    held: str | None = None  # a sentence on steps that were checked as they ended, and not written


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
    """Returns a sentence on the steps of a run that wrote none, because none held NaN or infinite values.

    This applies to a recording with `keep_last` that checks each step at its end. None if it did not, or wrote steps.
    """
    meta = data.meta
    watched = bool(meta.options.get("values")) and not _WATCH_ALL.isdisjoint(meta.options.get("triggers", ()))
    if data.table("values").num_rows or meta.marks or not watched:
        return None
    return next((note.reason for note in reversed(meta.notes) if note.kind == HELD), None)


def describe_row(data: RecordingData, number: int) -> NonFinite:
    """Returns the answer about one row of `values`, with the parameters of its module in its step."""
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
    """Refuses a recording in which no tensor has statistics, and no step was checked and dropped.

    Raises:
        NothingRecordedError: nothing was measured; the message says why.
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
    """Returns the index of the first NaN or infinite element from a row of `values`."""
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
    """Returns a sentence on parameters of the module that were not finite either; None if there are none."""
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
