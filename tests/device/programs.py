"""Small training runs that do the same on any device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from helpers.architectures import ARCHITECTURES

#: Trains a model on the default device, inside what records it, and returns the losses and the model.
Program = Callable[[], "tuple[list[torch.Tensor], nn.Module]"]


@contextmanager
def on(device: str) -> Iterator[None]:
    """Runs programs on a device, from one seed, with the ops that all devices have for attention."""
    torch.manual_seed(0)
    with torch.device(device), sdpa_kernel(SDPBackend.MATH):
        yield


def _without_dropout(model: nn.Module) -> nn.Module:
    """On an accelerator dropout is another op, which draws other numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def _gpt(
    reentrant: bool | None = None,
    optimizer: Callable[..., Any] = _adamw,
    low_precision: bool = False,
) -> "tuple[list[torch.Tensor], nn.Module]":
    model = _without_dropout(zoo.TiedGPT(layers=2))
    stepper, losses = optimizer(model.parameters()), []
    tokens = torch.randint(0, 17, (2, 8))
    for _ in range(2):
        stepper.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16) if low_precision else nullcontext():
            logits = model(tokens, reentrant)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(model.eval()(tokens).float().sum())
    return losses, model


def _module(make: Callable[[], nn.Module], **inputs: Any) -> "tuple[list[torch.Tensor], nn.Module]":
    model, losses = make(), []
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    stepper = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    for _ in range(2):
        x = torch.randn(3, 4)
        stepper.zero_grad()
        output = model(x=x) if isinstance(model, zoo.Structured) else model(x, **inputs)
        tensors = [output.first] if isinstance(output, zoo.Pair) else [output]
        tensors = [output["y"], *output["nested"][:1]] if isinstance(output, dict) else tensors
        loss = sum(tensor.square().sum() for tensor in tensors)
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    return losses, model


def _late() -> "tuple[list[torch.Tensor], nn.Module]":
    model, losses = zoo.Late(), []
    for _ in range(2):
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        losses.append(loss.detach())
        model.late = nn.Linear(4, 4)
    return losses, model


def _failing() -> "tuple[list[torch.Tensor], nn.Module]":
    model, losses = zoo.Failing(), []
    for error in (None, ValueError("planted"), None):
        model.error = error
        try:
            loss = model(torch.randn(3, 4)).sum()
        except ValueError:
            continue
        loss.backward()
        losses.append(loss.detach())
    return losses, model


def _images() -> "tuple[list[torch.Tensor], nn.Module]":
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    stepper, losses = torch.optim.Adam(model.parameters(), foreach=False), []
    for _ in range(2):
        images, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
        stepper.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    return losses, model


def _architecture(name: str) -> "tuple[list[torch.Tensor], nn.Module]":
    model, inputs = ARCHITECTURES[name]()
    model.eval()  # without dropout
    for config in (part.config for part in model.modules() if hasattr(part, "config")):
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach()], model


PROGRAMS: dict[str, Program] = {
    "GPT": _gpt,
    "GPT, reentrant checkpoints": partial(_gpt, reentrant=True),
    "GPT, non-reentrant checkpoints": partial(_gpt, reentrant=False),
    "GPT, optimizer in a loop": partial(_gpt, optimizer=partial(torch.optim.AdamW, foreach=False)),
    "GPT, SGD": partial(_gpt, optimizer=partial(torch.optim.SGD, lr=0.1, foreach=True)),
    "GPT, autocast": partial(_gpt, low_precision=True),
    "called twice": partial(_module, zoo.Twice),
    "recursive": partial(_module, zoo.Recursive),
    "two parents": partial(_module, zoo.TwoParents),
    "hidden": partial(_module, zoo.Hidden),
    "encoder": partial(_module, zoo.Encoder),
    "dataclass": partial(_module, zoo.Structured),
    "dictionary": partial(_module, partial(zoo.Structured, "dict")),
    "late": _late,
    "failing": _failing,
    "images": _images,
    **{
        name: partial(_architecture, name)
        for name in (
            "GPT-2",
            "Llama",
            "BERT",
        )  # T5 assigns a number to a slice, which torch does by other ops there
        if name in ARCHITECTURES
    },
}
