"""torch.compile does the same under a recording: same bits, same graphs, no break and no recompilation more."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import modtrace
import zoo
from helpers.twins import bits, state
from zoo import TiedGPT

WAYS = pytest.mark.parametrize(
    "options",
    [
        {"backend": "aot_eager", "fullgraph": True},
        {"backend": "eager", "per_block": True},
    ],
    ids=["full graph", "blocks by eager"],
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


class Outcome(NamedTuple):
    """What a run computed, and what Dynamo did for it."""

    bits: list[Any]
    graphs: int
    calls_captured: int
    breaks: dict[str, int]


def start_over() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


def outcome(given: Any) -> Outcome:
    stats = counters["stats"]
    return Outcome(
        [bits(each) for each in tree_leaves(given)],
        stats["unique_graphs"],
        stats["calls_captured"],
        dict(counters["graph_break"]),
    )


# A model that lives longer than the recording.


class Training:
    """A compiled GPT with its optimizer."""

    def __init__(self, backend: str, *, fullgraph: bool = False, per_block: bool = False) -> None:
        self.model = TiedGPT(layers=2 if per_block else 1)
        self.called: Callable[..., Any] = self.model
        if per_block:
            for block in self.model.blocks:
                block.compile(backend=backend, fullgraph=fullgraph)
        else:
            self.called = torch.compile(self.model, backend=backend, fullgraph=fullgraph)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[torch.Tensor] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(0, 17, (2, 8))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.called(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.detach())


def trained(make: Callable[[], Training], recorded: bool, before: int, inside: int, after: int) -> Outcome:
    """So many steps before, inside and after a recording; or as many without one."""
    start_over()
    training = make()
    training.run(before)
    recording = modtrace.record(strict=True, backward_times=True) if recorded else nullcontext()
    with recording:
        training.run(inside)
    training.run(after)
    if recorded:
        assert recording.meta.marks == ()
    return outcome([training.losses, state(training.model)])


@WAYS
def test_model_first_run_inside_the_recording_is_compiled_alike(options):
    plain, recorded = (
        trained(lambda: Training(**options), each, before=0, inside=3, after=0) for each in (False, True)
    )
    assert recorded == plain
    assert (plain.graphs, plain.breaks) == (1, {})


@WAYS
def test_model_compiled_before_the_recording_runs_on_inside_and_after_it(options):
    plain, recorded = (
        trained(lambda: Training(**options), each, before=2, inside=3, after=2) for each in (False, True)
    )
    assert recorded == plain
    assert (plain.graphs, plain.breaks) == (1, {})


def test_what_was_compiled_inside_is_compiled_once_more_afterwards_and_never_again():
    """Dynamo guards on the hooks that were there; what it makes without them, it then takes in recordings too."""
    start_over()
    training = Training("eager")
    graphs = []
    for recorded in (True, False, True, False, True, False):
        with modtrace.record(strict=True) if recorded else nullcontext():
            training.run(2)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 2, 2, 2]
    assert counters["graph_break"] == {}


def test_compiled_model_is_one_call_with_its_backward():
    model = torch.compile(TiedGPT(layers=1), backend="aot_eager")
    tokens = torch.randint(0, 17, (2, 8))
    model(tokens)
    with modtrace.record(strict=True, backward_times=True) as rec:
        model(tokens).sum().backward()
    types = dict(
        zip(*(rec.table("modules").column(name).to_pylist() for name in ("module_id", "type")), strict=True)
    )
    calls = [(types[row["module_id"]], row["phase"]) for row in rec.table("calls").to_pylist()]
    assert [
        each for each in calls if each[0] != "GraphModule"
    ] == [  # that is how this backend runs its graph
        ("OptimizedModule", "forward"),
        ("TiedGPT", "forward"),
        ("OptimizedModule", "backward"),
        ("TiedGPT", "backward"),
    ]


# Other things that are compiled, traced or exported. Each run gives what it computed.


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def three_steps(model: nn.Module, **options: Any) -> list[Any]:
    compiled = torch.compile(model, backend="aot_eager", **options)
    for batch in (3, 4, 5):
        compiled(torch.randn(batch, 4)).sum().backward()
    return state(model)


class Broken(nn.Module):
    """Its graph breaks between its two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = perceptron()

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def graph_breaks():
    return three_steps(Broken())


