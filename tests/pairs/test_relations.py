"""A difference is named by its kind where it has one: a factor, an offset, a sign, another order, a mask, a step."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers import pairs
from helpers.paired_models import GPT
from helpers.pairs import Run, seeded, tokens
from modtrace.analysis.divergence.answer import Divergence

Change = Callable[[torch.Tensor], torch.Tensor]

CAPTURES = {
    "tensors": modtrace.Capture(roles="all", tensors=True),
    "sketches": modtrace.Capture(roles="all", hash=True, sketch=True),
    "statistics": modtrace.Capture(roles=["output", "op_output", "leaf"]),
}
WIDTH, ROWS = 16, 6


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.ops.modtrace_tests.apply(self.inner(x).relu() + 0.1 * x, id(self)))


NETS: dict[int, Net] = {}


@torch.library.custom_op("modtrace_tests::apply", mutates_args=())
def apply(x: torch.Tensor, of: int) -> torch.Tensor:
    return NETS[of].change(x).contiguous().clone()


def shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :1], x[:, :-1]], 1)


def heads_permuted(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (4, 4))[:, :, [2, 0, 3, 1]].flatten(2)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(ROWS) < 3)[:, None]


KINDS: dict[str, tuple[Change, str, str]] = {
    "twice": (lambda x: x * 2, "scale", "2 x the first run's"),
    "half": (lambda x: x / 2, "scale", "1/2 x the first run's"),
    "sum for mean": (
        lambda x: x * WIDTH,
        "scale",
        f"{WIDTH} x the first run's: {WIDTH} is a size here; a sum where the other takes a mean?",
    ),
    "mean for sum": (
        lambda x: x / ROWS,
        "scale",
        f"1/{ROWS} x the first run's: {ROWS} is a size here; a sum where the other takes a mean?",
    ),
    "missing root": (
        lambda x: x / math.sqrt(ROWS),
        "scale",
        f"1/sqrt({ROWS}) x the first run's: {ROWS} is a size here",
    ),
    "factor": (lambda x: x * 1.02, "scale", "1.02 x the first run's"),
    "negative": (lambda x: -x, "sign", "the negative of the first run's"),
    "offset": (lambda x: x + 1, "offset", "the first run's + 1"),
    "transposed": (transposed, "transposed", "the first run's with axes 0 and 1 exchanged"),
    "heads": (heads_permuted, "permuted", "the first run's in another order along axis 2"),
    "shifted": (shifted, "shifted", "the first run's, shifted by 1 along axis 1"),
    "masked": (masked, "masked", "equal but for 50% of the elements, which the second run has as 0"),
}
#: What is seen of these kinds where whole tensors are not there.
BY_SUMS = {"transposed": "reordered", "heads": "reordered", "shifted": None, "masked": None}


def record(change: Change, capture: str, steps: int = 1) -> modtrace.Recording:
    net = Net(change)
    NETS[id(net)] = net
    with modtrace.record(net, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
        for step in range(steps):
            net(torch.randn(3, ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))
    return rec


def find(change: Change, capture: str, steps: int = 1) -> Divergence:
    one, other = record(torch.clone, capture, steps), record(change, capture, steps)
    found = modtrace.compare(one, other)
    assert found.first is not None
    assert found.first.op == "modtrace_tests.apply.default", str(found)
    if found.first.relation:
        assert f"  the second run's is {found.first.relation}\n" in str(found)
    return found.first


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", KINDS)
def test_kind_of_a_difference_is_named(name: str, capture: str) -> None:
    change, kind, relation = KINDS[name]
    if capture == "statistics" and BY_SUMS.get(name) == "reordered":
        return  # extremes and sums are equal: no difference is seen
    first = find(change, capture)
    if capture == "tensors" or name not in BY_SUMS:
        assert (first.kind_of_difference, first.relation) == (kind, relation)
    else:
        assert first.kind_of_difference == BY_SUMS[name]


@pytest.mark.parametrize("capture", CAPTURES)
def test_other_numbers_are_of_no_kind(capture: str) -> None:
    first = find(lambda x: x + torch.linspace(0, 1, WIDTH).sin() * x.roll(1, -1), capture)
    assert first.kind_of_difference is None and first.relation is None


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("change", [lambda z: z * 1j, lambda z: z.roll(1, -1)])
def test_complex_numbers_are_of_no_kind(change: Change, capture: str) -> None:
    class Complex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return change(torch.fft.fft(x)) if self.training else torch.fft.fft(x)

    runs = []
    for is_changed in (False, True):
        model = Complex().train(is_changed)
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec:
            model(torch.linspace(-1, 1, 32).reshape(4, 8))
        runs.append(rec)
    found = modtrace.compare(*runs, allow_missing=True)
    assert {each.kind_of_difference for each in found.divergences} <= {None}


@pytest.mark.parametrize("capture", CAPTURES)
def test_tensor_of_the_step_before_is_told(capture: str) -> None:
    kept: list[torch.Tensor] = []

    def stale(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        return kept[max(len(kept) - 2, 0)]

    first = find(stale, capture, steps=3)
    assert (first.step, first.kind_of_difference) == (1, "stale")
    assert first.relation == "the first run's of step 0"


@pytest.mark.parametrize("capture", CAPTURES)
def test_tensor_that_was_always_so_is_of_no_step(capture: str) -> None:
    """Each batch has the same numbers, and the second run halves them from step 2 on."""
    batch, calls = torch.randn(3, ROWS, WIDTH), iter(range(3))

    def same(x: torch.Tensor) -> torch.Tensor:
        return batch

    runs = []
    for change in (same, lambda x: batch / 2 if next(calls) == 2 else batch):
        runs.append(record(change, capture, steps=3))
    first = modtrace.compare(*runs).first
    assert first is not None
    assert (first.step, first.relation) == (2, "1/2 x the first run's")


class Linear(nn.Module):
    """A layer with the name of the one that it replaces, whose weight is transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.data.t().contiguous()), layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.parametrize("roles", [["output", "op_output", "leaf"], "all"], ids=["read", "all"])
