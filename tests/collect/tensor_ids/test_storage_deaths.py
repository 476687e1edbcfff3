"""`live_bytes` follows the death of every storage, to the op; `TensorIds` sees it by an attribute of the storage."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.python_op_mode import PythonOpMode
from helpers.python_tensor_ids import TensorIds
from helpers.storage_count import StorageCount
from modtrace.collect.ops import recorder
from modtrace.collect.tensor_ids.tensor_ids import NO_TENSOR, STORAGE, new_tensor_ids
from zoo import TiedGPT


@pytest.fixture(params=["python", "compiled"])
def new_ids(request, monkeypatch) -> Callable[[], Any]:
    """Makes objects of the class, and has recordings take that."""
    if request.param == "python":
        monkeypatch.setattr(recorder, "OpMode", PythonOpMode)
        return TensorIds
    return new_tensor_ids


def train(optimizer: Callable[[Any], torch.optim.Optimizer], reentrant: bool | None = None) -> None:
    model = TiedGPT(layers=2, width=8)
    stepping = optimizer(model.parameters())
    for _ in range(2):
        tokens = torch.randint(0, 17, (2, 8))
        loss = F.cross_entropy(model(tokens, reentrant).flatten(0, 1), tokens.flatten())
        loss.backward()
        stepping.step()
        stepping.zero_grad()


def show_by_views() -> None:
    kept = [torch.ones(100)[at : at + 2] for at in range(5)]
    kept += [*torch.arange(24.0).view(2, 3, 4).unbind()]
    del kept[:3]
    torch.stack(kept[:2])
    kept.clear()
    torch.ones(1)


def hold_by_autograd_alone() -> None:
    x = torch.ones(64, requires_grad=True)
    y = ((x * 2).exp() * 3).sin()
    for _ in range(3):
        y = y * y.detach()
    y.sum().backward()
    del y
    torch.ones(1)


def change_in_place() -> None:
    x = torch.zeros(16)
    x.add_(1).mul_(x.clone())
    x[2:4].fill_(1)
    x.resize_(4).resize_(64)
    x.set_(torch.ones(8).untyped_storage())
    x.data = torch.ones(3)
    y = x * 2
    y.untyped_storage().resize_(0)
    del x, y
    torch.ones(1)


def be_garbage() -> None:
    gc.disable()  # a collection between the two counts of an op would part them
    for number in range(20):
        cycle: list[Any] = [torch.ones(number + 1) * 2]
        cycle.append(cycle)
        if number % 7 == 6:
            gc.collect()
    del cycle
    gc.collect()
    gc.enable()
    torch.ones(1)


def stop_in_the_middle() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = (x * 2).exp()
            raise ValueError(hidden.numel())

    for _ in range(3):
        with pytest.raises(ValueError, match="4"):
            checkpoint(Failing(), torch.ones(4, requires_grad=True), use_reentrant=False)
        torch.ones(1)


RUNS: dict[str, Callable[[], None]] = {
    "views": show_by_views,
    "saved for backward": hold_by_autograd_alone,
    "in place": change_in_place,
    "cycles": be_garbage,
    "exceptions": stop_in_the_middle,
    "AdamW": lambda: train(torch.optim.AdamW),
    "AdamW, foreach": lambda: train(lambda given: torch.optim.AdamW(given, foreach=True)),
    "AdamW, fused": lambda: train(lambda given: torch.optim.AdamW(given, fused=True)),
    "reentrant": lambda: train(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), True),
    "non-reentrant": lambda: train(lambda given: torch.optim.SGD(given, lr=0.1, foreach=True), False),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_live_bytes_are_those_of_an_independent_count(new_ids, run):
    torch.manual_seed(0)
    count = StorageCount()
    with modtrace.record(ops=True, values=None, strict=True), count:
        run()
    assert count.ours == [(line.op, line.began, line.after) for line in count.lines]
    assert len(count.lines) > 5


# The attribute.


def made(ids: Any, count: int = 1) -> list[torch.Tensor]:
    """Tensors that an op has made."""
    tensors = [torch.ones(4) for _ in range(count)]
    for tensor in tensors:
        ids.make(tensor, 3, "", ())
    return tensors


def storages_of(ids: Any, *tensors: torch.Tensor) -> list[int]:
    """The numbers of the storages of tensors that are new to it."""
    ids.take()
    for tensor in tensors:
        ids.read(tensor)
    rows, _, _ = ids.take()
    return list(rows[STORAGE::8])


def test_each_has_an_attribute_of_its_own_and_takes_it_off(new_ids):
    outer, inner = new_ids(), new_ids()
    [x] = made(outer)
    inner.read(x)
    storage = x.untyped_storage()
    assert len(vars(storage)) == 2
    outer.forget()
    assert len(vars(storage)) == 1
    assert [outer.find(x), inner.find(x)] == [NO_TENSOR, 0]
    outer.read(x)
    del inner
    assert len(vars(storage)) == 1
    del outer
    assert vars(storage) == {}


def test_user_attributes_stay(new_ids):
    ids = new_ids()
    [x] = made(ids)
    x.untyped_storage().mine = 3
    ids.forget()
    assert vars(x.untyped_storage()) == {"mine": 3}


def test_nothing_of_it_is_copied_or_saved(new_ids):
    ids = new_ids()
    [x] = made(ids)
    layer = nn.Linear(2, 2)
    ids.read(layer.weight)
    file = io.BytesIO()
    torch.save((x, layer, layer.state_dict()), file)
    file.seek(0)
    loaded, loaded_layer, state = torch.load(file, weights_only=False)
    copies = [
        copy.deepcopy(x), x.clone(), pickle.loads(pickle.dumps(x)), loaded, loaded_layer.weight, state["weight"],
        copy.deepcopy(layer).weight, copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer)).weight,
    ]  # fmt: skip
    storages = [each.untyped_storage() for each in copies]
    storages += [
        copy.copy(x.untyped_storage()),
        copy.deepcopy(x.untyped_storage()),
        x.untyped_storage().clone(),
    ]
    assert [[name for name in vars(each) if name.startswith("_modtrace")] for each in storages] == [[]] * 12
    before = ids.live_bytes
    copied = copy.deepcopy(vars(x.untyped_storage())), pickle.loads(pickle.dumps(vars(x.untyped_storage())))
    assert [list(each.values()) for each in copied] == [[None], [None]]
    del copied
    assert ids.live_bytes == before == 16


def test_storage_that_is_shared_with_processes_stays_known(new_ids):
    ids = new_ids()
    [x] = made(ids)
    x.share_memory_()
    assert (ids.find(x), ids.live_bytes) == (0, 16)
    reduced = torch.multiprocessing.reductions.reduce_storage(x.untyped_storage())
    assert "_modtrace" not in repr(reduced)
    del x
    assert ids.live_bytes == 0


def test_storage_whose_attributes_a_user_clears_stays_known(new_ids):
    ids = new_ids()
    [x] = made(ids)
    vars(x.untyped_storage()).clear()
    assert (ids.find(x), ids.live_bytes) == (0, 16)
    ids.forget()
    assert (ids.find(x), ids.live_bytes, vars(x.untyped_storage())) == (NO_TENSOR, 0, {})


def test_deaths_that_nobody_tells_are_seen_when_the_table_grows(new_ids):
    ids = new_ids()
    for x in made(ids, 300):
        vars(x.untyped_storage()).clear()
    del x
    kept = made(ids, 2000)
    assert ids.live_bytes == 16 * 2000
    assert storages_of(ids, *(each[1:] for each in kept)) == [*range(300, 2300)]


def test_attribute_that_outlives_its_storage_takes_nothing_for_it(new_ids):
    ids = new_ids()
    held = []
    for _ in range(200):
        [x] = made(ids)
        held.append(vars(x.untyped_storage()))
    assert len(set(storages_of(ids, x[1:]))) == 1
    del x
    [y] = made(ids)
    assert storages_of(ids, y[1:]) == [200]
    held.clear()
    assert storages_of(ids, y[2:]) == [200]
    del y
    assert ids.live_bytes == 0
    del ids
    gc.collect()


def test_attribute_that_outlives_its_owner_does_nothing(new_ids):
    ids = new_ids()
    [x] = made(ids)
    held = [*vars(x.untyped_storage()).values()]
    del ids
    held.clear()
    assert vars(x.untyped_storage()) == {}


class Storage(torch.UntypedStorage):
    """A user's own, with a will of its own."""

    alive: "list[Storage]" = []  # noqa: RUF012

    def __setattr__(self, name: str, value: object) -> None:
        raise ValueError("not to be changed")

    def __del__(self) -> None:
        Storage.alive.append(self)


