"""Keeps what the tables cannot hold of each recorded op: function, arguments, digests and leaves."""

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..collect.log.thread_log import ThreadLog
from ..collect.ops.mode import tensors_in
from ..collect.ops.schemas import OpSchema, base_name
from ..torch_internals.ops import schema_arguments
from ..torch_internals.subclasses import has_no_memory
from ..torch_internals.tensors import has_own_dispatch
from ..torch_internals.transforms import is_functorch_tensor
from .contents import aside, copy_of, digest
from .generators import GeneratorStates
from .templates import Template

#: Namespaces of ops that have no effect, or another one, when they run a second time.
_NOT_AGAIN = {
    "profiler": "it is a mark for the profiler",
    "c10d": "it talks to other processes",
    "_c10d_functional": "it talks to other processes",
}


#: Ops that leave parts of their outputs unwritten, with the slots of these.
_PARTLY_UNWRITTEN = {
    "mkldnn_rnn_layer": ("[3]",),  # the slot of its workspace
    "_ctc_loss": ("[1]",),
    "resize_": ("",),
    "resize_as_": ("",),
    "_resize_output_": ("",),
}


class KeptOutput(NamedTuple):
    """A tensor that an op returned."""

    slot: str
    digest: bytes | None  # None if it has no bytes to read
    content: torch.Tensor | None  # for uninitialized memory, what was in it


@dataclass
class KeptOp:
    """One op as it ran: its function, arguments and results."""

    number: int
    schema: OpSchema
    template: Template
    grad_mode: bool
    generators: GeneratorStates | None  # their states before it ran; None if it draws no numbers
    obstacle: str | None  # why the op cannot run again; None if it can
    written: tuple[int, ...]  # the tensors among its arguments that share memory with a written one
    has_returned: bool = False
    outputs: list[KeptOutput] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # numbers that the op returned
    written_digests: dict[int, bytes | None] = field(default_factory=dict)  # for `written`, afterwards
    #: The memory after the op, if the op cannot run again.
    storages: dict[int | str, torch.UntypedStorage] = field(default_factory=dict)
    undeclared: tuple[int, ...] = ()  # arguments that it changed without the recorder listing them

    @property
    def name(self) -> str:
        """The name of the op, such as `aten.addmm.default`."""
        return self.schema.name

    @property
    def argument_names(self) -> list[str]:
        """The argument name of each tensor that the op was given; a tensor in a list has the list's name."""
        names = self.schema.argument_names
        return [
            names[argument] if isinstance(argument, int) else argument for argument in self.template.arguments
        ]


class _Given(NamedTuple):
    """A tensor that an op was given."""

    alias: torch.Tensor  # keeps the shape and memory from before the op
    digest: bytes | None


class OpKeep:
    """Keeps each op and each leaf of a recording; it implements `OpKeeper`."""

    def __init__(self) -> None:
        self.ops: dict[int, KeptOp] = {}
        #: By tensor id, the storage as it was when the tensor was first seen.
        self.leaves: dict[int, torch.UntypedStorage] = {}
        self._met: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}
        self._running: dict[int, list[_Given | None]] = {}

    def begins(self, op: int, schema: OpSchema, args: Any, kwargs: Any) -> None:
        """Keeps the arguments of an op, and the digests of all tensors among them."""
        template = Template(args, kwargs)
        tensors = template.forget_tensors()
        obstacle = _obstacle(schema, template, tensors)
        written = () if obstacle else _written(schema, template, tensors, _declared_writes(schema))
        generators = GeneratorStates() if schema.is_random else None
        kept = KeptOp(op, schema, template, torch.is_grad_enabled(), generators, obstacle, written)
        self.ops[op] = kept
        with aside():
            self._running[op] = [
                _Given(tensor.detach(), _try_digest(tensor)) if _is_plain(tensor) else None
                for tensor in tensors
            ]

    def ended(self, op: int, schema: OpSchema, output: Any) -> None:
        """Keeps the digests of an op's outputs and written tensors, and finds what else the op changed."""
        kept, before = self.ops[op], self._running.pop(op)
        returned = list(tensors_in(output, ""))
        kept.has_returned = True
        kept.values = list(numbers_in(output))
        kept.obstacle = kept.obstacle or _first_obstacle(tensor for tensor, _ in returned)
        with aside():
            unwritten = uninitialised(kept.name) or ()
            kept.outputs = [
                KeptOutput(slot, _try_digest(tensor), tensor.clone() if slot in unwritten else None)
                for tensor, slot in returned
                if _is_plain(tensor)
            ]
            after = [None if tensor is None else _try_digest(tensor.alias) for tensor in before]
            changed = [
                at for at, tensor in enumerate(before) if tensor is not None and tensor.digest != after[at]
            ]
            if kept.obstacle is not None:
                kept.storages = _storages(before, changed, returned)
        kept.written_digests = {at: after[at] for at in kept.written}
        aliases = [None if tensor is None else tensor.alias for tensor in before]
        known = _written(schema, kept.template, aliases, _known_keys(schema) if schema.writes else set())
        kept.undeclared = tuple(at for at in changed if at not in known)

    def met(self, tensor_id: int, tensor: torch.Tensor, log: ThreadLog) -> None:
        """Keeps the content of a leaf, once for all tensors on the same storage."""
        if not _is_plain(tensor):
            return
        with aside():
            storage = tensor.untyped_storage()
            known = self._met.get(id(storage))
            if known is None or known[0]() is not storage:
                known = self._met[id(storage)] = (weakref.ref(storage), copy_of(storage))
        self.leaves[tensor_id] = known[1]


