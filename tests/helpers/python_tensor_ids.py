"""What `_tensor_ids.c` and `_argument_reader.c` do, in Python: their specification."""

import weakref
from array import array
from collections.abc import Iterable
from typing import Any

import torch

from modtrace.collect.tensor_ids.argument_reader import FLOAT, PLAIN, TENSOR, TRUTH, new_reader
from modtrace.collect.tensor_ids.tensor_ids import BITS, FRESH, NO_OP, NO_TENSOR, ROW_WIDTH, Geometry

_NO_STORAGE = -1

_COMPLEX = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_complex
)

#: Python objects of tensors that are remembered for one version of a storage.
_OBJECTS_KEPT = 64

#: The size of a storage that does not give it as a number.
UNKNOWN_SIZE = -1

_NONE, _NOBODY = -1, -2


def size_of(stored: Any) -> int:
    """Returns the size of a storage in bytes; UNKNOWN_SIZE if it is symbolic, or a subclass of the user's raises."""
    try:
        size = stored.nbytes()
    except Exception:
        return UNKNOWN_SIZE
    return size if type(size) is int and 0 <= size < 2**63 else UNKNOWN_SIZE


class KnownStorage:
    """A storage with the tensor objects that show it, each with its offset, its geometry and its number."""

    __slots__ = (
        "device", "geometry", "is_made", "key", "live_bytes", "number", "object", "offset", "others", "ref",
        "size_bytes", "tensor", "version", "writer",
    )  # fmt: skip

    def __init__(self, stored: Any, device: int, size_bytes: int, *, is_made: bool) -> None:
        self.is_made = is_made  # an op has made it
        self.number = -1
        self.device = device
        self.size_bytes = size_bytes  # when it was last asked; UNKNOWN_SIZE
        self.live_bytes = 0  # its part of `TensorIds.live_bytes`
        self.key = id(stored)
        self.ref = weakref.ref(stored)
        #: How often it has been written to: torch's own count misses `.data`, fused optimizers ...
        self.version = 0
        self.writer = NO_OP  # the op that wrote to it last
        # The first tensor, which is the only one most often: its `id`, what it shows, and its number.
        self.object = self.offset = self.geometry = self.tensor = _NONE
        self.others: list[Any] = []  # the same of each

    def find(self, key: int, offset: int, geometry: int) -> int | None:
        """Returns the number of a tensor object, or of the first object with the same offset and geometry."""
        shown = (offset, geometry)
        for known, *parts, number in self.others:
            if known == key and (*parts,) == shown:
                return number
        if self.object != _NONE and (self.offset, self.geometry) == shown:
            return self.tensor
        return next((number for _, *parts, number in self.others if (*parts,) == shown), None)

    def remember(self, key: int, offset: int, geometry: int, number: int) -> None:
        """Remembers the offset, the geometry and the number of the tensor object whose `id` is `key`.

        What an object with this `id` has shown before stays known without it: the object shows something else now, or
        it has died.
        """
        if self.object == _NONE:
            self.object, self.offset, self.geometry, self.tensor = key, offset, geometry, number
            return
        if self.object == key:
            self.object = _NOBODY
        if len(self.others) >= _OBJECTS_KEPT:
            self.others = []
        self.others = [(_NOBODY if known == key else known, *shown) for known, *shown in self.others]
        self.others.append((key, offset, geometry, number))

    def note_write(self, op: int) -> None:
        """Counts a write by an op. An op counts once, however many tensors it writes through."""
        if self.writer != op:
            self.version += 1
            self.writer = op
            self.object = _NONE
            self.others = []


class StorageLife:
    """An attribute of a storage, which dies with it; `_storages.c` explains why it is no weak reference."""

    __slots__ = ("_owner", "_storage")

    def __init__(self, storage: KnownStorage, owner: "weakref.ref[Any]") -> None:
        self._storage = storage
        self._owner = owner  # its `remove()` is called at the death

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy is None

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None and self._storage.ref() is None:  # otherwise the attribute was removed
            owner.remove(self._storage)


