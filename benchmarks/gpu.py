"""What recording costs where models train, on a CUDA device: `make gpu-check`, or `python benchmarks/gpu.py 134M`.

Wall time of a step (forward, loss, backward, fused AdamW; bf16), interleaved, as the ratio to the plain step, with the
time that the host takes to issue the step. What is recorded is kept in memory.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import modtrace


class Size(NamedTuple):
    """A model, its batch, and how often its step is timed."""

    width: int
    layers: int
    heads: int
    tokens: int
    batch: int
    rounds: int
    steps: int


SIZES = {
    "21M": Size(256, 6, 8, 128, 8, 7, 20),
    "134M": Size(768, 12, 12, 1024, 8, 7, 10),
    "1.34B": Size(2048, 24, 16, 1024, 8, 5, 4),
}

VOCABULARY = 32_000


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(self.act(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A language model without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Work:
    """A model in training."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self.size = size
        self.model = GPT(size).cuda().bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.ids = torch.randint(0, VOCABULARY, (size.batch, size.tokens)).cuda()

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.ids).flatten(0, 1), self.ids.flatten()).backward()
        self.optimizer.step()


class EmptyMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def std_hooks(model: nn.Module) -> Iterator[None]:
    """What a careful user writes."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.detach().std()
        if output.requires_grad:
            output.register_hook(_std)

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _std(gradient: Tensor) -> None:
    gradient.std()


Variant = Callable[[nn.Module], Any]


def variants() -> dict[str, Variant]:
    recorded = modtrace.record
    return {
        "plain": lambda model: nullcontext(),
        "empty dispatch mode": lambda model: EmptyMode(),
        "hooks that take std()": std_hooks,
        "calls alone": lambda model: recorded(model, values=None),
        "calls and backward times": lambda model: recorded(model, values=None, backward_times=True),
        "calls with device times": lambda model: recorded(model, values=None, device_times=True),
        "outputs and gradients": lambda model: recorded(model, exclude=["**.weight", "**.bias"]),
        "default": lambda model: recorded(model),
        'default, on_nonfinite="stop"': lambda model: recorded(model, on_nonfinite="stop"),
        "tier 2, hash and sketch": lambda model: recorded(
            model, values=modtrace.Capture(stats=2, hash=True, sketch=True)
        ),
        'default, steps="::10"': lambda model: recorded(model, steps="::10"),
        'idle, steps="1000:"': lambda model: recorded(model, steps="1000:"),
        "every op, no values": lambda model: recorded(model, values=None, ops=True),
        "every op with statistics": lambda model: recorded(model, ops=True),
    }


class Timed(NamedTuple):
    """What a step takes. Beginning and ending a recording are left out."""

    wall_ms: float
    issued_ms: float
    memory_bytes: int  # the most that was allocated on the device


def timed(work: Work, variant: Variant) -> Timed:
    with variant(work.model):
        work.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(work.size.steps):
            work.step()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
    wall_s, issued_s = end - start, issued - start
    memory_bytes = torch.cuda.max_memory_allocated()
    return Timed(wall_s / work.size.steps * 1e3, issued_s / work.size.steps * 1e3, memory_bytes)


def table(name: str, only: list[str]) -> None:
    work = Work(SIZES[name])
    for _ in range(3):
        work.step()
    found: dict[str, list[Timed]] = {}
    chosen = {
        key: variant for key, variant in variants().items() if not only or key in only or key == "plain"
    }
    for variant in chosen.values():
        timed(work, variant)
    for _ in range(work.size.rounds):
        for key, variant in chosen.items():
            found.setdefault(key, []).append(timed(work, variant))
    plain = found["plain"]
    parameters = sum(parameter.numel() for parameter in work.model.parameters())
    print(f"{name}: {parameters / 1e6:.0f}M, {torch.cuda.get_device_name()}")
    for key, times in found.items():
        ratio = statistics.median(of.wall_ms / base.wall_ms for of, base in zip(times, plain, strict=True))
        wall_ms, issued_ms = (statistics.median(column) for column in list(zip(*times, strict=True))[:2])
        more = max(of.memory_bytes for of in times) - max(of.memory_bytes for of in plain)
        print(
            f"  {key:30} {ratio:6.3f}  {wall_ms:8.2f} ms, issued in {issued_ms:8.2f} ms, {more / 2**20:+7.1f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(print("benchmarks/gpu.py: there is no CUDA device, so nothing is timed; see gpu_host.py"))
    names = [each for each in sys.argv[1:] if each in SIZES] or list(SIZES)
    for each in names:
        table(each, [each for each in sys.argv[1:] if each not in SIZES])
