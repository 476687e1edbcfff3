"""What the other arguments of an op hide is exempt; an op that does not read what it is given is named all the same."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import modtrace
from helpers.proved import Calls
from modtrace.replay.exemptions import HIDDEN

NAN, INF = float("nan"), float("inf")
NOWHERE = torch.zeros(3, 4, dtype=torch.bool)
IGNORED = torch.full((3,), -100)
INTEGERS = torch.arange(4)

#: By what hides it: functions of a tensor of random numbers.
HIDING = {
    "NaN": [
        lambda x: x * torch.full_like(x, NAN),
        lambda x: x * NAN,
        lambda x: x + torch.tensor(NAN),
        lambda x: x @ torch.full((4, 4), NAN),
        lambda x: torch.maximum(x, torch.tensor(NAN)),
        lambda x: torch.full_like(x, NAN).clamp(x, x + 1),
        lambda x: x < NAN,
    ],
    "infinity": [lambda x: torch.hypot(x, torch.tensor(INF))],
    "an exponent": [
        lambda x: x**0.0,
        lambda x: x**0,
        lambda x: x ** torch.zeros(4),
        lambda x: torch._foreach_pow([x], 0),
    ],
    "a base": [lambda x: 1.0**x, lambda x: torch.ones(4) ** x],
    "a factor": [
        lambda x: INTEGERS * torch.zeros(4, dtype=torch.int64),
        lambda x: torch.addmm(x[:, :3] + 0, x, x.t() + 0, beta=0),
        lambda x: torch._int_mm(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8)),
    ],
    "a mask": [
        lambda x: torch.where(NOWHERE, x, x + 1),
        lambda x: torch.where(x > 0, torch.tensor(NAN), torch.tensor(NAN)),
        lambda x: x.masked_scatter(NOWHERE, x + 1),
        lambda x: (x > 0) * NOWHERE,
    ],
    "a cut": [lambda x: x.tril(-10), lambda x: F.pad(x, (-4, 4))],
    "an index": [
        lambda x: (x + 0).index_put_((NOWHERE,), x.sum()),
        lambda x: (x + 0).index_put_((torch.tensor([0, 2]),), torch.tensor(0.0), accumulate=True),
        lambda x: torch.full((3, 4), NAN)[torch.tensor([0, 2])],
        lambda x: torch.zeros(9, dtype=torch.int64).gather(0, INTEGERS),
        lambda x: torch.ones(3, 4).index_select(1, torch.tensor([1, 2])),
        lambda x: torch.full((3, 4), INF).scatter_reduce(0, torch.tensor([[0, 1, 2, 1]]), x, "amax"),
    ],
    "a limit of the dtype": [
        lambda x: INTEGERS.to(torch.int8) > 127,
        lambda x: torch.iinfo(torch.int64).max >= INTEGERS,
    ],
    "bits": [lambda x: INTEGERS & 0, lambda x: INTEGERS | -1],
    "a divisor": [lambda x: INTEGERS % 1, lambda x: INTEGERS % torch.tensor(1)],
    "a target": [
        lambda x: F.nll_loss(x, IGNORED),
        lambda x: F.nll_loss(x, IGNORED, weight=torch.ones(4), reduction="none"),
        lambda x: F.nll_loss(x, torch.tensor([0, 1, 2]), weight=torch.zeros(4)),
        lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), ignore_index=0),
        lambda x: F.cross_entropy(x, IGNORED, label_smoothing=0.1),
        lambda x: F.ctc_loss(
            x.unsqueeze(1),
            torch.tensor([[1, 1, 1]]),
            torch.tensor([3]),
            torch.tensor([3]),
            zero_infinity=True,
        ),
    ],
    "an empty target": [
        lambda x: F.ctc_loss(x.unsqueeze(1), torch.tensor([[1, 1]]), torch.tensor([3]), torch.tensor([0]))
    ],
    "a place that is far away": [lambda x: F.grid_sample(x[None, None], torch.full((1, 2, 2, 2), 50.0))],
}

#: Gradients that are hidden: functions of a tensor that requires one.
HIDING_IN_BACKWARD = {
    "saturation": lambda x: F.relu6(x + 1000) + F.hardshrink(x, 1000.0) + F.threshold(x, 100.0, 5.0),
    "a token of padding": lambda x: F.embedding(torch.tensor([1, 1]), x, padding_idx=1),
    "targets that are ignored": lambda x: F.nll_loss(x, IGNORED, reduction="none"),
    "no alignment": lambda x: F.ctc_loss(
        x.unsqueeze(1).log_softmax(-1), torch.tensor([[1, 1, 1]]), torch.tensor([3]), torch.tensor([3])
    ),
    "the first token of padding": lambda x: F.embedding(torch.tensor([0, 0]), x, padding_idx=0),
    "NaN": lambda x: (x * 0) / (x * 0),
}

#: What needs no rule: contents beyond those that are there change what the op gives.
CROSSED = [
    lambda x: torch.full((4,), 5) > torch.full((4,), 100),
    lambda x: torch.tensor([300, 200, 400])[:, None] < INTEGERS,
    lambda x: INTEGERS <= 1000,
    lambda x: INTEGERS < -1000,
    lambda x: INTEGERS.clone().le_(1000),
    lambda x: INTEGERS.to(torch.uint8) >= 200,
    lambda x: INTEGERS.clamp(100, 200),
    lambda x: torch.bucketize(INTEGERS, torch.tensor([100, 200])),
    lambda x: torch.searchsorted(torch.tensor([100, 200]), INTEGERS),
    lambda x: torch.isin(torch.tensor([10000, 20000]), torch.tensor([1, 2])),
    lambda x: INTEGERS // 1000,
    lambda x: INTEGERS & 1024,
    lambda x: x >= torch.tensor([1e5, 2e5, 3e5, 4e5]),
    lambda x: torch.tensor(torch.equal(x, x + 1)),
    lambda x: torch.tensor(torch.allclose(x, x + 1)),
]


def prove(functions, x):
    found = modtrace.verify(Calls(lambda model, x: [function(x) for function in functions]), (x,))
    assert found, f"\n{found}"
    return found


@pytest.mark.parametrize("by", HIDING)
def test_what_other_arguments_hide_is_exempt(seeded, by):
    with torch.no_grad():
        for function in HIDING[by]:
            assert prove([function], torch.randn(3, 4)).exempt[HIDDEN] >= 1


@pytest.mark.parametrize("value", [16, True])
def test_index_over_equal_values_is_exempt_whatever_is_drawn(seeded, value):
    """Values that are drawn may be equal where the index leads, so any two places get different ones once."""

    def select_ends(size):
        return lambda x: torch.full((size,), value).index_select(0, torch.tensor([0, size - 1]))

    sizes = [*range(2, 40), 1_000, 100_000]
    with torch.no_grad():
        assert prove([*map(select_ends, sizes)], torch.randn(1)).exempt[HIDDEN] == len(sizes)


@pytest.mark.parametrize("by", HIDING_IN_BACKWARD)
def test_gradient_that_other_arguments_hide_is_exempt(seeded, by):
    assert prove([HIDING_IN_BACKWARD[by]], torch.randn(3, 4, requires_grad=True)).exempt[HIDDEN] >= 1


def test_content_beyond_what_it_is_compared_with_changes_something(seeded):
    with torch.no_grad():
        assert HIDDEN not in prove(CROSSED, torch.randn(3, 4)).exempt


def test_zeros_without_memory_are_not_read(seeded):
    found = prove([torch.sgn], torch.randn(3, 4, requires_grad=True))
    assert {why for _, why in found.unchecked} == {"it works with zeros that have no memory"}


def test_no_integer_is_tried_as_an_index_that_is_not_there(seeded):
    """Kernels do not check all of them: `nll_loss_backward` (torch 2.13) writes where another one leads."""
    tried = set()

    def note(x, at):
        tried.update(at.tolist())
        return x + (at == 255).sum()

    with planted("(Tensor x, Tensor at) -> Tensor", note) as op, torch.no_grad():
        found = modtrace.verify(Calls(lambda model, x: op(x, torch.tensor([-100, 7, 255]))), (torch.ones(2),))
    assert found, f"\n{found}"
    assert tried == {-100, 0, 7, 255}


@contextmanager
def planted(schema, run, tags=(), name="planted"):
    library = torch.library.Library("modtrace_hiding", "FRAGMENT")
    library.define(f"{name}{schema}", tags=tags)
    library.impl(name, run, "CompositeExplicitAutograd")
    try:
        yield getattr(torch.ops.modtrace_hiding, name)
    finally:
        library._destroy()


def fill(out, mask):
    out.masked_fill_(mask, 0.0)


#: Ops that make nothing of their first tensor: schema, what they do, and arguments that would hide it from others.
PLANTED = {
    "NaN": ("(Tensor x, Tensor y) -> Tensor", lambda x, y: y * 1, lambda x: (x, torch.full_like(x, NAN))),
    "zeros": ("(Tensor x, Tensor y) -> Tensor", lambda x, y: y * 1, lambda x: (x, torch.zeros_like(x))),
    "an exponent": ("(Tensor x, float p) -> Tensor", lambda x, p: torch.full((3,), p), lambda x: (x, 0.0)),
    "a mask": ("(Tensor x, Tensor mask) -> Tensor", lambda x, mask: mask.float(), lambda x: (x, NOWHERE)),
    "an index": (
        "(Tensor x, Tensor at) -> Tensor",
        lambda x, at: at * 2,
        lambda x: (x, torch.tensor([0, 2])),
    ),
    "a limit": (
        "(Tensor x, Scalar top) -> Tensor",
        lambda x, top: torch.full((3,), top),
        lambda x: (INTEGERS, 1000),
    ),
    "targets": (
        "(Tensor x, Tensor target, int ignore_index) -> Tensor",
        lambda x, target, ignore_index: (target == ignore_index).float(),
        lambda x: (x, IGNORED, -100),
    ),
    "what is written": (
        "(Tensor x, Tensor mask, Tensor(a!) out) -> ()",
        lambda x, mask, out: fill(out, mask),
        lambda x: (x, NOWHERE, torch.ones(3, 4)),
    ),
}


@pytest.mark.parametrize("beside", PLANTED)
@pytest.mark.parametrize("tags", [(), (torch.Tag.pointwise,)], ids=["", "pointwise"])
def test_op_that_makes_nothing_of_what_it_reads_is_named_beside_what_would_hide_it(seeded, beside, tags):
    schema, run, arguments = PLANTED[beside]
    with planted(schema, run, tags) as op, torch.no_grad():
        found = modtrace.verify(Calls(lambda model, x: (op(*arguments(x)), x + 1)), (torch.randn(3, 4),))
    [fault] = [each for each in found.checks if not each.passed]
    assert fault.name == "perturbation"
    assert "(modtrace_hiding.planted.default in Calls, forward): whatever its x (" in fault.why
    assert fault.why.endswith("it gives the same results, and no rule says why")


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("isnan", "self"),
        ("signbit", "self"),
        ("_segment_reduce_backward", "output"),
        ("_embedding_bag_backward", "offsets"),
        ("mkldnn_rnn_layer_backward", "input"),
    ],
)
def test_op_that_is_only_called_like_one_of_torchs_is_named(seeded, name, argument):
    with planted(f"(Tensor {argument}) -> Tensor", lambda x: torch.ones(3), name=name) as op, torch.no_grad():
        found = modtrace.verify(Calls(lambda model, x: (op(x), x + 1)), (torch.randn(3, 4),))
    [fault] = [each for each in found.checks if not each.passed]
    assert fault.name == "perturbation"
    assert f"(modtrace_hiding.{name}.default in Calls, forward): whatever its {argument} (" in fault.why


def test_integers_are_not_asked_whether_they_are_numbers(seeded):
    with torch.no_grad():
        found = prove([lambda x: INTEGERS.isnan(), lambda x: (x > 0).signbit()], torch.randn(3, 4))
    assert found.exempt["only its shape is used"] == 2


def test_integers_of_dtypes_with_few_operations_are_perturbed(seeded):
    with torch.no_grad():
        prove(
            [lambda x: INTEGERS.to(torch.uint16).long() + INTEGERS.to(torch.uint32)[1:].long()[0]],
            torch.ones(2),
        )
