"""Calls a user's functions with tensors, without effects on the run and the tensors."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

from ...errors import describe_error
from ...torch_internals.modes import unseen
from ...torch_internals.transforms import outside_transforms
from ..special import shortened
from .want import Extra

Function = Callable[[torch.Tensor], Any]


class UserFunctions:
    """The functions of one recorder's captures."""

    def __init__(
        self,
        raised: Callable[[str, Exception], None],
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Creates the functions, none of which has been called.

        Args:
            raised: called when a function has raised for the first time, or has returned what JSON cannot hold. The
                error has no traceback.
            aside: returns a context in which module calls do not count as part of the run.
        """
        self._raised = raised
        self._aside = aside
        self._reported: dict[int, tuple[Function]] = {}  # by `id`: they need not be hashable
        self._of_thread = threading.local()

    def call(self, tensor: torch.Tensor, functions: Sequence[Function], extra: Extra) -> None:
        """Calls each function that was not called for this tensor yet with `tensor.detach()`.

        Functions run outside of the user's modes, transforms and autocast, without gradients. The states of torch's
        generators are restored (3 us); those of `random` and numpy are not, because checking them takes 10 and 30 us.
        """
        missing = [function for function in functions if not _has_been_called(function, extra)]
        # A function may run a module whose tensors are looked at.
        if not missing or getattr(self._of_thread, "is_inside", False):
            return
        self._of_thread.is_inside = True
        try:
            with self._aside(), _unobserved(tensor.device):
                for function in missing:
                    self._call(function, tensor, extra)
        finally:
            self._of_thread.is_inside = False

    def _call(self, function: Function, tensor: torch.Tensor, extra: Extra) -> None:
        try:
            with _generators_kept(tensor.device):
                extra.user.append((function, to_json_value(function(tensor.detach()))))
        except Exception as error:
            _forget_frames(error)
            name = name_of(function)
            extra.add_note(shortened(f"function {name} raised {describe_error(error)}"), "user", function)
            token = (function,)
            if self._reported.setdefault(id(function), token) is token:  # of several threads one reports
                with suppress(Warning):  # a filter of the user's makes errors of warnings
                    self._raised(f"Capture: the function {name}", error)


def name_of(function: Any) -> str:
    """Returns the name of a user's function."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _has_been_called(function: Function, extra: Extra) -> bool:
    called = any(called is function for called, _ in extra.user)
    return called or any(note.about is function for note in extra.notes)


@contextmanager
def _unobserved(device: torch.device) -> Iterator[None]:
    """Suspends everything of the user's that changes what ops do. It takes 12 us."""
    is_cast = torch.is_autocast_enabled(device.type)
    uncast: Any = torch.autocast(device.type, enabled=False) if is_cast else nullcontext()
    with unseen(), outside_transforms(), torch.no_grad(), uncast:
        yield


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Restores the states of torch's generators if they have changed.

    A generator that the function has not used is not written to, because another thread may use it meanwhile.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            now = generator.get_state()
            if now.numpy().tobytes() != state.numpy().tobytes():  # 2 us; `torch.equal` takes 4
                generator.set_state(state)


def _forget_frames(error: BaseException) -> None:
    """Drops the frames of an error and of its causes, which would keep all their tensors alive."""
    pending: list[BaseException | None] = [error]
    visited: set[int] = set()
    while pending:
        cause = pending.pop()
        if cause is not None and id(cause) not in visited:
            visited.add(id(cause))
            cause.__traceback__ = None
            pending += [cause.__cause__, cause.__context__]


#: A tensor or an array with more elements than this does not become a list.
MOST_ELEMENTS = 10_000

#: Python refuses to write longer integers as text (4,300 digits).
_MOST_BITS = 14_000


def to_json_value(value: Any) -> Any:
    """Returns a value as numbers, text, lists and dicts. A tensor on another device becomes a copy there.

    Call it outside of modes and transforms. NaN and infinite numbers stay, as Python's own `json` writes and reads
    them.

    Raises:
        TypeError: JSON cannot hold the value.
        ValueError: the value is too large.
    """
    if value is None or type(value) in (bool, str, float):
        return value
    if isinstance(value, torch.Tensor):
        return _from_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_array(np.asarray(value))
    if isinstance(value, Mapping):
        return {_key(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    return _from_scalar(value)


def _from_scalar(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        number = int(value)
        if number.bit_length() > _MOST_BITS:
            raise ValueError(f"an integer of {number.bit_length():,} bits is too long for JSON")
        return number
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass the text itself
    raise TypeError(f"JSON cannot hold a value of type {type(value).__name__}")


def _key(key: Any) -> str:
    """Returns a key as Python's `json` writes it: `1` and `None` are "1" and "null"."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return repr(_from_scalar(key))
    raise TypeError(f"JSON cannot hold a dict with keys of type {type(key).__name__}")


def _from_array(array: Any) -> Any:
    _check_size("an array", array.shape)
    if array.dtype.kind == "f":
        return array.astype(np.float64).tolist()  # longer ones would stay numpy's
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.dtype.kind in "OU":
        return to_json_value(array.tolist())
    raise TypeError(f"JSON cannot hold an array of {array.dtype.name}")


def _from_tensor(tensor: torch.Tensor) -> Any:
    _check_size("a tensor", tensor.shape)
    if tensor.is_complex():
        raise TypeError("JSON cannot hold a complex tensor. Return torch.view_as_real(...) of it.")
    own = tensor.detach()
    return own.tolist() if own.device.type == "cpu" else own.clone()


def _check_size(what: str, shape: Any) -> None:
    size = math.prod(shape)
    if size > MOST_ELEMENTS:
        raise ValueError(f"{what} of {size:,} elements; lists have at most {MOST_ELEMENTS:,}")
