"""`on_nonfinite="stop"`: weights are finite and as before the step whenever it raises, and a healthy loop goes on."""

import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import modtrace

pytestmark = pytest.mark.usefixtures("seeded")
NOT_STEPPED = "The optimizer has not stepped: parameters and its state are as they were before."


class Batches(Dataset[torch.Tensor]):
    """Batches of which one is infinite."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float("inf") if index == self.bad else 1.0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def copies(tensors: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in tensors]


def are_finite(model: nn.Module) -> bool:
    return all(bool(each.isfinite().all()) for each in model.parameters())


# What stops: the third batch is infinite.

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": optim.AdamW,
    "AdamW foreach": lambda parameters: optim.AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: optim.LBFGS(parameters, max_iter=3),
}


def called(optimizer: optim.Optimizer) -> Callable[..., Any]:
    return optimizer.step


def compiled(optimizer: optim.Optimizer) -> Callable[..., Any]:
    return torch.compile(optimizer.step, backend="aot_eager")


def compiled_under_a_schedule(optimizer: optim.Optimizer) -> Callable[..., Any]:
    optim.lr_scheduler.ConstantLR(optimizer)  # wraps `step`
    return torch.compile(optimizer.step, backend="eager")


def compiled_in_the_class(optimizer: optim.Optimizer) -> Callable[..., Any]:
    step = torch.compile(type(optimizer).step, backend="eager")
    return lambda: step(optimizer)


def assert_stops(
    model: nn.Module, optimizer: optim.Optimizer, step: Callable[..., Any], *, with_closure: bool, ops: bool
) -> None:
    done, before = [], ([], [])
    with (
        pytest.raises(modtrace.NonFiniteError, match="in step 2, forward") as stopped,
        modtrace.record(model, ops=ops, on_nonfinite="stop", strict=True) as rec,
    ):
        for x in DataLoader(Batches(2)):

            def compute(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            before = copies(model.parameters()), len(optimizer.state)
            if with_closure:
                step(compute)
            else:
                compute()
                step()
            done.append(x)
    assert len(done) == 2
    assert str(stopped.value).endswith(NOT_STEPPED)
    assert are_finite(model)
    assert all(map(torch.equal, before[0], model.parameters()))
    assert rec.meta.complete


@pytest.mark.filterwarnings("ignore:.*Profiler record function")
@pytest.mark.parametrize(
    ("form", "kind", "ops"),
    [
        (called, "AdamW", True),
        (called, "AdamW fused", False),
        (compiled, "AdamW foreach", True),
        (compiled, "SGD", False),
    ],
)
def test_step_is_stopped_at_its_entry(
    form: Callable[[Any], Callable[..., Any]], kind: str, ops: bool, fresh_dynamo: None
) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert_stops(model, optimizer, form(optimizer), with_closure=False, ops=ops)


@pytest.mark.parametrize("form", [compiled_under_a_schedule, compiled_in_the_class])
def test_compiled_step_is_recognized_in_other_forms(
    form: Callable[[Any], Callable[..., Any]], fresh_dynamo: None
) -> None:
    model = make_model()
    optimizer = optim.AdamW(model.parameters())
    assert_stops(model, optimizer, form(optimizer), with_closure=False, ops=False)


def test_capturable_step_is_stopped_where_it_is_compiled(fresh_dynamo: None) -> None:
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), capturable=True)  # on a CPU, eager code refuses it
    assert_stops(model, optimizer, compiled(optimizer), with_closure=False, ops=False)


@pytest.mark.parametrize(("kind", "ops"), [("AdamW", False), ("LBFGS", True)])
def test_step_with_a_closure_is_stopped_when_the_closure_has_returned(kind: str, ops: bool) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert_stops(model, optimizer, optimizer.step, with_closure=True, ops=ops)


def test_closure_by_keyword_gets_what_it_is_called_with_and_is_looked_at_once() -> None:
    model, calls = make_model(), []
    optimizer = optim.LBFGS(model.parameters(), max_iter=3)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 8)).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    with modtrace.record(model, on_nonfinite="stop", strict=True):
        loss = optimizer.step(closure=compute)
    assert loss.item() == calls[0]
    assert len(calls) > 1


def test_later_evaluation_of_a_closure_is_not_said_to_have_left_the_weights() -> None:
    model, calls = make_model(), []
    optimizer = optim.LBFGS(model.parameters(), max_iter=3)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(len(calls))
        loss = model(torch.full((1, 8), float("inf") if calls[-1] == 1 else 1.0)).square().mean()
        loss.backward()
        return loss

    with (
        pytest.raises(modtrace.NonFiniteError) as stopped,
        modtrace.record(model, on_nonfinite="stop", strict=True),
    ):
        optimizer.step(compute)
        optimizer.step(compute)
    assert NOT_STEPPED not in str(stopped.value)


def test_optimizer_compiled_with_other_code_is_warned_of(fresh_dynamo: None) -> None:
    model = make_model()
    optimizer = optim.AdamW(model.parameters())
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with (
        pytest.warns(modtrace.ModtraceWarning, match="optimizer's step together with other code") as warned,
        pytest.raises(modtrace.NonFiniteError) as stopped,
        modtrace.record(model, on_nonfinite="stop", strict=True),
    ):
        for x in DataLoader(Batches(2)):
            model(x).square().mean().backward()
            step()
            optimizer.zero_grad()
    assert [each.category for each in warned].count(modtrace.ModtraceWarning) == 1  # torch warns too
    assert NOT_STEPPED not in str(stopped.value)


def test_function_of_the_users_that_is_called_step_is_no_optimizers(fresh_dynamo: None) -> None:
    model = make_model()
    optimizer = optim.AdamW(model.parameters())

    def step(optimizer: optim.Optimizer, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step_compiled = torch.compile(step, backend="eager")
    with (
        pytest.warns(modtrace.ModtraceWarning, match="optimizer's step together with other code"),
        modtrace.record(model, on_nonfinite="stop", strict=True),
    ):
        for _ in range(2):
            step_compiled(optimizer, torch.ones(1, 8))


def test_compiled_step_of_a_recording_that_does_not_stop_is_not_warned_of(fresh_dynamo: None) -> None:
    model = make_model()
    optimizer = optim.AdamW(model.parameters())
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with warnings.catch_warnings(), modtrace.record(model, on_nonfinite="report", strict=True):
        warnings.simplefilter("error", modtrace.ModtraceWarning)
        model(torch.ones(1, 8)).sum().backward()
        step()


# A GradScaler.


def scale_and_step(
    model: nn.Module, optimizers: list[optim.Optimizer], scaler: GradScaler, spoil: str, unscale: bool
) -> Iterator[None]:
    """Makes six steps, yields before each, and spoils the third."""
    for number in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        if number == 2:
            loss = loss * {"inf": float("inf"), "nan": float("nan")}.get(spoil, 1.0)
        scaler.scale(loss).backward()
        if unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number == 2 and spoil == "gradient":
            for layer in (model[0], model[2]):
                layer.bias.grad.fill_(float("nan"))
        yield
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def one(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.AdamW(model.parameters())]


def one_fused(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.AdamW(model.parameters(), fused=True)]


def two(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.SGD(model[0].parameters(), lr=1e-2), optim.AdamW(model[2].parameters())]


@pytest.mark.parametrize(
    ("make", "spoil", "scale", "unscale", "ops"),
    [
        (one, "", 1.9 * 2.0**127, False, True),
        (one, "inf", 4.0, False, False),
        (one, "gradient", 4.0, False, False),
        (one_fused, "", 1.9 * 2.0**127, True, False),
        (one_fused, "inf", 4.0, False, True),
        (two, "", 1.9 * 2.0**127, True, False),
        (two, "nan", 4.0, True, False),
        (two, "gradient", 4.0, False, True),
    ],
)
def test_step_that_a_grad_scaler_skips_is_no_reason_to_stop(
    make: Callable[[nn.Module], list[optim.Optimizer]], spoil: str, scale: float, unscale: bool, ops: bool
) -> None:
    model = make_model()
    scaler = GradScaler("cpu", init_scale=scale)
    with modtrace.record(model, ops=ops, on_nonfinite="stop", strict=True):
        done = len([*scale_and_step(model, make(model), scaler, spoil, unscale)])
    assert done == 6
    assert scaler.get_scale() < scale  # it has skipped
    assert are_finite(model)


@pytest.mark.parametrize(
    ("spoil", "enabled", "ops"), [("inf", False, True), ("nan", False, False), ("gradient", True, False)]
)
def test_what_a_grad_scaler_lets_pass_stops_before_the_weights_change(
    spoil: str, enabled: bool, ops: bool
) -> None:
    model, before = make_model(), []
    scaler = GradScaler("cpu", init_scale=4.0, enabled=enabled)
    with (
        pytest.raises(modtrace.NonFiniteError, match="in step 2") as stopped,
        modtrace.record(model, ops=ops, on_nonfinite="stop", strict=True) as rec,
    ):
        for _ in scale_and_step(model, one(model), scaler, spoil, unscale=True):
            before.append(copies(model.parameters()))
    assert len(before) == 3
    assert str(stopped.value).endswith(NOT_STEPPED)
    assert all(map(torch.equal, before[-1], model.parameters()))
    assert [note.step for note in rec.triggers] == [2]
    assert rec.first_nonfinite() is not None


def test_forward_that_overflows_in_a_step_that_is_skipped_stops_nothing_and_is_in_the_recording() -> None:
    model = make_model()
    scaler, optimizer = GradScaler("cpu", init_scale=4.0), optim.AdamW(model.parameters())
    with modtrace.record(model, on_nonfinite="stop", strict=True) as rec:
        for x in DataLoader(Batches(2)):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert are_finite(model)
    assert [note.step for note in rec.triggers] == [2]


# Without an optimizer.


def test_update_by_hand_stops_when_the_step_is_known_to_have_ended() -> None:
    model, done = make_model(), []
    with pytest.raises(modtrace.NonFiniteError), modtrace.record(model, on_nonfinite="stop", strict=True):
        for x in DataLoader(Batches(1)):
            loss = model(x).square().mean()
            gradients = torch.autograd.grad(loss, [*model.parameters()])
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.01 * gradient
            done.append(x)
    assert len(done) == 3  # without gradients in `grad`, a step ends when the call after the next begins


# Other processes.


def train(model: nn.Module, batches: Any) -> Iterator[bool]:
    """Yields before each step of the optimizer; the last yield tells whether the weights are as they were then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = [each.detach().clone() for each in model.parameters()]
        try:
            optimizer.step()
        except modtrace.NonFiniteError:
            yield all(map(torch.equal, before, model.parameters()))
            raise
        yield True