def test_storage_that_comes_back_to_life_is_known_no_more_than_once(new_ids):
    ids = new_ids()
    x = torch.empty(0).set_(Storage(16))
    ids.make(x, 0, "", ())
    assert ids.live_bytes == x.untyped_storage().nbytes() > 0
    del x
    [storage] = Storage.alive
    assert ids.live_bytes in (0, 16)
    again = torch.empty(0).set_(storage)
    ids.make(again, 1, "", ())
    Storage.alive.clear()
    del storage, again
    Storage.alive.clear()
    gc.collect()
    assert ids.live_bytes == 0


class Proxy:
    """What a subclass gives for its storage: nothing can be put on it."""

    __slots__ = ()


class Proxied(torch.Tensor):
    def untyped_storage(self) -> Any:
        return Proxy()


def test_storage_that_can_have_no_attribute_is_none(new_ids):
    ids = new_ids()
    x = torch.ones(2).as_subclass(Proxied)
    for call in (ids.read, lambda given: ids.write(given, 0)):
        with pytest.raises(RuntimeError):
            call(x)
    assert (ids.live_bytes, ids.leaves) == (0, [])


def test_ops_on_tensors_with_such_storages_are_recorded(new_ids):
    with modtrace.record(ops=True, values=None, strict=True) as rec:
        torch.ones(2).as_subclass(Proxied) * 2
        torch.ones(3)
    assert rec.meta.marks == ()
    assert [row["name"] for row in rec.table("ops").to_pylist()].count("aten.ones.default") == 2


