"""Finds what an autograd graph keeps in memory for its backward, node by node."""

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR, is_custom_function
from ...torch_internals.checkpoint import checkpoint_of_hook, held_by_checkpoint, node_of_arguments
from ...torch_internals.modes import unseen
from ...torch_internals.saved import (
    attributes_of,
    held_by_custom_function,
    is_function,
    is_saved_variable,
    packed_content,
    saved_variables,
    unpacked_variables,
)
from ...torch_internals.tensors import base_of, storage_of
from ..backward.graph_walk import walk_graph

#: More objects than this in what one node holds are taken for something else than tensors for backward.
_MOST_OBJECTS = 10_000

#: The same of what an object on a `ctx` holds: then it may hold a tensor, too.
_MOST_ATTRIBUTES = 1_000


class SavedTensor(NamedTuple):
    """A storage that a node keeps."""

    storage: Any  # identifies the storage as long as the graph lives
    size_bytes: int  # of the whole storage, however little of it the node needs
    is_leaf: bool  # it is the memory of a parameter, or of another leaf that requires grad
    weak: Any = None  # a weak reference to the storage, without a callback


class SavedByNode(NamedTuple):
    """The memory that one node keeps."""

    sequence_nr: int  # the number of the forward op that has made the node
    name: str  # "MulBackward0"
    saved: list[SavedTensor]
    is_unknown: bool  # it keeps, or may keep, more than `saved`
    #: It is of an autograd Function: it is numbered before the ops in its forward run.
    is_function: bool = False


def saved_in_graph(roots: Iterable[Any], beside: list[SavedByNode] | None = None) -> list[SavedByNode]:
    """Returns what each node below some roots keeps, by ascending sequence number; nodes that accumulate are left out.

    The numbers count per thread: nodes of two threads may have the same. Runs no unpack hook and no recompute, and
    keeps no tensor. Not while another thread runs a backward through the graph: it frees what is being read.

    Unknown are what a hook of the user's has packed (`saved_tensors_hooks`, `save_on_cpu`), nodes that torch shows
    nothing of (C++ extensions, in-place ops on views, some `_foreach` ops), and tensors without a storage (sparse).
    What a non-reentrant checkpoint has packed has no memory; each of its nodes keeps what the recompute needs.
    Of a custom Function the tensors in the attributes of `ctx` count too, in lists, tuples and dictionaries; where an
    object or a function there holds tensors it is unknown. Not counted are the states of random
    generators that checkpoints keep, and what functions hold: a tensor that a checkpointed closure captures. A number
    that an op is given (`x * 0.5`) may count as a tensor of 8 bytes: hooks are not shown it.

    Args:
        roots: autograd nodes (`tensor.grad_fn`), None among them allowed.
        beside: gets the nodes, which are in no graph, of the Functions by which torch 2.11 saves the arguments of
            non-reentrant checkpoints, as keeping nothing: that is charged to the nodes of their regions.
    """
    with unseen():
        described = _Described()
        nodes, leaves = _walk(roots, described)
        found = [_read(number, node, leaves, described) for number, node in nodes]
        if beside is not None:
            functions = [node for region in described.regions.values() if (node := node_of_arguments(region))]
            beside += [SavedByNode(node._sequence_nr(), node.name(), [], False, True) for node in functions]
    return sorted(found, key=_NUMBER)


def charge(nodes: Iterable[SavedByNode], alive_anyway: Container[Any] = ()) -> dict[int, int | None]:
    """Returns the bytes that live only because a backward will need them, by sequence number of the charged node.

    Each storage is charged once and whole, to the first node that keeps it. Leaves that require grad are not charged,
    because their owner keeps them, nor is what `alive_anyway` contains. Autograd cannot know what else its user keeps,
    so pass the storages of buffers, frozen parameters and inputs (`storages_of`). The result is an upper bound if the
    user keeps more, such as outputs. An entry is None if the node keeps, or may keep, more than is known. Nodes of two
    threads with the same number are summed.
    """
    charged: set[Any] = set()
    result: dict[int, int | None] = {}
    for number, _, saved, is_unknown, _ in sorted(nodes, key=_NUMBER):
        size: int | None = result.get(number, 0)
        for storage, size_bytes, is_leaf, _ in saved:
            if is_leaf or storage in charged or storage in alive_anyway:
                continue
            charged.add(storage)
            size = None if size is None else size + size_bytes
        result[number] = None if is_unknown else size
    return result


def storages_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """Returns the storages of some tensors in the form that `charge` takes; valid as long as these tensors live."""
    with unseen():
        described = _Described()
        return {part.storage for tensor in tensors for part in described.of(tensor) if part is not None}


_NUMBER = attrgetter("sequence_nr")


