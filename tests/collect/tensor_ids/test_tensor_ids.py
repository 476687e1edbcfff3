"""Which tensors are told apart, in Python and in C."""

import gc
import os
import sys
import threading
import weakref

import pytest
import torch

from helpers import python_tensor_ids
from modtrace.collect.tensor_ids.argument_reader import FLOAT, TENSOR, TRUTH
from modtrace.collect.tensor_ids.tensor_ids import (
    BITS,
    FRESH,
    GEOMETRY,
    NO_OP,
    NO_TENSOR,
    OFFSET,
    PRODUCER,
    REQUIRES_GRAD,
    ROW_WIDTH,
    SLOT,
    STORAGE,
    VERSION,
    Geometry,
    TensorIds,
)


@pytest.fixture(params=["python", "compiled", "compiled without exchange"])
def ids(request):
    if request.param == "python":
        return python_tensor_ids.TensorIds()
    exchange = None if "without" in request.param else torch.Tensor.__dlpack_c_exchange_api__
    return TensorIds(Geometry, exchange, (torch.Tensor, torch.nn.Parameter))


def taken(ids):
    """Rows, and uses as pairs, since this was last called."""
    rows, used, _ = ids.take()
    return (
        [tuple(rows[at : at + ROW_WIDTH]) for at in range(0, len(rows), ROW_WIDTH)],
        list(zip(used[::2], used[1::2], strict=True)),
    )


def tensors_read(ids, *tensors):
    """The numbers of tensors that are read one after the other."""
    for tensor in tensors:
        ids.read(tensor)
    return [number for number, _ in taken(ids)[1]]


def test_a_leaf_is_met_when_it_is_first_read(ids):
    x = torch.empty_strided((2, 3), (5, 1))
    ids.read(x)
    ids.read(x)
    assert taken(ids) == ([(0, 0, 0, 0, 0, NO_OP, 0, 0)], [(0, 0), (0, 0)])
    assert ids.geometries == [Geometry((2, 3), (5, 1), torch.float32, torch.strided, False, False)]
    assert ids.devices == [torch.device("cpu")]
    assert [(number, tensor is x) for number, tensor in ids.leaves] == [(0, True)]
    assert ids.next == 1


def test_what_is_known_is_found_and_what_would_be_a_leaf_is_not_met(ids):
    x, y = torch.ones(4), torch.ones(4)
    ids.read(x)
    ids.make(y, 3, "", ())
    ids.leaves = []
    assert [ids.find(each) for each in (x, y, torch.ones(4), x[:2])] == [0, 1, NO_TENSOR, NO_TENSOR]
    assert (ids.next, ids.leaves, taken(ids)[1]) == (2, [], [(0, 0)])


def test_unknown_view_of_what_an_op_has_made_is_met_when_it_is_looked_for(ids):
    x = torch.ones(4)
    ids.make(x, 3, "[0]", ())
    ids.write(x, 5)
    view = x[1:]
    assert [ids.find(view), ids.find(view), ids.find(x)] == [1, 1, 2]
    ids.read(view)
    rows, used = taken(ids)
    assert rows[1:] == [(0, 1, 1, 1, 0, 5, 0, 0), (0, 1, 0, 0, 0, 5, 0, 0)]
    assert (used, ids.leaves) == ([(1, 1)], [])


def test_what_is_found_is_asked_for_its_gradient_when_it_is_read(ids):
    x = torch.ones(2)
    ids.make(x, 3, "", ())
    assert ids.find(x) == 0
    ids.read(x.requires_grad_())
    assert [row[BITS] for row in taken(ids)[0]] == [FRESH | REQUIRES_GRAD]


def test_what_has_no_storage_is_not_found(ids):
    with pytest.raises(RuntimeError):
        ids.find(torch.ones(2).to_sparse())
    assert (taken(ids), ids.next) == (([], []), 0)


def test_leaves_are_taken_by_putting_a_new_list(ids):
    x = torch.ones(2)
    ids.read(x)
    leaves, ids.leaves = ids.leaves, []
    assert (len(leaves), ids.leaves) == (1, [])


def test_rows_and_uses_are_arrays_of_int64(ids):
    assert [(each.typecode, len(each)) for each in ids.take()[:2]] == [("q", 0), ("q", 0)]
    ids.read(torch.ones(2))
    assert ids.used_count == 2
    rows, used, first = ids.take()
    assert (rows.typecode, len(rows), used.typecode, len(used), first) == ("q", 8, "q", 2, 0)
    assert (ids.used_count, ids.take()[2]) == (0, 1)


