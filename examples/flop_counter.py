"""Counts floating-point operations per module, with forward, backward and recompute apart.

    python examples/flop_counter.py

Shows how a tool of one's own is built on `modtrace.ModuleTracker`: a dispatch mode asks it, for every op, where that
op belongs. The formulas are those of `torch.utils.flop_counter`; its `FlopCounterMode` takes the modules from torch's
own tracker, which counts too much where a model has branches or passes inputs by keyword.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from train_gpt import GPT

import modtrace

aten = torch.ops.aten
FORMULAS = {  # torch has none for attention on the CPU
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}

#: Phase and module; the phase is None outside of modules, the module "Global" for all that runs.
Key = tuple[str | None, str]


class FlopCounter(TorchDispatchMode):
    """Counts the operations of the code inside of it. What a module calls counts for the module too.

    Attributes:
        flops: how many, by phase and module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[Key] = Counter()
        self._tracker = modtrace.ModuleTracker()

    def __enter__(self) -> "FlopCounter":
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(op.overloadpacket)
        if formula is None:
            with self:  # some ops are made of others, such as a linear layer's in inference mode
                result = op.decompose(*args, **kwargs)
            return op(*args, **kwargs) if result is NotImplemented else result
        result = op(*args, **kwargs)
        self._add(formula(*args, **kwargs, out_val=result))
        return result

    def _add(self, flops: int) -> None:
        where = self._tracker.where()
        for name in dict.fromkeys(["Global", *where.stack]):  # a module that calls itself is there twice
            self.flops[where.phase, name] += flops


def render_table(flops: Mapping[Key, int]) -> str:
    """A line for each module, in the order in which they ran; a column for each phase."""
    phases = list(dict.fromkeys(phase for phase, _ in flops))
    names = list(dict.fromkeys(name for _, name in flops))
    lines = [["module", *(phase or "outside" for phase in phases)]]
    lines += [[name, *(f"{flops.get((phase, name), 0):,}" for phase in phases)] for name in names]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]) for name, *numbers in lines
    )


def main() -> None:
    model = GPT(64, layers=2, width=32, heads=4, context=16, checkpointing="non-reentrant")
    tokens = torch.randint(64, (8, 16))
    with FlopCounter() as counter:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    print(render_table(counter.flops))


if __name__ == "__main__":
    main()
