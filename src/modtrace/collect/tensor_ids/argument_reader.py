"""Reads the arguments of ops: records each tensor among them, and makes a key of the rest."""

from contextlib import suppress

import torch

from .tensor_ids import TensorIds

with suppress(ImportError):
    from ._tensor_ids import ArgumentReader

#: Types of arguments that are kept as they are. Subclasses, such as an enum that is an int, are not.
PLAIN = frozenset((int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Mark:
    """Marks the position of a tensor among the arguments, or the type of the next argument."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


TENSOR = _Mark("TENSOR")
FLOAT = _Mark("FLOAT")  # the next is a float: 1.0 and 1 would be one key
TRUTH = _Mark("TRUTH")  # the next is a bool


def new_reader(ids: TensorIds) -> "ArgumentReader":
    """Returns a reader that records tensors in `ids`, and makes keys of the other arguments.

    A key has the number of the op's schema, the number of positional arguments, these, and the names and values of the
    keyword arguments. The keys of two ops are equal if all arguments except the tensors are equal.
    """
    return ArgumentReader(ids, torch.Tensor, PLAIN, (TENSOR, FLOAT, TRUTH))
