"""Any order of reads, writes, views, deaths and moves of storages: C numbers tensors as Python does.

`make sanitize` runs many more of them, with C code that reports each read of memory that has been freed.
"""

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import python_tensor_ids
from helpers.fuzzed import FUZZ
from modtrace.collect.tensor_ids.tensor_ids import DEVICE, GEOMETRY, ROW_WIDTH, SLOT, Geometry, TensorIds

STEPS = 300


class Raising(torch.Tensor):
    """Raises what it is told to when it is asked for its storage."""

    error: type[BaseException] = KeyError

    def untyped_storage(self) -> Any:
        raise self.error("odd")


class Twins:
    """Numbers of the same tensors by Python, by C, and by C without torch's quick way to what a tensor shows."""

    def __init__(self) -> None:
        kinds, exchange = (torch.Tensor, torch.nn.Parameter), torch.Tensor.__dlpack_c_exchange_api__
        made = [TensorIds(Geometry, each, kinds) for each in (exchange, None)]
        self.all: list[Any] = [python_tensor_ids.TensorIds(), *made]
        self.readers = [python_tensor_ids.reader_of(each) for each in self.all]

    def same(self, ask: Callable[[Any], Any]) -> Any:
        """What all answer, or the class of what all raise."""
        first, *others = [_answer(ask, each) for each in self.all]
        assert others == [first, first]
        return first

    def read_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        first, *others = [_answer(lambda each: each.read(3, args, kwargs), reader) for reader in self.readers]
        assert others == [first, first]

    def compare(self) -> None:
        self.same(lambda ids: (ids.next, ids.used_count, ids.live_bytes))
        self.same(lambda ids: [(number, id(tensor)) for number, tensor in ids.leaves])

    def take(self) -> None:
        self.same(_taken)
        for ids in self.all:
            ids.leaves = []


def _taken(ids: Any) -> Any:
    """Rows and uses with what their numbers of geometries, devices and slots stand for."""
    rows, used, first = ids.take()
    of = {GEOMETRY: ids.geometries, DEVICE: ids.devices, SLOT: ids.slots}
    read = [of[at % ROW_WIDTH][each] if at % ROW_WIDTH in of else each for at, each in enumerate(rows)]
    return read, [ids.geometries[each] if at % 2 else each for at, each in enumerate(used)], first


def _answer(ask: Callable[[Any], Any], whom: Any) -> Any:
    try:
        return ask(whom)
    except Exception as error:
        return type(error)


def drawn_tensor(draw: random.Random) -> torch.Tensor:
    size = draw.choice([0, 1, 2, 3, 8, 1000])
    kind = draw.randrange(9)
    if kind == 0:
        return torch.empty(size, device="meta")
    if kind == 1:
        return torch.empty(size, dtype=torch.complex64)
    if kind == 2:
        return torch.nn.Parameter(torch.empty(size))
    if kind == 3:
        return torch.empty([1] * draw.choice([0, 11, 12, 13, 20]))
    if kind == 4:
        return torch.empty(size).as_subclass(Raising)
    if kind == 5:
        return torch.ones(size).to_sparse()
    return torch.empty(size, dtype=draw.choice([torch.float32, torch.int64, torch.bool, torch.bfloat16]))


