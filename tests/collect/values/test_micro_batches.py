"""What each backward adds to the gradients of parameters, and the hooks on them."""

import copy
import io
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import modtrace
import zoo
from helpers.parameter_watch import Watch, watching, watching_for
from helpers.ranks import fsdp1, fsdp2, group_of_one
from modtrace import Capture
from modtrace.collect.values.micro_batches import MicroBatchTaps

WANTED: dict[str, Any] = {"roles": "parameter_grad", "micro_batches": True}


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def added(watch: Watch) -> list[dict[str, torch.Tensor]]:
    """The gradients of each backward by name: a parameter that comes again begins the next."""
    found: list[dict[str, torch.Tensor]] = [{}]
    for each in watch.of("parameter_grad", phase="backward"):
        name = ".".join(filter(None, each.site))
        if name in found[-1]:
            found.append({})
        found[-1][name] = each.value
    return found


def gradients_of(model: nn.Module, loss: Any) -> dict[str, torch.Tensor]:
    """By `autograd.grad`, on a copy of the model."""
    twin = copy.deepcopy(model)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(twin), parameters), strict=True))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)


def hooks_on(model: nn.Module) -> int:
    return sum(len(each._backward_hooks or ()) for each in model.parameters())


def test_each_micro_batch_has_its_own_gradients():
    model = two_layers()
    batches = [torch.randn(5, 4) for _ in range(3)]
    expected = [gradients_of(model, lambda twin, x=x: twin(x).square().sum()) for x in batches]
    with watching(model, **WANTED) as watch:
        for x in batches:
            model(x).square().sum().backward()
    assert [same(*pair) for pair in zip(added(watch), expected, strict=True)] == [True] * 3
    assert all(each._backward_hooks is None for each in model.parameters())  # as before


def test_hooks_of_the_users_stay_and_are_heard_first():
    model = nn.Linear(2, 1, bias=False)
    handle = model.weight.register_hook(lambda gradient: gradient * 2)
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
    assert [each.value.tolist() for each in watch.rows] == [[[2.0, 2.0]]]
    assert hooks_on(model) == 1
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[4.0, 4.0]]
    handle.remove()


def test_parameter_used_several_times_has_the_sum_of_its_gradients():
    model = zoo.TiedGPT(layers=1).eval()  # its dropout draws
    x = torch.randint(0, 17, (2, 8))
    expected = gradients_of(model, lambda twin: twin(x).square().sum())
    with watching(model, **WANTED) as watch:
        model(x).square().sum().backward()
    [found] = added(watch)
    assert found.pop("head.weight").equal(expected["embed.weight"])  # tied
    assert same(found, expected)


def test_frozen_and_unused_parameters_have_no_rows():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["used"].bias.requires_grad_(False)
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
        assert hooks_on(model) == 3
    assert [each.site for each in watch.rows] == [("used", "weight")]


def test_hooks_stay_from_the_call_until_the_step_ends():
    model = two_layers()
    with watching(model, **WANTED) as watch:
        assert hooks_on(model) == 0
        model(torch.ones(1, 4)).sum().backward()
        assert hooks_on(model) == 4
        model(torch.ones(1, 4)).sum().backward()
        assert hooks_on(model) == 4
        watch.step_ends()
        assert hooks_on(model) == 0
        model(torch.ones(1, 4))
    assert hooks_on(model) == 0


def test_step_that_nobody_looks_at_has_no_hooks():
    model = two_layers()
    with watching(model, **WANTED) as watch:
        watch.active = 0
        model(torch.ones(1, 4)).sum().backward()
        assert hooks_on(model) == 0
        watch.active = 1
        with torch.no_grad():
            model(torch.ones(1, 4))
        assert hooks_on(model) == 0
    assert watch.rows == []


def test_only_parameters_that_a_capture_means_are_hooked():
    model = two_layers()
    with watching(model, include="2.*", **WANTED) as watch:
        model(torch.ones(1, 4)).sum().backward()
        assert hooks_on(model) == 2
    assert {each.site for each in watch.rows} == {("2", "weight"), ("2", "bias")}


