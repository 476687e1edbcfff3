"""torch.compile beside a recording of ops: it compiles as often as without, and runs what it has compiled."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import modtrace
from collect.compile.test_compiled import RUNS, Training, outcome, plain_outcome, start_over
from collect.ops.test_ops_tensors import op_rows
from helpers.twins import state

BACKENDS = pytest.mark.parametrize(("backend", "values"), [("eager", None), ("aot_eager", "stats")])

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


class Counted:
    """A compiled model that counts how often it was compiled, and how often the compiled code ran."""

    def __init__(self, backend: str) -> None:
        self.ran = 0
        self.counter = CompileCounterWithBackend(backend)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.model, self.called = model, torch.compile(model, backend=self._compile)

    def _compile(self, graph, inputs):
        compiled = self.counter(graph, inputs)

        def run(*args):
            self.ran += 1
            return compiled(*args)

        return run

    def step(self) -> None:
        self.called(torch.ones(2, 4)).sum().backward()
        self.model.zero_grad()

    @property
    def counts(self) -> tuple[int, int]:
        """Compiled so often, run so often."""
        return self.counter.frame_count, self.ran


@BACKENDS
def test_model_compiled_before_is_not_compiled_again(backend, values):
    counted = Counted(backend)
    counted.step()
    with modtrace.record(strict=True, ops=True, values=values) as rec:
        counted.step()
        counted.step()
    counted.step()
    assert counted.counts == (1, 4)
    assert rec.meta.marks == ()


@BACKENDS
def test_model_compiled_inside_is_compiled_once_there(backend, values):
    counted = Counted(backend)
    with modtrace.record(strict=True, ops=True, values=values) as rec:
        for _ in range(3):
            counted.step()
    assert counted.counts == (1, 3)
    assert rec.meta.marks == ()


def test_what_was_compiled_inside_is_compiled_once_more_afterwards_and_never_again():
    """Dynamo guards on the hooks that were there, as it does without ops."""
    counted = Counted("eager")
    counts = []
    for recorded in (True, False, True, False):
        with modtrace.record(strict=True, ops=True, values=None) if recorded else nullcontext():
            counted.step()
        counts.append(counted.counts[0])
    assert counts == [1, 2, 2, 2]


@pytest.mark.compile
def test_model_compiled_by_inductor_runs_compiled_and_its_ops_outside_of_kernels_are_seen():
    counted = Counted("inductor")
    counted.step()
    with modtrace.record(strict=True, ops=True, values=None) as rec:
        counted.step()
    assert counted.counts == (1, 2)
    forward = {row["name"] for row in op_rows(rec) if row["phase"] == "forward"}
    assert forward == {"aten.addmm.out"}  # the activation is in a kernel


def test_compiled_training_gives_the_same_bits_graphs_and_breaks():
    outcomes = []
    for recorded in (False, True):
        start_over()
        training = Training("aot_eager", fullgraph=True)
        with modtrace.record(strict=True, ops=True) if recorded else nullcontext():
            training.run(2)
        outcomes.append(outcome([training.losses, state(training.model)]))
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0].graphs, outcomes[0].breaks) == (1, {})


#: Where a mode for ops may be in the way; the others are compiled as they are without ops.
RUNS_WITH_OPS = [
    run
    for run in RUNS
    if run.__name__
    in (
        "graph_breaks",
        "compiled_autograd",
        "export",
        "proxy_tracing",
        "training_with_fake_tensors",
        "jit_tracing",
    )
]


@pytest.mark.parametrize("run", RUNS_WITH_OPS, ids=lambda run: run.__name__)
def test_recording_ops_changes_nothing_of(run):
    plain = plain_outcome(run)
    start_over()
    with modtrace.record(strict=True, ops=True, values=None) as rec:
        recorded = outcome(run())
    assert recorded == plain
    assert rec.meta.marks == ()
