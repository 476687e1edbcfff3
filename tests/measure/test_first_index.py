"""The index of the first element that is NaN or infinite, in row-major order, whatever the order in memory."""

import math
from collections.abc import Callable

import pytest
import torch

from helpers.devices import no_waiting
from helpers.float64_reference import measure
from modtrace.measure.dtypes import CHUNK
from modtrace.measure.measurers import measurer
from modtrace.measure.moments import device_kernel
from modtrace.measure.moments.cpu_kernel import RawStatistics
from modtrace.measure.moments.device_kernel import measure_on_device
from modtrace.measure.moments.rows import FIRST_INDEX, DeviceRows

Layout = Callable[[torch.Tensor], torch.Tensor]

#: Of a tensor of shape [6, 8, 10]; NaN at [2, 3, 4], infinity at [1, 7, 6].
LAYOUTS: dict[str, tuple[Layout, int]] = {
    "as it is": (lambda x: x, 156),
    "transposed": (lambda x: x.permute(2, 1, 0), 4 * 48 + 3 * 6 + 2),
    "every other": (lambda x: x[::2, :, ::2], 1 * 40 + 3 * 5 + 2),
    "expanded in front": (lambda x: x.expand(3, 6, 8, 10), 156),
    "expanded inside": (lambda x: x[:, :, 4:5].expand(6, 8, 9), 2 * 72 + 3 * 9),
    "one number": (lambda x: x[2, 3, 4], 0),
}
DTYPES = [torch.float32, torch.float16, torch.float8_e5m2, torch.complex64]


def planted(dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.ones(6, 8, 10)
    tensor[2, 3, 4], tensor[1, 7, 6] = math.nan, -math.inf
    return tensor.to(dtype)


def first_index(tensor: torch.Tensor) -> float:
    measurement = measure(tensor)
    assert measurement.rows is not None
    [row] = measurement.rows.read([measurement.row])
    measurement.rows.free([measurement.row])
    return float(row[FIRST_INDEX])


@pytest.fixture(params=["compiled", "numpy"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured by the compiled kernel, or by numpy."""
    if request.param == "numpy":
        monkeypatch.setattr(measurer, "measure_into", None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_element_in_row_major_order_is_found(by: None, layout: str, dtype: torch.dtype) -> None:
    view, expected = LAYOUTS[layout]
    assert first_index(view(planted(dtype))) == expected


@pytest.mark.parametrize("at", [0, 511, 512, CHUNK - 1, CHUNK, 2 * CHUNK + 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_first_element_of_a_large_tensor_is_found(by: None, dtype: torch.dtype, at: int) -> None:
    tensor = torch.zeros(2 * CHUNK + 5, dtype=dtype)
    tensor[at:] = math.inf
    assert first_index(tensor) == at
    assert first_index(tensor.as_strided((len(tensor) // 2,), (2,))) == (at + 1) // 2


def test_first_element_of_a_sparse_tensor_is_not_known(by: None) -> None:
    assert first_index(torch.tensor([[0.0, math.nan], [math.inf, 0.0]]).to_sparse()) == -1


def test_finite_tensor_is_not_read_again(by: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_again(*_: object) -> int:
        raise AssertionError("it is read again")

    monkeypatch.setattr(measurer, "first_nonfinite", read_again)
    for layout, _ in LAYOUTS.values():
        assert measure(layout(torch.ones(6, 8, 10))).note is None


@pytest.mark.parametrize("chunk", [2**23, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float16], ids=str)
def test_first_element_on_a_device_is_found_without_waiting(
    chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kernel, "_CHUNK", chunk)
    rows, tensor = DeviceRows(torch.device("cpu")), planted(dtype)
    with no_waiting():
        numbers = [measure_on_device(view, rows) for view in (tensor, tensor.permute(2, 0, 1))]
    assert rows.read(numbers)[:, FIRST_INDEX].tolist() == [156, -1]


def test_statistics_are_kept_where_the_first_element_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(measurer, "measure_into", None)
    monkeypatch.setattr(measurer, "first_nonfinite", fail)
    measurement = measure(planted(torch.float32).permute(2, 1, 0))
    assert measurement.rows is not None
    [row] = measurement.rows.read([measurement.row])
    measurement.rows.free([measurement.row])
    assert (row[FIRST_INDEX], measurement.note) == (-1, None)
    assert RawStatistics(*row[:FIRST_INDEX]).nan_count == 1
