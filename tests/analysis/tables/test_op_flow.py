"""What ops and calls read and return, and what nobody reads, against the rows one by one."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.tables.op_flow import OpFlow, read_op_flow

SLOTS = ("", "[0]", "[1]")
ARGUMENTS = ("self", "self[1]", "other")


@dataclass
class Program:
    """A recording of some ops, with its rows: the tensors of each by its id, and the uses."""

    data: TypedRecording
    made: dict[int, tuple[int | None, str]] = field(default_factory=dict)  # op and slot of each tensor
    reads: list[tuple[int | None, int, str]] = field(
        default_factory=list
    )  # op, None for a call; tensor, slot
    forwards: dict[int, int] = field(default_factory=dict)  # of each backward op the forward op


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Ops that read tensors of earlier ops and leaves, some of them forever unread; calls; rows that are lost."""
    made: dict[int, tuple[int | None, str]] = {}
    reads: list[tuple[int | None, int, str]] = []
    forwards: dict[int, int] = {}
    builder = RecordingBuilder()
    call = builder.call(builder.module("net", "Net"), 0, 100)
    for leaf in range(draw(st.integers(0, 2))):
        made[builder.tensor([2], slot=f"leaf {leaf}")] = None, ""
    for at in range(draw(st.integers(2, 8))):
        forward = draw(st.none() | st.integers(0, at - 1)) if at else None
        name = draw(st.sampled_from(["aten.add.Tensor", "aten.copy_.default"]))
        op = builder.op(call, name, at, at + 1, forward=forward)
        if forward is not None:
            forwards[op] = forward
        for tensor in draw(st.lists(st.sampled_from(sorted(made)), max_size=3)) if made else ():
            slot = draw(st.sampled_from(ARGUMENTS))
            builder.use(tensor, op=op, slot=slot)
            reads.append((op, tensor, slot))
        for slot in draw(st.lists(st.sampled_from(SLOTS), min_size=1, max_size=3)):
            made[builder.tensor([2], producer=op, slot=slot)] = op, slot
    for tensor in draw(st.lists(st.sampled_from(sorted(made)), max_size=2)) if made else ():
        slot = draw(st.sampled_from(["input[0]", "output"]))
        builder.use(tensor, call=call, slot=slot)
        reads.append((None, tensor, slot))
    builder.use(10**6, op=0)  # the row of the tensor is lost
    return Program(builder.data(), made, reads, forwards)


def copies(data: TypedRecording) -> np.ndarray:
    return np.array([name == "aten.copy_.default" for name in data.table("ops")["name"].to_pylist()], bool)


@settings(deadline=None, max_examples=40)
@given(programs())
def test_reads_and_returns_are_those_of_the_rows(program: Program) -> None:
    flow = read_op_flow(program.data)
    ids = flow.tensors.tensor_id.tolist()
    assert flow.reads_of(-1) == flow.returns_of(-1) == []
    for op in range(len(flow.op_id)):
        read = [(slot, tensor) for by, tensor, slot in program.reads if by == op]
        assert [(slot, ids[row]) for slot, row in flow.reads_of(op)] == read
        own = [(slot, tensor) for tensor, (by, slot) in program.made.items() if by == op]
        assert [(slot, ids[row]) for slot, row in flow.returns_of(op)] == own
        first = int(flow.first_returned[op])
        assert (ids[first] if first >= 0 else None) == (own[0][1] if own else None)
        for slot in SLOTS:
            [found] = flow.find_output(np.array([op]), np.array([0]), [slot])
            assert (ids[found] if found >= 0 else None) == dict(reversed(own)).get(slot)
    of_calls = [(tensor, slot) for by, tensor, slot in program.reads if by is None]
    for kind, rows in (("input", flow.given), ("output", flow.returned)):
        pairs = [
            *zip((ids[row] for row in rows.tensor), (flow.slots[code] for code in rows.slot), strict=True)
        ]
        assert pairs == [(tensor, slot) for tensor, slot in of_calls if slot.startswith(kind)]


def is_needed(op: int, program: Program, among: set[int], copied: np.ndarray) -> bool:
    """Says the same as the definition, by walking on from an op."""
    own = {tensor for tensor, (by, _) in program.made.items() if by == op}
    for by, tensor, slot in program.reads:
        slots = [made_at for maker, made_at in program.made.values() if maker == by]
        returns_whole = len(slots) > len({*slots})
        if tensor not in own or (
            by is not None and slot.startswith("self") and copied[by] and not returns_whole
        ):
            continue
        if by is None or by not in among or is_needed(by, program, among, copied):
            return True
    return False


@settings(deadline=None, max_examples=40)
@given(programs(), st.sets(st.integers(0, 7)))
def test_unread_is_what_leads_to_no_other_op_and_no_call(program: Program, chosen: set[int]) -> None:
    flow, copied = read_op_flow(program.data), copies(program.data)
    ops = range(len(flow.op_id))
    for among in ({*ops}, chosen & {*ops}):
        mask = np.isin(np.arange(len(ops)), [*among])
        found = flow.find_unread(copied, None if among == {*ops} else mask)
        expected = [op in among and not is_needed(op, program, among, copied) for op in ops]
        assert found.tolist() == expected


@settings(deadline=None, max_examples=30)
@given(programs(), st.permutations(range(8)), st.booleans())
def test_flow_of_some_ops_is_a_part_of_that_of_all(
    program: Program, order: list[int], with_call: bool
) -> None:
    """The other ops may be asked for by others, or their rows be lost: their tensors are then as those of no op."""
    whole = read_op_flow(program.data)
    chosen = [op for op in order if op < len(whole.op_id)][:5]
    calls = np.zeros(int(with_call), np.int64)
    part = read_op_flow(program.data, op_id=np.array(chosen, np.int64), call_id=calls)
    ids, all_ids = part.tensors.tensor_id.tolist(), whole.tensors.tensor_id.tolist()
    producers = {
        tensor: chosen[op] if op >= 0 else None
        for tensor, op in zip(ids, part.tensors.producer.tolist(), strict=True)
    }
    assert producers == {
        tensor: by if by in chosen else None for tensor, (by, _) in program.made.items() if tensor in ids
    }
    for at, op in enumerate(chosen):
        for few, many in ((part.reads_of, whole.reads_of), (part.returns_of, whole.returns_of)):
            expected = [(slot, all_ids[row]) for slot, row in many(op)]
            assert [(slot, ids[row]) for slot, row in few(at)] == expected
    for few, many in ((part.given, whole.given), (part.returned, whole.returned)):
        expected = [all_ids[row] for row in many.tensor] if with_call else []
        assert [ids[row] for row in few.tensor] == expected


def find_internal(flow: OpFlow, program: Program) -> list[int]:
    forward = np.array([program.forwards.get(op, -1) for op in range(len(flow.op_id))], np.int64)
    return flow.tensors.tensor_id[flow.find_internal(forward)].tolist()


@settings(deadline=None, max_examples=40)
@given(programs())
def test_internal_is_a_further_output_that_only_the_backward_of_its_op_reads(program: Program) -> None:
    expected = [
        tensor
        for tensor, (op, slot) in program.made.items()
        if op is not None
        and slot == "[1]"
        and op not in program.forwards
        and all(
            (by is None and read_as.startswith("input"))
            or (by is not None and program.forwards.get(by) == op)
            for by, read, read_as in program.reads
            if read == tensor
        )
    ]
    assert find_internal(read_op_flow(program.data), program) == expected
