"""Asks a module tracker at every op that runs."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from modtrace import ModuleTracker

GLOBAL = "Global"

#: The ops that tell whose work runs; of the others many depend on the version of torch.
OPS = {"addmm", "mm", "relu", "tanh", "mul", "sub", "threshold_backward", "tanh_backward", "pow"}


class Asked(TorchDispatchMode):
    """Asks a tracker at every op: a line such as "mm backward: M M.l", the outermost module first."""

    supports_higher_order_operators = True

    def __init__(
        self, tracker: Any, answer: Callable[[Any], str] | None = None, ops: frozenset[str] | set[str] = OPS
    ) -> None:
        super().__init__()
        self.tracker = tracker
        self.answer = answer or (ours if isinstance(tracker, ModuleTracker) else theirs)
        self.ops = ops
        self.lines: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled, and shows its ops."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = getattr(function, "overloadpacket", function)
        name = getattr(packet, "__name__", str(packet))
        if name in self.ops:
            self.lines.append(f"{name} {self.answer(self.tracker)}".rstrip())
        return function(*args, **(kwargs or {}))


def ours(tracker: ModuleTracker) -> str:
    """The answer of modtrace; all ways to ask must agree."""
    where = tracker.where()
    assert tracker.parents == {GLOBAL, *where.stack}
    assert where.known
    return f"{where.phase}: {' '.join(where.stack)}"


def theirs(tracker: Any) -> str:
    """The answer of one of PyTorch's trackers, which knows no order: sorted."""
    phase = "backward" if tracker.is_bw else "forward"
    return f"{phase}: {' '.join(sorted(tracker.parents - {GLOBAL}))}"
