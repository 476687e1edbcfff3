"""What `track(compiled="inside")` stashes of modules inside of compiled code is what an eager run has."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace import ModtraceWarning
from modtrace.tensor_tracker import Stash, Tracker, track

WIDTH = 8


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block(x) if self.around is None else self.around(block, x))
        return self.head(x)


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(self.mlp(x)) * 2)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Result:
    loss: Tensor
    others: dict[Any, Any]
    nothing: None = None


class Structured(nn.Module):
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Result(x * 2, {"key": [x + 1, None], 3: Pair(x.exp(), None)}), x - 1

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.part = self.Part()

    def forward(self, x: Tensor) -> Tensor:
        result, less = self.part(self.lin(x))
        return result.loss + result.others["key"][0] * result.others[3].left + less


class AtTimes(nn.Module):
    """Has a part that returns nothing in every second call."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, is_wanted: bool) -> Tensor | None:
            return self.lin(x) if is_wanted else None

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.part(x, False)
            x = self.part(x, True)
        return x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Inner(nn.Module):
    """A compiled part in an eager model."""

    def __init__(self, backend: str | None, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.before, self.mlp = nn.Linear(WIDTH, WIDTH), MLP()
        self.around = around
        if backend is not None:
            self.mlp.compile(backend=backend, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.mlp(x) if self.around is None else self.around(self.mlp, x)


checkpointed = partial(checkpoint, use_reentrant=False)

#: How a model is compiled, how it is made, and how often it is called before its backward.
CASES: dict[str, tuple[str, Callable[[], nn.Module], int]] = {
    "blocks, called twice": ("aot_eager", Blocks, 2),
    "parts called three times": ("aot_eager", Thrice, 2),
    "structures": ("aot_eager", Structured, 1),
    "in place": ("aot_eager", InPlace, 1),
    "nothing at times": ("aot_eager", AtTimes, 1),
    "blocks by the eager backend": ("eager", Blocks, 2),
}


def train(model: nn.Module, called: nn.Module, *, calls: int = 1, steps: int = 2, **options: Any) -> Tracker:
    """Trains for some steps with the outputs of `model` stashed, and returns the tracker."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with track(model, strict=True, **options) as tracker:
        for _ in range(steps):
            optimizer.zero_grad()
            inputs = [torch.randn(4, WIDTH) for _ in range(calls)]
            loss: Any = sum(called(each).pow(2).mean() for each in inputs)
            loss.backward()
            optimizer.step()
    return tracker


def flat(value: Any) -> list[Any]:
    """Returns the tensors of a structure with the containers around them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Result):
        value = vars(value)
    if isinstance(value, dict):
        return [type(value), *value, *flat(list(value.values()))]
    if isinstance(value, (list, tuple)):
        return [type(value), *(part for each in value for part in flat(each))]
    return [value]


def same(one: Any, other: Any) -> bool:
    mine, yours = flat(one), flat(other)
    return len(mine) == len(yours) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(mine, yours, strict=True)
    )


def place_of(stash: Stash) -> tuple[Any, ...]:
    return stash.name, stash.grad, stash.step, stash.phase, stash.call


def places(stashes: Any) -> list[tuple[Any, ...]]:
    return [(*place_of(each), each.type) for each in stashes]


def assert_same(found: list[Stash], expected: list[Stash]) -> None:
    assert places(found) == places(expected)
    differing = [
        one.name for one, other in zip(found, expected, strict=True) if not same(one.value, other.value)
    ]
    assert not differing


@pytest.mark.parametrize(("backend", "make", "calls"), CASES.values(), ids=CASES)
def test_stashes_are_those_of_an_eager_run(backend: str, make: Callable[[], nn.Module], calls: int) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    expected = train(twin, twin, calls=calls)
    counter = CompileCounterWithBackend(backend)
    found = train(
        model, torch.compile(model, backend=counter, fullgraph=True), calls=calls, compiled="inside"
    )

    assert counter.frame_count == 1
    if (
        backend == "eager"
    ):  # there what a region returns is the very tensor of its last module, which is told first
        assert_same(sorted(found, key=place_of), sorted(expected, key=place_of))
    else:
        assert_same(list(found), list(expected))


def test_region_in_an_eager_model_has_its_recomputes_too() -> None:
    torch.manual_seed(0)
    twin = Inner(None, checkpointed)
    model = Inner("aot_eager", checkpointed)
    model.load_state_dict(twin.state_dict())
    expected = train(twin, twin)
    found = train(model, model, compiled="inside")

    assert {each.phase for each in found} == {"forward", "backward", "recompute"}
    key = lambda each: (each.step, each.name, each.grad, each.phase)  # noqa: E731
    # An eager recompute ends early, when it has what backward needs.
    known = {key(each) for each in expected}
    assert known <= set(map(key, found))
    assert_same(sorted((each for each in found if key(each) in known), key=key), sorted(expected, key=key))