def run(model: nn.Module, batches: Any, *, recorded: bool = True) -> dict[str, Any]:
    """Trains, and returns how many steps were made, whether the run was stopped, and how the weights are."""
    found: dict[str, Any] = {"steps": 0, "told": None, "as before": True}
    recording = (
        modtrace.record(model, on_nonfinite="stop", strict=True) if recorded else warnings.catch_warnings()
    )
    try:
        with recording:
            for is_same in train(model, batches):
                found["as before"] = is_same
                found["steps"] += 1
    except modtrace.NonFiniteError as error:
        found["steps"] -= 1
        found["told"] = str(error).splitlines()[0]
    found["finite"] = all(bool(each.isfinite().all()) for each in model.parameters())
    return found


def run_rank(rank: int, folder: str) -> None:
    """One of two ranks of DDP. The second has an infinite batch; the gradients of both are NaN then."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        found = run(DistributedDataParallel(make_model()), DataLoader(Batches(2 if rank else None)))
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def run_child(folder: str, name: str, recorded: bool) -> None:
    """A child that meets an infinite batch, with a recording of its own, or with none."""
    found = run(make_model(), DataLoader(Batches(2)), recorded=recorded)
    Path(folder, f"{name}.json").write_text(json.dumps(found))


def results_of(folder: Path, children: dict[str, tuple[Callable[..., None], tuple[Any, ...]]]) -> list[Any]:
    """Runs functions in forks beside each other; gives what each has written under its name."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=args) for run, args in children.values()]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return [json.loads((folder / f"{name}.json").read_text()) for name in children]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_both_ranks_are_stopped_where_one_of_them_has_met_nan(tmp_path: Path) -> None:
    ranks = {str(rank): (run_rank, (rank, str(tmp_path))) for rank in range(2)}
    first, second = results_of(tmp_path, ranks)
    assert second["told"].endswith("in step 2, forward")
    assert first["told"].endswith("in step 2, optimizer")  # the gradients that the other rank has spoiled
    for result in (first, second):
        assert (result["steps"], result["as before"], result["finite"]) == (2, True, True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_is_stopped_by_a_recording_of_its_own_and_not_by_its_parents(tmp_path: Path) -> None:
    model = make_model()
    children = {name: (run_child, (str(tmp_path), name, name == "own")) for name in ("own", "none")}
    with modtrace.record(model, on_nonfinite="stop", strict=True):
        model(torch.ones(1, 8)).sum().backward()
        own, none = results_of(tmp_path, children)
    assert own["told"].endswith("in step 2, forward")
    assert (own["steps"], own["as before"], own["finite"]) == (2, True, True)
    assert (none["steps"], none["told"], none["finite"]) == (4, None, False)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_of_a_data_loader_change_nothing() -> None:
    model = make_model()
    found = run(model, DataLoader(Batches(2), num_workers=2))
    assert found["told"].endswith("in step 2, forward")
    assert (found["steps"], found["as before"], found["finite"]) == (2, True, True)


# Nothing is left behind.


def test_functions_of_torch_are_restored_after_the_last_of_two_recordings(fresh_dynamo: None) -> None:
    from torch._dynamo import eval_frame

    before = eval_frame.set_eval_frame, GradScaler._maybe_opt_step
    first, second = (modtrace.record(on_nonfinite="stop", strict=True) for _ in range(2))
    with first:
        with second:
            assert eval_frame.set_eval_frame is not before[0]
        assert eval_frame.set_eval_frame is not before[0]
    assert (eval_frame.set_eval_frame, GradScaler._maybe_opt_step) == before