def test_step_that_ends_while_another_is_open_leaves_that_one_its_hooks():
    trained, judged = two_layers(), two_layers()
    with watching(trained, judged, **WANTED) as watch:
        loss = trained(torch.ones(1, 4)).sum()
        open_call = watch._closed.pop()
        judged(torch.ones(1, 4))
        watch.step_ends()  # that of `judged` alone
        assert (hooks_on(trained), hooks_on(judged)) == (4, 0)
        loss.backward()
        watch._closed.append(open_call)
        watch.step_ends()
        assert hooks_on(trained) == 0
    assert len(watch.rows) == 4


def test_step_that_ends_in_the_middle_of_a_backward_leaves_it_its_hooks():
    model = two_layers()
    with watching(model, **WANTED) as watch:
        out = model(torch.ones(1, 4))
        out.register_hook(lambda gradient: watch.step_ends())
        out.sum().backward()
        assert hooks_on(model) == 0  # the backward is over
    assert len(watch.rows) == 4


def test_gradients_that_are_handed_out_are_added_to_nothing():
    model = two_layers()
    with watching(model, **WANTED) as watch:
        loss = model(torch.ones(1, 4)).square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        assert watch.rows == []
        sum(each.square().sum() for each in gradients).backward()
    assert {each.site for each in watch.rows} == {
        ("0", "weight"),
        ("0", "bias"),
        ("2", "weight"),
        ("2", "bias"),
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_model_has_the_gradients_of_a_plain_one(reentrant: bool):
    model = two_layers()
    x = torch.randn(2, 4, requires_grad=True)
    expected = gradients_of(model, lambda twin: twin(x).square().sum())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    outer = Checkpointed()
    with watching(outer, **WANTED) as watch:
        outer(x).square().sum().backward()
    [found] = added(watch)
    assert same({name.removeprefix("inner."): value for name, value in found.items()}, expected)


def test_parameter_that_is_replaced_between_micro_batches_is_hooked_again():
    model = nn.Linear(2, 1, bias=False)
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
        model.weight = nn.Parameter(torch.ones(1, 2))
        model(torch.full((1, 2), 3.0)).sum().backward()
    assert [each.value.tolist() for each in watch.rows] == [[[1.0, 1.0]], [[3.0, 3.0]]]
    assert hooks_on(model) == 0


def test_hooked_model_is_saved_copied_and_converted_as_any_other():
    model = two_layers()
    with watching(model, **WANTED) as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(torch.ones(1, 4)).sum()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert hooks_on(twin) == 0
            twin(torch.ones(1, 4))
        loss.backward()
        assert len(watch.of("parameter_grad")) == 4
        model.double()
        watch.step_ends()
        assert hooks_on(model) == 0


def test_hooked_parameters_can_be_swapped():
    model = nn.Linear(2, 1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with watching(model, **WANTED) as watch:
            model(torch.ones(1, 2))
            model.double()  # torch gives each parameter other insides, and forgets all its hooks
            watch.step_ends()
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            assert watch.values("parameter_grad")["", "weight"].dtype == torch.float64
            watch.step_ends()
            model.float()
            heard: list[torch.Tensor] = []
            model.weight.register_hook(heard.append)
            model.bias.register_hook(heard.append)
            model(torch.ones(1, 2)).sum().backward()
            assert len(heard) == 2
            model.weight._backward_hooks.clear()
            model.bias._backward_hooks.clear()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert hooks_on(model) == 0


def test_backward_that_raises_and_is_interrupted_leaves_no_hooks():
    model = two_layers()

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with watching(model, **WANTED) as watch:
        middle = model[0](torch.ones(1, 4))
        middle.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model[2](torch.tanh(middle)).sum().backward()
        watch.step_ends()
        assert hooks_on(model) == 0
        assert {each.path for each in watch.rows} == {"2"}
        watch.rows.clear()
        model(torch.ones(1, 4)).sum().backward()
    assert len(watch.rows) == 4


def test_ddp_has_the_gradients_of_this_rank_and_stays_as_it_is():
    plain = two_layers()
    batches = [torch.randn(3, 4) for _ in range(2)]
    expected = [gradients_of(plain, lambda twin, x=x: twin(x).square().sum()) for x in batches]

    def train() -> Watch:
        model = DistributedDataParallel(copy.deepcopy(plain))
        with watching(model, **WANTED) as watch:
            with model.no_sync():
                model(batches[0]).square().sum().backward()
            model(batches[1]).square().sum().backward()
        return watch

    with group_of_one():  # the model must be gone before the group is
        watch = train()
    assert [same(*pair) for pair in zip(added(watch), expected, strict=True)] == [True] * 2


@pytest.mark.parametrize("make", [fsdp1, fsdp2])
def test_sharded_models_train_on_undisturbed(make: Any):
    def run(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def train() -> None:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if watched:
            with watching(model, roles="all", micro_batches=True) as watch:
                for _ in range(2):
                    train()
                    watch.step_ends()
            assert watch.of("update")
            assert watch.of("optimizer_state")
        else:
            for _ in range(2):
                train()
        return [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]

    with group_of_one():
        plain, watched = run(False), run(True)
    assert all(each.equal(other) for each, other in zip(plain, watched, strict=True))


def test_compiled_model_breaks_no_graph_and_is_compiled_once():
    counters = torch._dynamo.utils.counters
    x = torch.randn(2, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square()

    def run(model: nn.Module, watch: Any) -> tuple[Any, ...]:
        torch._dynamo.reset()
        counters.clear()
        for _ in range(3):
            model(x).sum().backward()
            if watch is not None:
                watch.step_ends()
        return dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["frames"])

    model = Net()
    expected = gradients_of(model, lambda twin: twin(x).sum())
    with watching(model) as watch:  # hooks of the tracker's own are there, too
        plain = run(torch.compile(copy.deepcopy(model), backend="aot_eager"), watch)
    compiled = torch.compile(model, backend="aot_eager")
    with watching(model, **WANTED) as watch:
        assert run(compiled, watch) == plain
    found = added(watch)
    assert len(found) == 3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[0][name], gradient)
    torch._dynamo.reset()


def test_model_that_is_gone_leaves_nothing():
    with watching(**WANTED) as watch:
        for _ in range(3):
            model = nn.Linear(2, 1)
            model(torch.ones(1, 2)).sum().backward()
            del model
        watch.step_ends()
        assert watch.micro_batches._hooks == {}
    assert len(watch.rows) == 6


# Backwards of steps that have ended.


def test_hooks_of_a_late_backward_go_when_it_ends() -> None:
    model = nn.Linear(2, 1)
    with watching(model, **WANTED) as watch:
        loss = model(torch.ones(1, 2)).sum()
        watch.step_ends()
        assert hooks_on(model) == 0
        loss.backward()
        assert hooks_on(model) == 0
    assert [each.site for each in watch.rows] == [("", "bias"), ("", "weight")]


def test_step_that_ends_before_a_late_backward_runs_leaves_it_its_hooks() -> None:
    model = nn.Linear(2, 1)
    with watching(model, **WANTED) as watch:
        loss = model(torch.ones(1, 2)).sum()
        watch.step_ends()
        late: Any = object()  # it has begun, on another thread, and its first node has not run
        watch.micro_batches.backward_began(late)
        watch.step_ends()
        assert hooks_on(model) == 2
        assert watch.micro_batches.take_backward(late) is None
        assert hooks_on(model) == 0
    del loss


def test_module_without_parameters_is_not_remembered_for_late_backwards() -> None:
    model = nn.ReLU()
    with watching(model, **WANTED) as watch:
        output = model(torch.ones(1, requires_grad=True))
        watch.step_ends()
        assert [*watch.micro_batches._left.items()] == []
    assert output.requires_grad


# Captures of different steps.

TWO = (Capture(**WANTED), Capture(**WANTED))


def test_parameter_of_two_open_steps_is_looked_at_by_the_captures_of_both() -> None:
    model = nn.Linear(2, 1, bias=False)
    with watching_for(*TWO, roots=(model,)) as watch:
        watch.active = 0b01
        first = model(torch.ones(1, 2))
        watch.active = 0b10
        second = model(torch.ones(1, 2))
        (first + second).sum().backward()
    assert [each.mask for each in watch.rows] == [0b11]


def test_late_backward_through_two_steps_is_looked_at_by_the_captures_of_both() -> None:
    model = nn.Linear(2, 1, bias=False)
    outputs = []
    with watching_for(*TWO, roots=(model,)) as watch:
        for active in (0b01, 0b10):
            watch.active = active
            outputs.append(model(torch.ones(1, 2)))
            watch.step_ends()
        sum(outputs).sum().backward()
    assert [each.mask for each in watch.rows] == [0b11]


def test_function_is_not_called_in_steps_of_another_capture() -> None:
    asked: list[float] = []
    captures = [
        Capture(**WANTED),
        Capture(**WANTED, steps=[9], function=lambda tensor: asked.append(tensor.sum().item())),
    ]
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, strict=True, values=captures) as rec:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert rec.table("values").column("phase").to_pylist() == ["backward", "optimizer"] * 2
    assert asked == []


# Odd parameters.


def test_weight_that_is_computed_is_not_hooked() -> None:
    base = nn.Parameter(torch.ones(1, 2))
    model = nn.Linear(2, 1, bias=False)
    model._parameters["weight"] = base * 2  # as the replicas of DataParallel have it
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight._backward_hooks is None
    assert watch.rows == []
    assert base.grad.tolist() == [[2.0, 2.0]]


def test_parameter_without_memory_is_hooked_when_it_has_some() -> None:
    model = nn.LazyLinear(1, bias=False)
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
        assert watch.rows == []
        model(torch.ones(1, 2)).sum().backward()
    assert [each.value.tolist() for each in watch.rows] == [[[1.0, 1.0]]]


# Others on the same parameter.


def test_parameter_that_a_user_hooked_before_is_left_as_it_was() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.register_hook(lambda gradient: None).remove()
    assert model.weight._backward_hooks == {}
    with (
        modtrace.record(model, strict=True, values=Capture(**WANTED)),
        modtrace.record(model, strict=True, values=Capture(**WANTED)),
    ):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight._backward_hooks == {}


def test_hooked_parameter_is_sent_to_another_process_without_a_warning() -> None:
    model = nn.Linear(2, 1, bias=False).share_memory()
    with watching(model, **WANTED) as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2)).sum().backward()
        assert hooks_on(model) == 1
        ForkingPickler(io.BytesIO()).dump(model.weight)
    assert len(watch.rows) == 1


