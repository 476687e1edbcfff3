"""Large recordings, typed as columns straight into Arrow: 200,000 ops, modules 5,000 deep, 5,000 calls of one."""

from collections.abc import Sequence

import numpy as np

from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta
from modtrace.recording.phase import FORWARD, PHASES

#: Every so many ops of a block one also reads what the block before has made last.
SKIP_EVERY = 4
LAYERS = 5
_OP_NS = 10
_NONE = np.zeros(0, np.int64)


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
