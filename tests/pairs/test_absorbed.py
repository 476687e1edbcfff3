"""What both runs compute otherwise is no place if all that follows is equal; what goes on differing is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace.analysis.divergence import consequences

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Sums(nn.Module):
    """Adds three embeddings up, and goes on from there."""

    def __init__(self, add_up: Sum, factor: float = 1.0, *, returns_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Embedding(9, 16) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 4)
        self.add_up, self.factor, self.returns_all = add_up, factor, returns_all

    def forward(self, x: torch.Tensor) -> object:
        made = self.add_up(self.one(x), self.two(x), self.three(x))
        y = self.out(self.norm(made) * self.factor)
        return (y, self.first) if self.returns_all else y


def first_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a + b) + c


def last_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a + (b + c)


def outer_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a + c) + b


def in_place(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    filled = torch.zeros_like(a)
    for part in (c, b, a):
        filled += part
    return filled


def gathered(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Fills memory from the end on."""
    filled = torch.full((3, *a.shape), 7.0)
    for row, part in ((2, c), (1, b), (0, a)):
        filled[row] = part
    return filled.sum(0)


def stacked(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Fills memory from the beginning on."""
    filled = torch.full((3, *a.shape), -7.0)
    for row, part in enumerate((a, b, c)):
        filled[row] = part
    return filled.sum(0)


OTHERS = {
    "another order": (first_two, outer_two),
    "from the end on": (first_two, last_two),
    "in place": (first_two, in_place),
    "filled in another order": (stacked, gathered),
}

CAPTURES = {
    "hashes": modtrace.Capture(roles=["output", "op_output", "leaf"], hash=True, sketch=True),
    "tensors": modtrace.Capture(roles=["output", "op_output", "leaf"], tensors=True),
    "statistics": modtrace.Capture(roles=["output", "op_output", "leaf"]),
}


def record(model: nn.Module, capture: str) -> modtrace.Recording:
    with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec:
        model(torch.arange(8))
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_order_of_sums_is_no_place_and_a_fault_behind_it_is(name: str, capture: str) -> None:
    one, other = OTHERS[name]
    first = record(Sums(one), capture)
    found = modtrace.compare(first, record(Sums(other), capture), allow_missing=True)
    assert found.first is None and found.ok, str(found)
    assert found.compared == found.equal + found.within + found.absorbed
    found = modtrace.compare(first, record(Sums(other, 1.5), capture), allow_missing=True)
    assert found.first is not None
    assert (found.first.op, found.first.path) in {("aten.mul.Tensor", ""), ("aten.addmm.default", "out")}
    assert {each.op for each in found.divergences} <= {"aten.mul.Tensor", "aten.addmm.default"}


def test_what_the_model_returns_is_a_place_though_it_is_equal_again_elsewhere() -> None:
    def keep(add_up: Sum) -> Sums:
        model = Sums(add_up, returns_all=True)

        def with_first(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            model.first = a + b if add_up is first_two else a + c
            return model.first + (c if add_up is first_two else b)

        model.add_up = with_first
        return model

    found = modtrace.compare(keep(first_two), keep(outer_two), (torch.arange(8),))
    assert found.first is not None and found.first.op == "aten.add.Tensor"
    assert found.absorbed == 0


def test_what_the_program_reads_is_a_place() -> None:
    def read(add_up: Sum) -> modtrace.Recording:
        def looking(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            first = a + b if add_up is first_two else a + c
            first.sum().item()
            return first + (c if add_up is first_two else b)

        return record(Sums(looking), "tensors")

    assert modtrace.compare(read(first_two), read(outer_two)).first is not None


Compute = Callable[["Step", torch.Tensor, float], torch.Tensor]


class Step(nn.Module):
    """Calls a function with a linear layer, an input and a number, and goes on from what it returns."""

    def __init__(self, compute: Compute, number: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out, self.number = nn.Linear(8, 8), nn.Linear(8, 4), number
        self.compute = compute
        self.register_buffer("state", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.compute(self, x, self.number))


def alias_made_before(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    memory = model.inner(x).clone()
    row = memory[0]
    memory.mul_(number)
    return memory.sign() + row


def alias_written_again(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    memory = model.inner(x).clone()
    row = memory[0]
    memory.mul_(number)
    memory.sign_()
    return memory + row


def minus_itself(_: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    y = x * number
    return (y - y) + x


def base_of_a_view(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    memory = model.inner(x).clone()
    row = memory[0]
    row.mul_(number)
    return row.sign() + memory.sum(0)


def rows_written_twice(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    memory = torch.zeros(3, 8)
    one, other = memory[0], memory[1]
    one.copy_(model.inner(x)[0] * number)
    other.copy_(x[1])
    other.copy_(x[2])
    return memory


def branch(scale: float, dtype: torch.dtype) -> Compute:
    def add(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
        return (x.to(dtype) + (model.inner(x) * number).to(dtype) * scale).float()

    return add


def average(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    made = model.inner(x)
    model.state.lerp_(made[0].detach(), number)
    return made


def count(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    model.state.mul_(number).add_(1)
    return model.inner(x) + model.state.sign()


def joined(join: Callable[..., torch.Tensor], scale: float, dtype: torch.dtype) -> Compute:
    """Puts what differs beside what is much larger, or adds it to that by another op than an addition."""

    def run(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
        large, small = (x * scale).to(dtype), (model.inner(x).tanh() * number).to(dtype)
        return join(large, small).float()

    return run


def scatter(large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    return torch.scatter(large, 0, torch.zeros(1, 8, dtype=torch.long), small)


JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat and sum": lambda large, small: torch.cat([large, small], -1).unflatten(-1, (2, 8)).sum(-2),
    "stack and mean": lambda large, small: torch.stack([large, small]).mean(0),
    "cat and slice": lambda large, small: torch.cat([large, small], -1)[:, 8:].exp().log(),
    "index_add": lambda large, small: large.index_add(0, torch.arange(3), small),
    "scatter": scatter,
    "addmm": lambda large, small: torch.addmm(large, small, torch.eye(8, dtype=large.dtype)),
    "bias": lambda large, small: nn.functional.linear(small, torch.eye(8, dtype=large.dtype), large[0]),
}


def kept_out_of_sight(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    made = model.inner(x) * number
    model.seen = made * 2
    return made.sign()


def kept_loss(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    made = model.inner(x) * number
    model.seen = nn.MSELoss()(made, x)  # what a module returned, and all that it returned
    return made.sign()


class Cell(nn.Module):
    """Returns the signs of a state, and the state."""

    def forward(self, x: torch.Tensor, number: float) -> tuple[torch.Tensor, torch.Tensor]:
        state = x * number
        return state.sign(), state


def kept_state(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    made, model.seen = Cell()(model.inner(x), number)
    return made


def checked_buffer(model: Step, x: torch.Tensor, number: float) -> torch.Tensor:
    made = model.inner(x)
    model.state = model.state * number + made[0].detach() * (1 - number)
    assert model.state.isfinite().all()
    return made


STAYING = {
    "alias made before": alias_made_before,
    "base of a view": base_of_a_view,
    "rows written twice": rows_written_twice,
    "small branch": branch(1e-3, torch.float32),
    "branch that is less than noise": branch(1e-6, torch.float32),
    "small branch in bfloat16": branch(0.03, torch.bfloat16),
    "moving average of a buffer": average,
    "buffer": count,
    "kept, and read by no op": kept_out_of_sight,
    "loss that is kept": kept_loss,
    "state that is kept": kept_state,
    "buffer that is checked": checked_buffer,
    **{f"{name}, float32": joined(join, 1e6, torch.float32) for name, join in JOINS.items()},
    **{f"{name}, bfloat16": joined(join, 30.0, torch.bfloat16) for name, join in JOINS.items()},
}


@pytest.mark.parametrize(
    ("name", "capture"),
    [
        *((name, capture) for name in STAYING if "float" not in name for capture in CAPTURES),
        *((name, "statistics") for name in STAYING if ", float32" in name),
        *((name, "hashes") for name in STAYING if "bfloat16" in name),
    ],
)
def test_difference_that_stays_is_a_place(name: str, capture: str) -> None:
    def run(number: float) -> modtrace.Recording:
        model, x = Step(STAYING[name], number), torch.linspace(-1, 1, 24).reshape(3, 8)
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
            model(x)
        return rec

    found = modtrace.compare(run(0.5), run(0.125), allow_missing=True)
    assert not found.ok and found.first is not None, str(found)
    assert found.first.op in {"aten.mul.Tensor", "aten.mul_.Tensor", "aten.lerp_.Scalar"}, str(found)


@pytest.mark.parametrize("compute", [alias_written_again, lambda _, x, number: x * number * 0 + x])
def test_difference_that_is_gone_is_none(compute: Compute) -> None:
    with torch.no_grad():
        found = modtrace.compare(
            Step(compute, 0.5), Step(compute, 0.125), (torch.linspace(-1, 1, 24).reshape(3, 8),)
        )
    assert found.ok and found.absorbed, str(found)


def test_state_of_an_optimizer_is_a_place_though_the_step_is_equal() -> None:
    def run(beta: float) -> modtrace.Recording:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), betas=(beta, 0.999), foreach=False)
        with modtrace.record(model, ops=True, values=CAPTURES["tensors"], strict=True) as rec:
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return rec

    assert not modtrace.compare(run(0.9), run(0.5)).ok


class Faulty(nn.Module):
    """Two branches with a factor each, of which a sum takes the values and the signs."""

    def __init__(self, one: float, other: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), one, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left, right = x * self.one, x.sin() * self.other
        return self.last(left + right + left.sign() + right.sign())


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("capture", CAPTURES)
def test_two_faults_that_meet_do_not_excuse_each_other(capture: str, with_grad: bool) -> None:
    def run(model: nn.Module) -> modtrace.Recording:
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec:
            with torch.set_grad_enabled(with_grad):
                loss = model(torch.linspace(-1, 1, 24).reshape(3, 8)).sum()
            if with_grad:
                loss.backward()
        return rec

    first = modtrace.compare(run(Faulty(1.0, 1.0)), run(Faulty(1.3, 0.7))).first
    assert first is not None
    assert (first.phase, first.arguments) == ("forward", ("other 1.0 against 1.3",))


class Turned(torch.autograd.Function):
    """Multiplies gradients alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


class Turning(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.factor = nn.Linear(8, 16), nn.Linear(16, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Turned.apply(self.first(x), self.factor).relu())


def step(rate: float, momentum: float = 0.0) -> Callable[[nn.Module], object]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, foreach=False).step()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    "look",
    [
        step(0.0),
        step(1e-6),
        step(0.0, momentum=0.9),
        lambda model: [each.grad.norm().item() for each in model.parameters()],
        lambda model: [bool(torch.isfinite(each.grad).all()) for each in model.parameters()],
    ],
    ids=["rate 0", "small rate", "momentum", "norm", "check"],
)
def test_gradients_that_nothing_shows_are_a_place(look: Callable[[nn.Module], object], capture: str) -> None:
    def run(factor: float) -> modtrace.Recording:
        model = Turning(factor)
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec:
            model(torch.linspace(-1, 1, 24).reshape(3, 8)).square().mean().backward()
            look(model)
        return rec

    found = modtrace.compare(run(1.0), run(-1.0))
    assert not found.ok and found.first is not None
    assert (found.first.op, found.first.phase) == ("aten.mul.Tensor", "backward"), str(found)


