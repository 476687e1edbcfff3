"""Reads the ops of a recording with the tensors that each of them reads and makes."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..analysis.tables.op_flow import read_op_flow
from ..recording.protocols import RecordingData

#: The contents of a storage: its number, and the number of writes to it so far.
Content = tuple[int, int]


class TensorRow(NamedTuple):
    """A row of the table `tensors`."""

    tensor_id: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool
    dtype: str
    storage: int | None  # None if it has no storage
    version: int | None
    producer: int | None  # None if no op made it
    slot: str

    @property
    def content(self) -> Content | None:
        """The storage and version that the tensor shows; None if it has no storage."""
        return None if self.storage is None or self.version is None else (self.storage, self.version)


class Read(NamedTuple):
    """A tensor that an op reads, with the slot."""

    slot: str
    tensor: TensorRow


@dataclass
class RecordedOp:
    """A row of the table `ops`, with the tensors of the op."""

    number: int
    name: str
    place: str  # `layers.0, forward`
    reads: list[Read]
    makes: list[TensorRow]

    def __str__(self) -> str:
        return f"op {self.number} ({self.name} in {self.place})"

    def made_at(self, slot: str) -> TensorRow | None:
        """Returns the tensor that the op made at a slot; None if it returned a tensor that it was given."""
        return next((tensor for tensor in self.makes if tensor.slot == slot), None)


@dataclass(frozen=True)
class RecordedGraph:
    """All ops of a recording, in the order in which they ran."""

    ops: dict[int, RecordedOp]

    def parents(self) -> dict[int, set[int]]:
        """Returns for each op the ops that made what it reads."""
        return {
            number: {read.tensor.producer for read in op.reads if read.tensor.producer is not None}
            for number, op in self.ops.items()
        }

    def makers(self) -> dict[int, RecordedOp]:
        """Returns, for each storage that first appeared as the output of an op, that op."""
        tensors = {
            row for op in self.ops.values() for row in (*op.makes, *(read.tensor for read in op.reads))
        }
        first = {
            row.storage: row.producer for row in sorted(tensors, key=lambda row: row.tensor_id, reverse=True)
        }
        return {
            storage: self.ops[producer]
            for storage, producer in first.items()
            if storage is not None and producer in self.ops
        }

    def readers(self) -> Counter[Content | None]:
        """Returns how often each storage and version is read."""
        return Counter(read.tensor.content for op in self.ops.values() for read in op.reads)


def read_graph(data: RecordingData) -> RecordedGraph:
    """Returns the graph of a whole recording."""
    calls, flow, ops = _name_calls(data), read_op_flow(data), {}
    tensors = [_to_tensor(row) for row in flow.tensors.table.to_pylist()]
    for at, row in enumerate(data.table("ops").select(["op_id", "name", "call_id", "phase"]).to_pylist()):
        call = calls.get(row["call_id"], f"unknown call {row['call_id']}")
        place = f"{call}, {row['phase']}" if row["phase"] else call
        reads = [Read(slot, tensors[tensor]) for slot, tensor in flow.reads_of(at)]
        makes = [tensors[tensor] for _, tensor in flow.returns_of(at)]
        makes.sort(key=lambda tensor: tensor.tensor_id)
        ops[row["op_id"]] = RecordedOp(row["op_id"], row["name"], place, reads, makes)
    return RecordedGraph(dict(sorted(ops.items())))


def _to_tensor(row: dict[str, Any]) -> TensorRow:
    own = {"shape": tuple(row["shape"]), "stride": tuple(row["stride"]), "producer": row["producer_op"]}
    return TensorRow(**{name: own[name] if name in own else row[name] for name in TensorRow._fields})


def _name_calls(data: RecordingData) -> dict[int | None, str]:
    modules = {row["module_id"]: row for row in data.table("modules").to_pylist()}
    names: dict[int | None, str] = {None: "no module"}
    for call in data.table("calls").select(["call_id", "module_id", "nth"]).to_pylist():
        module = modules.get(call["module_id"], {})
        name = module.get("path") or module.get("name") or module.get("type") or "the optimizer"
        names[call["call_id"]] = f"{name}@{call['nth']}" if call["nth"] else name
    return names