def shapes_that_change():
    return three_steps(perceptron(), dynamic=False)


def a_checkpoint_inside():
    return three_steps(Checkpointed(), fullgraph=True)


def a_module_called_twice():
    return three_steps(zoo.Twice())


def hooks_of_the_user():
    model = perceptron()
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    return three_steps(model)


def a_function_around_modules():
    model = perceptron()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x):
        with torch.no_grad():
            still = model(x)
        return model(x) + still

    for _ in range(3):
        run(torch.randn(3, 4)).sum().backward()
    return state(model)


def whole_training_step():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="aot_eager")
    def step(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    return [[step(torch.randn(3, 4)).detach() for _ in range(3)], state(model)]


def compiled_autograd():
    model = perceptron()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
    return state(model)


def a_model_that_raises():
    model = zoo.Failing(ValueError("on purpose"))
    compiled = torch.compile(model, backend="eager")
    errors = []
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            compiled(torch.randn(3, 4))
        errors.append(type(caught.value).__name__)
    model.error = None
    compiled(torch.randn(3, 4)).sum().backward()
    return [errors, state(model)]


def export():
    return torch.export.export(perceptron(), (torch.randn(3, 4),)).graph_module.code


def fx_tracing():
    return torch.fx.symbolic_trace(nn.Sequential(perceptron(), zoo.Twice())).code


def proxy_tracing():
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(perceptron())(torch.randn(3, 4)).code


def training_with_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        model = perceptron()
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            model.zero_grad(set_to_none=False)
        return [list(each.grad.shape) for each in model.parameters()]


def meta_tensors():
    model = perceptron().to("meta")
    model(torch.randn(3, 4, device="meta")).sum().backward()
    return [list(each.grad.shape) for each in model.parameters()]


def jit_tracing():
    return torch.jit.trace(perceptron(), torch.randn(3, 4))(torch.randn(3, 4))


RUNS = [
    graph_breaks, shapes_that_change, a_checkpoint_inside, a_module_called_twice, hooks_of_the_user,
    a_function_around_modules, whole_training_step, compiled_autograd, a_model_that_raises, export,
    fx_tracing, proxy_tracing, training_with_fake_tensors, meta_tensors, jit_tracing,
]  # fmt: skip


@cache
def plain_outcome(run: Callable[[], Any]) -> Outcome:
    """What a run gives without a recording."""
    start_over()
    return outcome(run())


#: Some of each kind, for the usual tests.
SAMPLE = {graph_breaks, a_checkpoint_inside, whole_training_step, compiled_autograd, export, jit_tracing}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            each, id=each.__name__.replace("_", " "), marks=[] if each in SAMPLE else pytest.mark.long
        )
        for each in RUNS
    ],
)
def test_recording_changes_nothing_of(run):
    plain = plain_outcome(run)
    start_over()
    with modtrace.record(strict=True, backward_times=True) as rec:
        recorded = outcome(run())
    assert recorded == plain
    assert rec.meta.marks == ()


def test_scalars_are_logged_from_a_compiled_step():
    model = perceptron()
    with modtrace.record(strict=True) as rec:

        @torch.compile(backend="eager")
        def step(x):
            loss = model(x).sum()
            rec.log(loss=loss)
            return loss * 2

        doubled = [step(torch.ones(3, 4)) for _ in range(2)]
        sum(doubled).backward()
    assert [each.item() / 2 for each in doubled] == rec.table("scalars").column("value").to_pylist()


def test_calls_of_compiled_modules_are_marked():
    model = nn.Sequential(nn.Linear(4, 4), TiedGPT().blocks[0].attn)
    compiled = torch.compile(model[0], backend="eager")
    with modtrace.record({"plain": model[0], "compiled": compiled}, strict=True) as rec:
        model[0](torch.ones(2, 4))
        compiled(torch.ones(2, 4))
    names = {row["module_id"]: row["type"] for row in rec.table("modules").to_pylist()}
    marked = {(names[call["module_id"]], call["compiled"]) for call in rec.table("calls").to_pylist()}
    assert {("Linear", False), ("OptimizedModule", True)} <= marked
