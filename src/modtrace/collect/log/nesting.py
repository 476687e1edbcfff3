"""Finds how calls are nested: at once for closed segments, event by event for a running one."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Structure(NamedTuple):
    """The nesting of the calls of one or more whole segments."""

    enter_event: Ints  # the enter event of each call
    exit_event: Ints  # the exit event of each call
    parent: Ints  # the parent of each call; -1 for an outermost call
    scope_after: Ints  # the call that runs after each event; -1 for none


def structure_of(contexts: Ints) -> Structure:
    """Pairs enter and exit events, and finds each call's parent.

    Args:
        contexts: `[events]`. An enter event holds the number of a context, an exit event a negative number. Every
            enter event has its exit event.
    """
    entered = contexts >= 0
    depth = np.cumsum(np.where(entered, 1, -1))
    level = depth + ~entered  # the level of the call that the event begins or ends, from 1
    small = np.int16 if len(level) and level.max() < 2**15 else np.int64
    by_level = np.argsort(level.astype(small), kind="stable")  # numpy sorts int16 by radix
    number = np.cumsum(entered) - 1
    enter_event = np.flatnonzero(entered)
    exit_event = np.empty_like(enter_event)
    exit_event[number[by_level[0::2]]] = by_level[1::2]
    parent = _parents(level[enter_event])
    scope_after = np.empty_like(contexts)
    scope_after[enter_event] = np.arange(len(enter_event))
    scope_after[exit_event] = parent
    return Structure(enter_event, exit_event, parent, scope_after)


def _parents(level: Ints) -> Ints:
    parent = np.full(len(level), -1, np.int64)
    above = np.flatnonzero(level == 1)
    for depth in range(2, int(level.max(initial=0)) + 1):
        here = np.flatnonzero(level == depth)
        parent[here] = above[np.searchsorted(above, here) - 1]
        above = here
    return parent


def depths_of(parent: Ints) -> Ints:
    """Returns how many calls enclose each call; -1 stands for no parent, and parents may come in any order."""
    depth, above = np.zeros(len(parent), np.int64), parent
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    return depth


class OpenCalls:
    """The nesting of the calls of a running segment. Each event is read once, however often `follow` is called."""

    __slots__ = ("after", "children", "context", "entered", "innermost", "parent")

    def __init__(self) -> None:
        self.after: list[int] = []  # by event, the call that runs after it; -1 for none
        self.context: list[int] = []  # by call, the number of its context
        self.entered: list[int] = []  # by call, the event with which it began
        self.parent: list[int] = []  # by call, its parent
        self.children: list[list[int]] = []  # by call, its children
        self.innermost = -1  # the innermost open call; -1 for none

    def follow(self, contexts: list[int]) -> None:
        """Reads the events that were appended since the last call."""
        for event in contexts[len(self.after) :]:
            if event >= 0:
                self.entered.append(len(self.after))
                self.parent.append(self.innermost)
                self.children.append([])
                if self.innermost >= 0:
                    self.children[self.innermost].append(len(self.context))
                self.innermost = len(self.context)
                self.context.append(event)
            else:
                self.innermost = self.parent[self.innermost]
            self.after.append(self.innermost)
