"""Turns what a user's function returns into what JSON can hold."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

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
        return {_key(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(each) for each in value]
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
