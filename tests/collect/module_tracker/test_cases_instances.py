"""Several trackers at once, in which PyTorch's trackers fail."""

from collections.abc import Callable

import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn

from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    DISTRIBUTED,
    M_BACKWARD,
    M_FORWARD,
    MARKS,
    TORCHS,
    M,
    asked,
    asked_of_torch,
    train,
)
from modtrace import ModuleTracker

pytestmark = MARKS


# Instances.


def two_models() -> Callable[[], None]:
    models = [M(), M()]

    def run() -> None:
        outputs = [each(torch.ones(2, 4)) for each in models]
        for each in outputs:
            each.sum().backward()

    return run


def test_two_models_of_one_class_are_two_roots():
    """d08"""
    assert asked(two_models()) == [
        "addmm forward: M M.l",
        "relu forward: M",
        "addmm forward: M#1 M#1.l",
        "relu forward: M#1",
        "threshold_backward backward: M",
        "mm backward: M M.l",
        "threshold_backward backward: M#1",
        "mm backward: M#1 M#1.l",
    ]


@BOTH_OF_TORCH
def test_two_models_of_one_class_are_one_for_torch(kind):
    """d08"""
    assert asked_of_torch(kind, two_models()) == 2 * M_FORWARD + 2 * M_BACKWARD


class Peer(nn.Module):
    """Calls another of its class, which is not registered in it."""

    def __init__(self, peer: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["peer"] = peer
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        if self.peer is not None:
            x = self.peer(x)
        return self.b(x.relu())


PEER_LINES = [
    "addmm forward: Peer Peer.a",
    "addmm forward: Peer {peer} {peer}.a",
    "relu forward: Peer {peer}",
    "addmm forward: Peer {peer} {peer}.b",
    "relu forward: Peer",
    "addmm forward: Peer Peer.b",
    "mm backward: Peer Peer.b",
    "mm backward: Peer Peer.b",
    "threshold_backward backward: Peer",
    "mm backward: Peer {peer} {peer}.b",
    "mm backward: Peer {peer} {peer}.b",
    "threshold_backward backward: Peer {peer}",
    "mm backward: Peer {peer} {peer}.a",
    "mm backward: Peer {peer} {peer}.a",
    "mm backward: Peer Peer.a",
]


def peer_lines(name: str) -> list[str]:
    return [each.replace("{peer}", name) for each in PEER_LINES]


def test_unregistered_peer_of_the_same_class_is_an_instance_of_its_own():
    """d08b"""
    model = Peer(Peer())
    assert asked(lambda: train(model)) == peer_lines("Peer.(Peer#0)")


def test_unregistered_peer_that_is_a_given_root_has_the_name_of_that_root():
    """d08b"""
    model = Peer(Peer())
    tracker = ModuleTracker({"mine": model, "other": model.peer}, strict=True)
    lines = [each.replace("Peer", "mine") for each in peer_lines("other")]
    assert asked(lambda: train(model), tracker) == lines


def test_unregistered_peer_of_the_same_class_confuses_torch():
    """d08b: the outer one is lost in the first, and the two have one name in both."""
    model = Peer(Peer())
    assert asked_of_torch(TORCHS, lambda: model(torch.ones(2, 4))) == [
        "addmm forward: Peer Peer.a",
        "addmm forward: Peer Peer.a",
        "relu forward: Peer",
        "addmm forward: Peer Peer.b",
        "relu forward:",
        "addmm forward: Peer.b",
    ]
    assert asked_of_torch(DISTRIBUTED, lambda: model(torch.ones(2, 4))) == [
        "addmm forward: Peer Peer.a",
        "addmm forward: Peer Peer.a",
        "relu forward: Peer",
        "addmm forward: Peer Peer.b",
        "relu forward: Peer",
        "addmm forward: Peer Peer.b",
    ]
