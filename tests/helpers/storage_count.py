"""Counts the memory of storages beside a recording, independently of it, by asking every storage at every moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from modtrace.collect.ops.mode import OpMode


class Line(NamedTuple):
    """The bytes that lived around one op."""

    op: str
    least: int  # since the last op
    began: int  # when it began
    after: int
    allocated: int  # by it, or by what was resized since the last op


class Costs:
    """The costs of one call, with the calls inside of it."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(line.allocated for line in self.lines)

    @property
    def peak_bytes(self) -> int | None:
        if not self.lines:
            return None
        return max(0, max(line.after for line in self.lines) - self.lines[0].least)


class _Met:
    """A storage that some op was given or has returned."""

    def __init__(self, storage: torch.UntypedStorage, *, made: bool) -> None:
        self.ref = StorageWeakRef(storage)  # while it is held, no other storage has its address
        self.size_bytes = storage.nbytes()
        self.counted_bytes = self.size_bytes if made else 0

    def gain(self) -> int:
        """The bytes that it has gained since it was last asked; memory that is resized is new."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if storage is None or storage.nbytes() == self.size_bytes:
            return 0
        self.size_bytes, before = storage.nbytes(), self.counted_bytes
        self.counted_bytes = self.size_bytes
        return max(0, self.size_bytes - before)


class StorageCount(TorchDispatchMode):
    """Counts the bytes of storages that ops have made, or that were resized since they were met, and that live."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.ours: list[
            tuple[str, int, int]
        ] = []  # op, and what lives before and after it as modtrace knows it
        self.calls: list[Costs] = []  # in the order in which they began
        self._open: list[Costs] = []
        self._met: dict[int, _Met] = {}
        self._least = self._gained = 0  # since the last op

    @contextmanager
    def call(self) -> Iterator[None]:
        """What runs inside is charged to a call."""
        costs = Costs()
        self.calls.append(costs)
        self._open.append(costs)
        try:
            yield
        finally:
            self._open.remove(costs)

    def ask(self) -> int:
        """Asks every storage. Call it whenever one may have changed outside of an op."""
        for key in [key for key, met in self._met.items() if met.ref.expired()]:
            del self._met[key]
        self._gained += sum(met.gain() for met in self._met.values())
        live = sum(met.counted_bytes for met in self._met.values())
        self._least = min(self._least, live)
        return live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        [ours] = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, OpMode)]
        self._meet((args, kwargs), made=False)
        began, ours_began = self.ask(), ours.ids.live_bytes
        least = self._least
        try:
            output = func(*args, **kwargs or {})
            self._meet(output, made=True)
            return output
        finally:
            live = self.ask()
            line = Line(str(func), least, began, live, self._gained)
            self._least, self._gained = live, 0
            self.lines.append(line)
            self.ours.append((str(func), ours_began, ours.ids.live_bytes))
            for costs in self._open:
                costs.lines.append(line)

    def _meet(self, value: Any, *, made: bool) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._met:
                    met = self._met[storage._cdata] = _Met(storage, made=made)
                    self._gained += met.counted_bytes