def test_many_rows_are_kept(ids):
    kept = [torch.empty(1) for _ in range(3000)]
    for tensor in kept:
        ids.read(tensor)
    rows, used = taken(ids)
    assert [row[STORAGE] for row in rows] == [*range(3000)]
    assert used == [(number, 0) for number in range(3000)]


def test_what_an_op_makes_is_new_and_fresh(ids):
    x = torch.ones(2)
    ids.make(x, 7, "[0]", ())
    ids.read(x)
    assert taken(ids) == ([(0, 0, 0, 0, 0, 7, 1, FRESH)], [(0, 0)])
    assert ids.slots == ["", "[0]"]
    assert ids.leaves == []


def test_a_view_has_a_number_of_its_own_and_the_same_storage(ids):
    x = torch.ones(6)
    ids.read(x)
    view = x[2:4]
    ids.make(view, 1, "", (x,))
    rows, _ = taken(ids)
    assert [(row[STORAGE], row[OFFSET], row[GEOMETRY], row[BITS]) for row in rows] == [
        (0, 0, 0, 0),
        (0, 2, 1, 0),
    ]


def test_writing_through_a_view_makes_every_tensor_of_the_storage_new(ids):
    x = torch.ones(6)
    view = x[2:4]
    assert tensors_read(ids, x, view) == [0, 1]
    ids.write(view, 5)
    ids.read(x)
    ids.read(view)
    rows, _ = taken(ids)
    assert [(row[STORAGE], row[VERSION], row[PRODUCER]) for row in rows] == [(0, 1, 5), (0, 1, 5)]


def test_an_op_writes_once_through_however_many_tensors(ids):
    x = torch.ones(6)
    ids.write(x[:3], 5)
    ids.write(x[3:], 5)
    ids.read(x)
    assert [row[VERSION] for row in taken(ids)[0]] == [1]
    ids.write(x, 6)
    ids.read(x)
    assert [row[VERSION] for row in taken(ids)[0]] == [2]


def test_a_tensor_given_and_returned_unwritten_is_no_new_one(ids):
    x = torch.ones(2)
    ids.read(x)
    ids.make(x, 3, "", (1, x))
    ids.make(x, 3, "", iter([x]))
    assert len(taken(ids)[0]) == 1
    ids.make(x, 3, "", (torch.ones(2),))  # equal is not the same
    assert len(taken(ids)[0]) == 1


def test_a_tensor_given_and_written_is_a_new_one(ids):
    x = torch.ones(2)
    ids.read(x)
    ids.write(x, 3)
    ids.make(x, 3, "", (x,))
    assert [(row[VERSION], row[PRODUCER]) for row in taken(ids)[0]] == [(0, NO_OP), (1, 3)]
    assert tensors_read(ids, x) == [1]


def test_what_shows_the_same_of_a_storage_is_the_tensor_met_first(ids):
    x = torch.ones(2)
    assert tensors_read(ids, x, x.detach(), x.view(2)) == [0, 0, 0]


def test_an_alias_that_an_op_has_made_is_told_apart_by_its_object(ids):
    x = torch.ones(2)
    ids.read(x)
    alias = x.detach()
    ids.make(alias, 1, "", (x,))
    taken(ids)
    assert tensors_read(ids, x, alias, x, x.detach()) == [0, 1, 0, 0]


def test_what_an_object_has_shown_stays_known_when_it_shows_something_else(ids):
    """A tensor that autograd makes again is found whatever new tensor has the address of the one that died."""
    x = torch.ones(4)
    shown = x[:2]
    ids.make(x, 1, "", ())
    ids.make(shown, 2, "[0]", (x,))
    shown.data = x[2:]
    ids.make(shown, 3, "[1]", (x,))
    taken(ids)
    assert tensors_read(ids, x[:2], shown, x[2:], x[:2]) == [1, 2, 2, 1]


def test_what_shows_the_same_is_remembered_by_its_maker_alone(ids):
    """What autograd has made again dies with its backward, and any other tensor may have its address then."""
    x = torch.ones(4)
    alias = x.detach()
    ids.make(x, 1, "", ())
    ids.make(alias, 2, "", (x,))
    again = x.view(4)
    taken(ids)
    assert tensors_read(ids, again) == [0]
    again.data = x[1:]
    assert tensors_read(ids, again, x[1:], alias, x) == [2, 2, 1, 0]


