"""Graphs of 40,000 ops, 5,000 modules deep, and of 5,000 calls are built and shown like small ones."""

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from helpers.typed_graphs import box_lines
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta
from modtrace.recording.phase import FORWARD, PHASES

#: Every so many ops of a block one also reads what the block before has made last.
SKIP_EVERY = 4
LAYERS = 5
_OP_NS = 10
_NONE = np.zeros(0, np.int64)

#: Frames: far less than anything here is long or deep.
_SHALLOW = 300


@pytest.fixture(autouse=True)
def no_recursion() -> Iterator[None]:
    """Whatever calls itself for each of many fails."""
    before = sys.getrecursionlimit()
    frames, frame = 0, sys._getframe()
    while frame is not None:
        frames, frame = frames + 1, frame.f_back
    sys.setrecursionlimit(frames + _SHALLOW)
    yield
    sys.setrecursionlimit(before)


def test_modules_5000_deep():
    graph = graph_of(record_nested(5_000))
    assert repr(graph) == "<ModelGraph: 5002 nodes, 5001 edges>"
    assert [each.box for each in graph.boxes] == list(range(-1, 4_999))
    assert [each.depth for each in graph.boxes] == list(range(5_000))
    assert_drawn(graph)
    assert repr(graph.fold()) == repr(graph)  # none of them has a sibling
    assert len(graph.collapse(depth=4_000).boxes) == 4_000
    assert repr(graph.collapse(depth=0).expand("m.m")) == "<ModelGraph: 6 nodes, 5 edges>"


def test_5000_calls_of_one_module():
    graph = graph_of(record_calls(5_000))
    assert repr(graph) == "<ModelGraph: 5002 nodes, 5001 edges>"
    assert [each.key for each in graph.boxes[-2:]] == ["forward/Net/layer@4998", "forward/Net/layer@4999"]
    assert_drawn(graph)
    assert repr(graph.collapse("layer")) == "<ModelGraph: 5002 nodes, 5001 edges>"
    assert repr(graph.fold()) == repr(graph)  # a call of a module is not numbered


def test_40000_ops_are_drawn_and_seen_at_any_depth():
    graph = graph_of(record_blocks(400, 100))
    skips = 399 * 25
    both = 399  # the first op of a block reads the end of the one before twice
    assert len(graph.columns.edges) == 40_001 + skips
    assert repr(graph) == f"<ModelGraph: 40002 nodes, {40_001 + skips - both} edges>"
    assert len(graph.boxes) == 2 + 400 * 6
    assert sum(each.flops or 0 for each in graph.nodes) == 512 * 40_000
    assert graph.render_dot().count("\n") > 80_000
    root = graph.collapse(depth=0)
    assert repr(root) == "<ModelGraph: 3 nodes, 2 edges>"
    assert root.nodes[1].flops == 512 * 40_000
    blocks = graph.collapse("blocks.*")
    assert repr(blocks) == "<ModelGraph: 402 nodes, 401 edges>"
    assert {(each.ops, each.flops) for each in blocks.nodes[1:-1]} == {(100, 51_200)}
    assert_drawn(blocks)
    folded = graph.fold()
    assert box_lines(folded) == [
        "forward/Net",
        "  forward/Net/blocks",
        "    forward/Net/blocks.0 ×400",
        "      forward/Net/blocks.0.0 ×2000",
    ]
    assert len(folded.nodes) == 22
    assert_drawn(folded)
    assert len(graph.filter(path="blocks.7.**").nodes) == 1 + 100  # the first of them is what they read


