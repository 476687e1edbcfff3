"""Explains what made NaN or infinite values in one step, why, and where they went."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import BY_NAME, INPUT, LEAF, OP_OUTPUT, PARAMETER
from ..graph.parts import forms_of_op
from ..step.sites import Site
from ..values.nonfinite import PRODUCER, SOURCE, NonFinite
from .causes_and_remedies import ReadTensor, find_cause
from .indexed_tables import IndexedTables
from .op_rules import MOVES
from .step_counts import Counts
from .step_flow import Argument, tell_place
from .trace import Origin, Trace


def is_data(trace: Trace, event: Origin) -> bool:
    """Returns whether a model was given the values: no op made them, or one that writes what the program tells it."""
    return event.given is not None and (event.kind == SOURCE or _is_moved(trace, event))


def is_loaded(trace: Trace, event: Origin) -> bool:
    """Returns whether the program has written the values into a parameter or buffer, as from a checkpoint."""
    return event.loaded is not None and event.kind == PRODUCER and _is_moved(trace, event)


def _is_moved(trace: Trace, event: Origin) -> bool:
    """Returns whether an op outside of modules, and of an optimizer, has put the values there as they were."""
    ops = trace.flow.ops
    ran_outside = int(ops.call[event.op]) < 0 and ops.phase[event.op] < 0
    return ran_outside and trace.flow.bare_names[event.op] in MOVES


def answer(tables: IndexedTables, trace: Trace, event: Origin, step: int) -> NonFinite:
    """Returns what is known of one event of a step."""
    return _Answer(tables, trace, event).build(step)


class _Answer:
    """Tells one event."""

    def __init__(self, tables: IndexedTables, trace: Trace, event: Origin) -> None:
        self._tables = tables
        self._trace = trace
        self._flow = trace.flow
        self._event = event

    def build(self, step: int) -> NonFinite:
        """Returns what is known of the event."""
        if is_data(self._trace, self._event):
            return self._build_input(step)
        if is_loaded(self._trace, self._event):
            return self._build_loaded(step)
        flow, event, ops = self._flow, self._event, self._flow.ops
        phase, forward = int(ops.phase[event.op]), str(self._forward["name"]) if self._forward else None
        inputs = [
            ReadTensor(slot, tensor, self._counts(tensor)) for slot, tensor in flow.reads.get(event.op, ())
        ]
        cause = find_cause(self._trace, event, inputs, forward) if event.kind == PRODUCER else None
        site = self._site(event.tensor)
        is_made = event.kind != SOURCE
        ran = self._forward or self._find_op(int(ops.op_id[event.op]))
        return NonFinite(
            **tell_place(ops.placed, int(ops.call[event.op]), int(ops.where[event.op])),
            op=flow.name_op(event.op),
            op_nth=int(flow.ops.nth[event.op]),
            forward_op=forward,
            phase=PHASES[phase] if phase >= 0 else None,
            follows=self._find_phase_before(),
            step=step,
            role=OP_OUTPUT if is_made else (site.role if site else None),
            slot=event.slot,
            kind=event.kind,
            source=self._find_parameter(inputs) if is_made else _name_source(site),
            source_line=ran["source"] if ran else None,
            cause=cause.name if cause else None,
            count=event.counts.nan + event.counts.inf,
            nan_count=event.counts.nan,
            inf_count=event.counts.inf,
            numel=event.counts.numel,
            first_index=event.counts.first_index,
            inputs=tuple(self._describe(each) for each in inputs),
            chain=tuple(self._chain(phase)),
            replaced_by=tuple(
                dict.fromkeys(flow.describe_op(op) for op in event.absorbed_by if flow.returns.get(op))
            ),
            hint=cause.text if cause else self._hint(),
            remedy=cause.remedy if cause else None,
        )

    def _build_input(self, step: int) -> NonFinite:
        """Returns what is known of values that the program has given to a model."""
        flow, event, placed = self._flow, self._event, self._flow.ops.placed
        assert event.given is not None
        given, argument = event.given, self._argument(event.given)
        reader = next(op for op in flow.order if any(tensor == given for _, tensor in flow.reads.get(op, ())))
        numel = math.prod(flow.tensors.shapes[given])
        counts = self._counts(given)
        if counts is None or counts.numel != numel or not (counts.nan or counts.inf):
            # It was measured before they were written into it.
            counts = event.counts._replace(numel=numel, first_index=None)
        hint = "the program gave them to the model"
        if event.kind != SOURCE and flow.bare_names[event.op] != "set":  # a worker's tensor is set
            hint += f"; {flow.describe_op(event.op)} wrote them"
        return self._build_held(
            step,
            reader,
            counts,
            role=INPUT,
            slot=argument.slot,
            source=f"{argument.slot} of {placed.name(int(placed.where[argument.call])).name}",
            hint=hint,
            remedy="look at the data of this step",
        )

    def _build_loaded(self, step: int) -> NonFinite:
        """Returns what is known of values that the program has written into a parameter or buffer."""
        flow, event = self._flow, self._event
        assert event.loaded is not None
        site, storage = self._site(event.loaded), flow.regions[event.loaded].storage
        assert site is not None
        reads = (
            op
            for op in flow.order
            if flow.ops.phase[op] == PHASES.index(FORWARD)
            and any(flow.regions[tensor].storage == storage for _, tensor in flow.reads.get(op, ()))
        )
        return self._build_held(
            step,
            next(reads, event.op),
            event.counts,
            role=site.role,
            slot=site.slot,
            source=site.name,
            hint="the program wrote them into it before the forward",
            remedy="look at what it was loaded from, as a checkpoint",
        )

    def _build_held(self, step: int, reader: int, counts: Counts, **told: Any) -> NonFinite:
        """Returns what is known of values that no op of the step has made; `told` are the other fields."""
        flow, ops = self._flow, self._flow.ops
        ran = self._find_op(int(ops.op_id[reader]))
        return NonFinite(
            **tell_place(ops.placed, int(ops.call[reader]), int(ops.where[reader])),
            op=flow.name_op(reader),
            op_nth=int(ops.nth[reader]),
            phase=FORWARD,
            follows=self._find_phase_before(),
            step=step,
            kind=SOURCE,
            source_line=ran["source"] if ran else None,
            count=counts.nan + counts.inf,
            nan_count=counts.nan,
            inf_count=counts.inf,
            numel=counts.numel,
            first_index=counts.first_index,
            chain=tuple(self._chain(PHASES.index(FORWARD))),
            **told,
        )

    def _find_phase_before(self) -> str | None:
        """Returns the phase that ran last in the step before an op; None if none did."""
        order, phase = self._flow.order, self._flow.ops.phase
        before = order[: order.index(self._event.op)]
        code = next((int(phase[op]) for op in reversed(before) if phase[op] >= 0), -1)
        return PHASES[code] if code >= 0 else None

    @cached_property
    def _forward(self) -> Mapping[str, Any] | None:
        """The op whose derivative the op computes, as a row of `ops`."""
        forward = self._flow.forward_op[self._event.op]
        return None if forward is None else self._find_op(forward)

    def _find_op(self, op_id: int) -> Mapping[str, Any] | None:
        rows: list[Mapping[str, Any]] = self._tables.find("ops", op_id=np.array([op_id])).to_pylist()
        return rows[0] if rows else None

    def _site(self, tensor: int) -> Site | None:
        site = self._flow.sites[tensor]
        return None if site is None else self._tables.sites.get(site)

    def _hint(self) -> str | None:
        event = self._event
        if event.kind == PRODUCER:
            return None
        if event.kind == SOURCE:
            site = self._site(event.tensor)
            is_parameter = site is not None and site.role != LEAF
            unknown = "it held them before the recording, or an op wrote them that was not seen"
            return self._tell_writer(event.tensor) or (
                unknown if is_parameter else "no op of this step has made it: it is data, or was made before"
            )
        if event.unseen is None:
            return (
                "it makes no NaN of finite numbers: they were written from outside of torch, as through NumPy"
            )
        if event.unseen < 0 or event.unseen in self._trace.counts.dropped:
            return (
                "it read a tensor of an earlier step, which may have held them; nothing is known of it here"
            )
        written = self._tell_writer(event.unseen)
        return "it read a tensor that was not measured, and may have held them" + (
            f": {written}" if written else ""
        )

    def _tell_writer(self, tensor: int) -> str | None:
        """Returns which op wrote a tensor, and when; None if none did that was seen."""
        tensor_id = self._flow.tensors.tensor_id[[tensor]]
        written_by = self._tables.find("tensors", ["producer_op"], tensor_id=tensor_id)[
            "producer_op"
        ].to_pylist()
        writer = self._find_op(written_by[0]) if written_by and written_by[0] is not None else None
        if writer is None:
            return None
        phase = f", {writer['phase']}" if writer["phase"] else ""
        return f"{forms_of_op(writer['name'])[-1]} wrote it in step {writer['step']}{phase}"

    def _counts(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor, or of what it is a view of."""
        flow = self._flow
        for _ in range(len(flow.tensors)):
            op = int(flow.tensors.producer[tensor])
            if op < 0:
                return self._trace.counts.of_leaf(tensor)
            counts = self._trace.counts.of_output(tensor)
            shown = flow.shown_by(tensor)
            if counts is not None or shown is None:
                return counts
            tensor = shown
        return None

    def _describe(self, read: ReadTensor) -> str:
        flow = self._flow
        shape = ", ".join(map(str, flow.tensors.shapes[read.tensor]))
        text = f"{flow.tensors.dtypes[read.tensor]}[{shape}]"
        if read.counts is not None and read.counts.min is not None and read.counts.max is not None:
            text += f", {read.counts.min:.4g} .. {read.counts.max:.4g}"
        held = self._name_held(read.tensor)
        op = int(flow.tensors.producer[read.tensor])
        made = f"from {flow.describe_op(op)}" if op >= 0 else None
        return ", ".join(each for each in (text, held or made) if each)

    def _name_held(self, tensor: int) -> str | None:
        """Returns the name of the parameter, buffer or input that a tensor is, or shows; None if it is another."""
        shown: int | None = tensor
        while shown is not None:
            tensor, shown = (
                shown,
                self._flow.shown_by(shown) if self._flow.tensors.producer[shown] >= 0 else None,
            )
        site = self._site(tensor)
        role = BY_NAME.get((site.role if site else None) or "")
        if self._flow.tensors.producer[tensor] >= 0 or role is None or role.name == LEAF:
            return None
        return f"{role.of_one} {_name_source(site)}"

    def _find_parameter(self, inputs: list[ReadTensor]) -> str | None:
        """Returns the parameter that an op of an optimizer works on; None if it is another op, or of several."""
        if self._flow.ops.phase[self._event.op] != PHASES.index(OPTIMIZER):
            return None
        sites = [self._site(each.tensor) for each in inputs]
        names = {site.name for site in sites if site is not None and site.role == PARAMETER}
        return names.pop() if len(names) == 1 else None

    def _argument(self, given: int) -> Argument:
        """Returns to which call a tensor was given that no op of the step has made, and as what."""
        if given in self._flow.given:
            return self._flow.given[given]
        site, calls = self._site(given), self._flow.ops.placed.calls
        assert site is not None  # an input that its module was the first to see
        return Argument(int(np.flatnonzero(calls.in_step & (calls.module == site.module_id))[0]), site.slot)

    def _chain(self, phase: int) -> Iterator[str]:
        """Yields the modules through which the values went in a phase, with the first op of each."""
        flow, written = self._flow, {op for op, _ in self._trace.counts.outputs}
        carried = [op for op in self._event.carried_by if op in written and flow.ops.phase[op] in (phase, -1)]
        for _, ops in groupby(carried, key=lambda op: int(flow.ops.where[op])):
            yield flow.describe_op(next(ops))


def _name_source(site: Site | None) -> str:
    """Returns the path of a parameter or buffer, or what else held the values."""
    return (site.name or "a tensor of the program") if site else "a tensor"
