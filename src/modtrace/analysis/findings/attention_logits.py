"""Finds attention whose logits grow from step to step."""

from collections.abc import Callable, Iterator

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.role import OP_OUTPUT
from ...recording.statistics.moments import RAW, StatColumns, read_statistics
from ..tables.columns import Column, column_of, dictionary_codes, find_rows, phase_codes, take
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import Finding
from .names import name_steps_of
from .needs import lacks_ops, require_steps
from .places import place_of_module
from .readers import find_makers, find_read

#: The op that makes probabilities of logits.
_SOFTMAX = "_softmax"

#: How the names of fused attention begin: `_scaled_dot_product_flash_attention_for_cpu` and others.
_FUSED = ("_scaled_dot_product", "scaled_dot_product")

#: What the norms of queries and keys allow is more than what the logits are: queries and keys are hardly ever parallel.
_ALLOWED = 4

#: The number of steps at the beginning and at the end that are compared.
_ENDS = 5


@check("attention-logits", about="logits of attention that grow from step to step", needs="ops and values")
def ATTENTION_LOGITS(run: SampledSteps, most: float = 50, growth: float = 2) -> Iterator[Finding]:
    """Finds the softmax whose largest logit grew most, to more than `most` and by the factor `growth`.

    A softmax of logits that are 50 apart is 1 for one key and 0 for all others, and passes no gradient. Fused attention
    has no logits that could be recorded: there it is the largest logit that the norms of an average query and key
    allow, which must be four times as large.
    """
    if not run.data.table("ops").num_rows:
        raise lacks_ops(run)
    require_steps(len(run.numbers), 2 * _ENDS)
    found = []
    for (module, _, is_fused), largest in _find_largest(run).items():
        begin, end = float(np.median(largest[:_ENDS])), float(np.median(largest[-_ENDS:]))
        limit = most * _ALLOWED if is_fused else most
        if end > limit and end > growth * max(begin, 0):  # NaN is not larger
            found.append((end / limit, end, begin, module, is_fused))
    if not found:
        return
    _, end, begin, module, is_fused = max(found)
    place = place_of_module(run, module)
    others = f", and in {len(found) - 1} more" if len(found) > 1 else ""
    what = (
        f"queries and keys in {place.name} grew: their norms allow logits of {end:.3g}, before of {begin:.3g}"
        if is_fused
        else f"the largest logit of the softmax in {place.name} grew from {begin:.3g} to {end:.3g}"
    )
    yield Finding(
        severity="warning",
        text=what + others,
        remedy="normalize queries and keys (q and k norms), cap the logits, or lower the learning rate",
        rests_on=name_steps_of(run),
        root=place.root,
        path=place.path,
    )


def _find_largest(run: SampledSteps) -> dict[tuple[int, int, bool], Column]:
    """Returns the largest logit in each step, NaN for none.

    The keys are the module that runs a softmax, its number there, and whether it is that of fused attention.
    """
    ops = run.find("ops", ["op_id", "step", "call_id", "phase", "name", "nth"], step=run.numbers)
    codes, names = dictionary_codes(ops["name"])
    parts = [name.split(".") for name in names]
    is_forward = phase_codes(ops["phase"]) == PHASES.index(FORWARD)
    is_softmax = np.array([*(_SOFTMAX in of_name for of_name in parts), False])[codes]
    is_fused = np.array([*(any(part.startswith(_FUSED) for part in of_name) for of_name in parts), False])[
        codes
    ]
    largest: dict[tuple[int, int, bool], Column] = {}
    for fused, is_one, measure in ((False, is_softmax, _read_largest), (True, is_fused, _read_allowed)):
        rows = np.flatnonzero(is_one & is_forward)
        op_id, step, call, nth = (column_of(ops, name)[rows] for name in ("op_id", "step", "call_id", "nth"))
        calls = run.find("calls", ["call_id", "module_id"], call_id=call)
        module = take(column_of(calls, "module_id"), find_rows(column_of(calls, "call_id"), call))
        for owner, number, at, logit in zip(
            module.tolist(),
            nth.tolist(),
            find_rows(run.numbers, step).tolist(),
            measure(run, op_id).tolist(),
            strict=True,
        ):
            of_place = largest.setdefault((owner, number, fused), np.full(len(run.numbers), np.nan))
            of_place[at] = np.fmax(of_place[at], logit)
    return largest


def _read_largest(run: SampledSteps, op_id: Column) -> Column:
    """Returns the largest number that each softmax reads. A mask's -inf does not matter."""
    return _find_read(run, op_id, "self", lambda stats: stats.max)


def _read_allowed(run: SampledSteps, op_id: Column) -> Column:
    """Returns the product of the norms of an average query and an average key by the root of the size of a head."""
    query = find_read(run, op_id, "query")
    tensors = run.find("tensors", ["tensor_id", "shape"], tensor_id=query)
    sizes = np.array([(shape or [0])[-1] for shape in tensors["shape"].to_pylist()])
    size = take(sizes, find_rows(column_of(tensors, "tensor_id"), query))
    norms = [_find_read(run, op_id, slot, lambda stats: stats.rms) for slot in ("query", "key")]
    return np.asarray(norms[0] * norms[1] * np.sqrt(np.maximum(size, 0)))


def _find_read(
    run: SampledSteps, op_id: Column, slot: str, statistic: Callable[[StatColumns], Column]
) -> Column:
    """Returns a statistic of what each op reads in a slot, or of what that is a view of; NaN if it was not measured."""
    found = np.full(len(op_id), np.nan)
    for maker in find_makers(run, op_id, slot):
        values = run.find("values", ["op_id", "site_id", *RAW], op_id=maker)
        is_output = np.isin(column_of(values, "site_id"), run.sites_of(OP_OUTPUT))
        row = find_rows(column_of(values, "op_id")[is_output], maker)
        measured = np.append(statistic(read_statistics(values))[is_output], np.nan)[row]
        found = np.where(np.isnan(found), measured, found)
    return found
