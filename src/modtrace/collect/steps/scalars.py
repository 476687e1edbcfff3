"""Reads the numbers that a user logs with a step; numbers on a device are read only when the step is written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import describe_error
from ...measure.measurers.measurer import Measurement, Measurer
from ...torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ...torch_internals.modes import unseen
from ...torch_internals.tensors import kind_of, plain_kinds
from .step import Step

#: The column of the minimum in a row of `measure.rows`, which for one element is its value.
_MIN = 1


class Scalars:
    """Reads the scalars of one recording."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Creates a reader; `warn` receives a text for each scalar that is left out."""
        self._measurer = Measurer()
        self._warn = warn

    @property
    def has_met_device(self) -> bool:
        """True if numbers were left on a device, so that writing them waits for the device."""
        return self._measurer.has_met_device

    def read(self, scalars: Mapping[str, Any]) -> "dict[str, float | Measurement]":
        """Returns a user's scalars as floats, or as measurements where they are on a device with our kernels.

        A tensor on another device is read at once. It is left out if it cannot be read, after waiting a while for
        captures of CUDA graphs on other threads.

        Args:
            scalars: numbers, or tensors or arrays with one element, by name.

        Raises:
            TypeError: a value is something else, or does not fit into a 64-bit float.
        """
        found: dict[str, float | Measurement | None] = {}
        try:
            for name, value in scalars.items():
                found[name] = self._measured(value) or _to_float(name, value)
        except BaseException:
            _free(found.values())
            raise
        for name in [name for name, value in found.items() if value is None]:
            self._warn(
                f"log({name}=...) is left out: {BEING_CAPTURED}, which reading a number on a GPU would end"
            )
        return {name: value for name, value in found.items() if value is not None}

    def _measured(self, value: Any) -> Measurement | None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        with unseen():
            if not self._measurer.has_kernels(value.device) or value.numel() != 1 or value.is_complex():
                return None
            if kind_of(value) not in plain_kinds(value.device.type):  # sparse, or many numbers inside `vmap`
                return None
            measured = self._measurer.measure(value)
        return None if measured.rows is None else measured

    def columns(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        """Returns the columns of `scalars`; None if nothing was logged. It may wait for a device, and frees nothing."""
        rows = [
            (step.number, name, self._value(name, value)) for step in steps for name, value in step.scalars
        ]
        known = [row for row in rows if row[2] is not None]
        if not known:
            return None
        number, name, value = (list(column) for column in zip(*known, strict=True))
        return {"step": number, "name": name, "value": value}

    def _value(self, name: str, value: "float | Measurement") -> float | None:
        if not isinstance(value, Measurement):
            return value
        try:
            assert value.rows is not None
            return float(value.rows.read([value.row])[0, _MIN])
        except Exception as error:  # the device has failed
            self._warn(f"log({name}=...) is left out: {describe_error(error)}")
            return None


def free_scalars(steps: Sequence[Step]) -> None:
    """Frees the scalars of steps that were written or are not wanted."""
    for step in steps:
        scalars, step.scalars = step.scalars, []
        _free(value for _, value in scalars)


def _free(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, Measurement) and value.rows is not None:
            value.rows.free([value.row])


def _to_float(name: str, value: Any) -> float | None:
    try:
        if isinstance(value, torch.Tensor):
            with unseen(), graph_captures.device_work(value, waits=True) as is_allowed:
                return float(value.detach()) if is_allowed else None
        return float(value)
    # Even the text of such an integer may be refused (sys.set_int_max_str_digits).
    except OverflowError as error:
        raise TypeError(
            f"log({name}=...): the number is too large for a float of 64 bits, which reaches 1.8e308. "
            "Log its logarithm."
        ) from error
    except Exception as error:  # a user's class may raise any exception
        raise TypeError(
            f"log({name}={_shown(value)!r}): a scalar is a number or a tensor with one element, "
            f"not {type(value).__name__}"
        ) from error


def _shown(value: Any) -> str:
    try:
        return str(value)[:60]
    except Exception:
        return "..."