def test_calls_outside_and_inside_of_compiled_code_are_counted_together() -> None:
    def up_before_and_after(mlp: MLP, x: Tensor) -> Any:
        return mlp.up(mlp(mlp.up(x)))

    found = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = Inner(backend, up_before_and_after)
        options = {} if backend is None else {"compiled": "inside"}
        found.append(train(model, model, calls=2, **options))
    assert_same(list(found[1]), list(found[0]))


def test_second_backward_of_a_graph_gives_gradients_again() -> None:
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with track(model, include="up", strict=True, compiled="inside") as tracker:
        loss = compiled(torch.randn(4, WIDTH)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    gradients = [each for each in tracker if each.grad]
    assert len(gradients) == 4
    assert same(gradients[0].value, gradients[2].value)


def test_parts_without_gradients_have_outputs_alone() -> None:
    model = Blocks().requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), track(model, strict=True, compiled="inside") as tracker:
        compiled(torch.randn(4, WIDTH))
    assert {each.name for each in tracker} == {name for name, _ in model.named_modules() if name != "blocks"}
    assert not any(each.grad for each in tracker)


def test_tensors_kept_as_they_are_stay_what_they_were() -> None:
    """Compiled code uses its memory again."""
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = [torch.randn(4, WIDTH) for _ in range(3)]
    with track(model, strict=True, compiled="inside", stash_value=lambda t: t) as kept:
        for each in inputs:
            compiled(each).sum().backward()
    with track(model, strict=True) as expected:
        for each in inputs:
            model(each).sum().backward()
    assert_same([each for each in kept if each.name], [each for each in expected if each.name])


def test_error_of_the_function_for_stashes_reaches_the_caller() -> None:
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def fail_at_gradients(event: Any) -> Stash:
        if event.grad:
            raise ZeroDivisionError("mine")
        return Stash(event.name, event.type, event.grad, None)

    with track(model, strict=True, compiled="inside", stash=fail_at_gradients, include="up") as tracker:
        loss = compiled(torch.randn(4, WIDTH)).sum()
        with pytest.raises(ZeroDivisionError, match="mine"):
            loss.backward()
    assert len(tracker) == 2


def test_model_is_as_before_when_tracking_has_ended() -> None:
    model = Blocks()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    inputs = torch.randn(4, WIDTH)
    plain = compiled(inputs)
    for _ in range(2):
        with track(model, strict=True, compiled="inside") as tracker:
            tracked = compiled(inputs)
        assert len(tracker) == 10
    assert counter.frame_count == 2  # once more for all trackings
    assert torch.equal(compiled(inputs), plain)
    assert torch.equal(tracked, plain)
    assert counter.frame_count == 2
    assert not any("forward" in vars(each) or each._forward_hooks for each in model.modules())


def test_two_trackers_and_a_recording_have_each_their_own() -> None:
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = torch.randn(4, WIDTH)
    with (
        modtrace.record(model, strict=True, compiled="inside") as recording,
        track(model, strict=True, compiled="inside") as one,
        track(model, strict=True, compiled="inside", include="act") as other,
    ):
        for _ in range(2):
            compiled(inputs).sum().backward()
    assert_same(list(other), [each for each in one if "act" in each.name])
    assert [each.call for each in one if each.name == "blocks.0.up"] == [0, 0, 1, 1]
    assert recording.table("values").num_rows


def test_recompilation_for_another_size_brings_its_stashes() -> None:
    model = Blocks()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with track(model, include="head", strict=True, compiled="inside") as tracker:
        for size in (2, 3, 5):
            compiled(torch.randn(size, WIDTH)).sum().backward()
    assert [each.first_value.shape[0] for each in tracker] == [2, 2, 3, 3, 5, 5]


def test_compiled_function_says_what_to_compile() -> None:
    model = Blocks()
    function = torch.compile(lambda x: model(x).sum(), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with track(model, strict=True, compiled="inside") as tracker:
            function(torch.randn(4, WIDTH))
            function(torch.randn(4, WIDTH))
    told = [str(each.message) for each in caught if issubclass(each.category, ModtraceWarning)]
    assert told == [
        "nothing is stashed inside of a compiled function that calls a model; compile the model, not the function"
    ]
    assert len(tracker) == 0


@pytest.mark.parametrize("make", [Tracker, lambda **options: track(nn.Linear(1, 1), **options)])
def test_another_word_is_an_error(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^compiled='all': give boundary or inside$"):
        make(compiled="all")


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_attention_of_gpt2_is_stashed(backend: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0
    model = transformers.GPT2Model(config)
    tokens = torch.randint(64, (2, 16))
    with track(model, include=r"\.attn$", strict=True) as expected:
        model(tokens).last_hidden_state.pow(2).mean().backward()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with track(model, include=r"\.attn$", strict=True, compiled="inside") as found:
        compiled(tokens).last_hidden_state.pow(2).mean().backward()
    assert counter.frame_count == 1
    assert places(found) == places(expected)
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.value, other.value)
        if backend == "aot_eager":
            assert same(one.value, other.value)