def test_more_objects_than_are_kept_for_a_version(ids):
    x = torch.ones(2)
    aliases = [x.detach() for _ in range(70)]
    ids.read(x)
    for op, alias in enumerate(aliases):
        ids.make(alias, op, "", (x,))
    taken(ids)
    assert tensors_read(ids, x, aliases[0], aliases[63], aliases[64], aliases[69]) == [0, 0, 0, 65, 70]


def test_set_and_resize_change_what_a_tensor_shows(ids):
    x, y = torch.ones(4), torch.zeros(4)
    ids.read(x)
    x.set_(y.untyped_storage(), 1, (2,))
    ids.read(x)
    x.resize_(3)
    ids.read(x)
    x.data = torch.ones(3)
    ids.read(x)
    rows, _ = taken(ids)
    assert [(row[STORAGE], row[OFFSET], ids.geometries[row[GEOMETRY]].shape) for row in rows] == [
        (0, 0, (4,)), (1, 1, (2,)), (1, 1, (3,)), (2, 0, (3,))
    ]  # fmt: skip


def test_an_object_that_shows_another_offset_is_another_tensor(ids):
    x = torch.ones(4)
    shown = x[:2]
    ids.read(shown)
    shown.data = x[2:]
    ids.read(shown)
    assert [row[OFFSET] for row in taken(ids)[0]] == [0, 2]


def test_a_storage_that_moves_in_memory_keeps_its_tensors(ids):
    x = torch.ones(4)
    assert tensors_read(ids, x) == [0]
    x.untyped_storage().resize_(1 << 20)
    assert tensors_read(ids, x, x) == [0, 0]


def test_tensors_of_no_elements_are_told_apart(ids):
    x = torch.ones(4)
    assert tensors_read(ids, x[:0], x[2:2], x[:0]) == [0, 1, 0]


def test_dtypes_of_one_storage_are_told_apart(ids):
    x = torch.ones(4)
    assert tensors_read(ids, x, x.view(torch.int32), x) == [0, 1, 0]
    assert [each.dtype for each in ids.geometries] == [torch.float32, torch.int32]


def test_conjugated_and_negated_views_are_told_apart(ids):
    real = torch.ones(2)
    x = torch.ones(2, dtype=torch.complex64)
    views = [real, x, x.conj(), x.conj().imag, x.imag, real]
    assert tensors_read(ids, *views) == [0, 1, 2, 3, 4, 0]
    assert [(each.conj, each.neg) for each in ids.geometries] == [
        (False, False), (False, False), (True, False), (False, True), (False, False)
    ]  # fmt: skip


def test_parameters_and_many_dimensions(ids):
    parameter = torch.nn.Parameter(torch.ones(2))
    deep = torch.ones([1] * 20)
    assert tensors_read(ids, parameter, deep, parameter, deep) == [0, 1, 0, 1]
    assert ids.geometries[1].shape == (1,) * 20


def test_whether_it_requires_grad_is_learnt_when_an_output_is_first_read(ids):
    x = torch.ones(2)
    ids.make(x, 0, "", ())
    x.requires_grad_()
    ids.read(x)
    assert [row[BITS] for row in taken(ids)[0]] == [FRESH | REQUIRES_GRAD]


def test_an_output_that_is_read_after_its_row_was_taken_changes_no_row(ids):
    x, y = torch.ones(2), torch.ones(2)
    ids.make(x, 0, "", ())
    assert [row[BITS] for row in taken(ids)[0]] == [FRESH]
    x.requires_grad_()
    ids.make(y, 1, "", ())
    ids.read(x)
    assert [row[BITS] for row in taken(ids)[0]] == [FRESH]


def test_meta_tensors_have_storages(ids):
    x = torch.empty(4, device="meta")
    assert tensors_read(ids, x, x[2:], x) == [0, 1, 0]
    assert ids.devices == [torch.device("meta")]


SPARSE = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)


@pytest.mark.parametrize("kind", ["sparse", "mkldnn"])
def test_what_a_tensor_without_storage_raises_comes_out_and_nothing_changes(ids, kind):
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("built without mkldnn")
    tensor = SPARSE if kind == "sparse" else torch.ones(2).to_mkldnn()
    for call in (ids.read, lambda x: ids.write(x, 0), lambda x: ids.make(x, 0, "", ())):
        with pytest.raises(RuntimeError):
            call(tensor)
    assert (taken(ids), ids.next, ids.geometries, ids.devices, ids.leaves) == (([], []), 0, [], [], [])