class _Described:
    """The storages of tensors, each tensor read once: a weight is kept by a node of each call."""

    def __init__(self) -> None:
        # The tensor lives with its entry, so that neither another one nor another storage gets its address.
        self._known: dict[int, tuple[torch.Tensor, Sequence[SavedTensor | None]]] = {}
        #: By `SavedTensor.storage` and `is_leaf`: of an unrolled LSTM, four tensors share one storage.
        self._saved: dict[tuple[int, bool], SavedTensor] = {}
        #: The regions of non-reentrant checkpoints that nodes keep, by id.
        self.regions: dict[int, Any] = {}

    def of(self, tensor: torch.Tensor) -> Sequence[SavedTensor | None]:
        """Returns the storages of a tensor, or of the tensors it wraps; None for what cannot be read."""
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = tensor, self._read(tensor)
        return known[1]

    def _read(self, tensor: torch.Tensor) -> Sequence[SavedTensor | None]:
        found: list[SavedTensor | None] = []
        try:
            base = base_of(tensor)
            owner = tensor if base is None else base
            is_leaf = owner.requires_grad and owner.is_leaf
            for part in (tensor,) if type(tensor) is torch.Tensor else _parts(tensor):
                number, storage = storage_of(part)
                key = number, is_leaf
                if key not in self._saved:
                    self._saved[key] = SavedTensor(number, storage.nbytes(), is_leaf, weakref.ref(storage))
                found.append(self._saved[key])
        except Exception:  # sparse, a functorch wrapper, or whatever a subclass of the user's raises
            found.append(None)
        return found


def _walk(roots: Iterable[Any], described: _Described) -> tuple[list[tuple[int, Any]], set[Any]]:
    """Returns every node with its number, and the storages of the leaves whose gradients are accumulated."""
    nodes: list[tuple[int, Any]] = []
    leaves: set[Any] = set()
    for node, number, _ in walk_graph(root for root in roots if root is not None):
        if number == ACCUMULATE_SEQUENCE_NR:
            leaves.update(saved.storage for saved in described.of(node.variable) if saved is not None)
        else:
            nodes.append((number, node))
    return nodes, leaves


def _read(number: int, node: Any, leaves: Container[Any], described: _Described) -> SavedByNode:
    tensors = unpacked_variables(node)
    if tensors is not None:
        return SavedByNode(number, type(node).__name__, *_find_storages(tensors, leaves, described))
    held, may_hold_more = saved_variables(node)
    if is_custom_function(node):
        held += held_by_custom_function(node)
    saved, is_unknown = _find_storages(_tensors_in(held, described.regions), leaves, described)
    return SavedByNode(number, node.name(), saved, is_unknown or may_hold_more, is_function(node))


def _find_storages(
    tensors: Iterable[torch.Tensor | None], leaves: Container[Any], described: _Described
) -> tuple[list[SavedTensor], bool]:
    """Returns the storages of a node's tensors, each once, and whether some of them, or a tensor, cannot be read."""
    is_unknown = False
    found: dict[Any, SavedTensor] = {}
    for tensor in tensors:
        for saved in (None,) if tensor is None else described.of(tensor):
            if saved is None:
                is_unknown = True
            elif saved.storage not in found:
                is_leaf = saved.is_leaf or saved.storage not in leaves
                found[saved.storage] = saved if is_leaf else saved._replace(is_leaf=True)
    return list(found.values()), is_unknown


def _tensors_in(held: list[Any], regions: dict[int, Any]) -> Iterator[torch.Tensor | None]:
    """Yields the tensors in saved variables, in the regions of checkpoints, and in lists, tuples and dictionaries.

    None stands for what cannot be read.
    """
    seen: set[int] = set()
    left = _MOST_OBJECTS
    while held and left:
        value = held.pop()
        left -= 1
        if issubclass(type(value), torch.Tensor):
            yield value
        elif is_saved_variable(value):
            content, is_known = _unpacked(value, seen, regions)
            held.extend(content)
            if not is_known:
                yield None
        elif id(value) not in seen and (inner := _members(value)):
            seen.add(id(value))
            held.extend(inner)
        elif _may_hold(value):
            yield None
    if held:
        yield None


def _unpacked(saved: Any, seen: set[int], regions: dict[int, Any]) -> tuple[list[Any], bool]:
    """Returns what a saved variable keeps, and whether that is known to be all."""
    try:
        content, hook = packed_content(saved)
        if hook is None:
            return [content], True
        region = checkpoint_of_hook(hook)
        if region is None or id(region) in seen:
            return [], region is not None
        seen.add(id(region))
        regions[id(region)] = region
        held, may_hold_more = held_by_checkpoint(region)
    except Exception:  # other versions of torch may lack the names
        return [], False
    return held, not may_hold_more


def _members(value: Any) -> list[Any]:
    """Returns the elements of a list, a tuple or a dictionary, without calling the methods of a subclass."""
    if issubclass(type(value), dict):
        return list(dict.values(value))
    if issubclass(type(value), tuple):
        return list(tuple.__iter__(value))
    return list(list.__iter__(value)) if issubclass(type(value), list) else []


def _may_hold(value: Any) -> bool:
    """Returns whether an object or a function holds a tensor in its attributes or its closure, or may hold one.

    Modules are not searched, because their parameters live anyway.
    """
    pending, left = attributes_of(value), _MOST_ATTRIBUTES
    while pending and left:
        value = pending.pop()
        left -= 1
        if issubclass(type(value), torch.Tensor):
            return True
        pending.extend(_members(value) or attributes_of(value))
    return bool(pending)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory of their own that a tensor is made of.

    Raises:
        LookupError: a subclass runs its ops itself, and does not say what it holds.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        yield tensor
        return
    flatten = getattr(kind, "__tensor_flatten__", None)
    if flatten is None:
        raise LookupError(
            f"{kind.__name__} does not say which tensors it holds: give it `__tensor_flatten__`"
        )
    for name in flatten(tensor)[0]:
        yield from _parts(getattr(tensor, name))
