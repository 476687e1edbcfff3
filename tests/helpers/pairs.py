"""Pairs of runs that users compare, each healthy and with one planted fault, with the place that an answer must name.

The benchmark of comparing runs them too.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import modtrace

from .paired_models import GPT, TIME, TOKENS, WIDTH, CopiedAdamW

#: Everything that a comparison can use.
WHOLE = modtrace.Capture(roles="all", tensors=True, sketch=True, hash=True)


class Run(NamedTuple):
    """A model and what is done with it."""

    model: nn.Module
    work: Callable[[], object]


class Truth(NamedTuple):
    """The site at which two runs part, as the first one names it."""

    path: str | None
    phase: str | None = "forward"
    ops: Sequence[str | None] = ()  # any of them is right, None for no op; (): any op
    step: int = 0
    also: Sequence[str] = ()  # paths that are as right
    says: str = ""  # what is said besides


class Pair(NamedTuple):
    first: Callable[[], Run]
    second: Callable[[bool], Run]  # told whether to plant the fault
    truth: Truth
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    ops: bool = True  # are recorded
    noise: bool = False  # measured by running the first one again


def record(run: Run, *, ops: bool = True) -> modtrace.Recording:
    with modtrace.record(run.model, ops=ops, values=WHOLE, strict=True) as rec:
        run.work()
    return rec


@cache
def tokens() -> torch.Tensor:
    return torch.randint(TOKENS, (4, TIME), generator=torch.Generator().manual_seed(1))


def train(
    model: nn.Module,
    call: Callable[[Any], torch.Tensor] = lambda model: model(tokens()),
    *,
    labels: torch.Tensor | None = None,
    optimizer: Any = None,
    steps: int = 1,
) -> Run:
    """A run of training steps, by SGD if no optimizer is given; `call` returns the scores."""
    wanted = (tokens() if labels is None else labels).flatten()
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        torch.manual_seed(2)
        for _ in range(steps):
            F.cross_entropy(call(model).flatten(0, 1).float(), wanted).backward()
            chosen.step()
            chosen.zero_grad()

    return Run(model, work)


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return make(*args, **kwargs)


def spoil(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[0].neg_()


# ---------------------------------------------------------------------------------------------------------- structure


def plain(**options: Any) -> Run:
    return train(seeded(GPT, **options))


def in_bfloat16(is_planted: bool) -> Run:
    model = seeded(GPT).bfloat16()
    model.blocks[1].norm2.eps = 0.5 if is_planted else 1e-5
    return train(model)


def checkpointed(is_planted: bool) -> Run:
    model = seeded(GPT, dropout=0.5)
    model.is_checkpointed, model.keeps_rng = True, not is_planted
    return train(model)


def checkpointed_and_spoiled(is_planted: bool) -> Run:
    model = seeded(GPT, dropout=0.5)
    model.is_checkpointed = True
    if is_planted:
        spoil(model.blocks[1].fc.weight)
    return train(model)


def written_out(is_planted: bool) -> Run:
    model = seeded(GPT, "written")
    if is_planted:
        model.blocks[1].attn.scale = 1.0
    return train(model)


def fused(is_planted: bool) -> Run:
    model = seeded(GPT)
    if is_planted:
        with torch.no_grad():
            model.blocks[1].attn.qkv.bias[WIDTH : 2 * WIDTH].neg_()
    return train(model)


def compiled(is_planted: bool) -> Run:
    torch._dynamo.reset()  # code that was compiled too often would run as it is
    model = seeded(GPT)
    model.blocks[1].act.approximate = "tanh" if is_planted else "none"
    for block in model.blocks:
        block.compile(backend="eager")
    return train(model)


# ----------------------------------------------------------------------------------------------------------- training


def one_batch(labels: torch.Tensor) -> Run:
    return train(seeded(GPT), labels=labels)


def accumulated(is_planted: bool, *, labels: torch.Tensor) -> Run:
    """Two micro-batches; the fault is a mean of means: each loss is divided by its own number of labels."""
    model = seeded(GPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        count = (labels != -100).sum()
        for given, wanted in zip(tokens().chunk(2), labels.chunk(2), strict=True):
            scores = model(given).flatten(0, 1)
            if is_planted:
                loss = F.cross_entropy(scores, wanted.flatten()) / 2
            else:
                loss = F.cross_entropy(scores, wanted.flatten(), reduction="sum") / count
            loss.backward()
        optimizer.step()

    return Run(model, work)


def undivided(is_planted: bool) -> Run:
    """Two micro-batches; the fault is that the losses are not divided by the number of micro-batches."""
    model = seeded(GPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        for given in tokens().chunk(2):
            loss = F.cross_entropy(model(given).flatten(0, 1), given.flatten())
            (loss if is_planted else loss / 2).backward()
        optimizer.step()

    return Run(model, work)


def uneven_labels() -> torch.Tensor:
    """Labels of which the first half has many fewer than the second."""
    labels = tokens().clone()
    labels[:2, 2:] = -100
    return labels


def by_adamw() -> Run:
    model = seeded(GPT)
    return train(model, steps=2, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def by_copied_adamw(is_planted: bool) -> Run:
    model = seeded(GPT)
    return train(model, steps=2, optimizer=CopiedAdamW(model.parameters(), 1e-2, is_corrected=not is_planted))


def with_wide_head(is_planted: bool) -> Run:
    model = seeded(GPT).bfloat16()
    if is_planted:
        model.head.float()
    return train(model)


#: The op, or the weight itself.
LINEAR = ("aten.addmm.default", None)
SDPA = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)
#: Both sides have what the other has not: another way of doing the same.
OTHER_OPS = {"allow_missing": True}

#: The gradient that the model gets from the loss.
FROM_LOSS = Truth("", "backward", (None,))

PAIRS: dict[str, Pair] = {
    "float32 and bfloat16": Pair(
        plain, in_bfloat16, Truth("blocks.1.norm2", ops=("aten.native_layer_norm.default",))
    ),
    "checkpoints that lose the RNG's state": Pair(
        partial(plain, dropout=0.5),
        checkpointed,
        Truth("blocks.1.drop", "recompute", ("aten.bernoulli_.float",)),
        OTHER_OPS,
    ),
    "checkpoints and another weight": Pair(
        partial(plain, dropout=0.5),
        checkpointed_and_spoiled,
        Truth("blocks.1.fc", ops=LINEAR),
        OTHER_OPS,
    ),
    "written-out attention": Pair(
        plain, written_out, Truth("blocks.1.attn", ops=(*SDPA, "aten.bmm.default")), OTHER_OPS
    ),
    "fused projection": Pair(
        partial(plain, attention="three"),
        fused,
        Truth("blocks.1.attn.k", ops=LINEAR),
        {"map": [r"blocks\.(\d+)\.attn\.[qkv]=blocks.\1.attn.qkv"], **OTHER_OPS},
    ),
    "compiled blocks": Pair(plain, compiled, Truth("blocks.1.act", ops=("aten.gelu.default",)), OTHER_OPS),
    "compiled blocks, by modules": Pair(
        plain, compiled, Truth("blocks.1", ops=(None,)), OTHER_OPS, ops=False
    ),
    "accumulation without a divisor": Pair(plain, undivided, FROM_LOSS, OTHER_OPS),
    "accumulation of means": Pair(
        lambda: one_batch(uneven_labels()),
        partial(accumulated, labels=uneven_labels()),
        FROM_LOSS,
        OTHER_OPS,
    ),
    "copied AdamW": Pair(by_adamw, by_copied_adamw, Truth("embed", "optimizer"), OTHER_OPS),
    "head in float32": Pair(
        lambda: train(seeded(GPT).bfloat16()), with_wide_head, Truth("head"), OTHER_OPS, noise=True
    ),
}
