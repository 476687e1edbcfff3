"""Taps give the same rows whether they are compiled or not, and the garbage collector does not see them."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.stat_rows import rows
from modtrace.collect.values.gradient_taps import GradientTap, PythonTap, SuspendedTaps, Tap, tap_tensor

compiled = pytest.mark.skipif(tap_tensor is None, reason="taps are not compiled: there was no C compiler")


class Branches(nn.Module):
    """Returns views that are written to, one tensor twice, and what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.same = nn.Linear(4, 4), nn.Linear(4, 2), nn.Identity()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.same(torch.relu_(self.first(x)))
        return {"y": self.second(hidden + self.same(hidden)), "x": x, "hidden": hidden}


def recorded() -> list[list[str]]:
    """The rows of two steps whose graphs are run backward once more when both have ended."""
    torch.manual_seed(0)
    model = Branches()
    losses = []
    with modtrace.record(model, strict=True, values=modtrace.Capture(roles=["output", "grad_output"])) as rec:
        for _ in range(2):
            given = model(torch.linspace(-1, 1, 24).view(2, 3, 4))
            losses.append(given["y"].square().sum())
            losses[-1].backward(retain_graph=True)
            model.zero_grad()
        for loss in losses:
            loss.backward()
    assert rec.meta.marks == ()
    return [[str(field) for field in row] for row in rows(rec)]


@compiled
def test_what_is_not_compiled_gives_the_same_rows() -> None:
    program = (
        "import json, sys; sys.modules['modtrace.collect.values._taps'] = None\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from collect.values.test_taps import recorded, tap_tensor\n"
        "assert tap_tensor is None\n"
        "print(json.dumps(recorded()))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = recorded()
    assert len(found) > 20
    assert json.loads(ran.stdout.splitlines()[-1]) == found


@compiled
def test_both_have_the_same_attributes() -> None:
    members = {name for name in dir(Tap) if not name.startswith("__")}
    assert members == {name for name in PythonTap.__slots__ if not name.startswith("__")}


@compiled
def test_the_garbage_collector_sees_no_tap() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    with modtrace.record(model):
        loss = model(torch.ones(2, 3, 4)).sum()
        taps = [each for each in gc.get_objects() if isinstance(each, GradientTap)]
        hooked = [
            each
            for each in gc.get_objects()
            if type(each).__name__ == "OrderedDict" and any(map(_is_tap, each))
        ]
        loss.backward()
    assert (taps, hooked) == ([], [])


def _is_tap(key: object) -> bool:
    return isinstance(key, GradientTap)


def test_a_graph_that_dies_takes_no_taps_of_another_thread_with_it() -> None:
    """Nodes of two threads may have the same number."""
    output = torch.ones(2, requires_grad=True) * 2
    suspended, graphs, taps = SuspendedTaps(), [], []
    hooks: OrderedDict[Any, Any] = OrderedDict()
    for _ in range(2):
        graph = SimpleNamespace(alive=True)
        graph.has_graph = lambda graph=graph: graph.alive
        tap = GradientTap(graph, print)  # type: ignore[arg-type]
        tap.number, tap.hooks_ref = output.grad_fn._sequence_nr(), weakref.ref(hooks)
        suspended.add(graph, [tap])  # type: ignore[arg-type]
        graphs.append(graph)
        taps.append(tap)
    assert suspended.rehook(output) == taps
    hooks.clear()
    graphs[0].alive = False
    assert suspended.rehook(output) == taps[1:]
    graphs[1].alive = False
    assert suspended.rehook(output) == []


def test_backwards_of_two_threads_in_ended_steps_get_all_gradients() -> None:
    """Threads number their nodes alike, so that the first backward also hooks what the second one reaches."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    is_in, is_done = [threading.Event() for _ in range(2)], threading.Event()
    losses: list[torch.Tensor] = []

    def build() -> None:
        losses.append(model(torch.ones(2, 4)).sum())
        losses[-1].backward(retain_graph=True)

    def end_step() -> None:
        rec.step()
        rec.table("values")  # writes the step

    def pause(number: int) -> None:
        is_in[number].set()
        if number == 0:
            is_in[1].wait(60)
        else:
            is_done.wait(60)

    def run(number: int) -> None:
        if number:
            is_in[0].wait(60)
        losses[number].backward()
        if not number:
            end_step()
            is_done.set()

    capture = modtrace.Capture(roles=["grad_output"])
    with modtrace.record(model, strict=True, values=capture) as rec:
        for _ in range(2):
            start_all([threading.Thread(target=build)])
        end_step()
        for number, loss in enumerate(losses):
            loss.register_hook(lambda gradient, number=number: pause(number))
        start_all([threading.Thread(target=run, args=(number,)) for number in range(2)])
        rec.step()
    assert Counter(row.call_id for row in rows(rec)) == dict.fromkeys(range(8), 2)


def start_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
