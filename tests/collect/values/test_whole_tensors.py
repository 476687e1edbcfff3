"""Whole tensors are put at once, or later if nobody has written to them until then."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from helpers.tensor_kinds import COMPLEX, KINDS, silently
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.collect.values import whole_tensors as kept_module
from modtrace.collect.values.whole_tensors import KeptTensors
from modtrace.measure.measurers.want import Extra
from modtrace.recording.raw_tensor import check_raw
from modtrace.torch_internals.modes import DisableTorchFunction

WRITTEN = "not kept: written to before it was copied"
FREED = "not kept: its storage was freed before it was copied"


class Shelf:
    """What `put` was given."""

    def __init__(self):
        self.kept = {}
        self.is_full = False

    def put(self, name, array, dtype, shape):
        check_raw(name, array, dtype, shape)
        if self.is_full:
            return None
        self.kept[name] = (np.array(array).tolist(), dtype, shape)
        return f"shelf:{name}"


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def kept(shelf):
    return KeptTensors(shelf.put)


def keep(kept, tensor, name="it", *, lazy=False, extra=None):
    extra = Extra() if extra is None else extra
    with DisableTorchFunction():
        kept.keep(extra, tensor, name, lazy=lazy)
    return extra


def texts(extra):
    return [note.text for note in extra.notes]


# At once.


DTYPES = {
    "bfloat16": (torch.tensor([1.0], dtype=torch.bfloat16), ([0x3F80], "bfloat16", (1,))),
    "complex64": (torch.tensor([1 + 2j]), ([[1.0, 2.0]], "complex64", (1,))),
    "float8": (torch.tensor([1.0]).to(torch.float8_e4m3fn), ([0x38], "float8_e4m3fn", (1,))),
    "bool": (torch.tensor([True, False]), ([True, False], "bool", (2,))),
    "0-dim": (torch.tensor(7), (7, "int64", ())),
    "no elements": (torch.empty(0, 3), ([], "float32", (0, 3))),
    "expanded": (torch.tensor([2.0]).expand(3), ([2.0, 2.0, 2.0], "float32", (3,))),
    "leaf": (nn.Parameter(torch.ones(1)), ([1.0], "float32", (1,))),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "lazy"])
@pytest.mark.parametrize("kind", DTYPES)
def test_each_dtype_is_given_as_its_raw_elements(kept, shelf, kind, lazy):
    tensor, expected = DTYPES[kind]
    keep(kept, tensor, lazy=lazy)
    kept.settle()
    assert shelf.kept == {"it": expected}


@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "lazy"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tensor_is_put_or_says_why_not(kept, shelf, kind, lazy):
    make, expected = KINDS[kind]
    tensor = silently(make)
    with SeesOps() as ops, SeesFunctions() as functions:
        extra = keep(kept, tensor, lazy=lazy)
        with DisableTorchFunction():
            kept.settle()
    assert (ops.seen, functions.seen) == ([], [])
    if expected.statistics is None:
        assert extra.blob is None
        (text,) = [text for text in texts(extra) if text.startswith("not ")]
        assert text.partition(":")[2] == expected.note.partition(":")[2] or text.startswith("not kept: ")
        return
    assert extra.blob == "shelf:it"
    numbers, _, _ = shelf.kept["it"]
    assert np.array(numbers).size == expected.statistics[0]
    assert texts(extra) == [
        text for text in [(expected.note or "").removesuffix(COMPLEX).rstrip("; ")] if text
    ]


def test_what_is_dropped_says_so(kept, shelf):
    shelf.is_full = True
    now, later = keep(kept, torch.ones(1)), keep(kept, torch.ones(1), lazy=True)
    kept.settle()
    for extra in (now, later):
        assert extra.blob is None
        assert texts(extra) == [
            "not kept: the buffer of whole tensors was full, or they cannot be written any more"
        ]


def test_without_a_place_for_tensors_a_note_says_so():
    extra = keep(KeptTensors(None), torch.ones(1))
    assert texts(extra) == ["not kept: this recording takes no whole tensors"]


def test_what_has_been_put_is_not_put_again(kept, shelf):
    extra = keep(kept, torch.ones(1), "first")
    keep(kept, torch.ones(1), "second", extra=extra)
    keep(kept, torch.ones(1), "third", extra=extra, lazy=True)
    kept.settle()
    assert list(shelf.kept) == ["first"]


def test_what_was_to_be_put_later_is_put_now_if_somebody_wants_it_now(kept, shelf):
    tensor = torch.ones(1)
    extra = keep(kept, tensor, "later", lazy=True)
    keep(kept, tensor, "now", extra=extra)
    tensor.zero_()
    kept.settle()
    assert shelf.kept == {"now": ([1.0], "float32", (1,))}
    assert extra.notes == ()


def test_what_put_raises_is_raised_and_the_others_are_put(shelf):
    def put(name, *others):
        if name == "bad":
            raise OSError("disk")
        return shelf.put(name, *others)

    kept = KeptTensors(put)
    with pytest.raises(OSError, match="disk"):
        keep(kept, torch.ones(1), "bad")
    for name in ("good", "bad", "better"):
        keep(kept, torch.ones(1), name, lazy=True)
    with pytest.raises(OSError, match="disk"):
        kept.settle()
    kept.settle()
    assert list(shelf.kept) == ["good", "better"]


# Later.


WRITES = {
    "in place": lambda tensor: tensor.add_(1),
    "to a view": lambda tensor: tensor[1:].zero_(),
    "to a view of a view": lambda tensor: tensor.view(2, 2)[0].fill_(3),
    "by an out argument": lambda tensor: torch.add(torch.ones(4), 1, out=tensor),
    "by an item": lambda tensor: tensor.__setitem__(0, 5.0),
    "by copy_": lambda tensor: tensor.copy_(torch.zeros(4)),
    "by foreach": lambda tensor: torch._foreach_add_([tensor], 1.0),
    "to what it was detached from": lambda tensor: tensor.detach().mul_(2),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_tensor_that_was_written_to_is_not_put(kept, shelf, way):
    tensor = torch.ones(4)
    extra = keep(kept, tensor, lazy=True)
    WRITES[way](tensor)
    kept.settle()
    assert (shelf.kept, extra.blob, texts(extra)) == ({}, None, [WRITTEN])


UNCOUNTED = {
    "through .data": lambda tensor: tensor.data.zero_(),
    "through numpy": lambda tensor: tensor.numpy().fill(0),
    "through DLPack": lambda tensor: np.from_dlpack(tensor).__setitem__(slice(None), 0),
}


@pytest.mark.parametrize("way", UNCOUNTED)
def test_writes_that_torch_does_not_count_are_missed(kept, shelf, way):
    """So says the docstring: whoever keeps lazily has to know."""
    tensor = torch.ones(2)
    extra = keep(kept, tensor, lazy=True)
    UNCOUNTED[way](tensor)
    kept.settle()
    assert (shelf.kept["it"][0], extra.notes) == ([0.0, 0.0], ())


@pytest.mark.parametrize("size", [0, 4, 64], ids=["freed", "smaller", "larger"])
def test_storage_that_has_changed_its_size_is_not_read(kept, shelf, size):
    tensor = torch.ones(4)
    extra = keep(kept, tensor, lazy=True)
    tensor.untyped_storage().resize_(size)
    kept.settle()
    assert (shelf.kept, texts(extra)) == ({}, [FREED])


def test_a_tensor_that_was_given_other_memory_is_put_as_it_was(kept, shelf):
    tensor = torch.ones(2)
    extra = keep(kept, tensor, lazy=True)
    tensor.data = torch.zeros(2)
    kept.settle()
    assert (extra.blob, shelf.kept["it"][0]) == ("shelf:it", [1.0, 1.0])


def test_tensors_whose_writes_nobody_counts_are_put_at_once(kept, shelf):
    with torch.inference_mode():
        tensor = torch.ones(1)
        extra = keep(kept, tensor, "inference", lazy=True)
        tensor.zero_()
    sparse = torch.sparse_coo_tensor([[0]], [3.0], (2,), check_invariants=True)
    keep(kept, sparse, "sparse", lazy=True)
    assert {name: numbers for name, (numbers, _, _) in shelf.kept.items()} == {
        "inference": [1.0],
        "sparse": [3.0],
    }
    assert extra.blob == "shelf:inference"


def test_a_tensor_of_a_transform_is_put_at_once_and_does_not_outlive_it(kept, shelf):
    extras = []

    def function(x):
        extras.append(keep(kept, x, lazy=True))
        return x * 2

    torch.func.vmap(function)(torch.tensor([1.0, 2.0]))
    assert shelf.kept == {"it": ([1.0, 2.0], "float32", (2,))}
    assert texts(extras[0]) == ["vmap: all examples together"]


def test_nothing_is_held_once_it_is_settled_dropped_or_stopped(kept):
    tensors = [torch.ones(3, requires_grad=True) * number for number in range(3)]
    storages = [weakref.ref(each.untyped_storage()) for each in tensors]
    graph = weakref.ref(tensors[0])
    extras = [keep(kept, each, str(at), lazy=True) for at, each in enumerate(tensors)]
    del tensors
    gc.collect()
    assert graph() is None
    assert [each() is None for each in storages] == [False] * 3
    kept.drop(extras[1:])
    gc.collect()
    assert [each() is None for each in storages] == [False, True, True]
    kept.settle()
    gc.collect()
    assert storages[0]() is None
    assert [each.blob for each in extras] == ["shelf:0", None, None]
    keep(kept, torch.ones(1), "late", lazy=True)
    kept.stop()
    assert keep(kept, torch.ones(1)).blob is None
    kept.settle()


# Threads.


def test_who_settles_waits_until_another_thread_has_copied():
    begun, go_on, order = threading.Event(), threading.Event(), []

    def put(name, array, dtype, shape):
        begun.set()
        go_on.wait(10)
        order.append("copied")
        return name

    kept = KeptTensors(put)
    tensor = torch.ones(1)
    keep(kept, tensor, lazy=True)
    other = threading.Thread(target=kept.settle)
    other.start()
    assert begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    kept.settle()
    order.append("optimizer steps")
    other.join()
    assert order == ["copied", "optimizer steps"]


def test_what_another_thread_writes_to_while_it_is_copied_is_not_kept():
    tensor = torch.ones(1)

    def put(name, array, dtype, shape):
        tensor.add_(1)
        return name

    kept = KeptTensors(put)
    extra = keep(kept, tensor, lazy=True)
    kept.settle()
    assert (extra.blob, texts(extra)) == (None, [WRITTEN])


def test_threads_keep_and_settle_beside_each_other(kept, shelf):
    extras = []

    def run(thread):
        for number in range(100):
            extras.append(keep(kept, torch.ones(2), f"{thread}.{number}", lazy=bool(number % 3)))
            if number % 10 == 0:
                kept.settle()

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.settle()
    assert len(shelf.kept) == 400
    assert all(each.blob for each in extras)


# Other devices: CPU tensors that are taken for those of one.


class Elsewhere(torch.Tensor):
    """Says that it lies on another device."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def test_tensors_of_other_devices_are_cloned_and_put_by_settle(kept, shelf, monkeypatch):
    monkeypatch.setattr(kept_module, "is_plain", lambda tensor, kinds: False)
    tensor = torch.ones(2).as_subclass(Elsewhere)
    now, later = keep(kept, tensor, "now"), keep(kept, tensor, "later", lazy=True)
    assert shelf.kept == {}
    tensor.zero_()
    kept.settle()
    assert {name: numbers for name, (numbers, _, _) in shelf.kept.items()} == {"now": [1.0, 1.0]}
    assert (now.blob, texts(now)) == ("shelf:now", [])
    assert (later.blob, texts(later)) == (None, [WRITTEN])
