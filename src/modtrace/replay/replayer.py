"""Runs recorded ops again, one at a time, on the memory that earlier ops have left."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..collect.ops.mode import tensors_in
from .contents import copy_of, digest, tensor_in
from .generators import GeneratorStates
from .kept_ops import KeptOp, OpKeep, numbers_in, uninitialised
from .recorded_graph import Content, RecordedGraph, RecordedOp, TensorRow


class ReplayFault(Exception):
    """Raised when a recorded op, run again, gives other results; it names the op and what was expected."""


class Replayer:
    """Holds the contents of all storages that will still be read, and runs ops on them.

    copy_writes: whether ops write to copies of their arguments, so that they may run in any order with parents before
        children. If False, they write to the same memory as when they were recorded.
    """

    def __init__(self, graph: RecordedGraph, keep: OpKeep, *, copy_writes: bool) -> None:
        self._graph = graph
        self._keep = keep
        self._copy_writes = copy_writes
        self._storage_makers = graph.makers()
        self._left = graph.readers()  # how often each content will still be read
        self._contents: dict[Content, torch.UntypedStorage] = {}
        #: The storages that first appeared as an output.
        self._makers: dict[Content, RecordedOp] = {}

    def inputs(self, op: RecordedOp) -> list[torch.Tensor]:
        """Returns the tensors that an op reads.

        Raises:
            ReplayFault: a tensor is missing, or its storage is too small.
        """
        return [self._tensor(op, read.slot, read.tensor) for read in op.reads]

    def run(self, op: RecordedOp, kept: KeptOp, inputs: Sequence[torch.Tensor]) -> None:
        """Runs an op, keeps its results for later ops, and compares them with the recording.

        Raises:
            ReplayFault: the results differ.
        """
        arguments = own_memory(inputs, kept.written) if self._copy_writes else list(inputs)
        # An op may change the shape or memory of its arguments.
        shown = [tensor.detach() for tensor in arguments]
        try:
            output = call_op(kept, arguments)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise ReplayFault(f"{op} does not run again on what is recorded: {reason}") from error
        returned = {slot: tensor for tensor, slot in tensors_in(output, "")}
        for made in kept.outputs:  # outputs in memory that the op leaves uninitialized
            if made.content is not None and made.slot in returned:
                returned[made.slot].copy_(made.content)
        _compare(op, kept, output, returned, shown)
        self._check_new(op)
        storages = {slot: tensor.untyped_storage() for slot, tensor in returned.items()}
        self._remember(op, storages, [tensor.untyped_storage() for tensor in shown])

    def skip(self, op: RecordedOp, kept: KeptOp) -> None:
        """Takes the results of an op that cannot run again from the recording."""
        returned = {
            slot: copy_of(storage) for slot, storage in kept.storages.items() if isinstance(slot, str)
        }
        arguments = [
            copy_of(kept.storages[at]) if at in kept.storages else None for at in range(len(op.reads))
        ]
        self._remember(op, returned, arguments)

    def release(self, op: RecordedOp) -> None:
        """Frees the contents that no later op will read."""
        for content in (read.tensor.content for read in op.reads):
            if content is not None:
                self._left[content] -= 1
                if self._left[content] <= 0:
                    self._contents.pop(content, None)

    def _tensor(self, op: RecordedOp, slot: str, row: TensorRow) -> torch.Tensor:
        content = row.content
        if content is None:
            raise ReplayFault(f"{op}: its {slot} has no storage in the recording")
        maker = self._storage_makers.get(content[0])
        if row.producer is None and maker is not None:
            raise ReplayFault(
                f"{op}: its {slot} is recorded as made by no op, and {maker} made its storage {content[0]}"
            )
        storage = self._contents.get(content)
        if storage is None and row.producer is None and row.tensor_id in self._keep.leaves:
            storage = self._contents[content] = copy_of(self._keep.leaves[row.tensor_id])
        if storage is None:
            raise ReplayFault(f"{op}: its {slot} is recorded as {_describe_missing(row)}")
        try:
            dtype: torch.dtype = getattr(torch, row.dtype)
            return tensor_in(storage, dtype, row.offset, row.shape, row.stride, conj=row.conj, neg=row.neg)
        except RuntimeError as error:
            raise ReplayFault(
                f"{op}: its {slot} does not fit its recorded storage {content[0]}: {error}"
            ) from error

    def _check_new(self, op: RecordedOp) -> None:
        """Raises `ReplayFault` if an output has a storage and version that another op has made."""
        known = {read.tensor.storage for read in op.reads}
        for row in op.makes:
            if row.content is None or row.storage in known or self._makers.setdefault(row.content, op) is op:
                continue
            raise ReplayFault(
                f"{op}: its output{row.slot and ' '}{row.slot} is recorded as storage {row.storage} in version "
                f"{row.version}, which {self._makers[row.content]} has made"
            )

    def _remember(
        self,
        op: RecordedOp,
        returned: Mapping[Any, torch.UntypedStorage],
        given: Sequence[torch.UntypedStorage | None],
    ) -> None:
        """Keeps the contents that an op made: in storages that it was given, and in storages that it returned."""
        of_given = {read.tensor.storage: stored for read, stored in zip(op.reads, given, strict=False)}
        for row in op.makes:
            if row.content is None:
                continue
            storage = of_given.get(row.storage) or returned.get(row.slot)
            if storage is not None and row.content not in self._contents and self._left.get(row.content):
                self._contents[row.content] = storage


def call_op(kept: KeptOp, tensors: Sequence[torch.Tensor]) -> Any:
    """Runs an op on other tensors, with the grad mode and the generator states from its recording."""
    args, kwargs = kept.template.fill(tensors)
    if kept.generators is not None:
        GeneratorStates.restore(kept.generators)
    mode: AbstractContextManager[Any] = torch.set_grad_enabled(kept.grad_mode)
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the op gave its warnings when it was recorded
        return kept.schema.func(*args, **kwargs)


def own_memory(tensors: Sequence[torch.Tensor], which: Sequence[int]) -> list[torch.Tensor]:
    """Returns the tensors, with those in `which` moved to copies of their storages.

    Tensors that share a storage share the copy.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    owned = list(tensors)
    for at in which:
        storage = tensors[at].untyped_storage()
        key = storage.data_ptr() if storage.nbytes() else id(storage)
        if key not in copies:
            copies[key] = copy_of(storage)
        owned[at] = moved(tensors[at], copies[key])
    return owned


