"""Step, phase and call of each stash, as a recording of the same run has them."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.tensor_tracker import Event, Stash, Tracker, track
from zoo import TiedGPT, Twice


def places(tracker: Tracker, name: str | None = None) -> list[tuple[Any, ...]]:
    """Name, phase, step and call of the stashes."""
    chosen = [each for each in tracker if name in (None, each.name)]
    return [(each.name, each.phase, each.step, each.call) for each in chosen]


def tokens() -> Tensor:
    return torch.randint(0, 17, (2, 8))


def test_module_called_twice_tells_its_calls() -> None:
    model = Twice()
    with track(model, strict=True) as tracker:
        model(torch.ones(1, 4)).sum().backward()
    assert places(tracker) == [
        ("layer", "forward", 0, 0),
        ("layer", "forward", 0, 1),
        ("", "forward", 0, 0),
        ("", "backward", 0, 0),
        ("layer", "backward", 0, 1),
        ("layer", "backward", 0, 0),
    ]


def test_steps_of_inference_are_counted() -> None:
    model = nn.Linear(2, 2)
    with track(model, strict=True) as tracker, torch.no_grad():
        for _ in range(100):
            model(torch.ones(2))
    assert [each.step for each in tracker] == [*range(100)]


def test_siamese_calls_are_of_one_step_once_the_backward_has_joined_them() -> None:
    model = nn.Linear(2, 2)
    with track(model, strict=True) as tracker:
        for _ in range(2):
            left, right = model(torch.ones(2)), model(torch.ones(2))
            (left - 2 * right).sum().backward()
            model.zero_grad()
    assert places(tracker) == [
        ("", phase, step, call)
        for step in range(2)
        for phase, call in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))
    ]


def test_gradients_cleared_between_forward_and_backward_divide_the_step() -> None:
    model = nn.Linear(2, 2)
    with track(model, strict=True) as tracker:
        for _ in range(3):
            loss = model(torch.ones(2)).sum()
            model.zero_grad()
            loss.backward()
    assert [(each.step, each.call) for each in tracker] == [(step, 0) for step in (0, 0, 1, 1, 2, 2)]


def test_forward_that_no_backward_follows_ends_in_the_step_that_was_open() -> None:
    model = nn.Linear(2, 2)
    with track(model, strict=True) as tracker:
        model(torch.ones(2)).sum().backward()
        model(torch.ones(2))
    assert [(each.step, each.call) for each in tracker] == [(0, 0), (0, 0), (0, 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_told_from_the_forward_it_repeats(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = TiedGPT(layers=2)
    with track(model, strict=True, include=[r"^blocks\.\d$", "fc"]) as tracker:
        model(tokens(), reentrant=reentrant).sum().backward()
    forward = [("blocks.0.fc", "forward", 0, 0), ("blocks.0", "forward", 0, 0)]
    forward += [("blocks.1.fc", "forward", 0, 0), ("blocks.1", "forward", 0, 0)]
    again = [[(f"blocks.{n}.fc", "recompute", 0, 0), (f"blocks.{n}", "recompute", 0, 0)] for n in (1, 0)]
    found = places(tracker)
    assert found[:4] == forward
    assert [each for each in found if each[1] == "recompute"] == [
        each for each in (again[0] + again[1]) if reentrant or each[0].endswith("fc")
    ]
    inside = [each for each in found if each[1] == "backward" and each[0].endswith("fc")]
    assert inside == [("blocks.1.fc", "backward", 0, 0), ("blocks.0.fc", "backward", 0, 0)]


def test_region_called_twice_is_recomputed_as_its_calls() -> None:
    model = Twice()

    def run(x: Tensor) -> Tensor:
        x = checkpoint(model, x, use_reentrant=False)
        return checkpoint(model, x, use_reentrant=False)

    with track(model, strict=True) as tracker:
        run(torch.ones(1, 4, requires_grad=True)).sum().backward()
    forward = [each for each in places(tracker, "layer") if each[1] == "forward"]
    again = [each for each in places(tracker, "layer") if each[1] == "recompute"]
    assert forward == [("layer", "forward", 0, call) for call in range(4)]
    # The last call of a region is not run to its end: torch stops once it has what backward needs.
    assert again == [("layer", "recompute", 0, call) for call in (2, 0)]


def test_module_of_a_region_whose_other_modules_are_not_tracked_is_recomputed_as_its_calls() -> None:
    first, second = nn.Tanh(), nn.Linear(2, 2)

    def run(x: Tensor) -> Tensor:
        return first(second(first(second(x))))

    with Tracker(strict=True) as tracker:
        tracker.register(second, "second")
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(run, x, use_reentrant=False)
        x.sum().backward()
    assert places(tracker) == [
        *(("second", "forward", 0, call) for call in range(4)),
        *(("second", "recompute", 0, call) for call in (2, 3)),
        *(("second", "backward", 0, call) for call in (3, 2)),
        *(("second", "recompute", 0, call) for call in (0, 1)),
        *(("second", "backward", 0, call) for call in (1, 0)),
    ]


def test_unrelated_calls_in_the_backward_of_a_custom_function_are_backward() -> None:
    inner = nn.Linear(2, 2)

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            inner(gradient)
            return gradient * 2

    with track(inner, strict=True) as tracker:
        Custom.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert places(tracker) == [("", "backward", None, None)]
    assert not tracker[0].grad


def test_steps_and_calls_are_those_of_a_recording() -> None:
    torch.manual_seed(0)
    model = TiedGPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with modtrace.record(model, strict=True, values=None) as rec, track(model, strict=True) as tracker:
        for step in range(4):
            for _ in range(step % 2 + 1):
                model(tokens(), reentrant=None if step < 2 else step % 2 == 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(tokens())
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    calls = rec.table("calls").to_pylist()
    recorded = [
        (paths[row["module_id"]], row["phase"], row["step"], row["nth"])
        for row in calls
        if row["phase"] in ("forward", "recompute") and not row["raised"]
    ]
    found = [each for each in places(tracker) if each[1] != "backward"]
    assert len(found) > 100
    assert not Counter(found) - Counter(recorded)
    # A call in which a recompute stops early returns nothing that could be stashed.
    assert {each[1] for each in Counter(recorded) - Counter(found)} == {"recompute"}
    forwards = {each for each in found if each[1] == "forward"}
    assert {(name, "forward", *where) for name, phase, *where in places(tracker)} <= forwards


def test_event_knows_its_place_and_a_stash_with_a_place_of_its_own_keeps_it() -> None:
    events: list[Event] = []

    def keep(event: Event) -> Stash:
        events.append(event)
        return Stash(event.name, event.type, event.grad, None, step=40, phase="mine", call=2)

    model = nn.Linear(2, 2)
    with track(model, stash=keep, strict=True) as tracker:
        model(torch.ones(2)).sum().backward()
    assert [(each.step, each.phase, each.call) for each in events] == [(0, "forward", 0), (0, "backward", 0)]
    assert [(each.step, each.phase, each.call) for each in tracker] == [(40, "mine", 2)] * 2


def test_what_is_no_stash_is_kept_as_it_is() -> None:
    model = nn.Linear(2, 2)
    with track(model, stash=lambda event: event.name, strict=True) as tracker:
        model(torch.ones(2)).sum().backward()
    assert list(tracker) == ["", ""]


def test_tracker_entered_in_a_forward_stashes_what_runs_inside() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with track(self, strict=True) as self.tracker:
                return self.inner(x)

    model = Outer()
    model(torch.ones(2))
    assert places(model.tracker) == [("inner", "forward", 0, 0)]
    with track(model, strict=True):  # calls are followed already when the inner one begins
        model(torch.ones(2))
    assert places(model.tracker) == [("inner", "forward", 0, 0)]


def test_numbers_of_steps_are_final_when_modules_are_not_registered_any_more() -> None:
    """Two calls wait for a backward until then."""
    model = nn.Linear(2, 2)
    with modtrace.record(model, strict=True, values=None) as rec:
        tracker = track(model, strict=True)
        outputs = [model(torch.ones(2)), model(torch.ones(2))]
        outputs.pop().sum().backward()
        outputs.append(model(torch.ones(2)))
        model.zero_grad()
        tracker.unregister()
    assert [(each.step, each.call) for each in tracker] == [(0, 0), (1, 0), (1, 0), (1, 1)]
    calls = rec.table("calls").to_pylist()
    assert [(row["step"], row["nth"]) for row in calls] == [(0, 0), (1, 0), (1, 1)]


def test_steps_are_counted_from_zero_when_modules_are_registered_again() -> None:
    model = nn.Linear(2, 2)
    tracker = Tracker(strict=True)
    for _ in range(2):
        tracker.register_all(model)
        model(torch.ones(2)).sum().backward()
        model.zero_grad()
        tracker.unregister()
        tracker.unregister()
    assert places(tracker) == [("", "forward", 0, 0), ("", "backward", 0, 0)] * 2
