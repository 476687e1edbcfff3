"""Checks for each tensor that an op reads whether other contents change what the op returns."""

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress

import torch

from ..collect.ops.mode import tensors_in
from .contents import digest
from .exemptions import HIDDEN, SAME_AS_CHECKED, find_exemption
from .kept_ops import KeptOp, numbers_in, uninitialised
from .perturbations import perturbed, with_other_arguments
from .recorded_graph import RecordedOp
from .replayer import call_op, own_memory

#: The number of ops with the same arguments and shapes that are checked.
CHECKED_OF_A_KIND = 3

#: The exceptions by which an op refuses its arguments.
_REFUSALS = (RuntimeError, IndexError, ValueError)

_Answer = tuple[Hashable, ...]


class Perturber:
    """Changes what ops read, and counts the tensors whose change affects the results.

    `fault` describes the first tensor whose change should affect the results and does not; None if there is none.
    """

    def __init__(self, seed: int) -> None:
        self.checked = 0  # how many tensors affect their op's results
        self.exempt: Counter[str] = Counter()
        self.fault: str | None = None
        self._seed = seed
        self._seen: Counter[Hashable] = Counter()

    def check(self, op: RecordedOp, kept: KeptOp, inputs: Sequence[torch.Tensor]) -> None:
        """Checks all tensors that an op reads, one after the other."""
        kind = (
            kept.name,
            kept.template.key(),
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs),
        )
        self._seen[kind] += 1
        if self._seen[kind] > CHECKED_OF_A_KIND:
            self.exempt[SAME_AS_CHECKED] += len(inputs)
            return
        if not inputs:
            return
        expected, outputs = _answer(kept, own_memory(inputs, kept.written))
        for at in range(len(inputs)):
            if self._changes_something(kept, at, inputs, expected, self._seed + kept.number):
                self.checked += 1
                continue
            rule = find_exemption(kept, at, inputs, outputs)
            if rule is None and self._is_hidden(kept, at, inputs):
                rule = HIDDEN
            if rule is not None:
                self.exempt[rule] += 1
            elif self.fault is None:
                read = op.reads[at]
                self.fault = (
                    f"{op}: whatever its {read.slot} (tensor {read.tensor.tensor_id}) contains, it gives the same "
                    "results, and no rule says why"
                )

    def _changes_something(
        self, kept: KeptOp, at: int, inputs: Sequence[torch.Tensor], expected: _Answer, seed: int
    ) -> bool:
        for other in perturbed(kept, at, inputs, seed):
            tensors = own_memory(inputs, [written for written in kept.written if written != at])
            tensors[at] = other
            try:
                if _answer(kept, tensors)[0] != expected:
                    return True
            except _REFUSALS:
                return True  # the op refuses this content, but not the recorded one, so it reads the tensor
        return False

    def _is_hidden(self, kept: KeptOp, at: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Returns whether a tensor changes the op's results once the other arguments have other values."""
        seed = self._seed + kept.number
        for more, (op, tensors) in enumerate(with_other_arguments(kept, at, inputs, seed)):
            with suppress(*_REFUSALS):
                expected, _ = _answer(op, own_memory(tensors, op.written))
                if self._changes_something(op, at, tensors, expected, seed + more):
                    return True
        return False


def _answer(kept: KeptOp, tensors: list[torch.Tensor]) -> tuple[_Answer, list[torch.Tensor]]:
    """Runs an op. Returns the results in comparable form, and the tensors that it returns."""
    output = call_op(kept, tensors)
    unwritten = uninitialised(kept.name) or ()
    returned = [tensor for tensor, slot in tensors_in(output, "") if slot not in unwritten]
    left = [*returned, *(tensors[at] for at in kept.written)]
    return (*map(digest, left), *map(repr, numbers_in(output))), returned
