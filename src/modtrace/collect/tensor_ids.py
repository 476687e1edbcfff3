"""Tells tensors apart: by storage, by how often that was written to, and by what each tensor shows of it."""

import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

NO_STORAGE = -1
NO_OP = -1

#: Numbers that a tensor's row has in `TensorIds.rows`, one behind the other.
ROW_WIDTH = 8
STORAGE, VERSION, OFFSET, GEOMETRY, DEVICE, PRODUCER, SLOT, BITS = range(ROW_WIDTH)

# Bits.
REQUIRES_GRAD = 1
FRESH = 2  # its storage is met with it

#: Python objects of tensors that are remembered for one version of a storage.
_OBJECTS_KEPT = 64

_COMPLEX = frozenset(
    each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_complex
)


class Geometry(NamedTuple):
    """How a tensor shows its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None  # None: it has none
    dtype: torch.dtype
    layout: torch.layout
    conj: bool
    neg: bool

    @property
    def size_bytes(self) -> int:
        """What its elements take."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Storage:
    """One storage while it lives, with the tensors that are known to show its present version."""

    __slots__ = (
        "device", "geometry", "number", "object", "offset", "others", "ref", "size_bytes", "tensor", "version",
        "writer",
    )  # fmt: skip

    def __init__(self, number: int, device: int, size_bytes: int) -> None:
        self.number = number
        self.device = device
        self.size_bytes = size_bytes  # if an op has made it
        self.version = (
            0  # how often it has been written to: torch's own count misses `.data`, fused optimizers ...
        )
        self.writer = NO_OP  # the op that wrote to it last
        # The first tensor, which is the only one most often: its `id`, what it shows, and its number.
        self.object = self.offset = self.geometry = self.tensor = -1
        self.others: dict[int, tuple[int, int, int]] | None = None  # by `id`: offset, geometry, number
        self.ref: Any = None


class _StorageRef(weakref.ref[Any]):
    """A weak reference that knows under what its storage is known."""

    __slots__ = ("key",)

    key: int