def moved(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a tensor with the geometry of `tensor` on another storage."""
    conj, neg = tensor.is_conj(), tensor.is_neg()
    return tensor_in(
        storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(), conj=conj, neg=neg
    )


def _compare(
    op: RecordedOp,
    kept: KeptOp,
    output: Any,
    returned: Mapping[str, torch.Tensor],
    given: Sequence[torch.Tensor],
) -> None:
    """Raises `ReplayFault` if an op returned other results, or left other contents in its arguments."""
    for made in kept.outputs:
        tensor = returned.get(made.slot)
        where = f"{op}: its output{made.slot and ' '}{made.slot}"
        if tensor is None:
            raise ReplayFault(f"{where} is missing when it runs again")
        row = op.made_at(made.slot)
        recorded = None if row is None else (row.shape, row.stride, row.offset, row.dtype)
        if recorded not in (None, _geometry(tensor)) and uninitialised(kept.name) is None:
            raise ReplayFault(f"{where} has {_geometry(tensor)}, recorded is {recorded}")
        if made.digest is not None and digest(tensor) != made.digest:
            raise ReplayFault(f"{where} has other bits than it had when it was recorded")
    for at, expected in kept.written_digests.items():
        if expected is not None and digest(given[at]) != expected:
            raise ReplayFault(f"{op} leaves other bits in its {op.reads[at].slot} than when it was recorded")
    values = list(numbers_in(output))
    if not all(_same_value(one, other) for one, other in zip(values, kept.values, strict=False)):
        raise ReplayFault(f"{op} gives {values}, recorded is {kept.values}")


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), dtype


def _same_value(one: Any, other: Any) -> bool:
    """Returns whether two numbers have the same type and value. NaN equals itself."""
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _describe_missing(row: TensorRow) -> str:
    if row.producer is None:
        return f"made by no op (storage {row.storage} in version {row.version}), and no such leaf was met"
    return f"storage {row.storage} in version {row.version}, which its recorded parent op {row.producer} has not made"
