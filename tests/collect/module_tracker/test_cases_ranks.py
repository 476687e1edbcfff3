"""Several processes that train together."""

from collections.abc import Iterator
from typing import Any

import pytest

from helpers import ranks
from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    MARKS,
    of_torch,
)
from modtrace import ModuleTracker

pytestmark = MARKS


# Ranks.

NET_FORWARD = [
    "addmm forward: Net Net.a Net.a.l",
    "relu forward: Net Net.a",
    "addmm forward: Net Net.b Net.b.l",
    "relu forward: Net Net.b",
]


NET_BACKWARD = [
    "threshold_backward backward: Net Net.b",
    "mm backward: Net Net.b Net.b.l",
    "mm backward: Net Net.b Net.b.l",
    "threshold_backward backward: Net Net.a",
    "mm backward: Net Net.a Net.a.l",
]


CHECKPOINTED_BACKWARD = [
    "addmm recompute: Net Net.b Net.b.l",
    "relu recompute: Net Net.b",
    *NET_BACKWARD[:3],
    "addmm recompute: Net Net.a Net.a.l",
    "relu recompute: Net Net.a",
    *NET_BACKWARD[3:],
]


@pytest.fixture
def process_group() -> Iterator[None]:
    with ranks.group_of_one():
        yield


def own(lines: list[str]) -> list[str]:
    """Without communication, and without what torch does to gradients as they are accumulated."""
    return [each for each in lines if each.split()[0] not in ranks.COMMUNICATION and not each.endswith("]")]


def ask_ours(name: str) -> list[str]:
    model = ranks.MODELS[name]()
    with ModuleTracker(strict=True) as tracker:
        first = ranks.ask(model, tracker, ranks.with_parameter)
        assert own(ranks.ask(model, tracker, ranks.with_parameter)) == own(first)
    return first


def names_of_torch(kind: Any, name: str) -> set[str]:
    model = ranks.MODELS[name]()
    with of_torch(kind) as tracker:
        lines = ranks.ask(model, tracker)
    return {each for line in lines for each in line.partition(":")[2].split()}


def test_distributed_data_parallel_is_stripped_from_names(process_group):
    """DDP: the bucket's all-reduce is told from the Linear's work by the parameter whose gradient came last."""
    lines = ask_ours("ddp")
    assert own(lines) == NET_FORWARD + NET_BACKWARD
    assert [each for each in lines if each.startswith("allreduce_")] == [
        "allreduce_ backward: Net Net.a Net.a.l [a.l.weight]"
    ]


def test_fully_sharded_model_has_the_name_of_its_own_class(process_group):
    """FSDP2"""
    lines = ask_ours("fsdp2")
    assert own(lines) == NET_FORWARD + NET_BACKWARD
    # The last one runs when the engine is done with all nodes: outside of all modules.
    assert [each for each in lines if each.startswith("chunk_cat")] == [
        "chunk_cat backward: Net Net.b",
        "chunk_cat backward:",
    ]


def test_fully_sharded_and_checkpointed_model_has_plain_names(process_group):
    """FSDP2 + checkpoint_wrapper"""
    assert own(ask_ours("fsdp2_with_checkpoints")) == NET_FORWARD + CHECKPOINTED_BACKWARD


def test_first_fsdp_is_stripped_from_names(process_group):
    """FSDP1"""
    assert own(ask_ours("fsdp1")) == NET_FORWARD + NET_BACKWARD


@BOTH_OF_TORCH
def test_wrappers_of_distributed_models_are_in_the_names_of_torch(process_group, kind):
    """DDP, FSDP2, FSDP2 + checkpoint_wrapper, FSDP1"""
    assert "DistributedDataParallel.module.a.l" in names_of_torch(kind, "ddp")
    assert {"FSDPNet", "FSDPNet.a.l"} <= names_of_torch(kind, "fsdp2")
    assert "FSDPNet.a._checkpoint_wrapped_module.l" in names_of_torch(kind, "fsdp2_with_checkpoints")
    twice = "FullyShardedDataParallel._fsdp_wrapped_module.a._fsdp_wrapped_module.l"
    assert twice in names_of_torch(kind, "fsdp1")


@pytest.mark.soak
def test_names_in_two_processes_are_those_in_one(tmp_path):
    """DDP and FSDP2, gloo, 2 processes"""
    for found in ranks.in_processes(2, ["ddp", "fsdp2"], tmp_path):
        assert {name: own(lines) for name, lines in found.items()} == {
            "ddp": NET_FORWARD + NET_BACKWARD,
            "fsdp2": NET_FORWARD + NET_BACKWARD,
        }