class TensorIds:
    """Numbers for tensors; keeps none of them alive.

    A storage is known by its Python object, which torch keeps as long as the storage lives; addresses and `id`s are
    used again within microseconds. A tensor object alone does not do: autograd hands out new ones for what it saved.
    Which object it is tells apart tensors that show the same of one storage (`x` and `x.detach()`).

    What is found goes into flat lists of integers: Python's garbage collector would visit anything else again and
    again until it is written.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []  # ROW_WIDTH numbers for each tensor met since they were last taken
        self.used: list[int] = []  # tensor and geometry, for each use of one since they were last taken
        self.leaves: list[
            tuple[int, torch.Tensor]
        ] = []  # that no op has made; whoever reads takes them at once
        self.live_bytes = 0  # of the storages that ops have made and that live
        self.next = 0  # the number of the next tensor
        self.geometries: list[Geometry] = []  # by number
        self.devices: list[torch.device] = []
        self.slots: list[str] = [""]
        self._first = 0  # the tensor of the first row
        self._numbers: dict[Any, int] = {}  # of geometries
        self._devices: dict[torch.device, int] = {}
        self._slots: dict[str, int] = {"": 0}
        self._has_complex = False  # only then may a tensor be a conjugated or negated view
        self._unread: set[int] = set()
        self._next_storage = 0
        self._storages: dict[int, _Storage] = {}  # by `id` of the storage object, while it lives
        self._gone = self._remove  # bound once

    def take(self) -> tuple[list[int], list[int], int]:
        """Rows and uses since this was last called, and the tensor of the first row."""
        rows, used, first = self.rows, self.used, self._first
        self.rows, self.used, self._first = [], [], self.next
        self._unread.clear()
        return rows, used, first

    def forget(self) -> None:
        """Whatever comes now is met for the first time: ops have run unseen."""
        self._storages = {}
        self.live_bytes = 0

    def read(self, tensor: torch.Tensor) -> None:
        """An op reads a tensor: notes the use. 0.6 us for one that is known."""
        geometry = self._numbers.get((tensor.shape, tensor.stride(), tensor.dtype))
        if geometry is None:
            geometry = self._find_geometry(tensor)
        storage = self._storages.get(id(tensor.untyped_storage()))
        if storage is None:
            number = self._meet(tensor, self._add_storage(tensor, made=False), geometry)
        elif (
            storage.object == id(tensor)
            and storage.geometry == geometry
            and storage.offset == tensor.storage_offset()
        ):
            number = storage.tensor
        else:
            number = self._meet(tensor, storage, geometry)
        if number in self._unread:  # an op's output gets its gradient's node only after the op
            self._unread.discard(number)
            self.rows[(number - self._first) * ROW_WIDTH + BITS] |= tensor.requires_grad
        self.used += (number, geometry)

    def write(self, tensor: torch.Tensor, op: int) -> None:
        """An op has written to a tensor that it was given."""
        storage = self._storages.get(id(tensor.untyped_storage()))
        if storage is None:
            storage = self._add_storage(tensor, made=False)
        if storage.writer != op:  # one op writes once, through however many tensors
            storage.version += 1
            storage.writer = op
            storage.object = -1
            storage.others = None

    def make(self, tensor: torch.Tensor, op: int, slot: str, given: Iterable[Any]) -> None:
        """An op returns a tensor: a new one, unless the op was given it and has not written."""
        geometry = self._numbers.get((tensor.shape, tensor.stride(), tensor.dtype))
        if geometry is None:
            geometry = self._find_geometry(tensor)
        storage = self._storages.get(id(tensor.untyped_storage()))
        bits = 0
        if storage is None:
            storage, bits = self._add_storage(tensor, made=True), FRESH
        elif storage.writer != op and any(each is tensor for each in given):
            return
        self._unread.add(self._add(tensor, storage, geometry, op, slot, bits))

    def note_without_storage(self, tensor: torch.Tensor, op: int, slot: str) -> None:
        """A tensor that has no storage (sparse, mkldnn): each time another one."""
        geometry = self._number_of(Geometry(tensor.shape, None, tensor.dtype, tensor.layout, False, False))
        device = self._device(tensor)
        self.rows += (NO_STORAGE, 0, 0, geometry, device, op, self._slot(slot), tensor.requires_grad)
        if op == NO_OP:
            self.used += (self.next, geometry)
        self.next += 1

    def _meet(self, tensor: torch.Tensor, storage: _Storage, geometry: int) -> int:
        """A tensor object that was not seen first of its storage."""
        offset = int(tensor.storage_offset())
        if storage.others is not None:
            known = storage.others.get(id(tensor))
            if known is not None and known[0] == offset and known[1] == geometry:
                return known[2]
        number = _find_same(storage, offset, geometry)
        if number is not None:  # autograd has saved that, and made a tensor of it again
            _remember(storage, id(tensor), offset, geometry, number)
            return number
        number = self._add(tensor, storage, geometry, storage.writer, "", tensor.requires_grad)
        if storage.writer == NO_OP:
            self.leaves.append((number, tensor))
        return number

    def _add(
        self, tensor: torch.Tensor, storage: _Storage, geometry: int, producer: int, slot: str, bits: int
    ) -> int:
        number, offset = self.next, int(tensor.storage_offset())
        self.rows += (
            storage.number, storage.version, offset, geometry, storage.device, producer, self._slot(slot), bits
        )  # fmt: skip
        self.next = number + 1
        _remember(storage, id(tensor), offset, geometry, number)
        return number

    def _add_storage(self, tensor: torch.Tensor, *, made: bool) -> _Storage:
        stored = tensor.untyped_storage()
        key = id(stored)
        size = stored.nbytes() if made else 0
        storage = self._storages[key] = _Storage(self._next_storage, self._device(tensor), size)
        storage.ref = _StorageRef(stored, self._gone)
        storage.ref.key = key
        self._next_storage += 1
        self.live_bytes += size
        return storage

    def _remove(self, ref: Any) -> None:
        """A storage has died."""
        storage = self._storages.get(ref.key)
        if storage is not None and storage.ref is ref:
            self.live_bytes -= storage.size_bytes
            del self._storages[ref.key]

    def _find_geometry(self, tensor: torch.Tensor) -> int:
        """The number of what a tensor shows; the quick way finds only plain ones."""
        dtype = tensor.dtype
        if dtype in _COMPLEX and not self._has_complex:
            self._has_complex = True
            self._numbers = {
                key: number for key, number in self._numbers.items() if isinstance(key, Geometry)
            }
        conj, neg = (tensor.is_conj(), tensor.is_neg()) if self._has_complex else (False, False)
        geometry = Geometry(tensor.shape, tensor.stride(), dtype, tensor.layout, conj, neg)
        number = self._number_of(geometry)
        if not self._has_complex:
            self._numbers[geometry[:3]] = number
        return number

    def _number_of(self, geometry: Geometry) -> int:
        number = self._numbers.get(geometry)
        if number is None:
            number = self._numbers[geometry] = len(self.geometries)
            self.geometries.append(geometry)
        return number

    def _device(self, tensor: torch.Tensor) -> int:
        device = tensor.device
        number = self._devices.get(device)
        if number is None:
            number = self._devices[device] = len(self.devices)
            self.devices.append(device)
        return number

    def _slot(self, slot: str) -> int:
        number = self._slots.get(slot)
        if number is None:
            number = self._slots[slot] = len(self.slots)
            self.slots.append(slot)
        return number


def _find_same(storage: _Storage, offset: int, geometry: int) -> int | None:
    """The first tensor of a storage that shows just this."""
    if storage.object != -1 and storage.offset == offset and storage.geometry == geometry:
        return storage.tensor
    for known in (storage.others or {}).values():
        if known[0] == offset and known[1] == geometry:
            return known[2]
    return None


def _remember(storage: _Storage, key: int, offset: int, geometry: int, number: int) -> None:
    if storage.object in (-1, key):
        storage.object, storage.offset, storage.geometry, storage.tensor = key, offset, geometry, number
        return
    if storage.others is None or len(storage.others) >= _OBJECTS_KEPT:
        storage.others = {}
    storage.others[key] = (offset, geometry, number)