class Rotated(nn.Module):
    """Attention with rotary positions, which turns numbers that are neighbours, or half a head apart."""

    def __init__(self, are_neighbours: bool, factor: float = 1.0, of_gradient: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out, self.are_neighbours = nn.Linear(16, 4), are_neighbours
        self.factor, self.of_gradient = factor, of_gradient
        if are_neighbours:
            order = torch.arange(8).view(2, 4).t().flatten()
            for linear in self.qkv[:2]:
                linear.weight.data = linear.weight.data.view(2, 8, 16)[:, order].reshape(16, 16).clone()

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * 0.3 ** torch.arange(4)
        cos, sin = angle.cos(), angle.sin()
        if self.are_neighbours:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * cos.repeat_interleave(2, -1) + turned * sin.repeat_interleave(2, -1)
        return x * cos.repeat(1, 2) + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin.repeat(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for linear in self.qkv)
        k = Turned.apply(self.turn(k), self.of_gradient)
        y = nn.functional.scaled_dot_product_attention(self.turn(q), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2) * self.factor)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(
    "kept", [{"hash": True, "sketch": True}, {"tensors": True}], ids=["hashes", "tensors"]
)
def test_other_order_of_numbers_is_no_place_with_gradients_either(
    kept: dict[str, bool], with_gradients: bool
) -> None:
    roles = ["output", "op_output", *(["grad_output", "parameter_grad"] if with_gradients else [])]

    def run(model: nn.Module) -> modtrace.Recording:
        torch.manual_seed(1)
        with modtrace.record(
            model, ops=True, values=modtrace.Capture(roles=roles, **kept), strict=True
        ) as rec:
            model(torch.randn(2, 6, 16)).square().mean().backward()
        return rec

    first = run(Rotated(False))
    found = modtrace.compare(first, run(Rotated(True)), allow_missing=True)
    assert found.ok and found.absorbed, str(found)
    wrong = modtrace.compare(first, run(Rotated(True, factor=1.1)), allow_missing=True).first
    assert wrong is not None and (wrong.op, wrong.phase) == ("aten.mul.Tensor", "forward"), str(wrong)
    wrong = modtrace.compare(first, run(Rotated(True, of_gradient=1.5)), allow_missing=True).first
    assert wrong is not None and (wrong.path, wrong.phase) == ("", "backward"), str(wrong)