def test_stopped_taps_leave_no_hook_though_the_step_is_open() -> None:
    model = nn.Linear(2, 1)
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2))
        assert hooks_on(model) == 2
        watch.stop()
        assert hooks_on(model) == 0


# Errors of ours.


@pytest.mark.parametrize("role", ["parameter_grad", "parameter", "buffer"])
def test_error_of_ours_is_told_and_the_run_goes_on(role: str) -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = RuntimeError("no")

    def fail(*args: Any) -> Any:
        raise fails

    with watching(model, roles=role, micro_batches=role == "parameter_grad") as watch:
        watch.parameters._measure = watch.micro_batches._measure = watch.buffers._measure = fail
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        watch.step_ends()
        assert watch.errors
        assert all(each is fails for each in watch.errors)
        watch.errors.clear()
    assert model.bias.tolist() != [0.0, 0.0]
    assert watch.rows == []


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()


def test_two_recorders_leave_parameters_as_if_they_had_never_been_hooked() -> None:
    model = nn.Linear(2, 2)
    with (
        modtrace.record(model, values=Capture(**WANTED), strict=True),
        modtrace.record(model, values=Capture(**WANTED), strict=True),
    ):
        train(model, 3)
    assert model.weight._backward_hooks is None
    assert model.bias._backward_hooks is None


def test_steps_without_a_backward_gather_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MicroBatchTaps] = []
    initialize = MicroBatchTaps.__init__

    def note(taps: MicroBatchTaps, *args: Any, **kwargs: Any) -> None:
        made.append(taps)
        initialize(taps, *args, **kwargs)

    monkeypatch.setattr(MicroBatchTaps, "__init__", note)
    model = nn.Linear(2, 2)
    with modtrace.record(model, values=Capture(**WANTED), strict=True) as rec:
        for step in range(500):
            model(torch.ones(1, 2))
            rec.step()
            if step % 50 == 49:
                rec._recorder.flush()  # a step that waits to be written is known still
        assert len(list(made[0]._left.items())) <= 100
        assert len(made[0]._left._items) <= 200  # what is dead is swept when the number has doubled
