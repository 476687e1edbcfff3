"""The public tracker and its user hooks against what module hooks, node hooks and graph walks say.

On transformers, and on small models with one difficulty each, whose input needs no gradient or is a leaf.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.architectures import ARCHITECTURES
from helpers.small_models import SMALL, loss_in
from helpers.watched_step import Asker, Fired, Told, TrueCall, UserHooks, WatchedStep

SAMPLE = ("GPT-2", "T5", "Mixtral", "Swin")
MODES = {"plain": None, "reentrant": True, "non-reentrant": False}
CASES = [
    pytest.param((name, mode), id=f"{name}-{mode}", marks=[] if name in SAMPLE else [pytest.mark.zoo])
    for name in ARCHITECTURES
    for mode in MODES
]
CASES += [
    pytest.param((name, needs), id=f"{name}-{needs}") for name in SMALL for needs in ("plain", "leaf input")
]


@dataclass
class Result:
    """What a step leaves: all of it must be the same with and without a tracker."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    rng: torch.Tensor


@dataclass
class Case:
    """One architecture: its step alone, under a tracker with hooks, and under a tracker and the truth."""

    small: bool
    checkpoints: bool
    model: nn.Module
    inputs: dict[str, Any]
    plain: Result
    hooked: Result
    watched: Result
    told: list[Told]  # in the step with nothing but the tracker
    step: WatchedStep
    hooks: UserHooks
    asker: Asker

    @property
    def log(self) -> list[Fired | Told]:
        return self.step.log

    def at(self, kind: str) -> dict[TrueCall, int]:
        """Where in the log the hooks of a kind stand."""
        return {call: at for at, each, call in self.step.told_of() if each.kind == kind}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    name, mode = request.param
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small, checkpoints = name in SMALL, "checkpoint" in name or mode in ("reentrant", "non-reentrant")
        if small:
            model, inputs = SMALL[name](), {"x": torch.randn(2, 4, requires_grad=mode == "leaf input")}
        else:
            model, inputs = ARCHITECTURES[name]()
            model.train()
        if checkpoints and not small:
            if not model.supports_gradient_checkpointing:
                pytest.skip(f"{name} offers no gradient checkpointing")
            model.gradient_checkpointing_enable({"use_reentrant": MODES[mode]})
        plain = run(model, inputs)
        with modtrace.ModuleTracker(strict=True) as tracker:
            told = UserHooks(tracker).log
            hooked = run(model, inputs)
        step = WatchedStep(model)
        try:
            with modtrace.ModuleTracker(strict=True) as tracker:
                hooks = UserHooks(tracker, step)
                with step, Asker(tracker, step) as asker:
                    watched = run(model, inputs)
        finally:
            step.close()
        yield Case(small, checkpoints, model, inputs, plain, hooked, watched, told, step, hooks, asker)


