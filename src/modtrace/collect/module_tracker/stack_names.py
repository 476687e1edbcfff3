"""Names what runs both as PyTorch's trackers do (`Mod.c.0`) and as `state_dict` does (`c.0`)."""

from typing import NamedTuple

import torch
from torch import nn

from ...recording.module_path import join
from ..identity_map import IdentityMap
from ..log.call_context import CallContext, ContextTree
from ..log.segments import Segment
from ..names.module_names import SCOPE, ModuleNames, NamedModule
from ..names.wrappers import class_name, free_name, unwrapped


class NamedStack(NamedTuple):
    """The names of the running modules, outermost first."""

    names: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


#: A module, the root from which its path is counted, and the path.
_Level = tuple[NamedModule, NamedModule, str]


class RootLabels:
    """The labels that one tracker gives to roots: the user's names or the names of classes.

    The labels stay the same from one `with` block to the next.
    """

    def __init__(self, chosen: list[tuple[str | None, nn.Module]]) -> None:
        self._kept: IdentityMap[nn.Module, str] = IdentityMap()
        self._labels: dict[NamedModule, str] = {}
        for name, module in chosen:
            if name is not None:
                self._kept[module] = name

    def begin(self) -> None:
        """Begins another `with` block, in which roots get labels again."""
        self._labels = {}

    def label(self, root: NamedModule) -> str:
        """Returns the label of a root, which is chosen at the first request."""
        known = self._labels.get(root)
        if known is None:
            known = self._labels[root] = self._find(root)
        return known

    def _find(self, root: NamedModule) -> str:
        module = root.module
        if module is not None:
            kept = self._kept.get(module)
            if kept is not None:
                return kept
        label = self._free(_own_name(root, module))
        if module is not None:
            self._kept[module] = label
        return label

    def _free(self, wanted: str) -> str:
        taken = {label for root, label in self._labels.items() if root.root is root}
        alive = {id(root.module) for root in self._labels}
        taken.update(label for module, label in self._kept.items() if id(module) not in alive)
        return free_name(wanted, taken)


class StackNames:
    """Names the stacks of one `with` block of a tracker. A stack that was named before takes one look-up."""

    def __init__(self, names: ModuleNames, tree: ContextTree, labels: RootLabels) -> None:
        self._names = names
        self._tree = tree
        self._labels = labels
        self._known: dict[CallContext, NamedStack] = {}
        self._revision = -1

    def of(self, context: CallContext, segment: Segment) -> NamedStack:
        """Returns the names of the modules that run in a context of a segment."""
        if self._revision != self._names.revision:
            self._revision = self._names.revision
            self._known = {}
        if segment.around is not None or segment.owners:
            return self._name(_levels(context, segment))
        known = self._known.get(context)
        if known is None:
            known = self._known[context] = self._name(_levels(context, segment))
        return known

    def known(self, module: nn.Module) -> str | None:
        """Returns the name of a module; None if the module has not run."""
        named = self._names.get(module)
        return None if named is None else self.name_of(named)

    def parameter_name(self, parameter: torch.Tensor) -> str | None:
        """Returns the path of a parameter, as in `state_dict`."""
        return self._names.parameter_name(parameter)

    def of_parameter(self, parameter: torch.Tensor) -> NamedStack | None:
        """Returns the modules that hold a parameter, as far as all their calls have them in common.

        Returns None if no module holds it.
        """
        names = self._names
        owners = names.owners_of(parameter) or names.owners_of(parameter, learn=True)
        if not owners:
            return None
        contexts = [context for owner in owners for context in self._tree.contexts_of(owner.module)]
        stacks = [self._name(levels) for levels in map(_levels_outside, contexts) if levels is not None]
        if not stacks:  # the module has not run, but its weights may be used elsewhere
            stacks = [NamedStack((self.name_of(owner.module),), (owner.module.path,)) for owner in owners]
        first, *others = stacks
        common = [at for at, name in enumerate(first.names) if all(name in other.names for other in others)]
        return NamedStack(tuple(first.names[at] for at in common), tuple(first.paths[at] for at in common))

    def name_of(self, named: NamedModule) -> str:
        """Returns the name of a module, such as `Mod.c.0`."""
        return join(self._labels.label(named.root), named.path)

    def _name(self, levels: list[_Level]) -> NamedStack:
        names: list[str] = []
        paths: list[str] = []
        last: NamedModule | None = None
        for named, root, path in levels:
            name = join(self._labels.label(root), path)
            # A wrapper and its wrapped module have one name.
            if not names or names[-1] != name or named is last:
                names.append(name)
                paths.append(path)
            last = named
        return NamedStack(tuple(names), tuple(paths))


def _own_name(root: NamedModule, module: nn.Module | None) -> str:
    if root.type_name == SCOPE:
        return root.name or SCOPE
    return root.type_name if module is None else class_name(unwrapped(module))


def _chain(context: CallContext) -> list[CallContext]:
    return list(context.upwards())[::-1]


def _levels(context: CallContext, segment: Segment) -> list[_Level]:
    """Returns the modules that run in a context of a segment, outermost first."""
    own = _chain(context)
    around = segment.around
    if around is None:
        outer = [(owner, owner.root, owner.path) for owner in segment.owners]
    else:
        outer = _levels(around.context, around.segment)
        own = _as_called_from(around.context, own)
    return outer + [_level(context) for context in own]


def _levels_outside(context: CallContext) -> list[_Level] | None:
    """Returns the modules in a context outside of any backward; None if the module was only recomputed there."""
    own = _chain(context)
    if own[0].owners is None:
        return None
    return [*((owner, owner.root, owner.path) for owner in own[0].owners), *map(_level, own)]


def _level(context: CallContext) -> _Level:
    assert context.named is not None
    return context.named, context.root, context.path


def _as_called_from(caller: CallContext, chain: list[CallContext]) -> list[CallContext]:
    """Returns the contexts of the original calls. A shared module has the path below its original caller."""
    found: list[CallContext] = []
    at: CallContext | None = caller
    for context in chain:
        below = None if at is None else at.get(context.outermost)
        at = None if below is None or below.named is not context.named else below
        found.append(context if at is None else at)
    return found
