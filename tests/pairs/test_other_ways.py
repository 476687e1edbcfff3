"""A part that is written in two ways is not accused of what another op does."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace

WIDTH = 8


class Cosine(nn.Module):
    """The product of normalised vectors, or the product divided by both norms; and its temperature."""

    def __init__(self, is_second: bool, is_wrong: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.is_second, self.temperature = is_second, 0.07 if is_wrong else 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        if self.is_second:
            found = (a @ b.mT) / (a.norm(dim=-1)[..., :, None] * b.norm(dim=-1)[..., None, :])
        else:
            found = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).mT
        return found / self.temperature


class Scaled(nn.Module):
    """Attention that scales queries and keys, or their products; and its softmax."""

    def __init__(self, is_second: bool, is_wrong: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.is_second, self.dim = is_second, -2 if is_wrong else -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, scale = self.q(x), self.k(x), 1 / math.sqrt(WIDTH)
        root = math.sqrt(scale)
        scores = (q @ k.mT) * scale if self.is_second else (q * root) @ (k * root).mT
        return scores.softmax(self.dim) @ self.v(x)


class Adapted(nn.Module):
    """A layer with an adapter beside it, or in its weights; and its activation."""

    def __init__(self, is_second: bool, is_wrong: bool) -> None:
        super().__init__()
        self.w, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.is_second, self.act = is_second, F.gelu if is_wrong else F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = self.down.weight, self.up.weight
        if self.is_second:
            return self.act(F.linear(x, self.w.weight + 2.0 * (up @ down), self.w.bias))
        return self.act(self.w(x) + 2.0 * (x @ down.mT @ up.mT))


def run(make: Callable[[bool, bool], nn.Module], is_second: bool, is_wrong: bool) -> modtrace.Recording:
    torch.manual_seed(0)
    around = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    net = nn.Sequential(around[0], make(is_second, is_wrong), around[1])
    x = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    capture = modtrace.Capture(roles="all", hash=True, sketch=True)
    with modtrace.record(net, ops=True, values=capture, strict=True) as rec:
        net(x).square().mean().backward()
    return rec


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (Cosine, {"aten.div.Tensor"}),
        (Scaled, {"aten._softmax.default"}),
        (Adapted, {"aten.relu.default", "aten.gelu.default"}),
    ],
)
def test_fault_behind_a_part_in_another_way_is_told(
    make: Callable[[bool, bool], nn.Module], ops: set[str], is_second: bool
) -> None:
    first = run(make, is_second, False)
    found = modtrace.compare(first, run(make, not is_second, False), map="auto", allow_missing=True)
    assert found.ok, str(found)
    found = modtrace.compare(first, run(make, not is_second, True), map="auto", allow_missing=True)
    assert found.first is not None and found.first.path == "1" and found.first.op in ops, str(found)


class Exchanged(nn.Module):
    """Two scales, exchanged or not, beside an activation that is written in another way."""

    def __init__(self, is_second: bool, is_wrong: bool) -> None:
        super().__init__()
        self.is_second, self.scales = is_second, (3.0, 0.5) if is_wrong else (0.5, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * x.sigmoid() if self.is_second else F.silu(x)
        one, other = (x * each for each in self.scales)
        return one.softmax(-1) @ other.tanh().mT


class Copied(nn.Module):
    """Memory of zeros, by one function or another, into which what an op returned is copied."""

    def __init__(self, is_second: bool, is_wrong: bool) -> None:
        super().__init__()
        self.is_second, self.act = is_second, torch.sigmoid if is_wrong else torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x.new_zeros(x.shape) if self.is_second else torch.zeros(x.shape)
        memory.copy_(self.act(x))
        return memory.exp()


@pytest.mark.parametrize(
    ("make", "op"),
    [(Exchanged, "aten.mul.Tensor"), (Copied, "aten.copy_.default")],
    ids=["exchanged", "copied"],
)
def test_fault_is_not_hidden_by_what_is_elsewhere(make: Callable[[bool, bool], nn.Module], op: str) -> None:
    first, second = run(make, False, False), run(make, True, True)
    for pair in ((first, second), (second, first)):
        found = modtrace.compare(*pair, allow_missing=True)
        assert found.first is not None and (found.first.path, found.first.op) == ("1", op), str(found)


def test_what_is_apart_by_more_than_noise_is_not_taken_for_equal_in_bfloat16() -> None:
    """Both activations are of one run alone, and apart by twice the noise."""
    runs = []
    for is_second in (False, True):
        torch.manual_seed(0)
        layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 64)
        net, x = nn.Sequential(*layers).bfloat16(), torch.randn(64, 64).bfloat16()
        capture = modtrace.Capture(roles="all", hash=True, sketch=True)
        with modtrace.record(net, ops=True, values=capture, strict=True) as rec, torch.no_grad():
            y = net[2](net[1](net[0](x)))
            net[3](y * torch.sigmoid(1.2 * y) if is_second else F.silu(y))
        runs.append(rec)
    assert not modtrace.compare(*runs, allow_missing=True).ok


class Rotated(nn.Module):
    """Keys that are normalised and rotated, by one formula or another; one of the two ways also keeps them."""

    def __init__(self, is_second: bool, eps: float) -> None:
        super().__init__()
        self.k, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_second, self.eps = is_second, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.k(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        angle = torch.linspace(0, 3, 3 * WIDTH // 2).view(3, -1)
        one, other = k.chunk(2, -1)
        if self.is_second:
            cos, sin = angle.cos(), angle.sin()
            turned = torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
        else:
            both = torch.cat([angle, angle], -1)
            turned = k * both.cos() + torch.cat([-other, one], -1) * both.sin()
            self.kept = torch.cat([turned, turned], -2)
        return self.out(turned.tanh())


@pytest.mark.parametrize("is_second", [False, True])
def test_small_fault_is_not_hidden_by_a_part_in_another_way_behind_it(is_second: bool) -> None:
    def run_small(is_second: bool, eps: float) -> modtrace.Recording:
        torch.manual_seed(0)
        net, x = Rotated(is_second, eps), torch.randn(4, 3, WIDTH)
        capture = modtrace.Capture(roles="all", hash=True, sketch=True)
        with modtrace.record(net, ops=True, values=capture, strict=True) as rec, torch.no_grad():
            net(x)
        return rec

    first = run_small(is_second, 1e-6)
    assert modtrace.compare(first, run_small(not is_second, 1e-6), allow_missing=True).ok
    found = modtrace.compare(first, run_small(not is_second, 2e-6), allow_missing=True).first
    assert found is not None and found.arguments == ("other 1e-06 against 2e-06",), str(found)