class Scaled(nn.Module):
    """Scales in front of its last layer, or behind it: what one run returns, the other has on the way."""

    def __init__(self, is_behind: bool, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.is_behind, self.factor = is_behind, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x) * self.factor if self.is_behind else self.last(x * self.factor)


@pytest.mark.parametrize("capture", CAPTURES)
def test_result_that_is_on_the_way_in_the_other_run_is_no_place(capture: str) -> None:
    def run(model: nn.Module) -> modtrace.Recording:
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
            model(torch.linspace(-1, 1, 24).reshape(3, 8))
        return rec

    found = modtrace.compare(run(Scaled(True)), run(Scaled(False)), allow_missing=True)
    assert found.ok and found.first is None, str(found)
    assert not modtrace.compare(run(Scaled(True)), run(Scaled(False, 3.0)), allow_missing=True).ok


class Working(nn.Module):
    """Returns the mean of the rows, and leaves what it worked with in the second output of its op."""

    def __init__(self, left: float, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.left, self.factor = nn.Linear(8, 8), left, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, _ = torch.ops.modtrace_tests.mean_of_rows(self.inner(x) * self.factor, self.left)
        return made * 2


@torch.library.custom_op("modtrace_tests::mean_of_rows", mutates_args=())
def mean_of_rows(x: torch.Tensor, left: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), torch.full((5,), left)


@pytest.mark.parametrize("capture", CAPTURES)
def test_workspace_that_nobody_reads_is_no_place_and_a_fault_beside_it_is(capture: str) -> None:
    def run(model: nn.Module) -> modtrace.Recording:
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
            model(torch.arange(24.0).reshape(3, 8))
        return rec

    found = modtrace.compare(run(Working(1.0)), run(Working(2.0)))
    assert found.ok and found.absorbed == 1, str(found)
    faulty = modtrace.compare(run(Working(1.0)), run(Working(2.0, 1.25))).first
    assert faulty is not None and faulty.op == "aten.mul.Tensor"


class Signs(nn.Module):
    """Returns a view of what an op made of it, and its module takes the signs of that."""

    def __init__(self, number: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out, self.number = nn.Linear(8, 8), nn.Linear(4, 4), number
        self.scale = Scale(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.scale(self.inner(x)).sign())


class Scale(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.number).view(-1, 4)


def test_output_of_a_module_that_is_a_view_comes_to_nothing_with_its_op() -> None:
    with torch.no_grad():
        found = modtrace.compare(Signs(1.0), Signs(3.0), (torch.linspace(-1, 1, 24).reshape(3, 8),))
    assert found.ok and found.absorbed == 2, str(found)
    assert found.absorbed_most is not None and found.absorbed_most.op == "aten.mul.Tensor"


class Other(nn.Module):
    """Hands what a function makes of it through a module that returns what it is given, to another function."""

    def __init__(
        self, make: Callable[[torch.Tensor], torch.Tensor], end: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.same, self.out = nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 4)
        self.make, self.end = make, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.end(self.same(self.make(self.inner(x)))))


@pytest.mark.parametrize("end", [torch.sign, torch.tanh])
def test_module_that_returns_what_it_is_given_has_made_nothing(end: Callable[..., torch.Tensor]) -> None:
    def run(make: Callable[[torch.Tensor], torch.Tensor]) -> modtrace.Recording:
        model, x = Other(make, end), torch.linspace(-1, 1, 24).reshape(3, 8)
        with (
            modtrace.record(model, ops=True, values=CAPTURES["tensors"], strict=True) as rec,
            torch.no_grad(),
        ):
            model(x)
        return rec

    found = modtrace.compare(run(lambda x: x * 3), run(lambda x: x.div(3)), allow_missing=True)
    if end is torch.sign:
        assert found.ok and found.absorbed == 1, str(found)
    else:
        assert found.first is not None and found.first.op == "aten.mul.Tensor", str(found)


@pytest.mark.parametrize("is_first", [True, False])
def test_module_that_returns_what_it_is_given_in_one_run_alone_is_where_they_part(is_first: bool) -> None:
    def run(is_training: bool) -> modtrace.Recording:
        torch.manual_seed(0)
        drop = nn.Dropout(0.5).train(is_training)
        model, x = nn.Sequential(nn.Linear(8, 8), drop, nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(16, 8)
        with modtrace.record(model, ops=True, strict=True) as rec:
            model(x).sum().backward()
        return rec

    found = modtrace.compare(run(is_first), run(not is_first))
    assert found.first is not None and found.first.kind == "made", str(found)
    assert (found.first.path, found.first.only_in) == ("1", "first" if is_first else "second")


def test_what_was_not_followed_to_its_end_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (record(Sums(add_up), "tensors") for add_up in (first_two, outer_two))
    assert modtrace.compare(one, other).ok
    monkeypatch.setattr(consequences, "_MOST_TENSORS", 0)
    assert not modtrace.compare(one, other).ok
