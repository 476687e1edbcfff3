"""What is recorded of each kind of tensor: its shape and dtype, what is said of it, and its statistics."""

import pytest
import torch
import torch.autograd.forward_ad
from torch import nn

from helpers.float64_reference import measure, read
from helpers.tensor_kinds import KINDS, THREE, complex_numbers, dense, expect, silently, three


def check(tensor, expected) -> None:
    measurement = measure(tensor)
    assert (tuple(measurement.shape), measurement.dtype, measurement.note) == expected[:3]
    assert all(type(size) is int for size in measurement.shape)
    if expected.statistics is None:
        assert (measurement.rows, measurement.row) == (None, -1)
        assert expected.note.startswith("not measured: ")
    else:
        assert str(tuple(read(measurement))) == str(tuple(map(float, expected.statistics)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tensor_is_measured_or_says_why_not(kind):
    make, expected = KINDS[kind]
    check(silently(make), expected)


# Transforms: a tensor is of this kind only while the transform runs.


def transformed(transform, function, *inputs):
    """What is measured inside; and the result is as without."""
    found = []

    def measuring(x):
        y = function(x)
        found.append(measure(x))
        found.append(measure(y))
        return y.sum()

    result = transform(measuring)(*inputs)
    expected = transform(lambda x: function(x).sum())(*inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    return [(tuple(each.shape), each.note, *read(each)[:4]) for each in found]


def jvp(function):
    return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))


VMAP = "vmap: all examples together"


@pytest.mark.parametrize(
    ("transform", "shape", "note"),
    [
        (torch.func.grad, (2, 3), None),
        (jvp, (2, 3), None),
        (lambda f: lambda x: torch.func.vjp(f, x)[0], (2, 3), None),
        (lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()), (2, 3), None),
        (torch.func.vmap, (2, 3), VMAP),
        (lambda f: torch.func.vmap(f, in_dims=1), (2, 3), VMAP),
        (lambda f: torch.func.vmap(torch.func.grad(f)), (2, 3), VMAP),
        (lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum()), (2, 3), VMAP),
        (lambda f: torch.func.vmap(torch.func.vmap(f)), (2, 3), f"{VMAP}; {VMAP}"),
    ],
    ids=[
        "grad",
        "jvp",
        "vjp",
        "grad of grad",
        "vmap",
        "vmap over columns",
        "vmap of grad",
        "grad of vmap",
        "vmap of vmap",
    ],
)
def test_inside_a_transform_all_examples_are_measured(transform, shape, note):
    numbers = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    inputs, outputs = transformed(transform, lambda x: x * 2, numbers)
    assert inputs[1:] == (note, 6, 1, 6, 21)
    assert outputs[1:] == (note, 6, 2, 12, 42)
    assert sorted(inputs[0]) == sorted(outputs[0]) == [2, 3]


def test_conjugates_and_sparse_tensors_are_measured_inside_a_transform():
    found, sparse = [], dense().to_sparse_csr()

    def function(x):
        found.append(measure(complex_numbers().conj()))
        found.append(measure(sparse))
        found.append(measure(x))
        return x.sum()

    torch.func.grad(function)(three())
    assert [read(each).sum for each in found] == [6, 6, 6]


def test_tensors_that_have_left_their_transform_are_measured():
    left = []

    def function(x):
        left.extend([x, x * 2])
        return x.sum()

    torch.func.grad(function)(three())
    torch.func.vmap(function)(torch.ones(2, 3))
    assert [read(measure(each)).sum for each in left] == [6, 12, 6, 12]


def test_a_tensor_with_a_tangent_is_measured():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(three(), torch.ones(3))
        check(dual, expect((3,), None, THREE))


def test_a_functionalized_tensor_is_not_measured_as_its_writes_may_be_pending():
    found = []

    def function(x):
        y = x.clone()
        y.view(-1).add_(5)
        found.append(measure(y))
        return y

    assert torch.func.functionalize(function)(three()).tolist() == [6, 7, 8]
    note = "not measured: functionalize may have writes to it still to do"
    assert (found[0].shape, found[0].dtype, found[0].note) == ((3,), torch.float32, note)


# Distributed: a group of one process.


@pytest.fixture(scope="module")
def mesh():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch without gloo")
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [lambda x: x, nn.Parameter], ids=["DTensor", "Parameter of a DTensor"])
def test_the_local_part_of_a_dtensor_is_measured(mesh, wrap):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for placement in (Shard(0), Replicate()):
        tensor = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [placement])
        expected = expect((3, 2), None, (6, 0, 5, 15, 55, 0, 0))
        check(wrap(tensor), expected)
        check(wrap(tensor), expected)


def test_a_dtensor_is_measured_also_where_torch_does_not_say_its_place(mesh, monkeypatch):
    from torch.distributed.tensor import Shard, _utils, distribute_tensor

    def refuse(*given):
        raise NotImplementedError("placement")

    tensor = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    monkeypatch.setattr(_utils, "compute_local_shape_and_global_offset", refuse)
    note = "DTensor: the part on this rank, at an unknown place"
    check(tensor, expect((3, 2), note, (6, 0, 5, 15, 55, 0, 0)))


def test_a_collective_that_has_not_been_waited_for_is_not_waited_for(mesh):
    import torch.distributed._functional_collectives as collectives

    tensor = collectives.all_reduce(torch.ones(3), "sum", mesh)
    if not isinstance(tensor, collectives.AsyncCollectiveTensor):
        pytest.skip("this torch waits at once")
    note = "not measured: a collective that has not been waited for"
    check(tensor, expect((3,), note, None))
    assert not tensor.completed
    tensor.wait()


def masked(data, mask):
    from torch.masked import as_masked_tensor

    return as_masked_tensor(data, mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("kind", ["conjugate", "negative", "masked"])
def test_what_would_be_copied_to_be_measured_is_not_read_once_its_storage_is_freed(kind):
    data = torch.ones(4, dtype=torch.float32 if kind == "masked" else torch.complex64)
    views = {
        "conjugate": data.conj,
        "negative": lambda: data.conj().imag,
        "masked": lambda: masked(data, torch.ones(4, dtype=torch.bool)),
    }
    tensor = views[kind]()
    storage = tensor._masked_data.untyped_storage() if kind == "masked" else data.untyped_storage()
    storage.resize_(0)
    note = measure(tensor).note
    assert (
        note == "not measured: " + ("ValueError: " if kind == "masked" else "") + "its storage has been freed"
    )
