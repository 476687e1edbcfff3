"""What is asked for beyond the usual statistics is measured of every kind of tensor, or a note says why not."""

import gc
import threading
import warnings

import numpy as np
import pytest
import torch

from helpers.float64_reference import to_numbers
from helpers.tensor_kinds import HOLDERS, KINDS, references, silently
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.measure.dtypes import format_of
from modtrace.measure.fingerprints.fingerprints import fingerprint_array
from modtrace.measure.measurers import extras as extras_module
from modtrace.measure.measurers.extras import Extras
from modtrace.measure.measurers.user_functions import UserFunctions
from modtrace.measure.measurers.want import Extra, ExtraNote, Want
from modtrace.torch_internals.modes import DisableTorchFunction

EVERYTHING = Want(stats=2, hash=True, sketch=True, sample=4)

MEASURED = [kind for kind, (_, expected) in KINDS.items() if expected.statistics is not None]
NOT_MEASURED = [kind for kind in KINDS if kind not in MEASURED]


def measure(tensor, want, extra=None):
    extra = Extra() if extra is None else extra
    with DisableTorchFunction():
        _extras.measure(tensor, want, extra)
    return extra


_extras = Extras(UserFunctions(lambda what, error: None))


def texts(extra):
    return [note.text for note in extra.notes]


# Every kind of tensor.


@pytest.mark.parametrize("kind", MEASURED)
def test_each_kind_of_tensor_is_measured_in_the_part_that_its_statistics_are_of(kind):
    make, expected = KINDS[kind]
    given = []
    want = EVERYTHING._replace(functions=(lambda tensor: given.append(to_numbers(tensor)),))
    extra = measure(silently(make), want)
    if kind == OWN_DISPATCH:
        given = [to_numbers(torch.tensor([1.0, 2.0, 3.0]))]
        assert texts(extra).pop().endswith("raised AssertionError: the subclass has seen aten.detach.default")
        extra.notes = ()
    (numbers,) = given
    count, total, nans, infs = (expected.statistics[at] for at in (0, 3, 5, 6))
    assert numbers.size == count
    np.testing.assert_equal(numbers.sum(), total)
    np.testing.assert_equal(extra.sumabs, np.abs(numbers).sum())
    assert extra.zero_count == np.count_nonzero(numbers == 0)
    np.testing.assert_equal(extra.sum4, (numbers**4).sum())
    assert extra.histogram.sum() + extra.zero_count + nans + infs == count
    assert (extra.argmax is None) == (count == 0)
    assert extra.sketch.shape == (64,)
    assert isinstance(extra.hash, int)
    assert set(extra.sample) == {4}
    noted = [text for text in texts(extra) if not text.startswith("no channel_max: ")]
    assert "; ".join(noted) == (expected.note or "")


@pytest.mark.parametrize("kind", NOT_MEASURED)
def test_of_what_cannot_be_read_a_note_says_why_and_no_function_is_called(kind):
    make, expected = KINDS[kind]
    called = []
    extra = measure(silently(make), EVERYTHING._replace(functions=(called.append,)))
    assert _values(extra) == [None] * 7 + [{}, {}]
    (note,) = extra.notes
    assert note == ExtraNote(expected.note)
    assert len(called) == (kind in {"uint4", "float4"})  # a dtype that a function may know


def _values(extra):
    alone = ("sumabs", "zero_count", "sum4", "argmax", "histogram", "hash", "sketch")
    return [getattr(extra, name) for name in alone] + [extra.channel_max, extra.sample]


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_is_noticed_nowhere_and_raises_no_error_of_the_users(kind):
    """Modes hear of nothing, and no number is drawn, where numpy and warnings raise."""
    tensor = silently(KINDS[kind][0])
    want = EVERYTHING._replace(functions=(lambda tensor: (tensor + 1).shape[0] if tensor.dim() else 0,))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with SeesOps() as ops, SeesFunctions() as functions:
        with warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")
            measure(tensor, want)
        seen = list(ops.seen), list(functions.seen)
    assert seen == ([], [])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("kind", HOLDERS)
def test_neither_the_tensor_nor_its_storage_is_kept_alive(kind):
    tensor = silently(KINDS[kind][0])
    gone = references(tensor)
    identity = EVERYTHING._replace(functions=(lambda each: [each], lambda each: {"it": each}))
    extra = measure(tensor, identity)
    del tensor
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert len(extra.user) == (0 if kind == "conjugate" else 2)  # JSON has no complex numbers


def test_what_was_measured_stays_when_the_tensor_is_written_to():
    tensor = torch.tensor([[1.0, -2.0, 3.0]])
    extra = measure(tensor, EVERYTHING)
    tensor.fill_(9)
    assert extra.sample[4].tolist() == [1.0, -2.0, 3.0]
    assert extra.channel_max[-1].tolist() == [1.0, 2.0, 3.0]
    assert extra.sumabs == 6.0


