"""Whole models take what torch's FlopCounterMode counts, where it counts."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from helpers.architectures import ARCHITECTURES
from helpers.flop_mode import FlopMode, flops_of, total_flops

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def torch_says(run: Callable[[], Any], with_flash: bool = False) -> int:
    """The total of FlopCounterMode, which can be told of attention on the CPU."""
    more = {}
    if with_flash:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        more = {
            FLASH: _unwrapped(flop_counter.sdpa_flop),
            backward: _unwrapped(flop_counter.sdpa_backward_flop),
        }
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        run()
    return counter.get_total_flops()


def _unwrapped(formula: Any) -> Any:
    return formula.__wrapped__  # the counter wraps what it is given


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, groups=groups, bias=False)
        self.short = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.short(x))


def resnet(groups: int = 1) -> nn.Module:
    blocks = [Residual(8, 8, 1, groups), Residual(8, 16, 2, groups)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3),
        nn.MaxPool2d(2),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


class Upsampling(nn.Module):
    """A small U-Net with a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(7, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, self.up(F.relu(self.down(x)))], 1))


@pytest.mark.parametrize("make", [resnet, Upsampling])
def test_convolutional_network_takes_what_torch_counts(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 3, 32, 32, requires_grad=True)

    def run() -> None:
        model(x).sum().backward()

    assert total_flops(run) == torch_says(run) > 1_000_000


@pytest.mark.parametrize(
    ("kind", "groups", "forward"),
    [
        (nn.Conv2d, 1, 73_728),
        (nn.Conv2d, 4, 18_432),
        (nn.Conv2d, 8, 9_216),  # depthwise
        (nn.ConvTranspose2d, 1, 373_248),
        (nn.ConvTranspose2d, 4, 93_312),
        (nn.ConvTranspose2d, 8, 46_656),
    ],
)
def test_weight_gradient_of_a_grouped_convolution_is_counted_once_not_once_a_group(
    kind: Any, groups: int, forward: int
) -> None:
    layer, x = kind(8, 16, 3, stride=2, groups=groups), torch.randn(2, 8, 9, 9)

    def run(of_input: bool, of_weight: bool) -> None:
        layer.weight.requires_grad_(of_weight)
        layer(x.detach().requires_grad_(of_input)).sum().backward()

    with torch.no_grad():
        assert total_flops(lambda: layer(x)) == torch_says(lambda: layer(x)) == forward
    for of_input, of_weight in ((True, False), (False, True), (True, True)):
        each = functools.partial(run, of_input, of_weight)
        assert total_flops(each) == forward * (1 + of_input + of_weight)
        assert torch_says(each) == forward * (1 + of_input + groups * of_weight)


def _multiply_in_place() -> None:
    torch.ones(2, 3).addmm_(torch.ones(2, 4), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3), 2 * 2 * 2 * 4 * 4 * 8),
        (lambda: nn.LSTM(4, 8)(torch.ones(3, 2, 4)), 2 * 3 * 2 * 4 * 8 * (4 + 8)),
        (lambda: torch.ones(3, 4).mv(torch.ones(4)), 2 * 3 * 4),
        (_multiply_in_place, 2 * 2 * 4 * 3),
        (lambda: torch.fft.fft(torch.ones(8)), None),
        (lambda: torch.linalg.svd(torch.eye(3)), None),
    ],
    ids=["attention on the CPU", "LSTM", "mv", "in place", "FFT", "factorisation"],
)
def test_what_torch_counts_as_nothing_is_counted_or_unknown(
    run: Callable[[], Any], flops: int | None
) -> None:
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert [count for _, count in flops_of(run)] == [flops]
        assert torch_says(run) == 0


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc, self.out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + self.proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.other_norm(x))))


@pytest.mark.parametrize(
    ("backend", "scores"), [(SDPBackend.MATH, 4), (SDPBackend.FLASH_ATTENTION, 5)], ids=["math", "flash"]
)
def test_block_takes_what_torch_counts_and_flash_attention_recomputes_the_scores(
    backend: SDPBackend, scores: int
) -> None:
    model, x = Block(), torch.randn(2, 8, 16, requires_grad=True)

    def run() -> None:
        with sdpa_kernel(backend):
            model(x).sum().backward()

    linear = 2 * 16 * (16 * 48 + 16 * 16 + 2 * 16 * 64)
    attention = 2 * 2 * 2 * 8 * 8 * 8  # one product
    assert total_flops(run) == 3 * linear + (2 + scores) * attention
    assert total_flops(run) == torch_says(run, with_flash=True)


def by_operator(run: Callable[[], Any]) -> dict[str, int]:
    """Our counts, as FlopCounterMode adds them up."""
    with FlopMode() as mode:
        run()
    sums: dict[str, int] = {}
    for name, flops in mode.counts:
        assert flops is not None, name
        packet = name.partition(".")[0].replace("::", ".")
        sums[packet] = sums.get(packet, 0) + flops
    return sums


def torch_by_operator(run: Callable[[], Any]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(packet): flops for packet, flops in counter.get_flop_counts()["Global"].items()}


#: What torch does not count at all.
MISSING = {
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._grouped_mm",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_takes_what_torch_counts(name: str, seeded: None) -> None:
    pytest.importorskip("transformers")
    model, inputs = ARCHITECTURES[name]()

    def run() -> None:
        model(**inputs).loss.backward()

    ours, torchs = by_operator(run), torch_by_operator(run)
    if name == "Mamba":  # each of its 32 channels is convolved by itself
        forward = ours["aten.convolution"]
        assert ours.pop("aten.convolution_backward") == 2 * forward
        assert torchs.pop("aten.convolution_backward") == (1 + 32) * forward
    assert {op: flops for op, flops in ours.items() if op not in MISSING} == torchs
    assert sum(torchs.values()) > 10_000


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_takes_the_same_in_inference_mode(name: str, seeded: None) -> None:
    pytest.importorskip("transformers")
    model, inputs = ARCHITECTURES[name]()
    model.eval()

    def run() -> None:
        model(**inputs)

    with torch.no_grad():
        expected = total_flops(run)
    with torch.inference_mode():
        assert total_flops(run) == expected