def drawn_view(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    views: list[Callable[[], torch.Tensor]] = [
        x.detach, lambda: x[1:], lambda: x[:0], lambda: x[::2], lambda: x.view(-1, 1), lambda: x.expand(3, *x.shape),
        lambda: x.conj(), lambda: x.conj().imag, lambda: x.view(torch.uint8), lambda: x.unsqueeze(0).t(),
        lambda: x.as_strided((2, 2), (1, 0)),
    ]  # fmt: skip
    return draw.choice(views)()


def move(draw: random.Random, x: torch.Tensor, other: torch.Tensor) -> None:
    """What changes a tensor's storage, or where it lies, behind the back of everybody."""
    moves: list[Callable[[], Any]] = [
        lambda: x.untyped_storage().resize_(0),
        lambda: x.untyped_storage().resize_(draw.choice([8, 4096, 1 << 20])),
        lambda: x.set_(other.untyped_storage(), 0, (1,), (1,)),
        lambda: setattr(x, "data", other.data),
        lambda: x.resize_(draw.choice([0, 1, 5])),
        lambda: torch.utils.swap_tensors(x, other),
    ]
    with torch.no_grad():
        draw.choice(moves)()


@pytest.mark.parametrize("seed", range(10 * FUZZ))
def test_whatever_happens_to_tensors_c_numbers_them_as_python_does(seed):
    draw, twins = random.Random(seed), Twins()
    tensors = [torch.ones(3), torch.ones(2)]
    slots = ["", "[0]", "['a']"]

    def add_view() -> None:
        try:
            tensors.append(drawn_view(draw, draw.choice(tensors)))
        except (RuntimeError, IndexError, KeyError):  # not of this one
            return

    def disturb() -> None:
        try:
            move(draw, draw.choice(tensors), draw.choice(tensors))
        except (RuntimeError, KeyError, TypeError):
            return

    def require_gradient(x: torch.Tensor) -> None:
        try:
            if x.is_floating_point() and x.is_leaf:
                x.requires_grad_()
        except (
            RuntimeError
        ):  # a view whose base has lost its memory: torch makes its grad_fn anew, and cannot
            return

    def make(op: int) -> None:
        x, slot, given = draw.choice(tensors), draw.choice(slots), draw.choices(tensors, k=2)
        twins.same(lambda ids: ids.make(x, op, slot, given))

    def read_arguments() -> None:
        some: list[Any] = [*draw.choices(tensors, k=draw.choice([0, 2, 50])), 1.0, 0.0, None, True, {"a": 1j}]
        draw.shuffle(some)
        twins.read_arguments((some[0], some, *some), draw.choice([None, {}, {"x": some}]))

    def lose() -> None:
        for _ in range(min(len(tensors) - 2, draw.randrange(8))):
            del tensors[draw.randrange(len(tensors))]
        if draw.random() < 0.1:
            gc.collect()

    for op in range(STEPS):
        x = draw.choice(tensors)
        steps: list[Callable[[], Any]] = [
            lambda: tensors.append(drawn_tensor(draw)), add_view, add_view, disturb, lose, read_arguments,
            lambda op=op: make(op), lambda op=op: make(op),
            lambda x=x: twins.same(lambda ids: ids.read(x)),
            lambda x=x: twins.same(lambda ids: (ids.storage_of(x), ids.find(x))),
            lambda x=x: twins.same(lambda ids: ids.identify(x)),
            lambda x=x, op=op: twins.same(lambda ids: ids.write(x, op)),
            lambda x=x, op=op: twins.same(lambda ids: ids.note_unreadable(x, op, "", KeyError(op))),
            lambda x=x: require_gradient(x),
        ]  # fmt: skip
        draw.choice(steps)()
        del x, steps
        twins.compare()
        if draw.random() < 0.02:
            twins.take()
        if draw.random() < 0.01:
            twins.same(lambda ids: ids.forget())
    tensors.clear()
    twins.take()
    gc.collect()
    assert twins.same(lambda ids: ids.live_bytes) == 0


def test_storages_may_outlive_any_of_their_numbers():
    draw = random.Random(0)
    tensors = [torch.ones(2) for _ in range(300)]
    for at in range(40 * FUZZ):
        twins = Twins()
        for tensor in draw.sample(tensors, 50):
            twins.same(lambda ids, tensor=tensor: ids.make(tensor, at, "", ()))  # noqa: B023
        tensors[draw.randrange(300)] = torch.ones(3)
        twins.compare()
        del twins


@pytest.mark.parametrize("error", [KeyError, RuntimeError, MemoryError, KeyboardInterrupt])
def test_an_error_between_arguments_leaves_the_readers_usable(error, monkeypatch):
    monkeypatch.setattr(Raising, "error", error)
    twins, x = Twins(), torch.ones(2)
    odd = torch.ones(2).as_subclass(Raising)
    for reader in twins.readers:
        if issubclass(error, Exception):
            reader.read(0, (x, [odd, x], x), {"a": odd})
        else:
            with pytest.raises(error):
                reader.read(0, (x, [odd, x], x), {"a": odd})
    twins.compare()
    twins.take()
