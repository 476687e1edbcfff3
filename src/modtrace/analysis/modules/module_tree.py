"""Builds the tree of modules with the times of one step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from ...recording.meta import Note
from ...recording.phase import BACKWARD, FORWARD, PHASES, RECOMPUTE, ByPhase
from ...recording.protocols import RecordingData
from ...recording.statistics.moments import nonfinite_steps
from ..compile.compilations import Compilations, read_compilations
from ..tables.calls import read_calls
from ..tables.chosen_step import ShownStep, choose_step
from ..tables.columns import Rows, phase_codes
from ..tables.device_times import has_device_times, on_device, step_on_device
from ..tables.placement import NOWHERE, Placer, TreePlace, label_places, name_roots
from ..tables.times import NO_CALLS, CallTimes, PhaseTimes
from .value_summary import ValueSummary
from .values import read_values, summarize_values

Made = TypeVar("Made")

#: The phases in which modules run.
MODULE_PHASES = (FORWARD, BACKWARD, RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class ModuleNode(ByPhase[PhaseTimes]):
    """A module at one place in the tree; after folding, several equal modules.

    A module that was not called itself (a `ModuleList`) has the times of what ran inside it.
    """

    path: str
    root: str  # the name of the root: two models of one class are two roots
    label: str  # the part of the path below the parent; for a root, its name
    type: str
    module_id: int
    parameters: int | None
    called: bool
    same_as: str | None = None  # the module's own path, if a shared module is shown at another one
    forward: PhaseTimes = NO_CALLS
    backward: PhaseTimes = NO_CALLS
    recompute: PhaseTimes = NO_CALLS
    values: ValueSummary | None = None  # None if nothing was measured at the module or inside it
    count: int = 1  # how many modules this node sums up
    role: Literal["module", "folded", "inside"] = "module"  # inside: what the siblings before contain
    children: tuple["ModuleNode", ...] = ()
    members: tuple["ModuleNode", ...] = ()  # for a folded node, the modules that it sums up

    @property
    def calls(self) -> int:
        """The number of forward calls; if there are none, of calls in another phase."""
        return self.forward.calls or max(self.backward.calls, self.recompute.calls)


@dataclass(frozen=True, kw_only=True)
class ModuleTree(ByPhase[PhaseTimes]):
    """The modules that ran in one step, and where its time was spent."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    roots: tuple[ModuleNode, ...]
    forward: PhaseTimes  # forward calls of the step that are in no other forward call
    backward: PhaseTimes
    recompute: PhaseTimes
    optimizer: PhaseTimes
    outside_ns: int | None  # the part of the step in which no call ran; None: not known
    backward_recorded: bool  # whether the recording has backward calls, or was to have them
    ops_recorded: bool = False  # whether ops were to be recorded, which slows the calls
    #: Whether times are device times, rather than those of the host.
    device_times: bool = False
    device_step_ns: int | None = None  # the time from the first to the last device time in the step
    lacks_device_times: bool = False  # device times were to be recorded, but none is known
    notes: tuple[Note, ...] = ()  # why steps were written or not
    nonfinite_steps: tuple[int, ...] = ()  # the steps of the recording with NaN or infinite values
    compilations: Compilations | None = None  # what torch.compile did in all steps; None for nothing


def build_module_tree(data: RecordingData, *, step: int | None = None) -> ModuleTree:
    """Returns the modules that ran in a step, as they are registered, with their times and values.

    Args:
        data: the recording.
        step: the number of the step. None chooses the last complete training step that has calls; without one the
            last complete step, and without any the last that was begun.

    Raises:
        ValueError: the recording has no such step; the message names the existing ones.
    """
    table, options = data.table("calls"), data.meta.options
    shown = choose_step(data.table("steps"), table, step)
    number = shown.step if shown else None
    values = read_values(data, number)
    # gradients may belong to calls of an earlier step
    placer = Placer(data)
    calls = read_calls(table, placer, number, also=values.rows.call_id)
    on_clock = step_on_device(shown, calls)
    times = CallTimes(on_device(calls), on_clock)
    summaries = summarize_values(values, calls)
    return ModuleTree(
        command=data.meta.argv,
        marks=data.meta.marks,
        notes=data.meta.notes,
        step=shown,
        roots=_assemble(placer.places, times, summaries),
        **{phase: times.of_phase(phase) for phase in PHASES},
        outside_ns=times.outside_ns(),
        backward_recorded=bool(options.get("backward_times") or options.get("ops"))
        or PHASES.index(BACKWARD) in phase_codes(table["phase"]),
        ops_recorded=bool(options.get("ops")),
        device_times=has_device_times(calls),
        device_step_ns=on_clock.duration_ns if on_clock is not None and on_clock is not shown else None,
        lacks_device_times=bool(options.get("device_times")) and not has_device_times(calls),
        nonfinite_steps=tuple(nonfinite_steps(data.table("values"), data.table("sites"))),
        compilations=read_compilations(data, placer.modules),
    )


