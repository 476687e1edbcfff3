"""Finds the memory that is saved for each backward, by autograd node."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ...recording.process import collector_paused
from ...torch_internals.dynamo import is_compiled_function
from ..backward.graph_walk import root_nodes
from ..log.listeners import Listener
from ..log.nesting import Ints
from ..log.thread_log import Backward, ThreadLog
from ..scopes.tracker import ScopeTracker
from .batches import NodeOwners, owners_of
from .leaves import OpLeaves
from .saved_tensors import SavedByNode, charge, saved_in_graph, storages_of

UNKNOWN = -1


class SavedForBackward:
    """The memory that the graph of one backward keeps."""

    __slots__ = ("is_compiled", "is_function", "node", "owners", "size_bytes", "thread")

    def __init__(self, owner: ThreadLog, found: list[SavedByNode], charges: dict[int, int | None]) -> None:
        self.thread = owner.number  # that has made the nodes
        self.node: Ints = np.array(sorted(charges), np.int64)
        self.size_bytes: Ints = np.array([_known(charges[number]) for number in self.node.tolist()], np.int64)
        functions = {saved.sequence_nr: saved.name for saved in found if saved.is_function}
        self.is_function = np.isin(self.node, [*functions])
        self.is_compiled = np.isin(
            self.node, [at for at, name in functions.items() if is_compiled_function(name)]
        )
        self.owners: NodeOwners = owners_of(owner, self.node)


class SavedMemoryFinder(Listener):
    """Walks the graph when a backward begins. It is a listener of the tracker."""

    def __init__(
        self,
        tracker: ScopeTracker,
        leaves: OpLeaves,
        *,
        is_wanted: Callable[[], bool],
        failed: Callable[[Exception, str], None],
    ) -> None:
        self._tracker = tracker
        self._is_wanted = is_wanted  # whether ops are recorded now
        self._failed = failed
        self._has_failed = False
        self._leaves = leaves
        self._found: dict[Backward, SavedForBackward] = {}
        #: Storages that were kept for backwards since the last optimizer's step, and may still live.
        self._seen: dict[int, Any] = {}

    def forget(self) -> None:
        """Drops all references to storages."""
        self._seen = {}

    def take(self, backward: Backward) -> SavedForBackward | None:
        """Returns what was found when a backward began; None if there is nothing."""
        self._leaves.forget_inputs()
        return self._found.pop(backward, None)

    def backward_began(self, backward: Backward) -> None:
        """Walks the graph below the outputs, which is still whole."""
        if self._has_failed or not self._is_wanted():
            return
        try:
            with collector_paused():
                self._read_graph(backward, backward.outputs)
        except Exception as error:
            self._has_failed = True
            self._failed(error, "what a graph keeps for backward")

    def _read_graph(self, backward: Backward, outputs: Any) -> None:
        roots = root_nodes(outputs)
        owner = self._tracker.backwards.owner(backward.log, backward.task, roots[0]) if roots else None
        if owner is None:
            return
        beside: list[SavedByNode] = []
        found = saved_in_graph(roots, beside) + beside
        self._seen = {number: storage for number, storage in self._seen.items() if storage() is not None}
        alive_anyway = storages_of(self._alive_anyway()) | self._seen.keys()
        self._found[backward] = SavedForBackward(owner, found, charge(found, alive_anyway))
        self._seen.update((saved.storage, saved.weak) for node in found for saved in node.saved)

    def _alive_anyway(self) -> Iterable[torch.Tensor]:
        """Yields parameters, buffers, and inputs that the user keeps."""
        yield from self._leaves.alive_inputs()
        for named in list(self._tracker.names.modules):
            module = named.module
            for held in () if module is None else (module._parameters, module._buffers):
                yield from (tensor for _, tensor in held.items() if tensor is not None)

    def before_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Forgets the storages: what the user keeps over many steps counts in each of them."""
        self._seen = {}


def _known(size: int | None) -> int:
    return UNKNOWN if size is None else size
