"""Finds the module and the op in which the run failed, with the shapes that it was given."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...recording.meta import RUN_ENDED
from ...recording.out_of_memory import is_out_of_memory
from ..tables.calls import Calls, read_calls
from ..tables.columns import column_of
from ..tables.placement import Placer
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .places import name_place

#: Errors by which somebody ends a run that is well.
_WANTED = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "Terminated")

_COMPARE = "look at the line that raised it, and compare what it was given there with a step that ran"
_DETACH = "detach() what is carried from one step to the next (a hidden state, a running sum)"

#: Patterns of what errors of ops say, and what helps. The first that fits counts.
_REMEDIES = (
    (re.compile("backward through the graph a second time"), _DETACH),
    (
        re.compile("found invalid values"),  # what torch.distributions says of parameters and samples
        "look for NaN or a value outside of the allowed range: modtrace nonfinite names what made the first NaN",
    ),
    (
        re.compile(r"out of (bounds|range)"),
        "look for a label or an index that is negative, or not below the size that the op was given",
    ),
    (re.compile(r"dtype|scalar type"), "bring what it was given to one dtype (.to(), torch.autocast)"),
    (
        re.compile(r"shape|size|dimension|mat1"),
        "compare the shapes with those of a step that ran, or of the layer before",
    ),
)


class RaisedCall(NamedTuple):
    """The innermost call that the error that ended the run has left."""

    calls: Calls
    call: int  # its row there
    step: int


@check("failed", about="the call and the op that raised the error that ended the run")
def FAILED(run: SampledSteps) -> Iterator[Finding]:
    """Finds the innermost call that the error left; a backward, an optimizer or the loop may have raised it, too."""
    mark = next((mark for mark in run.data.meta.marks if mark.startswith(RUN_ENDED)), None)
    has_calls = run.data.table("calls").num_rows > 0
    if mark is None and not has_calls:
        raise CannotCheck("no calls were recorded")
    if mark is None or is_out_of_memory(mark):
        return
    error = mark.removeprefix(RUN_ENDED).split("; step ")[0].strip()
    if error.partition(":")[0] in _WANTED:
        return
    raised = find_raised(run) if has_calls else None
    if raised is None:
        last = column_of(run.steps, "step").max(initial=-1)
        after = f"in step {last} or after it" if last >= 0 else "before its first step ended"
        yield Finding(
            severity="error",
            text=f"the run fails outside of modules, {after}: {error}",
            remedy=_advise(run, error, None),
        )
        return
    calls, call, step = raised
    place = calls.name(int(calls.where[call]))
    op = _find_op(run, calls, call, step)
    op_name = None if op is None else op["name"]
    yield Finding(
        severity="error",
        text=f"{name_place(run, place)} fails in step {step}: {error}",
        remedy=_advise(run, error, op),
        evidence=() if op is None else (describe_op(run, op),),
        root=place.root,
        path=place.path,
        op=op_name,
        step=step,
    )


def _advise(run: SampledSteps, error: str, op: Mapping[str, Any] | None) -> str:
    """Returns what helps against an error: what its words suggest, and how to learn more if that is not recorded."""
    remedy = next((remedy for pattern, remedy in _REMEDIES if pattern.search(error)), _COMPARE)
    if remedy == _DETACH or op is not None or run.data.meta.options.get("ops"):
        return remedy
    return f"{remedy}; record --ops (ops=True) names the op and what it was given"


def find_raised(run: SampledSteps) -> RaisedCall | None:
    """Returns the innermost call of the last step that ended by an exception; None if there is none."""
    step = int(column_of(run.data.table("calls"), "step").max(initial=0))
    calls = read_calls(run.rows("calls", np.array([step])), Placer(run.data), step)
    raised = np.flatnonzero(calls.raised & calls.in_step)
    return RaisedCall(calls, int(raised[np.argmax(calls.start_ns[raised])]), step) if len(raised) else None


def _find_op(run: SampledSteps, calls: Calls, call: int, step: int) -> Mapping[str, Any] | None:
    """Returns the row of the last op that raised in a call."""
    ops = run.find("ops", call_id=calls.call_id[call : call + 1])
    rows: list[Mapping[str, Any]] = [row for row in ops.to_pylist() if row["raised"] and row["step"] == step]
    return rows[-1] if rows else None


def describe_op(run: SampledSteps, op: Mapping[str, Any]) -> str:
    """Returns the op with the shapes and dtypes of its tensors: `aten.addmm.default(self: [2], mat1: [2, 4], ...)`."""
    uses = run.find("uses", consumer_op=np.array([op["op_id"]])).to_pylist()
    ids = np.array([use["tensor_id"] for use in uses], np.int64)
    tensors = {row["tensor_id"]: row for row in run.find("tensors", tensor_id=ids).to_pylist()}
    given = []
    for use in uses:
        tensor = tensors.get(use["tensor_id"])
        if tensor is not None:
            given.append(f"{use['slot']}: {tensor['shape']} {tensor['dtype'] or ''}".rstrip())
    others = [f"{name}: {value}" for name, value in _read_args(op["args"]).items() if "$" not in str(value)]
    line = f" at {op['source']}" if op["source"] else ""
    return f"{op['name']} was given {', '.join([*given, *others]) or 'nothing'}{line}"


def _read_args(args: str | None) -> Mapping[str, Any]:
    try:
        read = json.loads(args or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
