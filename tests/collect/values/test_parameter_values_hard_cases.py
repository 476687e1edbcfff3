"""What the taps on parameters leave alone, let go of and say: each would go unnoticed in a run that is plain."""

import time
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.parameter_watch import watching, watching_for
from helpers.stat_rows import one
from modtrace import Capture
from modtrace.collect.names.module_names import ModuleNames

ALL = ("parameter", "parameter_grad", "update", "optimizer_state", "buffer")


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


# Taps that are told to measure nothing any more.


def test_abandoned_taps_measure_nothing_and_hook_nothing() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters())
    with watching(model, roles=ALL, micro_batches=True) as watch:
        train(model, optimizer)
        watch.step_ends()
        # 2 parameters with 2 gradients, an update and 3 states each, and 3 buffers.
        assert len(watch.rows) == 17
        watch.rows.clear()
        watch.abandon()
        model(torch.ones(2, 2))
        assert not model.weight._backward_hooks
        train(model, optimizer)
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
        train(model, optimizer)
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
        train(model, optimizer)
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
            train(model, optimizer)
        model[1].tied = model[0].weight
        other.step()  # looks for the owner of its parameter in all modules
        watch.rows.clear()
        train(model, optimizer)
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
        train(model, optimizer)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ModuleNames, "owners_of", interrupted)
            train(model, optimizer)
        watch.rows.clear()
        train(model, optimizer)
    assert len(watch.rows) == 4


# Which parameter it is.


def test_parameter_that_takes_the_place_of_another_has_a_row_there_in_the_same_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, roles="parameter") as watch:
        train(model, optimizer)
        model[1].weight = model[0].weight
        watch.rows.clear()
        train(model, optimizer)
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


def test_gradient_that_a_fused_optimizer_unscales_itself_says_that_it_is_scaled_still() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with modtrace.record(model, strict=True, values=Capture(roles=("parameter", "parameter_grad"))) as rec:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    gradient = one(rec, role="parameter_grad")
    assert (gradient.sum, gradient.note) == (8, "still scaled by the GradScaler")
    assert one(rec, role="parameter").note is None


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
    rows = [row for row in rec.table("calls").to_pylist() if row["phase"] == "optimizer"]
    assert spin.calls
    assert rows[0]["overhead_ns"] >= spin.calls * 1_000_000


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