def uninitialised(name: str) -> tuple[str, ...] | None:
    """Returns the slots of outputs that an op leaves uninitialized; None if it writes all outputs."""
    base = base_name(name).removeprefix("aten.")
    if base.removeprefix("new_").startswith("empty"):
        return ("",)
    return _PARTLY_UNWRITTEN.get(base)


def _obstacle(schema: OpSchema, template: Template, tensors: list[torch.Tensor]) -> str | None:
    """Returns why an op cannot run again, judging by its arguments; None if it can."""
    if schema_arguments(schema.func) is None:
        return "it is a higher-order operator, which calls functions of Python"
    again = _NOT_AGAIN.get(schema.name.split(".")[0].split("::")[0])
    return again or template.obstacle or _first_obstacle(tensors)


def _first_obstacle(tensors: Iterable[torch.Tensor]) -> str | None:
    return next(filter(None, map(_why_not_plain, tensors)), None)


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor cannot be rebuilt from a storage; None if it can."""
    if has_own_dispatch(type(tensor)):
        return f"it works with a {type(tensor).__name__}, a tensor that answers in Python"
    if tensor.layout is not torch.strided:
        return f"it works with a tensor of layout {str(tensor.layout).removeprefix('torch.')}, which has no storage"
    if tensor.is_nested or tensor.is_quantized or is_functorch_tensor(tensor):
        return "it works with a nested, quantised or transformed tensor, which is more than its storage"
    if tensor.is_meta:
        return "it works with a meta tensor, which has no content"
    return "it works with zeros that have no memory" if has_no_memory(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return _why_not_plain(tensor) is None


def _try_digest(tensor: torch.Tensor) -> bytes | None:
    try:
        return digest(tensor)
    except RuntimeError:  # its storage was freed (`resize_(0)`), or has become too small
        return None


def _declared_writes(schema: OpSchema) -> frozenset[int | str]:
    """Returns the positions and names of arguments that an op writes, according to its schema or to the recorder."""
    arguments = enumerate(schema_arguments(schema.func) or [])
    declared = {name if by_name else at for at, (name, by_name, writes) in arguments if writes}
    return frozenset({*declared, *_known_keys(schema)})


def _known_keys(schema: OpSchema) -> set[int | str]:
    """Returns the positions and names of arguments that the recorder knows to be written."""
    return {write.key for write in schema.written} | {write.name for write in schema.written}


def _written(
    schema: OpSchema,
    template: Template,
    tensors: Sequence[torch.Tensor | None],
    arguments: Set[int | str],
) -> tuple[int, ...]:
    """Returns the numbers of the tensors that share memory with one of these arguments, to which the op writes."""
    if schema.is_changing_view or arguments.isdisjoint(template.arguments):
        return ()  # a changing view changes what the tensor shows, but not its memory
    storages = [None if tensor is None else id(tensor.untyped_storage()) for tensor in tensors]
    places = zip(template.arguments, storages, strict=True)
    shared = {storage for argument, storage in places if argument in arguments} - {None}
    return tuple(at for at, storage in enumerate(storages) if storage in shared)


def _storages(
    given: "list[_Given | None]", changed: list[int], returned: list[tuple[torch.Tensor, str]]
) -> dict[int | str, torch.UntypedStorage]:
    """Returns the storages after an op: by number for the tensors it was given, by slot for those it returned."""
    of_given: list[tuple[int | str, torch.Tensor]] = [
        (at, tensor.alias) for at, tensor in enumerate(given) if tensor is not None and at in changed
    ]
    of_returned = [(slot, tensor) for tensor, slot in returned if _is_plain(tensor)]
    return {key: copy_of(tensor.untyped_storage()) for key, tensor in (*of_given, *of_returned)}


def numbers_in(output: Any) -> Iterator[Any]:
    """Yields the numbers among the outputs of an op."""
    if isinstance(output, (bool, int, float, complex)):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from numbers_in(item)
