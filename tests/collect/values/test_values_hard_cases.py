"""Runs in which rows were once lost, doubled, or kept for ever."""

import itertools

import pytest
import torch
from torch import nn

import modtrace
from helpers.stat_rows import names, rows
from modtrace.collect.recorder.ready_steps import ReadySteps


def record(model: object = None, **options: object) -> modtrace.LiveRecording:
    return modtrace.record(model, strict=True, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_interrupt_while_an_outermost_call_begins_costs_that_call_alone(monkeypatch):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opened, original = itertools.count(), ReadySteps.settle

    def settle(self, *args):
        if next(opened) == 20:
            raise KeyboardInterrupt
        original(self, *args)

    with modtrace.record(model) as rec:
        monkeypatch.setattr(ReadySteps, "settle", settle)
        interrupted = 0
        for _ in range(30):
            try:
                train(model, optimizer)
            except KeyboardInterrupt:
                interrupted += 1
        monkeypatch.undo()
    assert interrupted == 1
    assert rec.table("steps").num_rows >= 29
    assert rec.meta.marks == ()


@pytest.mark.parametrize("steps", ["0:1", "1:2", "0:9:2"])
def test_step_that_is_joined_later_is_sampled_whole(steps):
    """A siamese model: the second call looks like a new step until the backward reaches both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with record(model, steps=steps) as rec:
        for _ in range(3):
            a, b = model(torch.ones(2, 4)), model(torch.zeros(2, 4))
            (a.sum() - b.sum()).backward()
            model.zero_grad()
    kept = set(names(rows(rec), "step"))
    assert kept
    for step in kept:
        assert len(rows(rec, step=step, role="output")) == len(rows(rec, step=step, role="grad_output")) == 6


def test_two_recorders_each_have_a_late_gradient_once():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with record(model) as one, record(model) as other:
        kept = model(torch.ones(2, 4))
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4))
        kept.sum().backward()
    for rec in (one, other):
        assert names(rows(rec, role="grad_output"), "sum") == [2.0]


def test_scripted_module_is_measured_and_its_steps_are_found():
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(scripted, nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        for _ in range(3):
            train(model, optimizer)
    assert len(rows(rec, role="parameter")) == 6
    with record(scripted, values=None) as alone:
        for _ in range(3):
            scripted.zero_grad()
            scripted(torch.ones(2, 4)).sum().backward()
    assert alone.table("steps").num_rows == 3


def test_optimizer_that_comes_after_another_has_died_has_a_name_of_its_own():
    def make() -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return torch.optim.SGD([parameter], lr=0.1)

    with record() as rec:
        first, second = make(), make()
        first.step()
        second.step()
        del first
        third = make()
        third.step()
    assert names(rows(rec, role="parameter"), "slot") == [
        "param_groups[0].params[0]",
        "optimizer#1.param_groups[0].params[0]",
        "optimizer#2.param_groups[0].params[0]",
    ]


def test_optimizer_that_raises_takes_no_rows_for_ever():
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("on purpose")

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    optimizer = Raises(model.parameters(), lr=0.1)
    with record(model) as rec:
        for _ in range(100):
            with pytest.raises(RuntimeError, match="on purpose"):
                train(model, optimizer)
        blocks = len(rec._recorder._values.measurer._measurer._host.blocks)
    assert blocks <= 8  # 20,000 rows were taken; 2,048 and those of a few steps may wait at once


def test_parameter_set_by_hand_before_the_optimizer_is_sampled_though_a_step_without_gradients_is_open():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(**options):
        with record(model, **options) as rec:
            for _ in range(3):
                with torch.no_grad():
                    model(torch.ones(2, 4))
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        return rec

    every = run()
    step = names(rows(every, role="parameter"), "step")[0]
    sampled = run(steps=f"{step}:{step + 1}")
    assert len(rows(sampled, role="parameter")) == 2


def test_recorder_whose_values_fail_costs_another_one_no_row(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with modtrace.record(model) as failing, record(model) as sound:
        with monkeypatch.context() as patch:
            patch.setattr(failing._recorder._values.measurer._measurer, "measure", None)
            with pytest.warns(modtrace.ModtraceWarning, match="measures no more values"):
                model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        assert len(failing._recorder._tracker.subscribers.returned) == 2
    assert [mark.split(":")[0] for mark in failing.meta.marks] == ["values are incomplete from step 0"]
    assert len(rows(sound, role="output")) == len(rows(sound, role="grad_output")) == 8
