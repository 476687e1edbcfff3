"""The kernel of devices, on tensors of the CPU in place of a device's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.any_numbers import from_valid_bytes
from helpers.devices import Devices, no_waiting
from helpers.dtypes import DEVICE_DTYPES as DTYPES
from helpers.float64_reference import assert_near_reference, to_numbers
from helpers.layouts import LAYOUTS, laid_out
from modtrace.measure.moments import device_kernel
from modtrace.measure.moments.cpu_kernel import RawStatistics
from modtrace.measure.moments.device_kernel import measure_on_device
from modtrace.measure.moments.rows import FIRST_INDEX, DeviceRows


@pytest.fixture(scope="module", params=[2**23, 100], ids=["one chunk", "chunks of 100"])
def chunk(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_kernel, "_CHUNK", request.param)
        yield request.param


def measured(tensor: torch.Tensor) -> RawStatistics:
    rows = DeviceRows(torch.device("cpu"))
    for _ in range(3):  # the last one finds what others have left in its rows
        with torch.no_grad():
            number = measure_on_device(tensor, rows)
        found = RawStatistics(*rows.read([number])[0, :FIRST_INDEX].tolist())
        rows.free([number])
        taken = [rows.take() for _ in range(5)]
        for row in taken:
            rows.row(row).fill_(99)
        rows.free(taken)
    assert len(set(rows._free)) == len(rows._free) == len(rows.blocks) * 1024, "all rows are free again"
    return found


def check(tensor: torch.Tensor) -> None:
    assert_near_reference(measured(tensor), to_numbers(tensor))


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=16, max_size=3000), st.sampled_from(DTYPES))
def test_statistics_of_any_bits_equal_the_reference(chunk, content, dtype):
    check(from_valid_bytes(content[: len(content) // 16 * 16], dtype))


@pytest.mark.parametrize("value", [1e-45, 2e19, 3.3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_beyond_the_range_of_float32_are_summed(chunk, dtype, value):
    check(torch.full((100_000,), value, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_measured(chunk, layout):
    for dtype in (torch.float32, torch.complex64, torch.float8_e5m2):
        check(laid_out(layout, dtype))


def test_an_expanded_tensor_is_not_copied_in_full():
    """2^50 elements."""
    assert measured(torch.tensor([1.0, -3.0]).expand(2**49, 2)) == (2**50, -3, 1, -(2**50), 10 * 2**49, 0, 0)


def test_rows_are_read_in_any_order_and_freed_with_all_their_parts(chunk):
    rows = DeviceRows(torch.device("cpu"))
    tensors = [torch.full((size,), float(size)) for size in (2, 350, 1, 100)]
    numbers = [measure_on_device(tensor, rows) for tensor in tensors]
    order = [3, 0, 2, 1, 3]
    table = rows.read([numbers[at] for at in order])
    assert [tuple(row) for row in table.tolist()] == [
        (n, n, n, n * n, n * n * n, 0, 0, -1) for n in (float(len(tensors[at])) for at in order)
    ]
    rows.free(numbers)
    assert sorted(rows.take() for _ in range(1024)) == list(range(1024))


class Launches(TorchDispatchMode):
    """The ops that run a kernel: those that make views or memory run none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_one_chunk_takes_8_launches(dtype):
    rows = DeviceRows(torch.device("cpu"))
    rows.free([rows.take()])
    tensor = torch.ones(40, dtype=dtype)
    for view, launches in (
        (tensor, 8),
        (tensor.view(4, 10).t(), 8),
        (tensor[:1].expand(4), 8),
        (tensor[:0], 0),
    ):
        with Launches() as mode:
            measure_on_device(view, rows)
        assert len(mode.names) == launches, mode.names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype):
    tensors = [torch.ones(5, dtype=dtype), torch.empty(0, dtype=dtype), torch.ones(1, dtype=dtype).expand(4)]
    rows = DeviceRows(torch.device("cpu"))
    with no_waiting():
        numbers = [measure_on_device(tensor, rows) for tensor in tensors]
    assert rows.read(numbers)[:, 0].tolist() == ([10, 0, 8] if dtype.is_complex else [5, 0, 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_no_tensor_of_another_device_takes_part(chunk, dtype):
    """A copy from the host would wait, too; and what would have to be read fails on meta."""
    ones = torch.ones(250, dtype=dtype, device="meta")
    for tensor in (ones, ones[:0], ones[:1].expand(4), ones.view(10, 25)[:, ::2]):
        rows = DeviceRows(torch.device("meta"))
        with Devices() as devices:
            measure_on_device(tensor, rows)
        assert devices.types == {"meta"}