def test_numbers_that_are_garbage_with_their_storages_are_collected(new_ids):
    ids = new_ids()
    tensors = made(ids, 10)
    ids.read(torch.ones(3))
    cycle: list[Any] = [ids, tensors]
    cycle.append(cycle)
    storage = weakref.ref(tensors[0].untyped_storage())
    del ids, tensors, cycle
    gc.collect()
    assert storage() is None


def test_threads_that_free_what_others_read(new_ids):
    ids = new_ids()
    shared: list[torch.Tensor] = []

    def work() -> None:
        for number in range(300):
            x = torch.ones(2)
            ids.make(x, number, "", ())
            shared.append(x[1:])
            for view in shared[:2]:
                ids.read(view)
            if len(shared) > 3:
                shared.pop(0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids.live_bytes == 8 * len({id(each.untyped_storage()) for each in shared})
    shared.clear()
    assert ids.live_bytes == 0


def test_recording_that_is_dropped_leaves_no_attribute(new_ids):
    def stream(model: nn.Module) -> Iterator[None]:
        with modtrace.record(model, ops=True, values=None):
            yield

    model = nn.Linear(2, 2)
    running = stream(model)
    next(running)
    y = model(torch.ones(1, 2))
    tensors = [*model.parameters(), y]
    assert [len(vars(each.untyped_storage())) for each in tensors] == [1, 1, 1]
    del running
    gc.collect()
    assert [vars(each.untyped_storage()) for each in tensors] == [{}, {}, {}]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_leaves_no_attribute(new_ids, error):
    model = nn.Linear(2, 2)
    with pytest.raises(error), modtrace.record(model, ops=True, values=None):
        model(torch.ones(1, 2))
        raise error
    assert [vars(each.untyped_storage()) for each in model.parameters()] == [{}, {}]


def test_storages_may_outlive_the_interpreter():
    program = """
import torch, modtrace
from modtrace.collect.tensor_ids import tensor_ids
ids = tensor_ids.new_tensor_ids()
x = torch.ones(3, requires_grad=True) * 2
ids.make(x, 0, "", ())
torch.kept = tensor_ids.held = [ids, x, (x * x).sum(), vars(x.untyped_storage())]
recording = modtrace.record(ops=True, values=None)
recording.__enter__()
held = torch.ones(3) * 2
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "Error" in line]) == (0, [])