class TensorIds:
    """Gives numbers to tensors, without keeping any of them alive.

    A storage is known by its Python object, which torch keeps as long as the storage lives, because addresses and `id`s
    are used again within microseconds. An attribute of ours ends with that object. Tensor objects are compared, too,
    since several of them may show the same part of one storage (`x` and `x.detach()`), but they do not suffice, because
    autograd creates new ones for tensors that it saved.

    Results go into flat lists of integers, because Python's garbage collector would visit anything else again and again
    until it is written.
    """

    def __init__(self) -> None:
        #: Tensors that no op has made, with their numbers. The reader of the list empties it at once.
        self.leaves: list[tuple[int, torch.Tensor]] = []
        #: Of the memory that ops have allocated and that lives: of storages that they have made, and of those that
        #: were resized since they were met.
        self.live_bytes = 0
        self.lowest_bytes = 0  # the least of that since the last call of `take_allocated`
        self._allocated_bytes = 0  # added to storages since then
        self.geometries: list[Geometry] = []  # by number
        self.devices: list[torch.device | None] = []  # None: not known
        self.slots: list[str] = [""]
        self._rows: list[int] = []  # ROW_WIDTH numbers for each tensor met since they were last taken
        self._used: list[int] = []  # tensor and geometry, for each use of one since they were last taken
        self._first = 0  # the tensor of the first row
        self._numbers: dict[Any, int] = {}  # of geometries
        self._devices: dict[torch.device | None, int] = {}
        self._slots: dict[str, int] = {"": 0}
        self._has_complex = False  # only then may a tensor be a conjugated or negated view
        self._unread: set[int] = set()
        self._next_storage = 0
        self._storages: dict[int, KnownStorage] = {}  # by `id` of the storage object, while it lives
        self._most_storages = 64  # at this many, dead storages are dropped whose end was not seen
        self._attribute = f"_modtrace_{id(self):#x}"  # of storages; no other living object has it
        self._ref: weakref.ref[Any] = weakref.ref(self)

    def __del__(self) -> None:
        self.forget()

    @property
    def next(self) -> int:
        """The number of the next tensor."""
        return self._first + len(self._rows) // ROW_WIDTH

    @property
    def used_count(self) -> int:
        """The number of entries for uses since the last call of `take`; each use has two."""
        return len(self._used)

    def take(self) -> "tuple[array[int], array[int], int]":
        """Returns the rows and uses since the last call, and the number of the first row's tensor."""
        rows, used, first, following = array("q", self._rows), array("q", self._used), self._first, self.next
        self._unread.clear()
        self._rows, self._used, self._first = [], [], following
        return rows, used, first

    def take_allocated(self) -> int:
        """Returns the bytes that were added to storages since the last call, whatever was freed meanwhile."""
        allocated, self._allocated_bytes, self.lowest_bytes = self._allocated_bytes, 0, self.live_bytes
        return allocated

    def living(self) -> "array[int]":
        """Returns number, bytes and device of each storage that lives and has memory."""
        living = [one for one in self._storages.values() if one.size_bytes > 0 and one.ref() is not None]
        return array("q", [part for one in living for part in (one.number, one.size_bytes, one.device)])

    def forget(self) -> None:
        """Forgets every storage, because ops have run unseen: each tensor that is seen from now on is new."""
        storages, self._storages = self._storages, {}
        self.live_bytes = self.lowest_bytes = self._allocated_bytes = 0
        for storage in storages.values():
            stored = storage.ref()
            if stored is not None:
                vars(stored).pop(self._attribute, None)

    def read(self, tensor: torch.Tensor) -> None:
        """Records that an op reads a tensor. A known tensor takes 0.6 us."""
        self._used += self._identify(tensor)

    def identify(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor that a call returns and no op reads."""
        return self._identify(tensor)[0]

    def find(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor that a call is given; NO_TENSOR if it is new and would become a leaf.

        For the output of an op, whether it requires a gradient is left to the op that reads it first.
        """
        stored = tensor.untyped_storage()
        geometry = self._numbers.get((tensor.shape, tensor.stride(), tensor.dtype))
        if geometry is None:
            geometry = self._find_geometry(tensor)
        storage = self._known(stored)
        if storage is None:
            return NO_TENSOR
        number = storage.find(id(tensor), int(tensor.storage_offset()), geometry)
        if number is None and storage.is_made:
            number = self._add(tensor, storage, geometry, storage.writer, "", tensor.requires_grad)
        return NO_TENSOR if number is None else number

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's storage; -1 if it is new."""
        storage = self._known(tensor.untyped_storage())
        return -1 if storage is None else storage.number

    def _identify(self, tensor: torch.Tensor) -> tuple[int, int]:
        stored = tensor.untyped_storage()
        geometry = self._numbers.get((tensor.shape, tensor.stride(), tensor.dtype))
        if geometry is None:
            geometry = self._find_geometry(tensor)
        storage = self._storages.get(id(stored))
        if (
            storage is not None
            and storage.object == id(tensor)
            and storage.geometry == geometry
            and storage.offset == tensor.storage_offset()
            and storage.ref() is stored
        ):
            number = storage.tensor
        else:
            number = self._meet(tensor, stored, geometry)
        if number in self._unread:  # an op's output gets its gradient's node only after the op
            self._rows[(number - self._first) * ROW_WIDTH + BITS] |= tensor.requires_grad
            self._unread.discard(number)
        return number, geometry

    def write(self, tensor: torch.Tensor, op: int) -> None:
        """Records that an op has written to a tensor that it was given, and maybe resized its storage."""
        stored = tensor.untyped_storage()
        storage = self._known(stored)
        if storage is None:
            storage = self._add_storage(tensor, stored, made=False)
        storage.note_write(op)
        self._note_size(storage, size_of(stored))

    def resized(self, stored: torch.UntypedStorage) -> None:
        """Records the size of a storage that may have been resized."""
        storage = self._known(stored)
        if storage is not None:
            self._note_size(storage, size_of(stored))

    def make(self, tensor: torch.Tensor, op: int, slot: str, given: Iterable[Any]) -> None:
        """Records that an op returns a tensor.

        The tensor is new unless the op was given it and has not written to it.
        """
        stored = tensor.untyped_storage()
        geometry = self._numbers.get((tensor.shape, tensor.stride(), tensor.dtype))
        if geometry is None:
            geometry = self._find_geometry(tensor)
        storage = self._known(stored)
        bits = 0
        if storage is None:
            storage, bits = self._add_storage(tensor, stored, made=True), FRESH
            storage.writer = op
        elif storage.writer != op and any(argument is tensor for argument in given):
            return
        self._unread.add(self._add(tensor, storage, geometry, op, slot, bits))

    def note_unreadable(self, tensor: torch.Tensor, op: int, slot: str, error: Exception) -> None:
        """Adds a row for a tensor that raised an error when it was read; it is a new tensor each time.

        A tensor without storage (sparse, mkldnn) raises one, and a subclass of the user's may raise any.
        """
        shown, device, requires_grad = Geometry.of_unreadable(tensor, error)
        geometry, place = self._number_of(shown), _number_in(self._devices, self.devices, device)
        row = (_NO_STORAGE, 0, 0, geometry, place, op, self._slot(slot), requires_grad)
        if op == NO_OP:
            self._used += (self.next, geometry)
        self._rows += row

    def _meet(self, tensor: torch.Tensor, stored: Any, geometry: int) -> int:
        """Returns the number of a tensor object that is not the first one seen of its storage."""
        storage = self._known(stored)
        if storage is None:
            storage = self._add_storage(tensor, stored, made=False)
        offset = int(tensor.storage_offset())
        number = storage.find(id(tensor), offset, geometry)
        if number is not None:  # autograd may have saved that, and made a tensor of it again
            return number
        number = self._add(tensor, storage, geometry, storage.writer, "", tensor.requires_grad)
        if not storage.is_made:
            self.leaves.append((number, tensor))
        return number

    def _add(
        self, tensor: torch.Tensor, storage: KnownStorage, geometry: int, producer: int, slot: str, bits: int
    ) -> int:
        number, offset = self.next, int(tensor.storage_offset())
        self._rows += (
            storage.number, storage.version, offset, geometry, storage.device, producer, self._slot(slot), bits
        )  # fmt: skip
        storage.remember(id(tensor), offset, geometry, number)
        return number

    def _known(self, stored: Any) -> KnownStorage | None:
        storage = self._storages.get(id(stored))
        if storage is None or storage.ref() is stored:
            return storage
        self.remove(storage)  # freed, while its attribute was kept alive; another storage has its address now
        return None

    def _add_storage(self, tensor: torch.Tensor, stored: Any, *, made: bool) -> KnownStorage:
        if len(self._storages) >= self._most_storages:
            for dead in [storage for storage in list(self._storages.values()) if storage.ref() is None]:
                self.remove(dead)
            self._most_storages = max(64, 2 * len(self._storages))
        device = _number_in(self._devices, self.devices, tensor.device)
        try:
            new = KnownStorage(stored, device, size_of(stored), is_made=made)
            vars(stored)[self._attribute] = StorageLife(new, self._ref)
        except TypeError as error:
            raise RuntimeError from error  # as torch raises where there is no storage at all
        storage = self._storages.setdefault(new.key, new)
        if storage is new:  # no other thread was faster
            new.number = self._next_storage
            self._next_storage += 1
            if made and new.size_bytes > 0:
                self._count_memory(new)
        return storage

    def _note_size(self, storage: KnownStorage, size_bytes: int) -> None:
        before = storage.size_bytes
        if size_bytes < 0 or size_bytes == before:
            return
        storage.size_bytes = size_bytes
        if before >= 0:
            self._count_memory(storage)

    def _count_memory(self, storage: KnownStorage) -> None:
        """Counts all of a storage's memory as allocated by ops.

        It is new, also where a storage that no op made is resized.
        """
        more = storage.size_bytes - storage.live_bytes
        storage.live_bytes = storage.size_bytes
        self._allocated_bytes += max(more, 0)
        self._add_live(more)

    def _add_live(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self.lowest_bytes = min(self.lowest_bytes, self.live_bytes)

    def remove(self, storage: KnownStorage) -> None:
        """Forgets a storage that has died."""
        if self._storages.get(storage.key) is storage:
            self._add_live(-storage.live_bytes)
            del self._storages[storage.key]

    def _find_geometry(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's geometry. The quick look-up finds only plain tensors."""
        dtype = tensor.dtype
        if dtype in _COMPLEX and not self._has_complex:
            self._has_complex = True
            self._numbers = {
                key: number for key, number in self._numbers.items() if isinstance(key, Geometry)
            }
        conj, neg = (tensor.is_conj(), tensor.is_neg()) if self._has_complex else (False, False)
        geometry = Geometry.of(tensor.shape, tensor.stride(), dtype, tensor.layout, conj, neg)
        number = self._number_of(geometry)
        if not self._has_complex:
            self._numbers[geometry[:3]] = number
        return number

    def _number_of(self, geometry: Geometry) -> int:
        return _number_in(self._numbers, self.geometries, geometry)

    def _slot(self, slot: str) -> int:
        return _number_in(self._slots, self.slots, slot)


def _number_in(numbers: dict[Any, int], values: list[Any], value: Any) -> int:
    number = numbers.get(value)
    if number is None:
        number = numbers[value] = len(values)
        values.append(value)
    return number


class ArgumentReader:
    """Reads the arguments of ops."""

    def __init__(self, ids: TensorIds) -> None:
        self._ids = ids

    def read(self, schema: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
        """Records the tensors that an op reads, and returns a key of its other arguments.

        Returns:
            the number of the op's schema, the number of positional arguments, these, and the names and values of the
            keyword arguments. The keys of two ops are equal if all arguments except the tensors are equal.
        """
        given: list[Any] = [schema, len(args)]
        self._read_all(args, given)
        for name, arg in (kwargs or {}).items():
            given.append(name)
            self._read_all((arg,), given)
        return tuple(given)

    def _read_all(self, args: Iterable[Any], given: list[Any]) -> None:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._read_tensor(arg)
                given.append(TENSOR)
            elif arg.__class__ in PLAIN:
                given.append(arg)
            elif arg.__class__ is float:
                # NaN is no key, and 0.0 would be -0.0.
                given += (FLOAT, arg if arg == arg and arg != 0.0 else repr(arg))
            elif arg.__class__ is bool:
                given += (TRUTH, arg)
            else:
                given.append(self._read_other(arg))

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        try:
            self._ids.read(tensor)
        except Exception as error:  # it has no storage, or a subclass of the user's raises
            self._ids.note_unreadable(tensor, NO_OP, "", error)

    def _read_other(self, arg: Any) -> Any:
        if isinstance(arg, dict):
            arg = [*arg.items()]
        if arg.__class__ is complex:
            return repr(arg)  # 1 + 0j would be 1
        if not isinstance(arg, (list, tuple)):
            return f"<{type(arg).__name__}>"
        inner: list[Any] = []
        self._read_all(arg, inner)
        return tuple(inner)


def reader_of(ids: Any) -> Any:
    """Returns a reader into these ids, in the language that they are in."""
    return ArgumentReader(ids) if isinstance(ids, TensorIds) else new_reader(ids)
