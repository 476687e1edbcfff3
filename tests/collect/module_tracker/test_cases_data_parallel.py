"""DataParallel, in which PyTorch's trackers fail."""

from typing import Any

import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn

from helpers.asked import Asked
from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    M_BACKWARD,
    M_FORWARD,
    M_TRAINS,
    MARKS,
    M,
    asked,
    asked_in_threads,
    asked_of_torch,
    in_threads,
    of_torch,
    replicas_of,
    train,
)
from modtrace import ModuleTracker

pytestmark = MARKS


# DataParallel.


def test_data_parallel_is_stripped_from_names():
    """d11"""
    model = nn.DataParallel(M())
    assert asked(lambda: train(model)) == M_TRAINS


@BOTH_OF_TORCH
def test_data_parallel_is_in_the_names_of_torch(kind):
    """d11"""
    model = nn.DataParallel(M())
    lines = asked_of_torch(kind, lambda: model(torch.ones(2, 4)))
    assert lines == [
        "addmm forward: DataParallel DataParallel.module DataParallel.module.l",
        "relu forward: DataParallel DataParallel.module",
    ]


def test_replicas_have_the_names_of_their_originals():
    """d11b"""
    model = M()
    with ModuleTracker(model, strict=True) as tracker:
        for _ in range(3):
            assert asked_in_threads(tracker, replicas_of(model, 2)) == [M_FORWARD, M_FORWARD]
        assert tracker.get_known_fqn(model.l) == "M.l"


def test_backward_through_replicas_has_the_names_of_their_originals():
    """d11b"""
    model = M()
    with ModuleTracker(model, strict=True) as tracker:
        outputs: list[Any] = [None, None]

        def run(at: int, replica: nn.Module) -> None:
            outputs[at] = replica(torch.ones(2, 4))

        in_threads(*(lambda at=at, each=each: run(at, each) for at, each in enumerate(replicas_of(model, 2))))
        for output in outputs:
            with Asked(tracker) as seen:
                output.sum().backward()
            assert seen.lines == M_BACKWARD


@BOTH_OF_TORCH
def test_replicas_are_other_roots_or_merged_with_torch(kind):
    """d11b: a copy that is called alone has its class for a name."""
    model = M()
    with of_torch(kind) as tracker:
        model(torch.ones(2, 4))
        with Asked(tracker) as seen:
            replicas_of(model, 1)[0].l(torch.ones(2, 4))
    assert seen.lines == ["addmm forward: Linear"]


def test_submodule_of_a_replica_called_alone_has_the_name_of_its_original():
    """d11b"""
    model = M()
    with ModuleTracker(model, strict=True) as tracker:
        lines = asked(lambda: replicas_of(model, 1)[0].l(torch.ones(2, 4)), tracker)
    assert lines == ["addmm forward: M.l"]
