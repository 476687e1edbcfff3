"""Decides which modules stay a single node when torch.fx traces a model."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from ...recording.options.path_filter import (
    PathFilter,
    PathPattern,
    Unmatched,
    describe_unmatched,
    to_path_filter,
)

Leaf: TypeAlias = type[nn.Module] | str | re.Pattern[str]

#: A rule: takes a module and its path, and returns whether the module is a leaf.
LeafRule: TypeAlias = Callable[[nn.Module, str], bool]

Leaves: TypeAlias = Leaf | Sequence[Leaf] | LeafRule | None


@dataclass(frozen=True)
class LeafChoice:
    """The user's choice of leaves."""

    beside_fx: bool = True  # whether leaves by torch.fx's own rule are leaves as well
    classes: tuple[type[nn.Module], ...] = ()
    patterns: tuple[PathPattern, ...] = ()
    rule: LeafRule | None = None

    def chooses(self, module: nn.Module, path: str, names: Collection[str]) -> bool:
        """Returns whether the user wants a module to be a leaf.

        Args:
            path: the path under which the module is called, which the user's rule receives.
            names: all paths of the module. A pattern may match any of them.
        """
        if self.rule is not None:
            return bool(self.rule(module, path))
        return isinstance(module, self.classes) or PathFilter(include=self.patterns).selects(*names)

    def check(self, paths: Collection[str]) -> None:
        """Checks that each pattern matches one of a model's paths.

        Raises:
            ValueError: a pattern matches no path; the message lists the nearest paths.
        """
        found = [pattern for pattern in self.patterns if not any(map(pattern.matches, paths))]
        if found:
            raise ValueError(describe_unmatched([Unmatched("leaves", pattern) for pattern in found], paths))


def to_leaf_choice(leaves: Leaves) -> LeafChoice:
    """Converts the argument `leaves` of the user.

    Raises:
        TypeError: an entry is not a module class, a pattern or a rule.
        ValueError: a pattern cannot be read.
    """
    if leaves is None:
        return LeafChoice()
    if isinstance(leaves, (list, tuple)):
        return _from_list(leaves)
    if isinstance(leaves, (type, str, re.Pattern)):
        return _from_list((leaves,))
    if callable(leaves) and not isinstance(leaves, nn.Module):
        return LeafChoice(beside_fx=False, rule=leaves)
    raise _not_a_leaf(leaves)


def _from_list(leaves: Sequence[Leaf]) -> LeafChoice:
    classes: list[type[nn.Module]] = []
    patterns: list[PathPattern] = []
    for leaf in leaves:
        if isinstance(leaf, type) and issubclass(leaf, nn.Module):
            classes.append(leaf)
        elif isinstance(leaf, (str, re.Pattern)):
            patterns.extend(to_path_filter(include=leaf).include or ())
        else:
            raise _not_a_leaf(leaf)
    return LeafChoice(bool(leaves), tuple(classes), tuple(patterns))


def _not_a_leaf(given: object) -> TypeError:
    shown = f"a {type(given).__name__} itself" if isinstance(given, nn.Module) else repr(given)[:80]
    return TypeError(
        f"leaves holds {shown}. Give classes of modules, path patterns such as 'layers.*', or a list of those; "
        "or one function (module, path) -> bool; or None for the leaves of torch.fx."
    )
