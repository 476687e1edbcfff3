"""Defines what a comparison keeps of its two recordings: which modules, calls and ops correspond, and the verdicts."""

from dataclasses import dataclass

from ...recording.protocols import RecordingData
from ..tables.columns import Bools, Column, Rows
from ..tables.placement import ModuleName

#: What the tensors of a module, a call or an op show: they are equal up to noise, their gradients alone differ, they
#: differ as their inputs do, they have other shapes, or they differ by themselves.
LEVELS = EQUAL, GRADIENTS, FOLLOWS, RESHAPED, CHANGED = range(5)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnpairedIds:
    """What only one of the two recordings has, without what computes nothing or is no difference of the models."""

    modules: frozenset[tuple[str, str]]  # the names of root and module
    calls: Rows  # ids of calls
    ops: Rows  # ids of ops


@dataclass(frozen=True, kw_only=True, eq=False)
class JudgedTensors:
    """One row for each compared tensor of the first recording."""

    step: Column
    place: Rows  # index of `RunPair.names`; -1 outside of modules
    call: Rows  # the id of its call; -1 for none
    op: Rows  # the id of its op; -1 for none
    phase: Column  # codes of PHASES; -1 for none
    is_parameter: Bools
    level: Column  # one of LEVELS


@dataclass(frozen=True, kw_only=True, eq=False)
class RunPair:
    """Two compared recordings. Calls and ops are named by their ids."""

    own: RecordingData  # the first recording
    other: RecordingData  # the second recording
    #: Where the first difference stands among the compared tensors of its step; 0 if there is none.
    position: int
    steps: Rows  # (n, 2): numbers of steps
    names: tuple[ModuleName, ...]  # the module of each place of the first recording
    modules: tuple[tuple[ModuleName, ModuleName], ...]
    calls: Rows  # (n, 2)
    ops: Rows  # (n, 2)
    missing: UnpairedIds  # what only the first recording has
    extra: UnpairedIds
    judged: JudgedTensors
