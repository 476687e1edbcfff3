"""Finds how parameters and gradients grew before NaN or infinite values, and whether those reached the loss."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD, OPTIMIZER
from ...recording.protocols import RecordingData
from ...recording.role import LOSS, PARAMETER, PARAMETER_GRAD
from ...recording.triggers.step_tables import GROWTH_STEPS
from ..tables.calls import phases_of
from ..tables.columns import ArrowTable, column_of, text_codes
from ..tables.indexed_tables import IndexedTables
from ..tables.one_step import OneStep
from ..tables.op_rules import SEED
from ..values.nonfinite import EXP_OVERFLOW, OVERFLOW, SOURCE, Aftermath, Growth, NonFinite
from .skipped_steps import SkippedSteps
from .step_counts import read_outputs

#: The largest number of figures that show a growth.
_FIGURES = 5

#: The least factor between two steps by which no learning rate moves a parameter whose gradients do not grow.
_JUMP = 1000.0

#: The least factors that are reported as growth of a largest magnitude within `GROWTH_STEPS`. In healthy training
#: parameters grow less; gradients and losses vary more by themselves.
_LEAST_GROWTH = {PARAMETER: 10.0, PARAMETER_GRAD: 100.0, "loss": 100.0}

_Rows = npt.NDArray[np.void]
_ROW = np.dtype([("step", "i8"), ("site_id", "i8"), ("of_gradient", "?"), ("is_bad", "?"), ("abs_max", "f8")])


def add_surroundings(
    run: IndexedTables, skipped: SkippedSteps, before: Sequence[ArrowTable], found: NonFinite
) -> NonFinite:
    """Returns the answer with what grew in the steps before, and what else was not finite from its step on.

    Args:
        run: the recording.
        skipped: the steps in which no optimizer used the gradients.
        before: further rows of `values` from earlier steps.
        found: the answer to complete.
    """
    step = OneStep(run, found.step)
    rows, phases = _read_parameters(run, before, found.step), phases_of(step)
    # All steps are searched for skipped ones only if this step has a backward and no optimizer.
    may_be_skipped = BACKWARD in phases and OPTIMIZER not in phases
    count, trained = skipped.find_many() if may_be_skipped else (0, 0)
    growth = tuple(_find_growth(run.data, rows, found.step))
    is_explained = found.cause not in (None, OVERFLOW, EXP_OVERFLOW) or found.kind == SOURCE or count > 0
    return replace(
        found,
        growth=growth,
        after=replace(_find_aftermath(step, rows), skipped=count, trained=trained),
        remedy=found.remedy if is_explained else _remedy_of(growth) or found.remedy,
    )


def _remedy_of(growth: Sequence[Growth]) -> str | None:
    """Returns a remedy against growth; None if neither parameters nor gradients have grown."""
    grown = {one.of: one.figures for one in growth}
    if PARAMETER in grown:
        (_, before), (step, last) = grown[PARAMETER][-2:]
        if last >= _JUMP * before and PARAMETER_GRAD not in grown:
            return f"a parameter jumped in step {step}, and gradients did not grow: look at what else writes to it"
        clip = "clip the gradients (torch.nn.utils.clip_grad_norm_), " if PARAMETER_GRAD in grown else ""
        return f"training diverges: lower the learning rate, {clip}or warm it up over the first steps"
    if PARAMETER_GRAD in grown:
        return "clip the gradients (torch.nn.utils.clip_grad_norm_), or lower the learning rate"
    return None


def _find_aftermath(step: OneStep, rows: _Rows) -> Aftermath:
    gradients = rows[(rows["step"] == step.number) & rows["of_gradient"]]
    later = rows[(rows["step"] >= step.number) & ~rows["of_gradient"]]
    own = later["site_id"][later["step"] == step.number]
    if len(own):  # another step may train another model
        later = later[np.isin(later["site_id"], own)]
    bad = later[later["is_bad"]]["step"]
    losses = list(find_bad_losses(step))
    return Aftermath(
        loss=True if True in losses else None if None in losses or not losses else False,
        gradients=int(gradients["is_bad"].sum()),
        measured_gradients=len(gradients),
        parameters_step=int(bad.min()) if len(bad) else None,
        last_parameters_step=int(later["step"].max()) if len(later) else None,
    )


def _read_parameters(run: IndexedTables, before: Sequence[ArrowTable], step: int) -> _Rows:
    """Returns the rows of parameters and their gradients, from `GROWTH_STEPS` before a step on."""
    of_gradients = run.sites_of(PARAMETER_GRAD)
    wanted = np.concatenate([run.sites_of(PARAMETER), of_gradients])
    names = ["step", "site_id", "count", "nan_count", "inf_count", "min", "max"]
    parts = [np.empty(0, _ROW)]
    tables = (*before, run.data.table("values"))
    for batch in chain.from_iterable(table.select(names).to_batches() for table in tables):
        of_step = to_numpy(batch.columns[0], null=-1)
        if not len(of_step) or of_step.max() <= step - GROWTH_STEPS:
            continue
        site_id, count = (to_numpy(column, null=-1) for column in batch.columns[1:3])
        is_wanted = np.isin(site_id, wanted) & (of_step > step - GROWTH_STEPS) & (count >= 0)
        kept = np.flatnonzero(is_wanted)
        if len(kept):
            nan, inf, low, high = (to_numpy(column, null=0)[kept] for column in batch.columns[3:])
            part = np.empty(len(kept), _ROW)
            part["step"], part["of_gradient"] = of_step[kept], np.isin(site_id[kept], of_gradients)
            part["site_id"], part["is_bad"] = site_id[kept], (nan > 0) | (inf > 0)
            part["abs_max"] = np.maximum(np.abs(low), np.abs(high))
            parts.append(part)
    return np.concatenate(parts)


def _find_growth(data: RecordingData, rows: _Rows, step: int) -> Iterator[Growth]:
    for role in (PARAMETER, PARAMETER_GRAD):
        of_role = rows[(rows["of_gradient"] == (role == PARAMETER_GRAD)) & (rows["step"] <= step)]
        largest: dict[int, float] = {}
        for number in np.unique(of_role["step"]).tolist():
            of_step = of_role[of_role["step"] == number]
            largest[number] = np.inf if of_step["is_bad"].any() else float(of_step["abs_max"].max())
        yield from _to_growth(role, largest, _LEAST_GROWTH[role])
    scalars = [row for row in data.table("scalars").to_pylist() if "loss" in row["name"].lower()]
    for name in dict.fromkeys(row["name"] for row in scalars):
        logged = {
            row["step"]: abs(row["value"])
            for row in scalars
            if row["name"] == name and step - GROWTH_STEPS < row["step"] <= step
        }
        yield from _to_growth(name, logged, _LEAST_GROWTH["loss"])


def _to_growth(of: str, largest: dict[int, float], least: float) -> Iterator[Growth]:
    finite = [(step, value) for step, value in sorted(largest.items()) if np.isfinite(value)]
    if len(finite) < 2:
        return
    values = [value for _, value in finite]
    first = values.index(min(values))
    if values[first] > 0 and values[-1] >= least * values[first] and values[-1] == max(values):
        grown = finite[first:]
        shown = np.unique(np.linspace(0, len(grown) - 1, _FIGURES).round().astype(int))
        yield Growth(of=of, figures=tuple(grown[number] for number in shown.tolist()))


def find_bad_losses(step: OneStep) -> Iterator[bool | None]:
    """Yields for each backward of a step whether its loss is not finite.

    None is yielded if that is not known, and nothing for a backward that was given a gradient.
    """
    values, losses, run = step.table("values"), step.is_of(LOSS), step.run
    if losses.any():
        bad = column_of(values, "nan_count") + column_of(values, "inf_count") > 0
        yield from bad[losses].tolist()
        return
    ops = step.table("ops").select(["op_id", "name", "start_ns"])
    name, names = text_codes(ops["name"])
    seeds = np.flatnonzero(np.array([*(one == SEED for one in names), False])[name])
    seeds = seeds[np.argsort(-column_of(ops, "start_ns")[seeds], kind="stable")]
    for seed in column_of(ops, "op_id")[seeds].tolist():
        used = run.find("uses", ["tensor_id"], consumer_op=np.array([seed]))
        read = run.find("tensors", ["shape", "producer_op"], tensor_id=column_of(used, "tensor_id")[:1])
        if read.num_rows and np.prod(read["shape"][0].as_py()) == 1:
            outputs = read_outputs(run, [read["producer_op"][0].as_py()])
            yield next((bool(counts.nan or counts.inf) for _, counts in outputs), None)
