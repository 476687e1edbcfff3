"""Asks trackers at every op of a run, and has small models to run."""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._tools import mod_tracker
from torch.nn.modules import module as module_globals
from torch.utils.checkpoint import checkpoint

from helpers.asked import Asked
from modtrace import ModuleTracker

TIMEOUT_S = 30

#: Of every module of cases.
MARKS = [
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


# What runs, asked at every op.


def asked(run: Callable[[], Any], tracker: Any = None, answer: Any = None) -> list[str]:
    """What a tracker says while something runs; by default a new one of ours."""
    if tracker is None:
        tracker = ModuleTracker(strict=True)
    with tracker, Asked(tracker, answer) as seen:
        run()
    return seen.lines


TORCHS = torch.utils.module_tracker.ModuleTracker


DISTRIBUTED = mod_tracker.ModTracker


@contextmanager
def of_torch(kind: Any) -> Iterator[Any]:
    """One of PyTorch's trackers, entered; what it leaves behind is taken away afterwards."""
    listed = [
        module_globals._global_forward_pre_hooks,
        module_globals._global_forward_hooks,
        module_globals._global_forward_hooks_always_called,
        module_globals._global_forward_hooks_with_kwargs,
    ]
    before = [dict(each) for each in listed]
    formatwarning = warnings.formatwarning
    loggers = [logging.getLogger(each.__module__) for each in (TORCHS, DISTRIBUTED)]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with kind() as tracker:
                yield tracker
    finally:
        warnings.formatwarning = formatwarning
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
        for each, was in zip(listed, before, strict=True):
            each.clear()
            each.update(was)


def asked_of_torch(kind: Any, run: Callable[[], Any]) -> list[str]:
    with of_torch(kind) as tracker, Asked(tracker) as seen:
        run()
    return seen.lines


BOTH_OF_TORCH = pytest.mark.parametrize("kind", [TORCHS, DISTRIBUTED], ids=["ModuleTracker", "ModTracker"])


# Small models. The work of each is told by its ops: `addmm` and `mm` are of Linears, the others of who calls them.


class M(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(x).relu()


def train(model: Callable[..., Any], x: torch.Tensor | None = None) -> None:
    model(torch.ones(2, 4) if x is None else x).sum().backward()


M_FORWARD = ["addmm forward: M M.l", "relu forward: M"]


M_BACKWARD = ["threshold_backward backward: M", "mm backward: M M.l"]


M_TRAINS = M_FORWARD + M_BACKWARD


def of(name: str, lines: list[str]) -> list[str]:
    """The same lines for a model that has another name."""
    return [
        " ".join(name + part[1:] if part[:2] in ("M", "M.") else part for part in line.split(" "))
        for line in lines
    ]


# Threads.


def in_threads(*runs: Callable[[], Any]) -> None:
    """Runs each in a thread of its own, all at the same time."""
    errors: list[BaseException] = []

    def catch(run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catch, args=(each,)) for each in runs]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT_S)
        assert not each.is_alive()
    if errors:
        raise errors[0]


# Compilation.


def compiled_graphs() -> tuple[int, dict[str, int]]:
    """How many graphs were compiled, and where graphs broke."""
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def replicas_of(model: nn.Module, count: int) -> list[nn.Module]:
    """What `torch.nn.parallel.replicate` makes, on one device."""
    modules = list(model.modules())
    copies = [{id(each): each._replicate_for_data_parallel() for each in modules} for _ in range(count)]
    for copied in copies:
        for module in modules:
            replica = copied[id(module)]
            for name, child in module._modules.items():
                replica._modules[name] = copied[id(child)]
            replica._former_parameters = {}
            for name, parameter in module._parameters.items():
                copy_ = parameter.view_as(parameter)  # not a leaf, as after broadcasting
                setattr(replica, name, copy_)
                replica._former_parameters[name] = copy_
    return [copied[id(model)] for copied in copies]


def asked_in_threads(tracker: Any, models: list[nn.Module]) -> list[list[str]]:
    """What each thread hears, as `torch.nn.parallel.parallel_apply` runs them."""
    heard: list[list[str]] = [[] for _ in models]

    def run(at: int) -> None:
        with Asked(tracker) as seen:
            models[at](torch.ones(2, 4))
        heard[at] = seen.lines

    in_threads(*(lambda at=at: run(at) for at in range(len(models))))
    return heard


class Checkpointed(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(M() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def checkpointed_lines(tracker: Any = None) -> list[str]:
    model = Checkpointed(1)
    return asked(lambda: train(model), tracker)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).pow(3).sum()
