"""The works that the benchmark of op recording times, with the number of their ops."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scopes import EXAMPLES, Work, reference_gpt
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from modtrace.collect.ops._op_mode import CompiledOpMode
from modtrace.torch_internals.modes import UnwrappedMode


class Counted(NamedTuple):
    """A work, the ops in a step of it, and what the model is given."""

    work: Work
    ops: int
    tokens: Tensor

    @property
    def calls(self) -> int:
        """Forward calls of modules in a step."""
        return self.work.calls // self.work.steps

    def with_steps(self, steps: int) -> "Counted":
        """The same with so many steps in a round, for a row that takes many times longer than others."""
        return self._replace(work=self.work._replace(steps=steps))


class Case(NamedTuple):
    """A training step, and the forward of the same model alone."""

    training: Counted
    forward: Counted


def set_up() -> None:
    """One thread, and the same random numbers in every run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


class PassingMode(TorchDispatchMode):
    """Does nothing with an op: below this no mode can come."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class PassingModeInC(CompiledOpMode, UnwrappedMode):
    """The same with a `__torch_dispatch__` in C: that of ours, which passes on as long as it is not set up."""


class CountingMode(PassingMode):
    """Counts ops; not timed."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def many_small_ops(quick: bool) -> Case:
    """A step is forward, loss and backward: 567 ops in some 3 ms, on one passage of 16 characters out of 64."""
    model = tiny_gpt(layers=1 if quick else 4)
    passage = torch.randint(64, (1, 17))

    def step() -> None:
        model.zero_grad()
        logits = model(passage[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), passage[:, 1:].flatten()).backward()

    work = Work("tiny GPT", model, step, steps=2 if quick else 15, rounds=3 if quick else 8)
    return _case(work, passage[:, :-1])


def tiny_gpt(*, layers: int) -> nn.Module:
    """A GPT of width 64 whose attention is made of many ops: as a single one it leaves 411 of the 567."""
    sys.path.append(str(EXAMPLES))
    from train_gpt import GPT

    class TinyGPT(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return super().forward(tokens)

    return TinyGPT(64, layers=layers, width=64, heads=4, context=16)


def reference_case(quick: bool) -> Case:
    """The reference of the budgets: a step is forward, loss, backward and optimizer."""
    if quick:
        work, batch = reference_gpt(width=32, layers=2, batch=1, steps=1, rounds=3), 1
    else:
        work, batch = reference_gpt(width=256, layers=6, batch=8, steps=3, rounds=5), 8
    return _case(work, torch.randint(2000, (batch, 128)))


def narrow_case(quick: bool) -> Case:
    """The same with width 16 and one passage."""
    work = reference_gpt(
        width=16, layers=2 if quick else 6, batch=1, steps=1 if quick else 5, rounds=3 if quick else 10
    )
    return _case(work._replace(name="GPT step, width 16"), torch.randint(2000, (1, 128)))


class UnrolledLSTM(nn.Module):
    """Two cells and a linear layer at each of the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        h, c, h2, c2 = (torch.zeros(len(sequences), 51) for _ in range(4))
        outputs = []
        for values in sequences.split(1, dim=1):
            h, c = self.first(values, (h, c))
            h2, c2 = self.second(h, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, 1)


def unrolled_case(quick: bool) -> Case:
    """A step is forward, loss, backward and SGD on 17 sequences of 30 numbers: 3,900 ops in some 12 ms."""
    model, sequences = UnrolledLSTM(), torch.randn(17, 3 if quick else 30)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def step() -> None:
        optimizer.zero_grad()
        model(sequences).square().mean().backward()
        optimizer.step()

    return _case(
        Work("LSTM cells", model, step, steps=2 if quick else 6, rounds=3 if quick else 6), sequences
    )


def transformers_case(quick: bool) -> Case:
    """A Llama of 24 layers with random weights: a step is forward, loss, backward and optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width = (2, 32) if quick else (24, 256)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    model, tokens = LlamaForCausalLM(config), torch.randint(1000, (2, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    work = Work(f"Llama, {layers} layers", model, step, steps=1 if quick else 3, rounds=3 if quick else 4)
    return _case(work, tokens)


def _case(work: Work, tokens: Tensor) -> Case:
    forward = work._replace(step=lambda: work.model(tokens))
    return Case(
        Counted(work, _count_ops(work.step), tokens),
        Counted(forward, _count_ops(forward.step), tokens),
    )


def _count_ops(step: Callable[[], object]) -> int:
    step()  # the first step of an optimizer makes its state
    with CountingMode() as mode:
        step()
    return mode.ops


#: The works by the names that a process is given them with; True makes a small one.
CASES: dict[str, Callable[[bool], Case]] = {
    "reference": reference_case,
    "narrow": narrow_case,
    "tiny": many_small_ops,
    "lstm": unrolled_case,
    "transformers": transformers_case,
}
