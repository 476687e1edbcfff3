"""A tensor of each kind, and what is to be recorded of it."""

import math
import warnings
import weakref
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

NAN = math.nan
COMPLEX = "complex: real and imaginary parts"


class Expected(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    note: str | None
    statistics: (
        tuple[float, ...] | None
    )  # count, min, max, sum, sum of squares, NaN, infinite; None: not measured


# Classes of a user's.


class Plain(torch.Tensor):
    pass


class OfPlain(Plain):
    pass


class Functional(torch.Tensor):
    """Would raise if it heard of anything."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"the subclass has seen {func}")


class Owner(torch.Tensor):
    """Runs its ops itself, with its numbers in its own memory."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"the subclass has seen {func}")


class Wrapper(torch.Tensor):
    """Holds another tensor, and does not say where."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(each):
            return each.inner if isinstance(each, Wrapper) else each

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Flattening(Wrapper):
    def __tensor_flatten__(self):
        return ["inner"], None


class Endless(Wrapper):
    """Says that it is inside itself."""

    @property
    def itself(self):
        return self

    def __tensor_flatten__(self):
        return ["itself"], None


class Packed(Wrapper):
    """Holds its numbers in another shape and dtype."""

    def __tensor_flatten__(self):
        return ["packed"], None

    @property
    def packed(self):
        return self.inner.view(torch.uint8)


class Secretive(torch.Tensor):
    """Raises whatever it is asked."""

    def __getattribute__(self, name):
        raise RuntimeError(f"no {name} for you\nand a second line")


class Shapeless(torch.Tensor):
    @property
    def shape(self):
        raise OSError("disk\tgone " + "x" * 500)


class Typeless(torch.Tensor):
    @property
    def dtype(self):
        raise KeyError("dtype")


class Speechless(torch.Tensor):
    def numel(self):
        raise _Mute()


class _Mute(Exception):
    def __str__(self):
        raise RuntimeError


# How each is made.


def silently(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def references(tensor):
    """Weak ones to the tensor and to its storage, if it has one of its own."""
    found = [weakref.ref(tensor)]
    with suppress(NotImplementedError):
        found.append(weakref.ref(tensor.untyped_storage()))
    return found


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(2, 3)


def inference():
    with torch.inference_mode():
        return torch.tensor([1.0, 2.0])


def coo(*, coalesced):
    tensor = torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 0]], [1.0, 2.0, 3.0], (2, 2), check_invariants=True)
    return tensor.coalesce() if coalesced else tensor


def dense():
    return torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0]])


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.full((3, 4), 2.0)], layout=layout)


def jagged_with_holes():
    numbers = torch.arange(10.0).view(2, 5, 1)
    return torch.nested.narrow(numbers, 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)


def masked(**options):
    numbers, mask = torch.tensor([1.0, NAN, 3.0]), torch.tensor([True, False, True])
    return torch.masked.masked_tensor(numbers, mask, **options)


def complex_numbers():
    return torch.tensor([1 + 2j, 3 - 4j])


def expect(shape, note, statistics, dtype=torch.float32):
    return Expected(shape, dtype, note, statistics)


THREE = (3, 1, 3, 6, 14, 0, 0)  # of 1, 2, 3


def three(**options):
    return torch.tensor([1.0, 2.0, 3.0], **options)


KINDS = {
    # Strided, of torch's own kind.
    "plain": (three, expect((3,), None, THREE)),
    "0-dim": (lambda: torch.tensor(-2.5), expect((), None, (1, -2.5, -2.5, -2.5, 6.25, 0, 0))),
    "no elements": (lambda: torch.empty(0, 3), expect((0, 3), None, (0, NAN, NAN, 0, 0, 0, 0))),
    "NaN": (lambda: torch.tensor([1.0, NAN]), expect((2,), None, (2, NAN, NAN, NAN, NAN, 1, 0))),
    "infinite": (
        lambda: torch.tensor([1.0, -math.inf]),
        expect((2,), None, (2, -math.inf, 1, -math.inf, math.inf, 0, 1)),
    ),
    "expanded": (lambda: three().expand(2, 3), expect((2, 3), None, (6, 1, 3, 12, 28, 0, 0))),
    "non-contiguous": (lambda: dense()[:, ::2], expect((2, 2), None, (4, 0, 2, 3, 5, 0, 0))),
    "leaf": (lambda: three(requires_grad=True), expect((3,), None, THREE)),
    "not a leaf": (lambda: three(requires_grad=True) * 2, expect((3,), None, (3, 2, 6, 12, 56, 0, 0))),
    "Parameter": (lambda: nn.Parameter(three()), expect((3,), None, THREE)),
    "Buffer": (lambda: nn.Buffer(three()), expect((3,), None, THREE)),
    "inference tensor": (inference, expect((2,), None, (2, 1, 2, 3, 5, 0, 0))),
    "float64": (lambda: three().double(), expect((3,), None, THREE, torch.float64)),
    "bfloat16": (lambda: three().bfloat16(), expect((3,), None, THREE, torch.bfloat16)),
    "float16": (lambda: three().half(), expect((3,), None, THREE, torch.float16)),
    "float8": (lambda: three().to(torch.float8_e5m2), expect((3,), None, THREE, torch.float8_e5m2)),
    "integer": (lambda: torch.tensor([1, 2, 3]), expect((3,), None, THREE, torch.int64)),
    "bool": (
        lambda: torch.tensor([True, False, True]),
        expect((3,), None, (3, 0, 1, 2, 2, 0, 0), torch.bool),
    ),
    # Complex.
    "complex": (complex_numbers, expect((2,), COMPLEX, (4, -4, 3, 2, 30, 0, 0), torch.complex64)),
    "conjugate": (
        lambda: complex_numbers().conj(),
        expect((2,), COMPLEX, (4, -2, 4, 6, 30, 0, 0), torch.complex64),
    ),
    "negative bit": (
        lambda: complex_numbers().conj().imag,
        expect((2,), None, (2, -2, 4, 2, 20, 0, 0)),
    ),
    "zeros that take no memory": (
        lambda: torch._efficientzerotensor((3,)),
        expect((3,), None, (3, 0, 0, 0, 0, 0, 0)),
    ),
    "0-dim complex32": (
        lambda: torch.tensor(1 + 2j, dtype=torch.complex32),
        expect((), COMPLEX, (2, 1, 2, 3, 5, 0, 0), torch.complex32),
    ),
    # Sparse and nested.
    "COO": (
        lambda: coo(coalesced=False),
        expect((2, 2), "sparse: the stored values, those of one place apart (not coalesced)", THREE),
    ),
    "coalesced COO": (
        lambda: coo(coalesced=True),
        expect((2, 2), "sparse: the stored values", (2, 3, 3, 6, 18, 0, 0)),
    ),
    "COO with gradient": (
        lambda: coo(coalesced=True).requires_grad_(),
        expect((2, 2), "sparse: the stored values", (2, 3, 3, 6, 18, 0, 0)),
    ),
    "CSR": (lambda: dense().to_sparse_csr(), expect((2, 4), "sparse: the stored values", THREE)),
    "CSC": (lambda: dense().to_sparse_csc(), expect((2, 4), "sparse: the stored values", THREE)),
    "BSR": (
        lambda: dense().to_sparse_bsr((1, 2)),
        expect((2, 4), "sparse: the stored values", (6, 0, 3, 6, 14, 0, 0)),
    ),
    "BSC": (
        lambda: dense().to_sparse_bsc((1, 2)),
        expect((2, 4), "sparse: the stored values", (6, 0, 3, 6, 14, 0, 0)),
    ),
    "nested": (nested, expect((20,), "nested: its values()", (20, 1, 2, 32, 56, 0, 0))),
    "slice of a nested": (
        lambda: nested().chunk(2, -1)[0],
        expect((20,), "nested: its values(), holes included", (20, 1, 2, 32, 56, 0, 0)),
    ),
    "jagged": (
        lambda: nested(torch.jagged),
        expect((5, 4), "nested: its values()", (20, 1, 2, 32, 56, 0, 0)),
    ),
    "jagged with holes": (
        jagged_with_holes,
        expect((10, 1), "nested: its values(), holes included", (10, 0, 9, 45, 285, 0, 0)),
    ),
    "masked": (
        masked,
        expect((3,), "MaskedTensor: the elements not masked", (2, 1, 3, 4, 10, 0, 0)),
    ),
    "masked with gradient": (
        lambda: masked(requires_grad=True) * 2,
        expect((3,), "MaskedTensor: the elements not masked", (2, 2, 6, 8, 40, 0, 0)),
    ),
    "conjugate with gradient": (
        lambda: (complex_numbers().requires_grad_() * 1).conj(),
        expect((2,), COMPLEX, (4, -2, 4, 6, 30, 0, 0), torch.complex64),
    ),
    # Subclasses.
    "plain subclass": (lambda: three().as_subclass(Plain), expect((3,), None, THREE)),
    "subclass of a subclass": (lambda: three().as_subclass(OfPlain), expect((3,), None, THREE)),
    "Parameter of a subclass": (
        lambda: nn.Parameter(three().as_subclass(Plain)),
        expect((3,), None, THREE),
    ),
    "subclass with __torch_function__": (
        lambda: three().as_subclass(Functional),
        expect((3,), None, THREE),
    ),
    "subclass with __torch_dispatch__ and own memory": (
        lambda: torch.Tensor._make_subclass(Owner, three()),
        expect((3,), None, THREE),
    ),
    "wrapper": (
        lambda: Wrapper(three()),
        expect((3,), "not measured: Wrapper does not say where its numbers are", None),
    ),
    "wrapper with __tensor_flatten__": (
        lambda: Flattening(three()),
        expect((3,), "Flattening: its inner", THREE),
    ),
    "wrapper of a wrapper": (
        lambda: Flattening(Flattening(three().expand(2, 3))),
        expect((2, 3), "Flattening: its inner; Flattening: its inner", (6, 1, 3, 12, 28, 0, 0)),
    ),
    "wrapper of a complex tensor": (
        lambda: Flattening(complex_numbers()),
        expect((2,), f"Flattening: its inner; {COMPLEX}", (4, -4, 3, 2, 30, 0, 0), torch.complex64),
    ),
    "wrapper of a meta tensor": (
        lambda: Flattening(torch.ones(3, device="meta")),
        expect((3,), "not measured: a meta tensor holds no numbers", None),
    ),
    "wrapper of freed memory": (
        lambda: Flattening(freed(torch.ones(3))),
        expect((3,), "not measured: its storage has been freed", None),
    ),
    "wrapper around itself": (
        lambda: Endless(three()),
        expect((3,), "not measured: Endless wraps too much", None),
    ),
    "wrapper of packed numbers": (
        lambda: Packed(three()),
        expect((3,), "not measured: Packed does not say where its numbers are", None),
    ),
    "wrapper of two": (
        lambda: TwoTensor(three(), three()),
        expect((3,), "not measured: TwoTensor does not say where its numbers are", None),
    ),
    "LoggingTensor": (
        lambda: LoggingTensor(three()),
        expect((3,), "not measured: LoggingTensor does not say where its numbers are", None),
    ),
    # What holds no numbers, or none that can be read.
    "meta": (
        lambda: torch.ones(2, 3, device="meta"),
        expect((2, 3), "not measured: a meta tensor holds no numbers", None),
    ),
    "fake": (fake, expect((2, 3), "not measured: a fake tensor holds no numbers", None)),
    "UninitializedParameter": (
        nn.UninitializedParameter,
        expect((), "not measured: not initialized yet", None),
    ),
    "UninitializedBuffer": (nn.UninitializedBuffer, expect((), "not measured: not initialized yet", None)),
    "freed": (
        lambda: freed(torch.ones(3)),
        expect((3,), "not measured: its storage has been freed", None),
    ),
    "view into freed memory": (
        lambda: freed(torch.ones(8)[5:]),
        expect((3,), "not measured: its storage has been freed", None),
    ),
    "stepped view into freed memory": (
        lambda: freed(torch.ones(8)[1::3]),
        expect((3,), "not measured: its storage has been freed", None),
    ),
    "mkldnn": (lambda: torch.ones(2, 3).to_mkldnn(), expect((2, 3), "not measured: mkldnn layout", None)),
    "quantized": (
        lambda: torch.quantize_per_tensor(three(), 0.1, 0, torch.qint8),
        expect((3,), "not measured: quantized (qint8)", None, torch.qint8),
    ),
    "uint4": (
        lambda: torch.empty(3, dtype=torch.uint4),
        expect((3,), "not measured: dtype uint4", None, torch.uint4),
    ),
    "float4": (
        lambda: torch.empty(3, dtype=torch.float4_e2m1fn_x2),
        expect((3,), "not measured: dtype float4_e2m1fn_x2", None, torch.float4_e2m1fn_x2),
    ),
    # What raises.
    "subclass that raises": (
        lambda: three().as_subclass(Secretive),
        expect((), "not measured: RuntimeError: no __class__ for you", None, None),
    ),
    "subclass without a shape": (
        lambda: three().as_subclass(Shapeless),
        expect((), "not measured: OSError: disk gone " + "x" * 87, None),
    ),
    "subclass without a dtype": (
        lambda: three().as_subclass(Typeless),
        expect((3,), "not measured: KeyError: 'dtype'", None, None),
    ),
    "subclass whose error raises": (
        lambda: three().as_subclass(Speechless),
        expect((3,), "not measured: _Mute", None),
    ),
}

#: Kinds that hold their numbers in one way each.
HOLDERS = [
    "plain",
    "expanded",
    "non-contiguous",
    "conjugate",
    "COO",
    "wrapper with __tensor_flatten__",
    "jagged",
]
