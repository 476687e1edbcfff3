"""What an optimizer's step changes, and what it keeps: measured, and equal to what is computed by hand."""

import gc
import threading
import time
import weakref
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import modtrace
import zoo
from helpers.parameter_watch import watching, watching_for
from helpers.ranks import group_of_one
from helpers.stat_rows import one, rows
from modtrace import Capture
from modtrace.collect.names.module_names import ModuleNames

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


# Taps that are told to measure nothing any more.


def test_abandoned_taps_measure_nothing_and_hook_nothing() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters())
    with watching(model, roles=ALL, micro_batches=True) as watch:
        train(model, optimizer, torch.ones(2, 2))
        watch.step_ends()
        # 2 parameters with 2 gradients, an update and 3 states each, and 3 buffers.
        assert len(watch.rows) == 17
        watch.rows.clear()
        watch.abandon()
        model(torch.ones(2, 2))
        assert not model.weight._backward_hooks
        train(model, optimizer, torch.ones(2, 2))
        watch.step_ends()
    assert watch.rows == []


def test_backward_and_step_that_run_while_the_taps_are_abandoned_add_no_rows() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles=("parameter", "parameter_grad", "update"), micro_batches=True) as watch:
        loss = model(torch.ones(2, 2)).sum()
        watch.abandon()
        loss.backward()
        assert watch.rows == []
        watch.parameters._is_abandoned = False
        optimizer.register_step_pre_hook(lambda *args: watch.abandon())  # behind ours
        optimizer.step()
    assert {each.role for each in watch.rows} == {"parameter", "parameter_grad"}


def test_stopped_taps_let_go_of_the_copies_while_the_optimizer_lives() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles="update") as watch:
        train(model, optimizer, torch.ones(2, 2))
        known = watch.parameters._optimizers
        assert [len(each.copies) for _, each in known.items()] == [2]
    assert [*known.items()] == []


# What need not be looked at.


def test_optimizer_that_no_capture_looks_at_is_not_gone_through() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[int] = []
    with watching(model, roles=("buffer", "output")) as watch:
        optimizer.register_step_pre_hook(lambda *args: found.append(len(watch.parameters._stepping)))
        train(model, optimizer, torch.ones(2, 2))
    assert found == [0]


def test_parameters_that_nobody_owns_are_looked_for_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[bool] = []
    look_up = ModuleNames.owners_of

    def counted(names: ModuleNames, parameter: torch.Tensor, *, learn: bool = False) -> Any:
        searched.append(learn)
        return look_up(names, parameter, learn=learn)

    free = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD(free, lr=0.1)
    monkeypatch.setattr(ModuleNames, "owners_of", counted)
    with watching(roles="parameter") as watch:
        optimizer.step()
    assert searched.count(True) == 1
    assert len(watch.rows) == 3


def test_owner_that_is_found_while_another_optimizer_steps_has_rows_from_then_on() -> None:
    model, free = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Parameter(torch.ones(1))
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([free], lr=0.1)
    with watching(model, roles="parameter") as watch:
        for _ in range(2):  # the second finds what is known of the optimizer
            train(model, optimizer, torch.ones(2, 2))
        model[1].tied = model[0].weight
        other.step()  # looks for the owner of its parameter in all modules
        watch.rows.clear()
        train(model, optimizer, torch.ones(2, 2))
    assert set(watch.values("parameter")) == {("0", "weight"), ("0", "bias"), ("1", "tied")}


@pytest.mark.parametrize("at", range(1, 5))
def test_an_interrupt_while_the_owners_are_looked_for_costs_that_step_alone(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, owners_of, calls = torch.optim.SGD(model.parameters(), lr=0.1), ModuleNames.owners_of, count(1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return owners_of(*args, **kwargs)

    with watching(model, roles="parameter") as watch:
        train(model, optimizer, torch.ones(2, 2))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ModuleNames, "owners_of", interrupted)
            train(model, optimizer, torch.ones(2, 2))
        watch.rows.clear()
        train(model, optimizer, torch.ones(2, 2))
    assert len(watch.rows) == 4


# Which parameter it is.


def test_parameter_that_takes_the_place_of_another_has_a_row_there_in_the_same_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles="parameter") as watch:
        train(model, optimizer, torch.ones(2, 2))
        model[1].weight = model[0].weight
        watch.rows.clear()
        train(model, optimizer, torch.ones(2, 2))
    tied = {("0", "weight"), ("1", "weight")}
    assert set(watch.values("parameter")) >= tied


def test_parameter_that_takes_the_place_of_another_while_it_steps_has_no_update() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))

    class Exchanges(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0] = second

    optimizer = Exchanges([first], lr=0.1)
    with watching(roles=("parameter", "update")) as watch:
        optimizer.step()
    assert [(each.role, each.slot) for each in watch.rows] == [("parameter", "param_groups[0].params[0]")]


def test_tied_parameter_is_called_by_the_name_that_a_capture_means() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    model["second"].weight = model["first"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles="parameter", include="second") as watch:
        optimizer.step()
    assert [each.site for each in watch.rows] == [("second", "weight")]
    assert watch.names == ["second.weight.parameter"]


