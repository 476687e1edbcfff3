"""Threads do not disturb each other: each call has its thread, its parent and its backward."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.twins import bits, grads
from zoo import TiedGPT

TIMEOUT_S = 30


class Meeting(nn.Module):
    """Its forward waits until the other thread is at the same place."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.__dict__["barrier"] = barrier
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        self.barrier.wait(TIMEOUT_S)
        x = self.first(x)
        self.barrier.wait(TIMEOUT_S)
        x = self.second(x)
        self.barrier.wait(TIMEOUT_S)
        return x


class Wait(torch.autograd.Function):
    """The identity, whose backward waits for the other thread's."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.wait(TIMEOUT_S)
        return grad, None


class MeetingBackward(nn.Module):
    """Three layers; before the backward of each it waits for the other thread."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.__dict__["barrier"] = barrier
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = Wait.apply(layer(x), self.barrier)
        return x


def run_all(*runs: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread of its own, all at the same time; gives what they return."""
    results: list[Any] = [None] * len(runs)
    errors: list[BaseException] = []

    def catch(at: int, run: Callable[[], Any]) -> None:
        try:
            results[at] = run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catch, args=each) for each in enumerate(runs)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT_S)
        assert not each.is_alive()
    if errors:
        raise errors[0]
    return results


def nested(rec: modtrace.Recording, phase: str = "forward") -> dict[int, list[str]]:
    """For each thread its calls as lines "root/path < parent's path", in order."""
    modules = {row["module_id"]: row for row in rec.table("modules").to_pylist()}
    roots = {number: row["name"] for number, row in modules.items()}
    rows = {row["call_id"]: row for row in rec.table("calls").to_pylist()}
    lines: dict[int, list[str]] = {}
    for row in sorted(rows.values(), key=lambda each: each["start_ns"]):
        if row["phase"] != phase:
            continue
        module = modules[row["module_id"]]
        line = f"{roots[module['root_id']]}/{module['path']}"
        if row["parent_call_id"] is not None:
            parent = rows[row["parent_call_id"]]
            assert parent["thread"] == row["thread"]
            assert parent["start_ns"] <= row["start_ns"] <= row["end_ns"] <= parent["end_ns"]
            line += f" < {modules[parent['module_id']]['path']}"
        lines.setdefault(row["thread"], []).append(line)
    return lines


def meeting_lines(root: str) -> list[str]:
    return [
        f"{root}/",
        f"{root}/first < ",
        f"{root}/second < ",
        f"{root}/second.0 < second",
        f"{root}/second.1 < second",
    ]


def test_two_models_in_two_threads_keep_their_calls_apart():
    barrier = threading.Barrier(2)
    models = {"one": Meeting(barrier), "other": Meeting(barrier)}
    with modtrace.record(models, strict=True) as rec:
        run_all(
            *(lambda model=model: [model(torch.ones(2, 4)) for _ in range(3)] for model in models.values())
        )
    found = nested(rec)
    assert sorted(found.values()) == [3 * meeting_lines("one"), 3 * meeting_lines("other")]
    assert rec.meta.marks == ()


def test_model_first_met_in_two_threads_at_once_has_one_name():
    model = Meeting(threading.Barrier(2))
    with modtrace.record(strict=True) as rec:
        run_all(*[lambda: model(torch.ones(2, 4))] * 2)
    assert list(nested(rec).values()) == [meeting_lines("Meeting")] * 2
    assert rec.table("modules").column("path").to_pylist() == ["", "first", "second", "second.0", "second.1"]


def test_calls_beside_a_running_one_are_in_its_step():
    barrier = threading.Barrier(2)
    models = [Meeting(barrier), Meeting(barrier)]
    with modtrace.record(models, strict=True) as rec:
        run_all(*(lambda model=model: model(torch.ones(2, 4)).sum().backward() for model in models))
    assert set(rec.table("calls").column("step").to_pylist()) == {0}


# Backward.


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_backward_times_of_another_thread_name_the_forward_calls():
    models = {"one": perceptron(), "other": perceptron()}
    with modtrace.record(models, strict=True, backward_times=True) as rec:
        (output,) = run_all(lambda: models["one"](torch.ones(2, 4)))
        mine = models["other"](torch.ones(2, 4))
        output.sum().backward()
        mine.sum().backward()
    rows = {row["call_id"]: row for row in rec.table("calls").to_pylist()}
    backward = [row for row in rows.values() if row["phase"] == "backward"]
    assert all(rows[row["forward_call_id"]]["module_id"] == row["module_id"] for row in backward)
    threads = {row["thread"] for row in rows.values() if row["phase"] == "forward"}
    assert threads == {0, 1}
    lines = nested(rec, "backward")
    assert len(lines) == 1  # both ran in the main thread
    assert next(iter(lines.values())) == [
        *["one/", "one/2 < ", "one/1 < ", "one/0 < "],
        *["other/", "other/2 < ", "other/1 < ", "other/0 < "],
    ]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recompute_in_another_thread_names_the_calls_it_repeats(reentrant):
    models = {"one": perceptron(), "other": perceptron()}

    def forward(name: str) -> torch.Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        return checkpoint(models[name], x, use_reentrant=reentrant)

    with modtrace.record(models, strict=True) as rec:
        (output,) = run_all(lambda: forward("one"))
        mine = forward("other")
        output.sum().backward()
        mine.sum().backward()
    rows = {row["call_id"]: row for row in rec.table("calls").to_pylist()}
    recomputes = [row for row in rows.values() if row["phase"] == "recompute"]
    repeated = [None if row["recompute_of"] is None else rows[row["recompute_of"]] for row in recomputes]
    assert len(recomputes) == 8
    for row, original in zip(recomputes, repeated, strict=True):
        assert original is None or original["module_id"] == row["module_id"]
    if (
        not reentrant
    ):  # the output of a reentrant one is made outside of every module: whose it is is not known
        assert None not in repeated


def test_rows_of_two_backwards_at_once_are_kept_apart():
    barrier = threading.Barrier(2)
    models = {"one": MeetingBackward(barrier), "other": MeetingBackward(barrier)}
    with modtrace.record(models, strict=True, backward_times=True) as rec:
        run_all(*(lambda model=model: model(torch.ones(2, 4)).sum().backward() for model in models.values()))
    # Between two layers the root's own nodes run, so it stays open around them.
    layers = ["layers.2", "layers.1", "layers.0"]
    assert sorted(nested(rec, "backward").values()) == [
        [f"{name}/", *(f"{name}/{layer} < " for layer in layers)] for name in ("one", "other")
    ]


def test_gradients_of_training_in_two_threads_are_the_same_when_recorded():
    def train(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh())
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.randint(0, 17, (2, 8), generator=generator)).square().sum().backward()
            optimizer.step()
        return [bits(each) for each in (*model.parameters(), *grads(model).values())]

    plain = run_all(lambda: train(1), lambda: train(2))
    with modtrace.record(strict=True, backward_times=True) as rec:
        recorded = run_all(lambda: train(1), lambda: train(2))
    assert recorded == plain
    assert rec.meta.marks == ()
    counts: dict[tuple[int, str], int] = {}
    for row in rec.table("calls").to_pylist():
        counts[row["thread"], row["phase"]] = counts.get((row["thread"], row["phase"]), 0) + 1
    threads = {
        thread for thread, phase in counts if phase == "forward"
    }  # a device's engine has one of its own
    assert len(threads) == 2
    assert {key: counts[key] for key in counts if key[1] != "backward"} == {
        **{(thread, "forward"): 400 for thread in threads},
        **{(thread, "optimizer"): 100 for thread in threads},
    }


def test_thread_that_starts_before_and_ends_after_the_recording():
    entered, left = threading.Event(), threading.Event()
    model = nn.Linear(4, 4)
    outer = nn.Sequential(model)

    def wait(module, args):
        entered.set()
        assert left.wait(TIMEOUT_S)

    handle = outer.register_forward_pre_hook(wait)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(outer(torch.ones(2, 4))))
    thread.start()
    assert entered.wait(TIMEOUT_S)
    with modtrace.record(strict=True) as rec:
        model(torch.ones(2, 4))
    left.set()
    thread.join(TIMEOUT_S)
    handle.remove()
    assert results[0].shape == (2, 4)
    assert rec.table("calls").num_rows == 1


def test_gpts_in_four_threads_are_attributed():
    models = {f"model{number}": TiedGPT(layers=1) for number in range(4)}

    def train(model: nn.Module) -> None:
        for _ in range(5):
            model(torch.zeros(2, 8, dtype=torch.long), False).sum().backward()

    with modtrace.record(models, strict=True, backward_times=True) as rec:
        run_all(*(lambda model=model: train(model) for model in models.values()))
    rows = {row["call_id"]: row for row in rec.table("calls").to_pylist()}
    roots = {row["module_id"]: row["root_id"] for row in rec.table("modules").to_pylist()}
    seen = set()
    for row in rows.values():
        seen.add((row["thread"], roots[row["module_id"]]))
        for other in ("parent_call_id", "forward_call_id", "recompute_of", "triggered_by"):
            if row[other] is not None:
                assert roots[rows[row[other]]["module_id"]] == roots[row["module_id"]]
                assert rows[row[other]]["thread"] == row["thread"]
        assert row["phase"] != "recompute" or row["recompute_of"] is not None
        assert row["phase"] != "backward" or row["forward_call_id"] is not None
    assert len(seen) == 4  # each thread ran one model


def test_backward_of_a_thread_without_modules_is_nobodys():
    """Its nodes have the same numbers as those of the other thread's modules."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def without_modules():
        x = torch.ones(3, requires_grad=True)
        for _ in range(30):
            x = x * 2
        x.sum().backward()

    with modtrace.record(model, backward_times=True, strict=True) as rec:
        kept = model(torch.ones(2, 4))
        thread = threading.Thread(target=without_modules)
        thread.start()
        thread.join(TIMEOUT_S)
    assert kept.requires_grad
    assert [call["phase"] for call in rec.table("calls").to_pylist()] == ["forward"] * 3
