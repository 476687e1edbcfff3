"""Finds NaN and infinite values that were not meant."""

from collections.abc import Iterator

import numpy as np

from ...errors import NothingRecordedError
from ...recording.module_path import join
from ...recording.options.capture import DEFAULT_ROLES
from ...recording.role import OF_PARAMETERS, OUTPUT
from ..provenance.search import GIVEN, find_all
from ..provenance.skipped_steps import SkippedSteps
from ..tables.columns import column_of, find_rows, take
from ..tables.placement import name_in_text
from ..tables.sampled_steps import SampledSteps
from ..values.nonfinite import PRODUCER, NonFinite, describe_counts
from .check import check
from .finding import CannotCheck, Finding, Findings
from .needs import lacks_values
from .places import describe_tensor, place_of_module

_MORE = "modtrace nonfinite RUN (first_nonfinite()) shows the way they took"


@check("nonfinite", about="NaN and infinite values that are no masks", needs="values")
def NONFINITE(run: SampledSteps) -> Iterator[Finding]:
    """Finds what made the first NaN or infinite values."""
    try:
        found = next(find_all(run.data), None)
    except NothingRecordedError as error:
        lack = lacks_values(run, "values", *DEFAULT_ROLES)
        raise (lack if lack.remedy else CannotCheck(str(error))) from error
    if found is not None:
        yield _to_finding(run, found)


def find_bad_step(findings: Findings) -> int | None:
    """Returns the step of the first NaN or infinite values that were not meant; None if none were found."""
    return next((found.step for found in findings.findings if found.check == NONFINITE.name), None)


def _to_finding(run: SampledSteps, found: NonFinite) -> Finding:
    values = describe_counts(found.nan_count, found.inf_count, are_negative=found.are_negative)
    remedy, may_be_given, _ = (found.remedy or "").partition(f"; {GIVEN}")
    evidence = [f"{found.cause}: {found.hint}" if found.cause else found.hint] if found.hint else []
    if may_be_given:
        evidence += [*_describe_before(run, found)] or [GIVEN]
    if found.step in SkippedSteps(run):
        evidence.append(f"no optimizer used the gradients of step {found.step}")
    return Finding(
        severity="error",
        text=f"{_describe_place(run, found)} {values} in step {found.step}"
        + (f", at {found.source_line}" if found.source_line else ""),
        remedy="; ".join(filter(None, [remedy, _MORE])),
        evidence=tuple(evidence),
        root=found.root,
        path=found.path,
        op=found.op,
        step=found.step,
    )


def _describe_place(run: SampledSteps, found: NonFinite) -> str:
    """Returns what made the values, or holds them first, with a verb."""
    role, root, path = found.role or "", found.root or "", found.path or ""
    if found.op is not None:
        where = "outside of modules" if found.path is None else f"in {name_in_text(run.data, root, path)}"
        return f"{found.op} {where} {'makes' if found.kind == PRODUCER else 'is the first op to meet'}"
    is_parameter = role in OF_PARAMETERS
    name = name_in_text(run.data, root, join(path, found.slot) if is_parameter else path)
    tensor = describe_tensor(role, name if is_parameter or not name else name + found.slot, found.slot)
    return f"{tensor} is the first that is not finite:"


def _describe_before(run: SampledSteps, found: NonFinite) -> Iterator[str]:
    """Yields what was finite before a module returned the values: it need not have made them itself."""
    outputs = run.values(OUTPUT, steps=np.array([found.step]))
    calls = run.rows("calls", np.array([found.step]))
    nan_count, inf_count = (column_of(outputs.table, name) for name in ("nan_count", "inf_count"))
    is_finite = nan_count + inf_count == 0
    parent = take(column_of(calls, "parent_call_id"), find_rows(column_of(calls, "call_id"), outputs.call_id))
    order = np.argsort(outputs.moment, kind="stable")
    bad = order[~is_finite[order] & (outputs.call_id[order] >= 0)][:1]
    if found.role != OUTPUT or not len(bad) or parent[bad[0]] < 0:
        return
    [row] = bad.tolist()
    caller = run.find("calls", ["module_id"], call_id=parent[bad])
    name = name_in_text(run.data, found.root or "", found.path or "")
    above = place_of_module(run, int(column_of(caller, "module_id")[0])).name
    before = order[(parent[order] == parent[row]) & (outputs.moment[order] < outputs.moment[row])]
    if len(before) and is_finite[before[-1]]:
        last = place_of_module(run, int(outputs.module[before[-1]])).name
        yield f"what {last} returned before is finite: {name} made them, or {above} between {last} and {name}"
    elif not len(before):
        yield f"{name} is the first module that {above} calls: it made them, or was given them"