def test_transposed_weight_is_named_unless_its_layer_reads_it_so(roles: str | list[str]) -> None:
    runs = []
    for kind in ("plain", "transposed", "another layer"):
        model = make_layers()
        if kind == "transposed":
            model[2].weight.data = model[2].weight.data.t().contiguous()
        elif kind == "another layer":
            model[2] = Linear(model[2])
        capture = modtrace.Capture(roles=roles, hash=True, sketch=True)
        with modtrace.record(model, ops=True, values=capture, strict=True) as rec:
            model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))).sum().backward()
        runs.append(rec)
    first = modtrace.compare(*runs[:2]).first
    assert first is not None
    assert (first.path, first.slot, first.kind, first.kind_of_difference) == (
        "2",
        "weight",
        "source",
        "reordered",
    )
    found = modtrace.compare(runs[0], runs[2], allow_missing=True)
    assert found.ok, str(found)


def trained_on_parts(count: int) -> modtrace.Recording:
    """A batch in micro-batches, whose losses of the next token nobody divides by their number."""
    model = seeded(GPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        for given in tokens().chunk(count):
            scores = model(given)[:, :-1]
            F.cross_entropy(scores.flatten(0, 1), given[:, 1:].flatten()).backward()
        optimizer.step()

    return pairs.record(Run(model, work))


@pytest.mark.parametrize("count", [2, 4])
def test_sum_over_micro_batches_is_named_by_their_number(count: int) -> None:
    whole, parts = trained_on_parts(1), trained_on_parts(count)
    for both, named in (((whole, parts), f"{count} x"), ((parts, whole), f"1/{count} x")):
        found = modtrace.compare(*both).first
        assert found is not None and (found.path, found.op, found.only_in) == ("", None, None)
        assert (found.phase, found.role) == ("backward", "grad_output")
        hint = f"{count} is the number of its parts; a sum where the other takes a mean?"
        assert found.relation == f"{named} the first run's: {hint}"


def test_rows_that_have_moved_since_do_not_accuse_the_op_that_takes_them_out() -> None:
    """Of a table, the optimizer moves only the rows that are used, by which its statistics hardly differ."""

    def trained(seed: int) -> modtrace.Recording:
        table = seeded(nn.Embedding, 4096, 8)
        optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
        with modtrace.record(table, ops=True) as rec:
            for step in range(2):
                torch.manual_seed(seed + step)
                (table(torch.arange(8)) * torch.randn(8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return rec

    found = modtrace.compare(trained(1), trained(2))
    assert not any((each.op or "").startswith("aten.embedding.") for each in found.divergences)
