"""The ops of a recording with the tensors that each of them reads and makes."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..analysis.tables.op_flow import read_op_flow
from ..recording.protocols import RecordingData

#: A storage in one state: its number, and the number of writes to it so far.
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
    storage: int | None  # None: it has none
    version: int | None
    producer: int | None  # None: no op has made it
    slot: str

    @property
    def content(self) -> Content | None:
        """The storage and version that the tensor shows; None if it has no storage."""
        return None if self.storage is None or self.version is None else (self.storage, self.version)


class Read(NamedTuple):
    """A tensor that an op reads, and its slot."""

    slot: str
    tensor: TensorRow


@dataclass
class RecordedOp:
    """A row of the table `ops`, with the tensors of the op."""

    number: int
    name: str
    place: str  # `layers.0, forward`
    reads: list[Read] = field(default_factory=list)
    makes: list[TensorRow] = field(default_factory=list)

    def __str__(self) -> str:
        return f"op {self.number} ({self.name} in {self.place})"

    def made_at(self, slot: str) -> TensorRow | None:
        """Returns the tensor that the op has made at a slot; None if it returned one that it was given."""
        return next((each for each in self.makes if each.slot == slot), None)


@dataclass(frozen=True)
class RecordedGraph:
    """All ops of a recording, in the order in which they ran."""

    ops: dict[int, RecordedOp]

    def parents(self) -> dict[int, set[int]]:
        """Returns, for each op, the ops that made what it reads."""
        return {
            number: {read.tensor.producer for read in op.reads if read.tensor.producer is not None}
            for number, op in self.ops.items()
        }

    def makers(self) -> dict[int, "RecordedOp"]:
        """Returns, for each storage that first appeared as the output of an op, that op."""
        read = (each.tensor for op in self.ops.values() for each in op.reads)
        made = (each for op in self.ops.values() for each in op.makes)
        first: dict[int, TensorRow] = {}
        for row in sorted({*read, *made}, key=lambda each: each.tensor_id):
            if row.storage is not None:
                first.setdefault(row.storage, row)
        producers = {storage: row.producer for storage, row in first.items()}
        return {
            storage: self.ops[op] for storage, op in producers.items() if op is not None and op in self.ops
        }

    def readers(self) -> dict[Content, int]:
        """Returns how often each content is read."""
        counts: dict[Content, int] = defaultdict(int)
        for op in self.ops.values():
            for read in op.reads:
                if read.tensor.content is not None:
                    counts[read.tensor.content] += 1
        return counts


def read_graph(data: RecordingData) -> RecordedGraph:
    """Returns the graph of a whole recording."""
    calls, ops = _name_calls(data), {}
    for row in _rows(data, "ops", "op_id", "name", "call_id", "phase"):
        call = calls.get(row["call_id"], f"unknown call {row['call_id']}")
        place = f"{call}, {row['phase']}" if row["phase"] else call
        ops[row["op_id"]] = RecordedOp(row["op_id"], row["name"], place)
    flow = read_op_flow(data)
    tensors = [_to_tensor(row) for row in flow.tensors.table.to_pylist()]
    for op, number in enumerate(flow.op_id.tolist()):
        ops[number].makes += [tensors[row] for _, row in flow.returns_by_op.get(op, ())]
        ops[number].makes.sort(key=lambda tensor: tensor.tensor_id)
        ops[number].reads += [Read(slot, tensors[row]) for slot, row in flow.reads_by_op.get(op, ())]
    return RecordedGraph(dict(sorted(ops.items())))


def _rows(data: RecordingData, table: str, *columns: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data.table(table).select(columns).to_pylist()
    return found


def _to_tensor(row: dict[str, Any]) -> TensorRow:
    own = {"shape": tuple(row["shape"]), "stride": tuple(row["stride"]), "producer": row["producer_op"]}
    return TensorRow(**{name: own[name] if name in own else row[name] for name in TensorRow._fields})


def _name_calls(data: RecordingData) -> dict[int | None, str]:
    modules = {row["module_id"]: row for row in _rows(data, "modules", "module_id", "path", "name", "type")}
    names: dict[int | None, str] = {None: "no module"}
    for call in _rows(data, "calls", "call_id", "module_id", "nth"):
        module = modules.get(call["module_id"], {})
        name = module.get("path") or module.get("name") or module.get("type") or "the optimizer"
        names[call["call_id"]] = f"{name}@{call['nth']}" if call["nth"] else name
    return names