def iterate_nodes(roots: Iterable[ModuleNode]) -> Iterator[tuple[int, ModuleNode]]:
    """Yields every node with its depth, parents first, without recursion."""
    waiting = [(0, node) for node in reversed(tuple(roots))]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        waiting.extend((depth + 1, child) for child in reversed(node.children))


def rebuild(roots: Sequence[ModuleNode], make: Callable[[ModuleNode, Sequence[Made]], Made]) -> list[Made]:
    """Returns the result of `make` for each root. `make` takes a node and its results for the node's children."""
    made: list[Made] = []
    for _, node in reversed(list(iterate_nodes(roots))):
        children = made[len(made) - len(node.children) :]
        del made[len(made) - len(children) :]
        made.append(make(node, children[::-1]))
    return made[::-1]


def children_first(top: Iterable[Made], below: Callable[[Made], Iterable[Made]]) -> Iterator[Made]:
    """Yields the nodes `top` and all nodes below them, children before parents, without recursion."""
    waiting, order = list(top), list[Made]()
    while waiting:
        order.append(waiting.pop())
        waiting.extend(below(order[-1]))
    return reversed(order)


@dataclass(frozen=True)
class _Assembled:
    """A node with the calls from which its times are summed; containers above need these."""

    node: ModuleNode
    rows: Mapping[str, Rows]


def _assemble(
    places: Sequence[TreePlace], times: CallTimes, summaries: Mapping[int, ValueSummary]
) -> tuple[ModuleNode, ...]:
    """Returns the nodes that ran, or that have such nodes below them, children before parents.

    A module that was not called is included if values of its calls are known (gradients of an earlier step's forward),
    or if its parameters are not finite.
    """
    below: dict[int, list[int]] = defaultdict(list)
    # Nodes are in the order of registration; shared modules registered elsewhere come last.
    order = sorted((place.is_alias, place.module.module_id, index) for index, place in enumerate(places))
    for _, _, index in order:
        below[places[index].parent].append(index)
    labels, roots = label_places(places), name_roots(places)
    phases = [phase for phase in MODULE_PHASES if phase in times.phases]
    made: dict[int, _Assembled] = {}
    for index in children_first(below[NOWHERE], below.__getitem__):
        place = places[index]
        children = [made.pop(child) for child in below[index] if child in made]
        rows = {phase: _rows_of(times.at(index, phase), phase, children, times) for phase in phases}
        values = summaries.get(index)
        was_called = any(len(of_phase) for of_phase in rows.values())
        if children or was_called or (values is not None and values.at_calls):
            sums = {phase: times.sum_up(times.at(index, phase), total=rows[phase]) for phase in phases}
            node = ModuleNode(
                path=place.path,
                root=roots.get(place.module.root_id, ""),
                label=labels[index],
                type=place.module.type,
                module_id=place.module.module_id,
                parameters=place.module.parameters,
                called=any(of_phase.calls for of_phase in sums.values()),
                same_as=place.module.path if place.is_alias else None,
                forward=sums.get(FORWARD, NO_CALLS),
                backward=sums.get(BACKWARD, NO_CALLS),
                recompute=sums.get(RECOMPUTE, NO_CALLS),
                values=values,
                children=tuple(child.node for child in children),
            )
            made[index] = _Assembled(node, rows)
    return tuple(made[index].node for index in below[NOWHERE] if index in made)


def _rows_of(own: Rows, phase: str, children: Sequence[_Assembled], times: CallTimes) -> Rows:
    """Returns the calls that a node's total time sums: its own calls, or its children's if it has none."""
    inside = [child.rows[phase] for child in children if len(child.rows[phase])]
    if not len(own) and inside:
        own = np.concatenate(inside)
    return times.outermost(own)