def run(model: nn.Module, inputs: dict[str, Any]) -> Result:
    """A step from the same weights and the same seed."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = loss_in(model(**inputs))
    loss.backward()
    rng = torch.get_rng_state()
    return Result(loss.detach(), {name: each.grad for name, each in model.named_parameters()}, rng)


def test_the_step_is_the_same_bit_by_bit(case):
    for other in (case.hooked, case.watched):
        assert same(other.loss, case.plain.loss)
        assert same(other.rng, case.plain.rng)
        assert list(other.gradients) == list(case.plain.gradients)
        wrong = [name for name, each in other.gradients.items() if not same(each, case.plain.gradients[name])]
        assert wrong == []


def test_forward_hooks_run_once_around_each_call_and_each_recompute(case):
    assert case.hooks.forward == case.step.forward_truth
    assert case.hooks.unnamed == []
    recomputed = sum(phase == "recompute" for _, _, phase in case.hooks.forward)
    assert (recomputed > (0 if case.small else 20)) == case.checkpoints


def test_every_op_has_the_callers_the_call_and_its_number_that_the_graph_says(case):
    assert case.asker.wrong == []
    asked = case.asker.asked
    assert case.small or (asked["forward"] > 80 and asked["backward"] > 100)
    assert (asked.get("recompute", 0) > (0 if case.small else 50)) == case.checkpoints


def test_backward_hooks_run_once_for_each_call_with_a_node_or_a_gradient_passing(case):
    expected = {call for call in case.step.calls if case.step.runs(call)}
    told = case.step.told_of()
    assert Counter((each.kind, call) for _, each, call in told) == Counter(
        (kind, call) for call in expected for kind in ("pre", "post")
    )
    assert len(expected) > (1 if case.small else 10)
    unknown = {call for _, each, call in told if each.call[1] is None}
    for call in unknown:  # not known: a module called twice in a `forward` that is repeated without its hooks
        assert call.parent is None and call.original is not None
        assert sum(each.module is call.module for each in call.original.parent.children) > 1


def test_a_call_begins_directly_before_its_first_node_and_ends_before_any_other(case):
    begun, ended = case.at("pre"), case.at("post")
    ran: dict[TrueCall, list[int]] = {}
    for at, each in enumerate(case.log):
        if isinstance(each, Fired) and each.node is not None:
            for call in each.calls:
                ran.setdefault(call, []).append(at)
    wrong = []
    for call, at in ran.items():
        between = case.log[begun[call] : at[0]]
        if begun[call] > at[0] or any(isinstance(each, Fired) for each in between):
            wrong.append(("begin", call, between))
        after = [each for each in case.log[at[-1] + 1 : ended[call]] if isinstance(each, Fired)]
        if ended[call] < at[-1] or any(each.node is not None for each in after):
            wrong.append(("end", call, after))
    assert wrong == []
    assert set(ran) == {call for call in case.step.calls if call.nodes}


def test_a_call_that_gradients_pass_stands_where_its_nodes_would(case):
    begun, ended = case.at("pre"), case.at("post")
    for call in begun:
        if call.nodes:
            continue
        assert not any(isinstance(each, Fired) for each in case.log[begun[call] : ended[call]]), call
        for at, each in enumerate(case.log):
            if isinstance(each, Fired) and each.op is None and each.inside[-1:] == inside(call):
                made_later = each.node.made > call.left
                assert made_later == (at < begun[call]), (call, each)


def test_calls_begin_and_end_inside_the_calls_around_them(case):
    begun, ended = case.at("pre"), case.at("post")
    batch, at_batch = 0, {}
    for at, each in enumerate(case.log):
        if not isinstance(each, Told) or each.kind == "pre":
            batch += 1
        at_batch[at] = batch
    for call in begun:
        around = around_of(call)
        if around is not None:
            assert begun[around] < begun[call], (call, around)
            assert at_batch[ended[call]] <= at_batch[ended[around]], (call, around)
    batches: dict[int, list[TrueCall]] = {}
    for call, at in ended.items():
        batches.setdefault(at_batch[at], []).append(call)
    for told in batches.values():
        innermost_first = sorted(told, key=begun.__getitem__, reverse=True)
        fed = [call for call in reversed(innermost_first) if call.inputs]
        assert told == fed + [call for call in innermost_first if not call.inputs]


def test_the_begin_is_told_what_the_first_node_receives(case):
    checked = 0
    received = {each.node: each.received for each in case.log if isinstance(each, Fired) and each.op is None}
    for call, at in case.at("pre").items():
        if call.nodes:
            first = next(each for each in case.log[at:] if isinstance(each, Fired))
            told, expected = case.log[at].gradients, received[first.node]
            assert len(told) == len(expected), call
            assert all(map(same, told, expected)), call
            checked += 1
    assert checked > (0 if case.small else 10)


def test_the_end_is_told_the_sum_over_the_edges_that_leave_the_call(case):
    several = 0
    for call, at in case.at("post").items():
        told, expected = case.log[at].by_slot, case.step.gradients_of(call)
        if not call.nodes:
            continue
        assert list(told) == list(expected), call
        wrong = [slot for slot, gradient in told.items() if not same(gradient, expected[slot])]
        assert wrong == [], (call, wrong)
        several += sum(each is not None for each in told.values())
    assert case.small or several > 10


def test_gradients_are_the_same_when_nothing_but_the_tracker_is_there(case):
    watched = [each for each in case.log if isinstance(each, Told)]
    assert [(each.kind, each.call) for each in case.told] == [(each.kind, each.call) for each in watched]
    for alone, each in zip(case.told, watched, strict=True):
        assert list(alone.by_slot) == list(each.by_slot), each.call
        assert all(map(same, alone.by_slot.values(), each.by_slot.values())), each.call


def test_a_module_recomputed_twice_in_one_checkpoint_has_no_wrong_number(seeded):
    """As in Swin of transformers with a dropout above 0: where the checkpoint began cannot be seen while it runs."""
    model = Twice(reentrant=False)
    x = torch.ones(2, 4, requires_grad=True)
    found = []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(
            lambda module, args: found.append((tracker.phase, tracker.call.path, tracker.call.nth))
        )
        model(x).sum().backward()
    assert found == [
        ("forward", "", 0),
        ("forward", "drop", 0),
        ("forward", "l", 0),
        ("forward", "drop", 1),
        ("recompute", "drop", None),
        ("recompute", "l", 0),
        ("recompute", "drop", None),
    ]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit for bit; None is only like None."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.equal(other)


def inside(call: TrueCall) -> tuple[Any, ...]:
    """The node that the call's backward runs in: that of a reentrant checkpoint."""
    return () if call.inside is None else (call.inside,)


def around_of(call: TrueCall) -> TrueCall | None:
    """The call around it; of a recompute's outermost the one whose checkpoint asked for it."""
    if call.parent is not None or call.inside is None:
        return call.parent
    return call.inside.call


class Twice(nn.Module):
    """Calls one module twice in a checkpoint that repeats its own `forward`."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.l = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.l(self.drop(x)))
