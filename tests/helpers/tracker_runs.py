"""Asks trackers at every op of a run, and has small models to run."""

import gc
import logging
import threading
import tracemalloc
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

from helpers.asked import Asked, ours
from modtrace import ModuleTracker

TIMEOUT_S = 30

#: Of every module of cases.
MARKS = [
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


# What runs, asked at every op.


def ours_compiled(tracker: ModuleTracker) -> str:
    """With "compiled" where the region is one, by the answer of the place and by that of the call."""
    where = tracker.where()
    call = where.call
    marks = ["compiled"] * where.compiled + ["(call compiled)"] * (call is not None and call.compiled)
    return " ".join([ours(tracker), *marks])


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


def whole(**options: Any) -> Callable[[], Any]:
    """Makes a model that `torch.compile` has been given."""
    return lambda: torch.compile(M(), **options)


def in_place(**options: Any) -> Callable[[], Any]:
    """Makes a model that has been told to compile itself."""

    def make() -> Any:
        model = M()
        model.compile(**options)
        return model

    return make


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(M(), M())

    def forward(self, x):
        return self.blocks(x).tanh()


def by_layer(**options: Any) -> Callable[[], Any]:
    """Makes a model each of whose blocks has been told to compile itself."""

    def make() -> Any:
        model = Stacked()
        for block in model.blocks:
            block.compile(**options)
        return model

    return make


#: d10, k01, k06, k05, k03, k04
WAYS = {
    "eager": (whole, {"backend": "eager"}),
    "aot_eager": (whole, {"backend": "aot_eager"}),
    "eager full graph": (whole, {"backend": "eager", "fullgraph": True}),
    "aot_eager full graph": (whole, {"backend": "aot_eager", "fullgraph": True}),
    "module.compile() by eager": (in_place, {"backend": "eager"}),
    "module.compile() by aot_eager": (in_place, {"backend": "aot_eager"}),
    "module.compile() full graph": (in_place, {"backend": "aot_eager", "fullgraph": True}),
    "by layer by eager": (by_layer, {"backend": "eager"}),
    "by layer by aot_eager": (by_layer, {"backend": "aot_eager"}),
    "by layer full graph": (by_layer, {"backend": "aot_eager", "fullgraph": True}),
}


def make_compiled(way: str, backend: Any = None) -> Any:
    make, options = WAYS[way]
    torch.manual_seed(0)
    return make(**({**options, "backend": backend} if backend is not None else options))()


COMPILED_M = [
    "addmm forward: M compiled (call compiled)",
    "relu forward: M compiled (call compiled)",
    "threshold_backward backward: M compiled (call compiled)",
    "mm backward: M compiled (call compiled)",
]


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


# Memory and what is left.


def held_bytes() -> int:
    """What lives of what our code has allocated."""
    gc.collect()
    ours_only = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/modtrace/*")])
    return sum(each.size for each in ours_only.statistics("filename"))


def held_objects() -> int:
    gc.collect()
    return sum(1 for each in gc.get_objects() if str(type(each).__module__).startswith("modtrace."))


@contextmanager
def memory_traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


#: What a tracker may hold. It drops what has ended in batches: 64 outermost calls, with their steps.
MOST_OBJECTS = 400


MOST_BYTES = 100_000


def hold_little(step: Callable[[], Any], base: int) -> None:
    """Runs hundreds of steps; no more lives of ours than a batch of what we drop at once."""
    for _ in range(120):
        step()
    size = held_bytes()
    for _ in range(320):
        step()
    assert held_objects() - base <= MOST_OBJECTS
    assert held_bytes() - size <= MOST_BYTES


class Checkpointed(nn.Module):
    def __init__(self, blocks: int) -> None:
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