def test_a_tensor_without_storage_is_another_one_each_time(ids):
    ids.note_unreadable(SPARSE, NO_OP, "", RuntimeError("no storage"))
    ids.note_unreadable(SPARSE, 4, "[1]", RuntimeError("no storage"))
    assert taken(ids) == ([(-1, 0, 0, 0, 0, NO_OP, 0, 0), (-1, 0, 0, 0, 0, 4, 1, 0)], [(0, 0)])
    assert ids.geometries == [
        Geometry((3,), None, torch.float32, torch.sparse_coo, False, False, "RuntimeError: no storage")
    ]


def test_a_tensor_that_raises_whatever_it_is_asked_is_noted_with_what_autograd_knows(ids):
    class Broken(torch.Tensor):
        def __getattribute__(self, name):
            raise KeyError(f"{name} of 0x7f1234")

    x = torch.ones(2).as_subclass(Broken)
    torch.Tensor.requires_grad_(x)
    reader = python_tensor_ids.reader_of(ids)
    assert reader.read(5, (x,), None) == (5, 1, TENSOR)
    assert taken(ids) == ([(-1, 0, 0, 0, 0, NO_OP, 0, REQUIRES_GRAD)], [(0, 0)])
    why = "KeyError: 'untyped_storage of N'"
    assert (ids.geometries, ids.devices) == ([Geometry((), None, None, None, False, False, why)], [None])
    assert ids.geometries[0].size_bytes == 0


def test_addresses_and_counters_in_errors_do_not_make_geometries_without_end(ids):
    for at in range(50):
        ids.note_unreadable(SPARSE, NO_OP, "", KeyError(f"tensor {at} at {hex(id(at))}"))
    assert [each.note for each in ids.geometries] == ["KeyError: 'tensor N at N'"]


