"""Finds losses that take probabilities for logits."""

from collections.abc import Iterator

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ..tables.columns import column_of, dictionary_codes, find_rows, phase_codes, take
from ..tables.ops import bare_name
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import Finding
from .names import name_steps_of
from .needs import lacks_ops
from .places import place_of_module
from .readers import find_makers

#: Losses that make probabilities of logits themselves, by their ops, and the op that has made some before by mistake.
#: A softmax of a softmax is no such thing: routers and attention compute it.
_LOSSES = {
    "log_softmax": ("softmax", "cross_entropy"),
    "binary_cross_entropy_with_logits": ("sigmoid", "binary_cross_entropy_with_logits"),
}


@check("double-softmax", about="losses that take probabilities for logits", needs="ops")
def DOUBLE_SOFTMAX(run: SampledSteps) -> Iterator[Finding]:
    """Finds a softmax before `cross_entropy`, and a sigmoid before `binary_cross_entropy_with_logits`.

    Such a loss is nearly flat: of ten classes it lies between 1.46 and 2.46, whatever the logits are.
    """
    if not run.data.table("ops").num_rows:
        raise lacks_ops(run)
    ops = run.find("ops", ["op_id", "call_id", "phase", "name"], step=run.numbers[-1:])
    codes, names = dictionary_codes(ops["name"])
    name = np.array([*map(bare_name, names), ""], object)[codes]
    op_id = column_of(ops, "op_id")
    # What a loss outside of modules computes has no phase.
    is_forward = np.isin(phase_codes(ops["phase"]), [PHASES.index(FORWARD), -1])
    for loss, (mistaken, function) in _LOSSES.items():
        for maker in find_makers(run, op_id[(name == loss) & is_forward], "self"):
            at = find_rows(op_id, maker)
            found = at[(at >= 0) & (name[at] == mistaken)]
            if len(found):
                call = column_of(ops, "call_id")[found[:1]]
                calls = run.find("calls", ["call_id", "module_id"], call_id=call)
                module = take(column_of(calls, "module_id"), find_rows(column_of(calls, "call_id"), call))
                place = place_of_module(run, int(module[0]))
                where = f"in {place.name}" if place.root is not None else "outside of modules"
                yield Finding(
                    severity="warning",
                    text=f"{function} is given what a {mistaken} {where} made, and takes it for logits",
                    remedy=f"leave out the {mistaken} in training: {function} has its own",
                    rests_on=name_steps_of(run, run.numbers[-1:]),
                    root=place.root,
                    path=place.path,
                    step=int(run.numbers[-1]),
                )
                break
