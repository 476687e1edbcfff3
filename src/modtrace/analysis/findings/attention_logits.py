"""Finds attention whose logits grow from step to step."""

from collections.abc import Iterator

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.role import OP_OUTPUT
from ..tables.columns import Column, column_of, dictionary_codes, find_rows, phase_codes, take
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import name_steps_of
from .places import place_of_module

#: The op that makes probabilities of logits.
_SOFTMAX = "_softmax"

#: The largest number of views between a softmax and the op that made its logits.
_MOST_VIEWS = 4

#: The number of steps at the beginning and at the end that are compared.
_ENDS = 5


@check("attention-logits", about="logits of attention that grow from step to step", needs="ops and values")
def ATTENTION_LOGITS(run: SampledSteps, most: float = 50, growth: float = 2) -> Iterator[Finding]:
    """Finds the softmax whose largest logit grew most, to more than `most` and by the factor `growth`.

    A softmax of logits that are 50 apart is 1 for one key and 0 for all others, and passes no gradient. Fused attention
    has no logits that could be recorded.
    """
    if not run.data.table("ops").num_rows:
        raise CannotCheck("no ops were recorded", "--ops (ops=True)")
    if len(run.numbers) < 2 * _ENDS:
        raise CannotCheck(f"there are {len(run.numbers)} comparable steps, and it takes {2 * _ENDS}")
    found = []
    for (module, nth), largest in _find_largest(run).items():
        begin, end = float(np.median(largest[:_ENDS])), float(np.median(largest[-_ENDS:]))
        if end > most and end > growth * max(begin, 0):  # NaN is not larger
            found.append((end, begin, module, nth))
    if not found:
        return
    end, begin, module, _ = max(found)
    place = place_of_module(run, module)
    others = f", and in {len(found) - 1} more" if len(found) > 1 else ""
    yield Finding(
        severity="warning",
        text=f"the largest logit of the softmax in {place.name} grew from {begin:.3g} to {end:.3g}{others}",
        remedy="normalize queries and keys (q and k norms), cap the logits, or lower the learning rate",
        rests_on=name_steps_of(run),
        root=place.root,
        path=place.path,
    )


def _find_largest(run: SampledSteps) -> dict[tuple[int, int], Column]:
    """Returns the largest logit in each step, NaN for none, by the module that runs a softmax and its number there."""
    ops = run.find("ops", ["op_id", "step", "call_id", "phase", "name", "nth"], step=run.numbers)
    codes, names = dictionary_codes(ops["name"])
    is_one = np.array([*(_SOFTMAX in name.split(".") for name in names), False])[codes]
    rows = np.flatnonzero(is_one & (phase_codes(ops["phase"]) == PHASES.index(FORWARD)))
    op_id, step, call, nth = (column_of(ops, name)[rows] for name in ("op_id", "step", "call_id", "nth"))
    logits = _find_maxima(run, op_id)
    calls = run.find("calls", ["call_id", "module_id"], call_id=call)
    module = take(column_of(calls, "module_id"), find_rows(column_of(calls, "call_id"), call))
    largest: dict[tuple[int, int], Column] = {}
    for owner, number, at, logit in zip(
        module.tolist(), nth.tolist(), find_rows(run.numbers, step).tolist(), logits.tolist(), strict=True
    ):
        of_place = largest.setdefault((owner, number), np.full(len(run.numbers), np.nan))
        of_place[at] = np.fmax(of_place[at], logit)
    return largest


def _find_maxima(run: SampledSteps, op_id: Column) -> Column:
    """Returns the maximum of what each op reads first; NaN where it was not measured. A mask's -inf does not matter."""
    maker, maxima = op_id, np.full(len(op_id), np.nan)
    for _ in range(_MOST_VIEWS):
        maker = _find_makers(run, maker)
        values = run.find("values", ["op_id", "site_id", "max"], op_id=maker)
        is_output = np.isin(column_of(values, "site_id"), run.sites_of(OP_OUTPUT))
        row = find_rows(column_of(values, "op_id")[is_output], maker)
        measured = np.append(to_numpy(values["max"], null=np.nan)[is_output], np.nan)[row]
        maxima = np.where(np.isnan(maxima), measured, maxima)
        ops = run.find("ops", ["op_id", "is_view"], op_id=maker)
        is_view = (
            take(column_of(ops, "is_view").astype(np.int64), find_rows(column_of(ops, "op_id"), maker)) == 1
        )
        maker = np.where(is_view & np.isnan(maxima), maker, -1)
    return maxima


def _find_makers(run: SampledSteps, op_id: Column) -> Column:
    """Returns the op that made what each op reads first; -1 for none."""
    uses = run.find("uses", ["consumer_op", "slot", "tensor_id"], consumer_op=op_id)
    is_first = np.array([slot == "self" for slot in uses["slot"].to_pylist()], bool)
    reader, tensor = (column_of(uses, name)[is_first] for name in ("consumer_op", "tensor_id"))
    tensors = run.find("tensors", ["tensor_id", "producer_op"], tensor_id=tensor)
    read = take(tensor, find_rows(reader, op_id))
    return take(column_of(tensors, "producer_op"), find_rows(column_of(tensors, "tensor_id"), read))
