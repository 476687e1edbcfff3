"""What an optimizer's step changes, and what it keeps: measured, and equal to what is computed by hand."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from helpers.parameter_watch import watching, watching_for
from modtrace.recording.options.capture import Capture

ALL = ("parameter", "parameter_grad", "update", "optimizer_state", "buffer")


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def path_and_slot(name: str) -> tuple[str, str]:
    path, _, slot = name.rpartition(".")
    return path, slot


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 4) if x is None else x).square().sum().backward()
    optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_update_is_what_the_step_has_added(make: Any):
    model = two_layers()
    optimizer = make(model.parameters())
    with watching(model, roles="update") as watch:
        for _ in range(3):
            watch.rows.clear()
            before = copied(model)
            train(model, optimizer)
            found = watch.values("update", phase="optimizer")
            assert found.keys() == {path_and_slot(name) for name in before}
            for name, after in model.named_parameters():
                assert found[path_and_slot(name)].equal(after.detach() - before[name])


def test_update_of_a_half_is_exact_in_float32():
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watching(model, roles="update") as watch:
        before = copied(model)
        train(model, optimizer, torch.randn(5, 4).bfloat16())
    for name, after in model.named_parameters():
        found = watch.values("update")["", name]
        assert found.dtype == torch.float32
        assert found.double().equal(after.detach().double() - before[name].double())


def test_update_of_complex_and_double_parameters_keeps_their_dtype():
    parameters = [nn.Parameter(torch.randn(3, dtype=dtype)) for dtype in (torch.complex64, torch.float64)]
    before = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with watching(roles="update") as watch:
        sum(each.abs().sum() for each in parameters).backward()
        optimizer.step()
    for number, (old, new) in enumerate(zip(before, parameters, strict=True)):
        assert watch.values("update")[None, f"param_groups[0].params[{number}]"].equal(new.detach() - old)


def test_update_of_lbfgs_goes_from_before_its_closures_to_behind_them():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with watching(model, roles=ALL) as watch:
        before = copied(model)
        optimizer.step(closure)
    assert watch.values("update")["", "weight"].equal(model.weight.detach() - before["weight"])
    assert watch.values("parameter_grad")["", "weight"].equal(model.weight.grad)
    state = optimizer.state[model.weight]
    kept = {slot: value for (_, slot), value in watch.values("optimizer_state").items()}
    assert kept["weight.d"].equal(state["d"])
    assert kept["weight.old_dirs[0]"].equal(state["old_dirs"][0])
    assert not any("func_evals" in slot for slot in kept)  # a number, no tensor


def test_sparse_gradient_moves_only_the_rows_it_has():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with watching(model, roles="update") as watch:
        before = copied(model)
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    found = watch.values("update")["", "weight"]
    assert found.equal(model.weight.detach() - before["weight"])
    assert found.count_nonzero(dim=1).tolist() == [0, 2, 2, 0, 0]


def test_state_of_adamw_is_what_its_formulas_say():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    first = second = torch.zeros(2, 4)
    with watching(model, roles="optimizer_state") as watch:
        for step in (1, 2, 3):
            watch.rows.clear()
            train(model, optimizer)
            gradient = model.weight.grad
            first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient.square()
            found = watch.values("optimizer_state", path="")
            assert found["", "weight.step"].item() == step
            torch.testing.assert_close(found["", "weight.exp_avg"], first)
            torch.testing.assert_close(found["", "weight.exp_avg_sq"], second)
    assert {each.slot for each in watch.rows} == {
        f"{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_momentum_of_sgd_is_what_its_formula_says():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    momentum = torch.zeros(2, 4)
    with watching(model, roles="optimizer_state") as watch:
        for _ in range(3):
            watch.rows.clear()
            train(model, optimizer)
            momentum = 0.5 * momentum + model.weight.grad
            torch.testing.assert_close(
                watch.values("optimizer_state")["", "weight.momentum_buffer"], momentum
            )


def test_sgd_without_momentum_keeps_nothing():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles="optimizer_state") as watch:
        train(model, optimizer)
        assert len(optimizer.state[model.weight].values()) <= 1
    assert watch.rows == []


class Odd(torch.optim.SGD):
    """Keeps what it likes."""

    def __init__(self, parameters: Any, kept: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self._kept = kept

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = self._kept


def test_nested_state_is_named_by_its_path():
    model = nn.Linear(1, 1, bias=False)
    number = torch.ones(())
    kept = {"a": {"b c": [number, {"d": number + 1}]}, 3: number + 2, "text": "x", "count": 4, "none": None}
    with watching(model, roles="optimizer_state") as watch:
        train_with = Odd(model.parameters(), kept)
        train_with.step()
    assert {slot: value.item() for (_, slot), value in watch.values("optimizer_state").items()} == {
        "weight.a['b c'][0]": 1,
        "weight.a['b c'][1].d": 2,
        "weight[3]": 3,
    }


def test_state_that_cannot_be_read_says_so_and_nothing_fails():
    class Refuses(dict):  # type: ignore[type-arg]
        def get(self, key: Any, default: Any = None) -> Any:
            raise KeyError(key)

    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state = Refuses()
    with watching(model, roles=("optimizer_state", "parameter")) as watch:
        optimizer.step()
    assert watch.values("optimizer_state") == {("", "weight"): "not measured: reading it raised KeyError"}
    optimizer.state = [1, 2]  # type: ignore[assignment]
    with watching(model, roles=("optimizer_state", "parameter")) as watch:
        optimizer.step()
    assert len(watch.of("parameter")) == 1
    assert watch.of("optimizer_state") == []


def test_step_that_raises_leaves_no_rows_and_the_next_one_is_right():
    model = nn.Linear(2, 1)
    for each in model.parameters():
        nn.init.zeros_(each)

    class Fails(torch.optim.SGD):
        fails = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for each in model.parameters():
                each.add_(1.0)
                if self.fails:
                    raise KeyboardInterrupt

    optimizer = Fails(model.parameters(), lr=0.1)
    with watching(model, roles=ALL) as watch:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert watch.rows == []
        optimizer.fails = False
        optimizer.step()
    assert all(value.eq(1).all() for value in watch.values("update").values())
    assert len(watch.of("parameter")) == 2


def test_step_that_the_gradscaler_skips_has_no_rows():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with watching(model, roles=ALL) as watch:
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert len(watch.of("update")) == (0 if factor > 1 else 2)
    torch.testing.assert_close(watch.values("update")["", "weight"], torch.full((1, 2), -0.1))


def test_two_optimizers_of_one_model_have_updates_of_their_own():
    model = two_layers()
    optimizers = [torch.optim.SGD(model[at].parameters(), lr=lr) for at, lr in ((0, 0.1), (2, 0.2))]
    with watching(model, roles="update") as watch:
        model(torch.ones(1, 4)).sum().backward()
        before = copied(model)
        for optimizer in optimizers:
            optimizer.step()
    found = watch.values("update")
    for name, after in model.named_parameters():
        assert found[path_and_slot(name)].equal(after.detach() - before[name])


def test_optimizer_inside_another_is_measured_once_around_both():
    model = nn.Linear(2, 1, bias=False)

    class Around(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.inner = torch.optim.SGD(self.param_groups, lr=1.0)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.inner.step()
            model.weight.mul_(2)

    with watching(model, roles="update") as watch:
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        Around(model.parameters()).step()
    assert watch.values("update")["", "weight"].equal(model.weight.detach() - before)


def test_tied_parameter_has_an_update_under_each_of_its_owners():
    model = zoo.TiedGPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with watching(model, roles=("update", "optimizer_state")) as watch:
        before = model.head.weight.detach().clone()
        model(torch.randint(0, 17, (2, 8))).sum().backward()
        optimizer.step()
    moved = model.head.weight.detach() - before
    for role, slot, expected in (
        ("update", "weight", moved),
        ("optimizer_state", "weight.exp_avg", optimizer.state[model.head.weight]["exp_avg"]),
    ):
        for owner in ("embed", "head"):
            assert watch.values(role)[owner, slot].equal(expected)
    assert watch.names.count("embed.weight.update") == 1  # measured once
    assert "head.weight.update" not in watch.names


def test_frozen_parameter_does_not_move():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles=ALL) as watch:
        train(model, optimizer, torch.ones(1, 2))
    assert watch.values("update")["", "bias"].eq(0).all()
    assert ("", "bias") not in watch.values("parameter_grad")


def test_parameter_that_is_given_another_shape_while_it_steps_has_no_update():
    parameter = nn.Parameter(torch.ones(2))

    class Grows(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            parameter.data = torch.ones(3)

    with watching(roles="update") as watch:
        Grows([parameter], lr=0.1).step()
    expected = "not measured: its shape, dtype or device has changed meanwhile"
    assert watch.values("update") == {(None, "param_groups[0].params[0]"): expected}


def test_group_added_while_it_runs_has_rows_from_the_next_step_on():
    model = two_layers()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with watching(model, roles="update") as watch:
        train(model, optimizer)
        optimizer.add_param_group({"params": model[2].parameters()})
        train(model, optimizer)
    assert [each.site for each in watch.rows] == [
        *[("0", "weight"), ("0", "bias")],
        *[("0", "weight"), ("0", "bias"), ("2", "weight"), ("2", "bias")],
    ]


def test_capture_means_parameters_by_path_role_and_step():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captures = (
        Capture(roles="update", include="2.weight"),
        Capture(roles=("update", "parameter"), include="0"),
    )
    with watching_for(*captures, roots=(model,)) as watch:
        train(model, optimizer)
        assert {(each.role, *each.site, each.mask) for each in watch.rows} == {
            ("update", "2", "weight", 0b01),
            ("update", "0", "weight", 0b10),
            ("update", "0", "bias", 0b10),
            ("parameter", "0", "weight", 0b10),
            ("parameter", "0", "bias", 0b10),
        }
        watch.rows.clear()
        watch.active = 0b01
        train(model, optimizer)
        assert [(each.role, *each.site) for each in watch.rows] == [("update", "2", "weight")]
        watch.active = 0
        train(model, optimizer)
        assert len(watch.rows) == 1


def test_what_is_copied_later_is_copied_before_the_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles="parameter", tensors="lazy") as watch:
        order: list[str] = []
        watch._settle = lambda: order.append("settle")  # type: ignore[method-assign]
        watch.parameters._settle = watch._settle
        optimizer.register_step_post_hook(lambda *args: order.append("step"))
        train(model, optimizer, torch.ones(1, 2))
    assert order == ["settle", "settle", "step"]


def test_update_that_is_kept_is_not_written_over():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept: list[torch.Tensor] = []
    with watching(model, roles="update", function=lambda tensor: 0) as watch:
        measure = watch.parameters._measure
        watch.parameters._measure = lambda tensor, mask, name: (
            kept.append(tensor),
            measure(tensor, mask, name),
        )[1]
        for factor in (1.0, 2.0):
            train(model, optimizer, torch.zeros(1, 2))
            model.weight.grad = torch.full((1, 2), factor)
            optimizer.step()
    assert [each.tolist() for each in kept] == [[[0.0, 0.0]], [[-1.0, -1.0]], [[0.0, 0.0]], [[-2.0, -2.0]]]


def test_whole_tensors_are_named_by_path_and_role():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    free = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([*model.parameters(), free], lr=0.1)
    with watching(model, roles=("update", "parameter_grad", "optimizer_state")) as watch:
        (model(torch.ones(1, 1)).sum() + free.sum()).backward()
        optimizer.step()
    assert watch.names == [
        "0.weight.parameter_grad",
        "param_groups[0].params[1].parameter_grad",
        "0.weight.update",
        "0.weight.step.optimizer_state",
        "0.weight.exp_avg.optimizer_state",
        "0.weight.exp_avg_sq.optimizer_state",
        "param_groups[0].params[1].update",
        "param_groups[0].params[1].step.optimizer_state",
        "param_groups[0].params[1].exp_avg.optimizer_state",
        "param_groups[0].params[1].exp_avg_sq.optimizer_state",
    ]


def test_optimizers_on_two_threads_do_not_mix_their_updates():
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    meeting = threading.Barrier(2)

    class Meets(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            meeting.wait()
            for group in self.param_groups:
                group["params"][0].add_(group["lr"])
            meeting.wait()

    with watching(*models, roles="update") as watch:
        steppers = [Meets(model.parameters(), lr=float(at + 1)) for at, model in enumerate(models)]
        threads = [threading.Thread(target=each.step) for each in steppers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = sorted(each.value.mean().item() for each in watch.of("update"))
    assert found == pytest.approx([1.0, 2.0])


def test_nothing_keeps_a_model_or_an_optimizer_alive():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with watching(roles=ALL, micro_batches=True) as watch:
        train(model, optimizer, torch.ones(1, 2))
        known = watch.parameters._optimizers
        assert [each is optimizer for each, _ in known.items()] == [True]
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
        watch.parameters.step_ended()
        assert known._items == {}  # the copies went with the step in which the optimizer died
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None


def test_module_without_parameters_and_optimizer_without_any_have_no_rows():
    model = nn.Sequential(nn.ReLU())
    with watching(model, roles=ALL, micro_batches=True) as watch:
        model(torch.ones(2, requires_grad=True)).sum().backward()
        torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1).step()
    assert [(each.role, each.slot) for each in watch.rows] == [
        ("parameter", "param_groups[0].params[0]"),
        ("update", "param_groups[0].params[0]"),
    ]