def test_the_profiler_sees_nothing_of_a_plain_tensor():
    plain = [torch.ones(2, 3), torch.ones(3, 4)[:, ::2], torch.ones(1).expand(5), torch.ones(2).bfloat16()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for tensor in plain:
            measure(tensor, EVERYTHING)
    assert [event.name for event in profile.events() or [] if "aten" in event.name] == []


def test_a_trace_has_no_trace_of_it():
    found = []

    def function(x):
        with DisableTorchFunction():
            found.append(measure(x, EVERYTHING._replace(functions=(lambda tensor: tensor.sum(),))))
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        traced = torch.jit.trace(function, torch.ones(2, 2), check_trace=False)
    kinds = [node.kind() for node in traced.graph.nodes() if node.kind() != "prim::Constant"]
    assert kinds == ["aten::mul"]
    assert found[0].sumabs == 4.0


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_inside_of_a_transform_all_is_measured(transform):
    found = []

    def function(x):
        want = EVERYTHING._replace(functions=(lambda tensor: tensor.sum(),))
        found.append(measure(x, want))
        found.append(measure(outer, want))  # a plain tensor, while the transform runs
        return (x * 2).sum()

    outer = torch.tensor([5.0])
    transform(function)(torch.tensor([1.0, 2.0]))
    assert [extra.sumabs for extra in found] == [3.0, 5.0]
    assert [extra.user[0][1] for extra in found] == [3.0, 5.0]


# What is wanted.


def test_nothing_but_what_is_wanted_is_measured():
    tensor = torch.tensor([1.0, 2.0])
    assert _values(measure(tensor, Want())) == [None] * 7 + [{}, {}]
    hashed = measure(tensor, Want(stats=0, hash=True))
    assert hashed.hash == fingerprint_array(tensor.numpy(), None).hash
    assert (hashed.sketch, hashed.sumabs) == (None, None)
    sketched = measure(tensor, Want(stats=0, sketch=True))
    np.testing.assert_array_equal(
        sketched.sketch, fingerprint_array(tensor.numpy(), format_of(torch.float32), is_hashed=False).sketch
    )
    assert sketched.hash is None


def test_what_is_there_is_not_measured_again():
    tensor, calls = torch.tensor([1.0, 2.0]), []
    want = EVERYTHING._replace(functions=(calls.append,))
    extra = measure(tensor, want)
    before = [id(each) for each in (*_values(extra), extra.channel_max[-1], extra.sample[4])]
    measure(torch.tensor([7.0, 7.0]), want, extra)
    assert [id(each) for each in (*_values(extra), extra.channel_max[-1], extra.sample[4])] == before
    assert len(calls) == 1


def test_sites_that_share_a_tensor_have_each_its_own_channels_and_sample():
    tensor = torch.tensor([[1.0, -5.0], [3.0, 4.0]])
    extra = measure(tensor, Want(stats=2, channel_dim=0, sample=1))
    measure(tensor, Want(stats=2, channel_dim=1, sample=9), extra)
    assert {dim: found.tolist() for dim, found in extra.channel_max.items()} == {0: [5.0, 4.0], 1: [3.0, 5.0]}
    assert {asked: len(found) for asked, found in extra.sample.items()} == {1: 1, 9: 4}


def test_a_part_that_fails_leaves_the_others(monkeypatch):
    def fail(*args, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(extras_module, "tier2_array", fail)
    extra = measure(torch.tensor([1.0]), EVERYTHING)
    assert ExtraNote("no histogram: MemoryError: no room", "histogram") in extra.notes
    assert (extra.sumabs, extra.hash is None, extra.sketch is None) == (None, False, False)
    monkeypatch.setattr(extras_module, "fingerprint_array", fail)
    extra = measure(torch.tensor([1.0]), EVERYTHING)
    assert ExtraNote("no hash: MemoryError: no room", "hash") in extra.notes
    assert ExtraNote("no sketch: MemoryError: no room", "sketch") in extra.notes


def test_more_channels_than_are_kept_are_a_note():
    extra = measure(torch.ones(2, 20_000), Want(stats=2))
    (note,) = extra.notes
    assert note.text.startswith("no channel_max: ")
    assert (note.of, note.about, extra.channel_max) == ("channel_max", -1, {})


def test_an_interrupt_goes_through():
    def stop(tensor):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(torch.ones(1), Want(functions=(stop,)))


def test_threads_measure_beside_each_other():
    found = []

    def run(number):
        for _ in range(50):
            extra = measure(torch.full((5,), float(number)), want)
            found.append((number, extra.sumabs, extra.user[0][1]))

    want = EVERYTHING._replace(functions=(lambda tensor: tensor.max(),))
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(found)) == [(number, 5.0 * number, float(number)) for number in range(4)]


# What is done on another device, done on this one.


@pytest.fixture
def on_device(monkeypatch):
    """CPU tensors are taken for those of another device."""
    monkeypatch.setattr(extras_module, "is_plain", lambda tensor, kinds: False)
    monkeypatch.setattr(extras_module, "_measure_host", _measure_as_on_device)


def _measure_as_on_device(tensor, form, parts, want, extra, shard):
    extras_module._measure_device(tensor, parts, want, extra, shard)


OWN_DISPATCH = "subclass with __torch_dispatch__ and own memory"  # raises when it hears of an op
MEASURED_BY_OPS = [kind for kind in MEASURED if kind != OWN_DISPATCH]


@pytest.mark.parametrize("kind", MEASURED_BY_OPS)
def test_on_a_device_the_same_is_measured_as_tensors_of_it(kind, on_device, monkeypatch):
    there = measure(silently(KINDS[kind][0]), EVERYTHING)
    monkeypatch.undo()
    here = measure(silently(KINDS[kind][0]), EVERYTHING)
    assert texts(there) == texts(here)
    for name in ("sumabs", "zero_count", "sum4", "histogram", "sketch", "hash"):
        assert isinstance(getattr(there, name), torch.Tensor)
    assert here.histogram.tolist() == there.histogram.tolist()
    assert here.hash == there.hash.item() % 2**64
    np.testing.assert_allclose(there.sumabs.item(), here.sumabs, rtol=1e-6)
    np.testing.assert_allclose(there.sketch.numpy(), here.sketch, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(there.sample[4], here.sample[4])
    for dim, found in here.channel_max.items():
        np.testing.assert_array_equal(there.channel_max[dim], found)
