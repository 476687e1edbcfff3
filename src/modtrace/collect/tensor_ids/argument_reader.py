"""Reads the arguments of ops: records each tensor among them, and makes a key of the rest."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .tensor_ids import NO_OP, AnyTensorIds, TensorIds

if TYPE_CHECKING:
    from ._tensor_ids import ArgumentReader as CompiledReader

#: The same class in C, which reads into compiled `TensorIds` only. None: not compiled.
compiled: "type[CompiledReader] | None"

try:
    from ._tensor_ids import ArgumentReader as compiled
except ImportError:
    compiled = None

#: Types of arguments that are kept as they are. Subclasses, such as an enum that is an int, are not.
_PLAIN = frozenset((int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Mark:
    """Marks the position of a tensor among the arguments, or the type of the next argument."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


TENSOR = _Mark("TENSOR")
FLOAT = _Mark("FLOAT")  # the next is a float: 1.0 and 1 would be one key
TRUTH = _Mark("TRUTH")  # the next is a bool


class ArgumentReader:
    """Reads the arguments of ops."""

    def __init__(self, ids: TensorIds) -> None:
        self._ids = ids

    def read(self, schema: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
        """Records the tensors that an op reads, and returns a key of its other arguments.

        Returns:
            the number of the op's schema, the number of positional arguments, these, and the names and values of the
            keyword arguments. The keys of two ops are equal if all arguments except the tensors are equal.
        """
        given: list[Any] = [schema, len(args)]
        self._read_all(args, given)
        for name, arg in (kwargs or {}).items():
            given.append(name)
            self._read_all((arg,), given)
        return tuple(given)

    def _read_all(self, args: Iterable[Any], given: list[Any]) -> None:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._read_tensor(arg)
                given.append(TENSOR)
            elif arg.__class__ in _PLAIN:
                given.append(arg)
            elif arg.__class__ is float:
                # NaN is no key, and 0.0 would be -0.0.
                given += (FLOAT, arg if arg == arg and arg != 0.0 else repr(arg))
            elif arg.__class__ is bool:
                given += (TRUTH, arg)
            else:
                given.append(self._read_other(arg))

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        try:
            self._ids.read(tensor)
        except Exception as error:  # it has no storage, or a subclass of the user's raises
            self._ids.note_unreadable(tensor, NO_OP, "", error)

    def _read_other(self, arg: Any) -> Any:
        if isinstance(arg, dict):
            arg = [*arg.items()]
        if arg.__class__ is complex:
            return repr(arg)  # 1 + 0j would be 1
        if not isinstance(arg, (list, tuple)):
            return f"<{type(arg).__name__}>"
        inner: list[Any] = []
        self._read_all(arg, inner)
        return tuple(inner)


def new_reader(ids: AnyTensorIds) -> "ArgumentReader | CompiledReader":
    """Returns a reader that records tensors in `ids`."""
    if isinstance(ids, TensorIds):
        return ArgumentReader(ids)
    assert compiled is not None, "compiled ids come with a compiled reader"
    return compiled(ids, torch.Tensor, _PLAIN, (TENSOR, FLOAT, TRUTH))
