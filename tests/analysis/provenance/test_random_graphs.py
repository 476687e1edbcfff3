"""In a random graph of ops one op makes NaN or infinite values: it is named, whatever comes before and after it."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import modtrace
from helpers.nonfinite_models import BY_OP
from modtrace.analysis.provenance import trace
from modtrace.analysis.provenance.search import find_absorbed, find_all

Values = list[torch.Tensor]
Step = tuple[str, int, int]


def write_halves(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(one)
    found[:, ::2] = one[:, ::2]
    found[:, 1::2] = other[:, 1::2]
    return found


def add_into_view(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    found = one.clone()
    found[:2].add_(other[:2])
    return found


#: They stay finite on finite input, which they keep within -1 .. 1.
FINITE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda one, other: (one + other) / 2,
    "mul": torch.mul,
    "matmul": lambda one, other: (one @ other).tanh(),
    "cat": lambda one, other: torch.cat([one[:2], other[2:]]),
    "transposed": lambda one, other: one.t().contiguous(),
    "shown": lambda one, other: one.t(),
    "softmax": lambda one, other: one.softmax(-1),
    "masked": lambda one, other: one.masked_fill(torch.eye(4, dtype=torch.bool), -math.inf).softmax(-1),
    "where": lambda one, other: torch.where(one > other, one, other),
    "absorbed": lambda one, other: one.nan_to_num(0.0, 1.0, -1.0),
    "clamped": lambda one, other: one.clamp(-1, 1),
    "halves": write_halves,
    "into a view": add_into_view,
    "sorted": lambda one, other: one.sort(dim=-1).values,
    "constant": lambda one, other: torch.zeros_like(one),
}


def write_through_view(one: torch.Tensor) -> torch.Tensor:
    found = one.clone()
    found[:, 1].fill_(math.nan)
    return found


def write_by_index(one: torch.Tensor) -> torch.Tensor:
    return one.clone().index_put_((torch.tensor([1]),), torch.tensor(math.nan))


def log_in_place(one: torch.Tensor) -> torch.Tensor:
    found = one * 0
    found.t()[1:].log_()
    return found


PRODUCERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "log": (lambda one: (one * 0).log(), "aten.log.default"),
    "root": (lambda one: (one.abs() + 1).neg().sqrt(), "aten.sqrt.default"),
    "exp": (lambda one: (one * 0 + 1e3).exp(), "aten.exp.default"),
    "division": (lambda one: one.abs() / (one * 0), "aten.div.Tensor"),
    "overflow": (lambda one: (one * 0 + 3e38) + (one * 0 + 3e38), "aten.add.Tensor"),
    "fully masked": (lambda one: torch.full_like(one, -math.inf).softmax(-1), "aten._softmax.default"),
    "view": (write_through_view, "aten.fill_.Scalar"),
    "index": (write_by_index, "aten.index_put_.default"),
    "in place": (log_in_place, "aten.log_.default"),
}


def run(steps: Sequence[Step], values: Values) -> None:
    """Applies each op to two of the values that there are, and adds what it returns to them."""
    for name, one, other in steps:
        values.append(FINITE[name](values[one % len(values)], values[other % len(values)]))


graphs = st.lists(
    st.tuples(st.sampled_from(sorted(FINITE)), st.integers(0, 20), st.integers(0, 20)), max_size=8
)


@given(before=graphs, after=graphs, planted=st.sampled_from(sorted(PRODUCERS)), reads=st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_only_op_that_makes_bad_values_in_a_random_graph_is_named(
    before: Sequence[Step], after: Sequence[Step], planted: str, reads: int
) -> None:
    producer, op = PRODUCERS[planted]
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(4, 4, generator=generator) * 2 - 1 for _ in range(3)]
    with modtrace.record(torch.nn.Identity(), ops=True, values=BY_OP) as rec:
        run(before, values)
        values.append(producer(values[reads % len(values)]))
        values[-1].sum()  # what is only read in order to replace it is nobody's fault
        run(after, values)
    assert [(each.op, each.kind) for each in find_all(rec.data)] == [(op, "producer")]


@given(
    before=graphs,
    after=graphs,
    planted=st.sampled_from([None, *sorted(PRODUCERS)]),
    reads=st.integers(0, 20),
    measured=st.sampled_from([(), ("*mul*", "*log*", "*div*")]),
)
@settings(max_examples=20, deadline=None)
def test_ops_that_are_not_visited_would_have_changed_nothing(
    before: Sequence[Step], after: Sequence[Step], planted: str | None, reads: int, measured: Sequence[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(4, 4, generator=generator) * 2 - 1 for _ in range(3)]
    capture = modtrace.Capture(roles=("op_output", "leaf"), ops=measured)
    with modtrace.record(torch.nn.Identity(), ops=True, values=capture) as rec:
        values[0].mul(values[1])
        run(before, values)
        if planted is not None:
            values.append(PRODUCERS[planted][0](values[reads % len(values)]))
        run(after, values)
    found = list(find_all(rec.data)), find_absorbed(rec.data, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "find_doubtful_ops", lambda step, counts: step.order)
        assert found == (list(find_all(rec.data)), find_absorbed(rec.data, 20))