def test_parameter_of_a_module_that_joins_a_model_is_meant_by_its_new_path() -> None:
    part = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    with watching(roles="parameter", include="*.inner") as watch:
        part(torch.ones(1, 2))
        optimizer.step()
        assert watch.rows == []
        whole = nn.ModuleDict({"outer": nn.ModuleDict({"inner": part})})
        whole.forward = part.forward  # type: ignore[method-assign]
        whole(torch.ones(1, 2))
        optimizer.step()
    assert [each.site for each in watch.rows] == [("outer.inner", "weight")]


# What a row says.


def test_update_of_a_sparse_parameter_has_its_shape_and_says_of_which_part_it_is() -> None:
    parameter = nn.Parameter(torch.tensor([[0.0, 2.0], [0.0, 3.0]]).to_sparse())

    class Adds(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            parameter.data._values().add_(1.0)

    with modtrace.record(strict=True, values=Capture(roles="update")) as rec:
        Adds([parameter], lr=0.1).step()
    update = one(rec, role="update")
    assert (update.shape, update.count, update.sum) == ((2, 2), 2, 2)
    assert update.note == "sparse: the stored values"


@pytest.mark.parametrize(
    "kept", [{"function": lambda tensor: 0}, {"tensors": "lazy"}], ids=["function", "lazy"]
)
def test_update_that_somebody_holds_is_not_written_over_by_the_next(kept: dict[str, Any]) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held: list[torch.Tensor] = []
    with watching(model, roles="update", **kept) as watch:
        measure = watch.parameters._measure
        watch.parameters._measure = lambda tensor, mask, name: (
            held.append(tensor),
            measure(tensor, mask, name),
        )[1]
        for factor in (1.0, 2.0):
            model.weight.grad = torch.full((1, 2), factor)
            optimizer.step()
    assert [each.tolist() for each in held] == [[[-1.0, -1.0]], [[-2.0, -2.0]]]


# What measuring took is no part of the run's time.


class Spin:
    """A function that takes a millisecond, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensor: torch.Tensor) -> int:
        self.calls += 1
        end_ns = time.perf_counter_ns() + 1_000_000
        while time.perf_counter_ns() < end_ns:
            pass
        return 0


@pytest.mark.parametrize(
    "capture",
    [
        {"roles": "input"},
        {"roles": "output"},
        {"roles": "grad_output"},
        {"roles": "parameter"},
        {"roles": "parameter_grad", "micro_batches": True},
        {"roles": "buffer"},
        {"roles": "op_output"},
    ],
    ids=lambda capture: capture["roles"],
)
def test_time_of_measuring_each_role_is_overhead_of_its_step(capture: dict[str, Any]) -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spin = Spin()
    values = Capture(function=spin, stats=0, **capture)
    inputs = torch.ones(2, 2)  # an op in front of the first call is in front of the step
    with modtrace.record(model, strict=True, values=values, ops=capture["roles"] == "op_output") as rec:
        model(inputs).sum().backward()
        optimizer.step()
    assert spin.calls
    [overhead_ns] = rec.table("steps").column("overhead_ns").to_pylist()
    assert overhead_ns >= spin.calls * 1_000_000


def test_time_of_measuring_what_an_optimizer_computes_is_overhead_of_its_call() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    spin = Spin()
    values = Capture(function=spin, stats=0, roles="op_output")
    with modtrace.record(model, strict=True, values=values, ops=True) as rec:
        model(torch.ones(2, 2)).sum().backward()
        spin.calls = 0
        optimizer.step()
    [call] = [row for row in rec.table("calls").to_pylist() if row["phase"] == "optimizer"]
    assert spin.calls
    assert call["overhead_ns"] >= spin.calls * 1_000_000


# Several captures.


def test_parameter_that_only_a_capture_of_steps_means_is_not_hooked_for_its_micro_batches() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    captures = (
        Capture(roles="parameter_grad", include="1", micro_batches=True),
        Capture(roles="parameter_grad"),
    )
    with watching_for(*captures, roots=(model,)) as watch:
        model(torch.ones(1, 2)).sum().backward()
        assert [len(each._backward_hooks or ()) for each in model.parameters()] == [0, 1]
    assert [(each.site, each.mask) for each in watch.rows] == [(("1", "weight"), 0b01)]


# Through a recording.


def test_only_the_steps_that_are_asked_for_have_rows():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    capture = Capture(roles=ALL, micro_batches=True, steps="1:4:2")
    with modtrace.record(model, values=capture, strict=True) as rec:
        for _ in range(5):
            model(torch.randn(3, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for role in ALL:
        assert {row.step for row in rows(rec, role=role)} == {1, 3}
    assert all(each._backward_hooks is None for each in model.parameters())


def test_exception_leaves_no_hook_on_a_parameter():
    model = nn.Linear(2, 1)
    capture = Capture(roles=ALL, micro_batches=True)
    with pytest.raises(KeyboardInterrupt), modtrace.record(model, values=capture, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        raise KeyboardInterrupt
    assert all(each._backward_hooks is None for each in model.parameters())


def test_states_are_followed_into_the_optimizer_that_has_them():
    with group_of_one():
        model = nn.Linear(2, 1, bias=False)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
        with watching(model, roles="optimizer_state") as watch:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert {slot for _, slot in watch.values("optimizer_state")} == {
        "weight.step",
        "weight.exp_avg",
        "weight.exp_avg_sq",
    }