def assert_drawn(graph: ModelGraph) -> None:
    """The first node, the middle one and the last are in the picture, and edges lead on unless they are loops."""
    text = graph.render_dot()
    assert all(f"n{number} " in text for number in (0, len(graph.nodes) // 2, len(graph.nodes) - 1))
    assert all(edge.source < edge.target for edge in graph.edges if not edge.is_loop)


def record_blocks(blocks: int, ops_per_block: int) -> MemoryRecording:
    """A net of equal blocks with five layers each, and a chain of ops through all of them.

    Args:
        ops_per_block: a multiple of 20.
    """
    size, per_block = blocks * ops_per_block, LAYERS + 1
    at = np.arange(blocks * per_block)  # blocks and layers in the order of time
    block, place = at // per_block, at % per_block  # place 0 is the block itself
    names = [
        f"blocks.{each}{f'.{part - 1}' if part else ''}" for each, part in zip(block, place, strict=True)
    ]
    registered_in = np.where(place == 0, 1, 2 + block * per_block)
    data = _begin([("", None), ("blocks", 0), *zip(names, registered_in.tolist(), strict=True)])
    per_layer = ops_per_block // LAYERS
    _write_calls(
        data,
        module=np.append(0, 2 + at),
        parent=np.append(-1, np.where(place == 0, 0, 1 + block * per_block)),
        first_op=np.append(0, block * ops_per_block + np.maximum(place - 1, 0) * per_layer),
        ops=np.append(size, np.where(place == 0, ops_per_block, per_layer)),
    )
    op = np.arange(size)
    skipping = op[(op % SKIP_EVERY == 0) & (op >= ops_per_block)]
    _write_ops(data, np.repeat(1 + at[place > 0], per_layer), skipping, skipping - skipping % ops_per_block)
    return data


def record_nested(depth: int) -> MemoryRecording:
    """Modules that call each other so many deep, each of which runs one op before it calls the next."""
    data = _begin([(".".join("m" * level), level - 1 if level else None) for level in range(depth)])
    level = np.arange(depth)
    _write_calls(data, level, level - 1, level, depth - level)
    _write_ops(data, level)
    return data


def record_calls(calls: int) -> MemoryRecording:
    """A net that sends its input so many times through one layer, which runs one op."""
    data = _begin([("", None), ("layer", 0)])
    inner = np.arange(calls)
    _write_calls(
        data,
        module=np.append(0, np.ones(calls, np.int64)),
        parent=np.append(-1, np.zeros(calls, np.int64)),
        first_op=np.append(0, inner),
        ops=np.append(calls, np.ones(calls, np.int64)),
    )
    _write_ops(data, 1 + inner)
    return data


def _begin(modules: Sequence[tuple[str, int | None]]) -> MemoryRecording:
    """A recording of modules, given by their paths and what they are registered in; the first one is the root."""
    data = MemoryRecording(RunMeta(), max_bytes=2**40)
    paths = [path for path, _ in modules]
    parents = [-1 if above is None else above for _, above in modules]
    data.write(
        "modules",
        {
            "module_id": np.arange(len(modules)),
            "root_id": np.zeros(len(modules), np.int64),
            "path": paths,
            "raw_path": paths,
            "name": ["Net", *[None] * (len(modules) - 1)],
            "type": ["Net", *["Part"] * (len(modules) - 1)],
            "parent_id": np.ma.masked_less(parents, 0),
        },
    )
    data.write("sites", {"site_id": [0], "module_id": [0], "nth": [0], "role": ["input"], "slot": ["[0]"]})
    return data


def _write_calls(
    data: MemoryRecording, module: np.ndarray, parent: np.ndarray, first_op: np.ndarray, ops: np.ndarray
) -> None:
    """Calls of modules, each after the one around it, with the ops in them and in those inside of them."""
    end_ns = (first_op + ops) * _OP_NS
    data.write(
        "calls",
        {
            "call_id": np.arange(len(module)),
            "step": np.zeros(len(module), np.int64),
            "module_id": module,
            "nth": _count_up(module),
            "parent_call_id": np.ma.masked_less(parent, 0),
            "phase": np.full(len(module), PHASES.index(FORWARD)),
            "start_ns": first_op * _OP_NS,
            "end_ns": end_ns,
        },
    )
    data.write("steps", {"step": [0], "kind": ["train"], "start_ns": [0], "end_ns": [int(end_ns.max())]})


def _count_up(keys: np.ndarray) -> np.ndarray:
    """For each the number of equal ones before it."""
    order = np.argsort(keys, kind="stable")
    _, begins, counts = np.unique(keys[order], return_index=True, return_counts=True)
    number = np.empty(len(keys), np.int64)
    number[order] = np.arange(len(keys)) - np.repeat(begins, counts)
    return number


def _write_ops(
    data: MemoryRecording,
    call: np.ndarray,
    also: np.ndarray = _NONE,
    reads: np.ndarray = _NONE,
) -> None:
    """A chain of ops that begins with the input: op n reads tensor n, and makes tensor n + 1.

    Args:
        call: in which each of them runs.
        also: ops that read another tensor too,
        reads: and which.
    """
    op = np.arange(len(call))
    data.write(
        "ops",
        {
            "op_id": op,
            "step": np.zeros(len(op), np.int64),
            "call_id": call,
            "phase": np.full(len(op), PHASES.index(FORWARD)),
            "name": ["aten.mul.Tensor"] * len(op),
            "nth": _count_up(call),
            "start_ns": op * _OP_NS + 1,
            "end_ns": op * _OP_NS + 9,
            "flops": np.full(len(op), 512),
            "bytes_read": np.full(len(op), 2048),
            "bytes_written": np.full(len(op), 2048),
        },
    )
    _write_tensors(data, len(op) + 1)
    consumer = np.concatenate([op, also])
    by_op = np.argsort(consumer, kind="stable")
    slots = np.repeat(["self", "other"], [len(op), len(also)])
    data.write(
        "uses",
        {
            "consumer_op": consumer[by_op],
            "slot": slots[by_op].tolist(),
            "tensor_id": np.concatenate([op, reads])[by_op],
        },
    )
    data.write("uses", {"consumer_call": [0], "slot": ["output"], "tensor_id": [len(op)]})


def _write_tensors(data: MemoryRecording, size: int) -> None:
    number = np.arange(size)
    data.write(
        "tensors",
        {
            "tensor_id": number,
            "site_id": np.ma.masked_greater(number, 0),
            "shape": np.tile([8, 64], (size, 1)),
            "stride": np.tile([64, 1], (size, 1)),
            "dtype": ["float32"] * size,
            "device": ["cpu"] * size,
            "layout": ["strided"] * size,
            "storage": number,
            "version": np.zeros(size, np.int64),
            "producer_op": np.ma.masked_less(number - 1, 0),
        },
    )
