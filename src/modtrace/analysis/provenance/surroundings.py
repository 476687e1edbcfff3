"""Tells how parameters and gradients grew before NaN or infinite values, and whether these reached the loss."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD, OPTIMIZER
from ...recording.protocols import RecordingData
from ...recording.role import LOSS, PARAMETER, PARAMETER_GRAD
from ...recording.triggers.step_tables import GROWTH_STEPS
from ..tables.calls import phases_of
from ..tables.columns import column_of
from ..tables.op_rules import SEED
from ..values.nonfinite import EXP_OVERFLOW, OVERFLOW, SOURCE, Aftermath, Growth, NonFinite
from .indexed_tables import IndexedTables
from .skipped_steps import SkippedSteps
from .step_counts import read_outputs

#: Growth is told with at most so many figures.
_FIGURES = 5

#: Within `GROWTH_STEPS`, healthy training changes the largest parameter less than this. Gradients vary more by
#: themselves.
_LEAST_GROWTH = {PARAMETER: 10.0, PARAMETER_GRAD: 100.0, "loss": 100.0}

_Rows = npt.NDArray[np.void]
_ROW = np.dtype([("step", "i8"), ("of_gradient", "?"), ("is_bad", "?"), ("abs_max", "f8")])


def add_surroundings(
    tables: IndexedTables, skipped: SkippedSteps, before: Sequence[pa.Table], found: NonFinite
) -> NonFinite:
    """Returns the answer with what grew in the steps before, and with what else was not finite from its step on.

    Args:
        tables: the recording.
        skipped: its steps without an optimizer.
        before: further rows of `values`, of earlier steps.
        found: the answer.
    """
    rows = _read_parameters(tables, before, found.step)
    count, trained = skipped.find_many() if _is_skipped(tables.of_step(found.step)) else (0, 0)
    growth = tuple(_find_growth(tables.data, rows, found.step))
    is_explained = found.cause not in (None, OVERFLOW, EXP_OVERFLOW) or found.kind == SOURCE or (count > 0)
    return replace(
        found,
        growth=growth,
        after=replace(_find_aftermath(tables, rows, found.step), skipped=count, trained=trained),
        remedy=found.remedy if is_explained else _remedy_of({each.of for each in growth}) or found.remedy,
    )


def _remedy_of(grown: Collection[str]) -> str | None:
    """Returns what helps against growth; None if neither parameters nor gradients have grown."""
    if PARAMETER in grown:
        clip = "clip the gradients (torch.nn.utils.clip_grad_norm_), " if PARAMETER_GRAD in grown else ""
        return f"training diverges: lower the learning rate, {clip}or warm it up over the first steps"
    if PARAMETER_GRAD in grown:
        return "clip the gradients (torch.nn.utils.clip_grad_norm_), or lower the learning rate"
    return None


def _find_aftermath(tables: IndexedTables, rows: _Rows, step: int) -> Aftermath:
    gradients = rows[(rows["step"] == step) & rows["of_gradient"]]
    later = rows[(rows["step"] >= step) & ~rows["of_gradient"]]
    bad = later[later["is_bad"]]["step"]
    return Aftermath(
        loss=_is_any(find_bad_losses(tables, step)),
        gradients=int(gradients["is_bad"].sum()),
        measured_gradients=len(gradients),
        parameters_step=int(bad.min()) if len(bad) else None,
        last_parameters_step=int(later["step"].max()) if len(later) else None,
    )


def _is_skipped(data: RecordingData) -> bool:
    """Returns whether a step has a backward and no optimizer: only then all steps are looked through for such."""
    phases = phases_of(data)
    return BACKWARD in phases and OPTIMIZER not in phases


def _is_any(losses: Iterable[bool | None]) -> bool | None:
    """Returns whether one is true; None if none is, and one is not known."""
    known = list(losses)
    return True if True in known else None if None in known or not known else False


def _read_parameters(tables: IndexedTables, before: Sequence[pa.Table], step: int) -> _Rows:
    """Returns the rows of parameters and of their gradients that were measured from `GROWTH_STEPS` before a step on."""
    role_of = np.zeros(max(tables.sites, default=-1) + 2, np.int8)
    for number, site in tables.sites.items():
        role_of[number] = {PARAMETER: 1, PARAMETER_GRAD: 2}.get(site.role or "", 0)
    names = ["step", "site_id", "count", "nan_count", "inf_count", "min", "max"]
    found = [np.empty(0, _ROW)]
    every = (*before, tables.data.table("values"))
    for batch in chain.from_iterable(each.select(names).to_batches() for each in every):
        of_step = to_numpy(batch.columns[0], null=-1)
        if not len(of_step) or of_step.max() <= step - GROWTH_STEPS:
            continue
        site_id, count = (to_numpy(column, null=-1) for column in batch.columns[1:3])
        role = role_of[np.clip(site_id, -1, len(role_of) - 1)]
        at = np.flatnonzero((role > 0) & (of_step > step - GROWTH_STEPS) & (count >= 0))
        if len(at):
            nan, inf, low, high = (to_numpy(column, null=0)[at] for column in batch.columns[3:])
            rows = np.empty(len(at), _ROW)
            rows["step"], rows["of_gradient"] = of_step[at], role[at] == 2
            rows["is_bad"] = (nan > 0) | (inf > 0)
            rows["abs_max"] = np.maximum(np.abs(low), np.abs(high))
            found.append(rows)
    return np.concatenate(found)


def _find_growth(data: RecordingData, rows: _Rows, step: int) -> Iterator[Growth]:
    for role in (PARAMETER, PARAMETER_GRAD):
        of_role = rows[(rows["of_gradient"] == (role == PARAMETER_GRAD)) & (rows["step"] <= step)]
        steps = np.unique(of_role["step"])
        largest = {each: _largest(of_role[of_role["step"] == each]) for each in steps.tolist()}
        yield from _to_growth(role, largest, _LEAST_GROWTH[role])
    scalars = data.table("scalars").to_pylist()
    for name in dict.fromkeys(row["name"] for row in scalars if "loss" in row["name"].lower()):
        logged = {row["step"]: abs(row["value"]) for row in scalars if row["name"] == name}
        logged = {each: value for each, value in logged.items() if step - GROWTH_STEPS < each <= step}
        yield from _to_growth(name, logged, _LEAST_GROWTH["loss"])


def _largest(rows: _Rows) -> float:
    return float("inf") if rows["is_bad"].any() else float(rows["abs_max"].max())


def _to_growth(of: str, largest: dict[int, float], least: float) -> Iterator[Growth]:
    finite = [(step, value) for step, value in sorted(largest.items()) if np.isfinite(value)]
    if len(finite) < 2:
        return
    first = min(range(len(finite)), key=lambda at: finite[at][1])
    low, last = finite[first][1], finite[-1][1]
    if low > 0 and last >= least * low and last == max(value for _, value in finite):
        grown = finite[first:]
        at = np.unique(np.linspace(0, len(grown) - 1, _FIGURES).round().astype(int))
        yield Growth(of=of, figures=tuple(grown[each] for each in at.tolist()))


def find_bad_losses(tables: IndexedTables, step: int) -> Iterator[bool | None]:
    """Yields for the backwards of a step whether the tensor at which it began is not finite.

    None if that is not known. Of a backward that was given a gradient nothing is yielded.
    """
    data = tables.of_step(step)
    values = data.table("values")
    losses = np.isin(column_of(values, "site_id"), tables.sites_of(LOSS))
    if losses.any():
        bad = column_of(values, "nan_count") + column_of(values, "inf_count") > 0
        yield from bad[losses].tolist()
        return
    seeds = data.table("ops").select(["op_id", "name", "start_ns"]).to_pylist()
    seeds = [row for row in seeds if row["name"] == SEED]
    for seed in sorted(seeds, key=lambda row: int(row["start_ns"]), reverse=True):
        used = tables.find("uses", ["tensor_id"], consumer_op=np.array([seed["op_id"]]))
        read = tables.find("tensors", ["shape", "producer_op"], tensor_id=column_of(used, "tensor_id")[:1])
        if read.num_rows and np.prod(read["shape"][0].as_py()) == 1:
            outputs = read_outputs(tables, [read["producer_op"][0].as_py()])
            yield next((bool(counts.nan or counts.inf) for _, counts in outputs), None)
