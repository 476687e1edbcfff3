"""Builds the tree of modules with the times of one step, or with medians over several."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from ...recording.meta import Note
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE, ByPhase
from ...recording.protocols import RecordingData
from ...recording.statistics.moments import nonfinite_steps
from ..compile.compilations import Compilations, read_compilations
from ..tables.calls import read_calls
from ..tables.chosen_step import ChosenSteps, ShownStep
from ..tables.columns import ArrowTable, Column, Rows, column_of, phase_codes
from ..tables.cycles import CycleSummary, find_own_times, summarize_cycles
from ..tables.device_times import has_device_times, on_device, steps_on_device
from ..tables.placement import (
    NO_PLACE_NAMES,
    NOWHERE,
    OPTIMIZERS,
    OUTSIDE,
    Placer,
    TreePlace,
    label_places,
    name_roots,
)
from ..tables.quartiles import Outlier, find_median, find_median_share, find_outliers, find_quartiles
from ..tables.sampled_steps import sample_steps
from ..tables.shown_steps import choose_steps
from ..tables.times import NO_CALLS, CallTimes, PhaseTimes
from .value_summary import ValueSummary
from .values import read_values, summarize_values

Made = TypeVar("Made")

#: The phases in which modules run.
MODULE_PHASES = (FORWARD, BACKWARD, RECOMPUTE)


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """The modules that ran in one step, and where its time was spent.

    Of several steps, times are medians, and values are those of one of them.
    """

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    values_step: int | None = None  # the step whose values are shown
    roots: tuple[ModuleNode, ...]
    forward: PhaseTimes  # forward calls of the step that are in no other forward call
    backward: PhaseTimes
    recompute: PhaseTimes
    optimizer: PhaseTimes  # its own time is without what a closure runs
    outside_ns: int | None  # the part of the step in which no call ran; None: not known
    outside_share: float | None = None
    #: Models with parameters that these steps do not call, each with the newest step that does.
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    #: Of several steps, the training steps between them that call models or optimizers otherwise.
    unlike: tuple[int, ...] = ()
    outliers: tuple[Outlier, ...] = ()  # steps that took at least twice the median
    backward_recorded: bool  # whether the recording has backward calls, or was to have them
    ops_recorded: bool = False  # whether ops were to be recorded, which slows the calls
    #: Whether times are device times, rather than those of the host.
    device_times: bool = False
    device_step_ns: int | None = None  # the time from the first to the last device time in the step
    lacks_device_times: bool = False  # device times were to be recorded, but none is known
    notes: tuple[Note, ...] = ()  # why steps were written or not
    nonfinite_steps: tuple[int, ...] = ()  # the steps of the recording with NaN or infinite values
    compilations: Compilations | None = None  # what torch.compile did in all steps; None for nothing
    #: Where training steps spend the time from one start to the next; None if it is not known, or of a single step.
    cycles: CycleSummary | None = None


def build_module_tree(
    data: RecordingData, *, step: int | None = None, steps: Any = None, values_step: int | None = None
) -> ModuleTree:
    """Returns the modules that ran in steps, as they are registered, with their times and values.

    Args:
        data: the recording.
        step: the number of a step that is shown alone.
        steps: the range of the steps whose medians are shown. If `step` is None too, they are the newest comparable
            training steps. Without three of them it is the last complete training step that has calls; without one the
            last complete step, and without any the last that was begun.
        values_step: the step whose values are shown; None: the last of those whose times are.

    Raises:
        TypeError, ValueError: the recording has no such step; the message names the existing ones.
    """
    table, options = data.table("calls"), data.meta.options
    chosen = choose_steps(data, step, steps)
    if values_step is None and chosen.shown is not None:
        values_step = chosen.shown.step
    values = read_values(data, np.array([step for step in [values_step] if step is not None], np.int64))
    # gradients may belong to calls of an earlier step
    placer = Placer(data)
    calls = read_calls(table, placer, chosen.numbers, also=values.rows.call_id)
    is_of_device = has_device_times(calls)
    on_clock = steps_on_device(chosen, calls)
    times = CallTimes(on_device(calls), on_clock)
    of_phases = {phase: times.of_phase(phase) for phase in PHASES}
    run = sample_steps(data)
    if of_phases[OPTIMIZER].calls and not is_of_device:
        own_ns = find_own_times(run, chosen.numbers)
        of_phases[OPTIMIZER] = _with_own_times(of_phases[OPTIMIZER], own_ns)
    outside_ns = times.outside_ns()
    roots = assemble_nodes(placer.places, times, summarize_values(values, calls))
    return ModuleTree(
        command=data.meta.argv,
        marks=data.meta.marks,
        notes=data.meta.notes,
        step=chosen.shown,
        values_step=values_step,
        roots=roots,
        **of_phases,
        outside_ns=find_median(outside_ns),
        outside_share=find_median_share(outside_ns, on_clock.duration_ns),
        elsewhere={} if step is not None else _find_elsewhere(table, placer, roots),
        unlike=tuple(run.find_unlike(chosen.numbers).tolist()) if len(chosen.numbers) > 1 else (),
        outliers=_find_outliers(roots, of_phases[OPTIMIZER], outside_ns, on_clock),
        backward_recorded=bool(options.get("backward_times") or options.get("ops"))
        or PHASES.index(BACKWARD) in phase_codes(table["phase"]),
        ops_recorded=bool(options.get("ops")),
        device_times=is_of_device,
        device_step_ns=find_median(on_clock.duration_ns) if on_clock is not chosen else None,
        lacks_device_times=bool(options.get("device_times")) and not is_of_device,
        nonfinite_steps=tuple(nonfinite_steps(data.table("values"), data.table("sites"))),
        compilations=read_compilations(data, placer.modules),
        cycles=summarize_cycles(run) if step is None else None,
    )


def _find_elsewhere(calls: ArrowTable, placer: Placer, shown: Sequence[ModuleNode]) -> dict[str, int]:
    """Returns the names of the models that other steps called, each with the newest step that did."""
    module, step = column_of(calls, "module_id"), column_of(calls, "step")
    number = np.unique(module)
    newest = np.full(len(number), -1, np.int64)
    np.maximum.at(newest, np.searchsorted(number, module), step)
    names, known = name_roots(placer.places), {node.root for node in shown}
    found: dict[str, int] = {}
    for module_id, last in zip(number.tolist(), newest.tolist(), strict=True):
        called = placer.modules.get(module_id)
        root = None if called is None else placer.modules.get(called.root_id)
        if root is not None and root.parameters and (name := names.get(root.root_id, "")) not in known:
            found[name] = max(found.get(name, -1), last)
    return found


def _with_own_times(times: PhaseTimes, own_ns: Column | None) -> PhaseTimes:
    """Returns the times of optimizers with other own times, those of each step; None: they are not known."""
    if own_ns is None:
        return times
    if times.over_steps is None:
        return replace(times, self_ns=int(own_ns[0]))
    has_calls = times.over_steps.times.has_calls
    [quartiles] = find_quartiles(own_ns[None], has_calls[None])
    only_group = replace(times.over_steps.of_groups, self_ns=own_ns[None])
    return replace(
        times,
        self_ns=quartiles.median,
        over_steps=replace(times.over_steps, self_ns=quartiles, of_groups=only_group),
    )


def _find_outliers(
    roots: Sequence[ModuleNode], optimizer: PhaseTimes, outside_ns: Column, steps: ChosenSteps
) -> tuple[Outlier, ...]:
    """Returns the steps that took far longer than most, each with the place where most of the excess was spent."""
    names: list[tuple[str, str | None]] = [(NO_PLACE_NAMES[OUTSIDE], None)]
    parts = [np.maximum(outside_ns, 0)]
    own: list[tuple[str, str | None, PhaseTimes]] = [(NO_PLACE_NAMES[OPTIMIZERS], None, optimizer)]
    for _, node in iterate_nodes(roots if steps.several else ()):
        own += [(node.path or node.root, phase, node.phase(phase)) for phase in MODULE_PHASES]
    for name, phase, times in own:
        if times.over_steps is not None:
            names.append((name, phase))
            parts.append(times.over_steps.times.self_ns)
    return find_outliers(steps.numbers, steps.duration_ns, np.stack(parts), names)


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


def assemble_nodes(
    places: Sequence[TreePlace], times: CallTimes, summaries: Mapping[int, ValueSummary]
) -> tuple[ModuleNode, ...]:
    """Returns the nodes that ran, or that have such nodes below them.

    A module that was not called is included if values of its calls are known (gradients of an earlier step's forward),
    or if its parameters are not finite.
    """
    totals, below, upwards = find_totals(places, times)
    shown: set[int] = {index for index, _ in totals}
    for index in upwards:
        values = summaries.get(index)
        if not shown.isdisjoint(below[index]) or (values is not None and values.at_calls):
            shown.add(index)
    sums = dict(
        zip(totals, times.sum_up([(times.at(*at), rows) for at, rows in totals.items()]), strict=True)
    )
    labels, roots = label_places(places), name_roots(places)
    made: dict[int, ModuleNode] = {}
    for index in upwards:
        if index not in shown:
            continue
        place = places[index]
        forward, backward, recompute = (sums.get((index, phase), NO_CALLS) for phase in MODULE_PHASES)
        made[index] = ModuleNode(
            path=place.path,
            root=roots.get(place.module.root_id, ""),
            label=labels[index],
            type=place.module.type,
            module_id=place.module.module_id,
            parameters=place.module.parameters,
            called=bool(forward.calls or backward.calls or recompute.calls),
            same_as=place.module.path if place.is_alias else None,
            forward=forward,
            backward=backward,
            recompute=recompute,
            values=summaries.get(index),
            children=tuple(made.pop(child) for child in below[index] if child in made),
        )
    return tuple(made[index] for index in below[NOWHERE] if index in made)


def find_totals(
    places: Sequence[TreePlace], times: CallTimes
) -> tuple[dict[tuple[int, str], Rows], Mapping[int, list[int]], list[int]]:
    """Returns the calls over which totals are summed by place and phase, what is below places, and these upwards."""
    below: dict[int, list[int]] = defaultdict(list)
    # Nodes are in the order of registration; shared modules registered elsewhere come last.
    order = sorted((place.is_alias, place.module.module_id, index) for index, place in enumerate(places))
    for _, _, index in order:
        below[places[index].parent].append(index)
    upwards = list(children_first(below[NOWHERE], below.__getitem__))
    totals: dict[tuple[int, str], Rows] = {}
    for phase in (phase for phase in MODULE_PHASES if phase in times.phases):
        for index in upwards:
            rows = times.total_at(index, phase)
            if rows is None:
                own = times.at(index, phase)
                inside = [totals[child, phase] for child in below[index] if (child, phase) in totals]
                rows = times.outermost(_join_inside(own, inside, times))
            if len(rows):
                totals[index, phase] = rows
    return totals, below, upwards


def _join_inside(own: Rows, inside: Sequence[Rows], times: CallTimes) -> Rows:
    """Returns the calls that a node's total time sums: its own calls, or its children's in steps without such."""
    if not inside:
        return own
    others = np.concatenate(inside)
    return np.concatenate([own, times.in_other_steps(others, own)]) if len(own) else others
