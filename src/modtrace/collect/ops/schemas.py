"""Reads the schema of an operator: which arguments it writes to, and whether it returns views."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...torch_internals.ops import callable_of, is_random_op, schema_of

#: Arguments that an op writes to although its schema does not say so (torch 2.13), by its name without the overload.
#: They were found by comparing all inputs before and after each op, which `modtrace.verify` does on every model.
_UNDECLARED_WRITES = {
    "aten.native_batch_norm": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm": ("running_mean", "running_var"),
    "aten.miopen_batch_norm": ("running_mean", "running_var"),
    "aten.batch_norm": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten.mkldnn_rnn_layer_backward": ("workspace",),
}

#: In-place ops that change what a tensor shows of its storage, and the storage too.
_WRITES_ANYHOW = ("aten.resize_", "aten.resize_as_", "aten._resize_output_")


#: Ops that never make an autograd node, whatever they return.
_NEVER_DIFFERENTIABLE = {"aten.detach", "aten.lift_fresh", "aten._local_scalar_dense"}

#: Ops that return whatever was in the memory before.
_UNINITIALIZED = {
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.empty_permuted", "aten.new_empty",
    "aten.new_empty_strided", "aten._empty_affine_quantized",
}  # fmt: skip


#: The namespaces of collectives, which return before the tensors that they return are written.
_COLLECTIVES = ("c10d.", "_c10d_functional.")


class WrittenArgument(NamedTuple):
    """An argument that an op writes to: a tensor, or a list of tensors."""

    key: int | str  # position, or name if it is given by name alone
    name: str


class OpSchema:
    """The properties of one operator, read when the operator is first seen."""

    __slots__ = (
        "argument_names", "call", "defaults", "func", "hides_writes", "index", "is_changing_view", "is_collective",
        "is_differentiable", "is_foreach", "is_random", "is_uninitialized", "is_view", "may_be_ours", "name",
        "out_names", "returns_early", "writes", "written",
    )  # fmt: skip

    def __init__(self, func: Any, index: int) -> None:
        self.func = func
        self.index = index
        self.name = name_of(func)
        self.call = callable_of(func)
        self.may_be_ours = self.name.startswith(("modtrace.", "with_effects"))
        self.is_random = is_random_op(func)
        declared = schema_of(func)
        arguments = [] if declared is None else list(declared.arguments)
        self.argument_names = tuple(argument.name for argument in arguments)
        #: How Python writes the value of an argument that is not given: 1, 1.0 and True are not the same.
        self.defaults = {
            argument.name: repr(_to_tuple(argument.default_value))
            for argument in arguments
            if argument.has_default_value()
        }
        self.is_collective = self.name.startswith("c10d.")
        #: What it returns is read too early when it has returned: other ranks write it, or nobody has yet.
        self.returns_early = self.name.startswith((*_COLLECTIVES, "fsdp.all_gather_copy_in")) and (
            "wait_tensor" not in self.name
        )
        #: `t_` and the like write to the tensor, and not to its storage.
        self.is_changing_view = _is_changing_view(func, self.name)
        self.is_differentiable = base_name(self.name) not in _NEVER_DIFFERENTIABLE
        self.is_uninitialized = base_name(self.name) in _UNINITIALIZED
        self.written = tuple(_written_arguments(self.name, arguments))
        self.writes = bool(self.written)
        returned = [] if declared is None else [value.alias_info for value in declared.returns]
        aliases = [alias for alias in returned if alias is not None]
        self.is_view = any(not alias.is_write for alias in aliases)
        #: Torch does not count the writes of an op that does not return what it writes to, at least not in a mode.
        self.hides_writes = self.is_collective or (
            self.writes and not any(alias.is_write for alias in aliases)
        )
        self.is_foreach = self.writes and self.name.startswith("aten._foreach_")
        self.out_names = tuple(argument.name for argument in arguments if argument.is_out)

    def is_ours(self, args: Sequence[Any]) -> bool:
        """Returns whether a call is of one of modtrace's ops, by which compiled code has modules measured."""
        # Compiled code calls another op through `with_effects`.
        op = args[1] if self.name == "with_effects" else self.func
        return self.may_be_ours and getattr(op, "namespace", "") == "modtrace"

    def find_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """Yields the tensors that a call writes to."""
        for argument in self.written:
            if isinstance(argument.key, int) and argument.key < len(args):
                value = args[argument.key]
            else:
                value = kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                yield value
            elif value:
                yield from value

    def only_written(self, kwargs: Mapping[str, Any]) -> Collection[int]:
        """Returns the `id` of what is given as `out=`, whose values before the op mean nothing."""
        return {id(kwargs.get(name)) for name in self.out_names}


def name_of(func: Any) -> str:
    """Returns the name of an op, such as `aten.addmm.default`. A higher-order op has no overload."""
    if schema_of(func) is not None:
        return str(func)
    name = getattr(func, "name", None)
    return str(name() if callable(name) else func)


def base_name(name: str) -> str:
    """Returns the name of an op without its overload, such as `aten.addmm`."""
    return name.rsplit(".", 1)[0] if name.count(".") > 1 else name


def _to_tuple(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


def _written_arguments(name: str, arguments: list[Any]) -> Iterator[WrittenArgument]:
    undeclared = _UNDECLARED_WRITES.get(base_name(name), ())
    for at, argument in enumerate(arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in undeclared:
            yield WrittenArgument(argument.name if argument.kwarg_only else at, argument.name)


def _is_changing_view(func: Any, name: str) -> bool:
    tags = {str(tag) for tag in getattr(func, "tags", ())}
    return "Tag.inplace_view" in tags and base_name(name) not in _WRITES_ANYHOW