@pytest.mark.parametrize(
    "name, answer", [("shape", [2]), ("stride", lambda: 2), ("dtype", "float32"), ("layout", None)]
)
def test_an_answer_of_another_type_is_an_error_and_nothing_changes(ids, name, answer):
    kind = type("Wrong", (torch.Tensor,), {name: property(lambda self: answer)})
    with pytest.raises((TypeError, AttributeError)):
        ids.read(torch.ones(2).as_subclass(kind))
    assert (taken(ids), ids.next, ids.geometries) == (([], []), 0, [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_of_a_tensors_own_goes_through_the_reader(ids, error):
    class Broken(torch.Tensor):
        def untyped_storage(self):
            raise error

    with pytest.raises(error):
        python_tensor_ids.reader_of(ids).read(0, (torch.ones(2).as_subclass(Broken),), None)
    assert taken(ids) == ([], [])


def test_live_bytes_count_what_ops_have_made(ids):
    given = torch.ones(100)
    ids.read(given)
    assert ids.live_bytes == 0
    x = torch.ones(4)
    ids.make(x, 0, "", ())
    y = torch.ones(2)
    ids.make(y, 1, "", ())
    view = x[1:]
    ids.make(view, 2, "", (x,))
    assert ids.live_bytes == 24
    del x
    assert ids.live_bytes == 24
    del view
    assert ids.live_bytes == 8
    del y
    assert ids.live_bytes == 0


def test_dead_storages_are_never_taken_for_new_ones(ids):
    kept = []
    for at in range(20_000):
        x = torch.ones(1)
        if at % 100 == 0:
            kept.append(x)
        ids.make(x, at, "", ())
    rows, _ = taken(ids)
    assert [row[STORAGE] for row in rows] == [*range(20_000)]
    assert ids.live_bytes == 4 * len({id(each) for each in [*kept, x]})
    assert tensors_read(ids, *kept) == [*range(0, 20_000, 100)]


def test_no_tensor_is_kept_alive(ids):
    x = torch.ones(2)
    ids.make(x, 0, "", ())
    ids.read(x)
    ref = weakref.ref(x)
    del x
    assert ref() is None


def test_forgotten_storages_are_met_anew(ids):
    x = torch.ones(2)
    ids.make(x, 0, "", ())
    ids.forget()
    assert ids.live_bytes == 0
    ids.read(x)
    assert [(row[STORAGE], row[PRODUCER]) for row in taken(ids)[0]] == [(0, 0), (1, NO_OP)]
    del x
    ids.leaves.clear()
    assert ids.live_bytes == 0


def test_storages_may_outlive_the_numbers(ids):
    kept = [torch.ones(1) for _ in range(100)]
    for tensor in kept:
        ids.make(tensor, 0, "", ())
    del ids
    gc.collect()
    kept.clear()


def test_a_circle_through_the_leaves_is_collected(ids):
    class Held(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Held)
    ids.read(x)
    x.ids = ids
    ref = weakref.ref(x)
    del x
    # the fixture's own reference goes with the test: what is checked here is that the leaf can be let go of
    ids.leaves = []
    gc.collect()
    assert ref() is None


def test_no_reference_is_left_over(ids):
    x = torch.ones(3)
    slot, shape_holder = "[a slot]", (x,)
    ids.make(x, 0, slot, shape_holder)
    ids.read(x)
    stored = x.untyped_storage()
    watched = (x, stored, slot, shape_holder, None, torch.float32)
    ids.leaves.clear()
    before = [sys.getrefcount(each) for each in watched]
    for op in range(500):
        ids.read(x)
        ids.find(x)
        ids.write(x, op)
        ids.find(x)
        ids.make(x, op, slot, shape_holder)
    ids.take()
    after = [sys.getrefcount(each) for each in watched]
    assert [b - a for a, b in zip(before, after, strict=True)][:4] == [0, 0, 0, 0]
    assert abs(after[4] - before[4]) < 50 and abs(after[5] - before[5]) < 50


def test_an_error_in_the_middle_leaves_everything_as_it_was(ids):
    class Broken(torch.Tensor):
        @property
        def requires_grad(self):
            raise KeyboardInterrupt

    x = torch.ones(2).as_subclass(Broken)
    with pytest.raises(KeyboardInterrupt):
        ids.read(x)
    assert ids.find(x) == NO_TENSOR
    assert (taken(ids), ids.next, ids.leaves) == (([], []), 0, [])
    y = torch.ones(2)
    assert tensors_read(ids, y) == [0]


def test_wrong_arguments_are_told(ids):
    with pytest.raises(TypeError):
        ids.make(torch.ones(2), 0)
    with pytest.raises(AttributeError):
        ids.read(3)
    with pytest.raises(AttributeError):
        ids.find(3)
    assert taken(ids) == ([], [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_goes_on_with_what_is_known(ids):
    x = torch.ones(2)
    ids.read(x)
    child = os.fork()
    if child == 0:
        known = tensors_read(ids, x, torch.ones(3)) == [0, 0, 1]
        os._exit(0 if known else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensors_read(ids, x) == [0, 0]


def test_threads_that_share_numbers_leave_them_whole(ids):
    def work():
        for at in range(300):
            x = torch.ones(at % 5 + 1)
            ids.make(x, at, "", ())
            ids.read(x)
            ids.write(x, at)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, used = taken(ids)
    assert (len(rows), len(used), ids.next, ids.live_bytes) == (1200, 1200, 1200, 0)


def test_arguments_are_read_in_order_and_kept_without_tensors(ids):
    x, y = torch.ones(2), torch.ones(3)
    reader = python_tensor_ids.reader_of(ids)
    found = reader.read(5, (x, 1, 1.5, 0.0, True, None, [x, (2, y)]), {"alpha": -0.0, "dtype": torch.int8})
    assert found == (
        5, 7, TENSOR, 1, FLOAT, 1.5, FLOAT, "0.0", TRUTH, True, None, (TENSOR, (2, TENSOR)),
        "alpha", FLOAT, "-0.0", "dtype", torch.int8,
    )  # fmt: skip
    assert [number for number, _ in taken(ids)[1]] == [0, 0, 1]


def test_arguments_of_other_classes_are_named(ids):
    reader = python_tensor_ids.reader_of(ids)
    found = reader.read(0, (slice(1), {"a": 1}, float("nan"), [1] * 50), None)
    assert found == (0, 4, "<slice>", (("a", 1),), FLOAT, "nan", (1,) * 50)


def test_an_argument_without_storage_is_noted(ids):
    reader = python_tensor_ids.reader_of(ids)
    assert reader.read(0, (SPARSE,), {}) == (0, 1, TENSOR)
    assert taken(ids) == ([(-1, 0, 0, 0, 0, NO_OP, 0, 0)], [(0, 0)])


def test_the_slot_of_an_output_has_a_number(ids):
    for slot in ("[0]", "", "[0]"):
        ids.make(torch.ones(1), 0, slot, ())
    assert [row[SLOT] for row in taken(ids)[0]] == [1, 0, 1]
