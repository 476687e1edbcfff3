"""Finds ops that drop out while their model is in eval()."""

import json
from collections.abc import Iterator

import numpy as np

from ...recording.suggestions import count_of
from ..tables.columns import column_of, dictionary_codes, find_rows
from ..tables.ops import bare_name
from ..tables.placement import read_modules
from ..tables.sampled_steps import MOST_STEPS, SampledSteps
from .check import check
from .finding import Finding
from .needs import lacks_ops
from .places import place_of_module

#: Ops that drop out if one of their arguments says so, and that argument.
_WITH_ARGUMENT = {"native_dropout": "train", "_fused_dropout": "p", "dropout": "train"}

#: The argument of fused attention.
_ATTENTION, _PROBABILITY = "scaled_dot_product", "dropout_p"

#: Draws the mask where nothing is fused.
_DRAWS = {"bernoulli_", "bernoulli"}


@check("dropout-in-eval", about="ops that drop out while their model is in eval()", needs="ops")
def DROPOUT_IN_EVAL(run: SampledSteps) -> Iterator[Finding]:
    """Finds a dropout that does not look at `training`, as a functional one may."""
    if not run.data.table("ops").num_rows:
        raise lacks_ops(run)
    evaluation = np.setdiff1d(column_of(run.steps, "step"), run.training)[-MOST_STEPS:].astype(np.int64)
    calls = run.find("calls", ["call_id", "step", "module_id", "parent_call_id", "training"], step=evaluation)
    is_outermost = column_of(calls, "parent_call_id") < 0
    training = column_of(calls, "training").astype(np.int64)
    trains = np.unique(column_of(calls, "step")[is_outermost & (training != 0)])
    steps = np.setdiff1d(np.unique(column_of(calls, "step")), trains)
    ops = run.find("ops", ["step", "call_id", "name", "args"], step=steps)
    call = find_rows(column_of(calls, "call_id"), column_of(ops, "call_id"))
    # A module of its own that is in train() drops out as it is told to.
    drops = np.array([*_drop_out(ops["name"], ops["args"])], bool) & (call >= 0)
    drops &= np.where(call >= 0, training[call], 1) != 1 if len(call) else drops
    rows = np.flatnonzero(drops)
    if not len(rows):
        return
    modules = read_modules(run.data)
    found = dict.fromkeys(column_of(calls, "module_id")[call[rows]].tolist())
    place = place_of_module(run, next(iter(found)))
    count = len(np.unique(column_of(ops, "step")[rows]))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    name = str(ops["name"][int(rows[0])].as_py())
    yield Finding(
        severity="warning",
        text=f"{place.name}{more} drops out in {count_of(count, 'evaluation step')}, though the model is in eval()",
        remedy="hand training=self.training to the dropout, or 0.0 for dropout_p if not self.training",
        evidence=(f"the op: {name}, in {modules[next(iter(found))].type}",),
        rests_on=count_of(len(steps), "evaluation step"),
        op=name,
        step=int(column_of(ops, "step")[rows[0]]),
        root=place.root,
        path=place.path,
    )


def _drop_out(names: object, args: object) -> Iterator[bool]:
    """Yields for each op whether it drops out."""
    codes, texts = dictionary_codes(names)
    bare = [bare_name(text) for text in texts]
    templates, templates_of = dictionary_codes(args)
    for name, template in zip(codes.tolist(), templates.tolist(), strict=True):
        of = bare[name] if name >= 0 else ""
        if of in _DRAWS:
            yield True
        elif of in _WITH_ARGUMENT or _ATTENTION in of:
            argument = _PROBABILITY if _ATTENTION in of else _WITH_ARGUMENT[of]
            yield template >= 0 and _is_set(templates_of[template], argument)
        else:
            yield False


def _is_set(template: str, argument: str) -> bool:
    try:
        return bool(json.loads(template).get(argument))
    except (ValueError, AttributeError):
        return False
