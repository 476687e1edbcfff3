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
from ..tables.op_rules import MOVES, UNINITIALIZED
from ..tables.ops import bare_name
from ..tables.sites import Site
from ..values.nonfinite import PRODUCER, SOURCE, NonFinite, describe_counts
from .causes_and_remedies import ReadTensor, find_cause
from .indexed_tables import IndexedTables
from .makers import Maker, Makers
from .step_counts import Counts
from .step_flow import Argument, tell_place
from .trace import MODEL_STATE, Origin, Trace


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


def answer(tables: IndexedTables, makers: Makers, trace: Trace, event: Origin, step: int) -> NonFinite:
    """Returns what is known of one event of a step."""
    return _Answer(tables, makers, trace, event, step).build()


class _Answer:
    """Tells one event."""

    def __init__(self, tables: IndexedTables, makers: Makers, trace: Trace, event: Origin, step: int) -> None:
        self._tables = tables
        self._makers = makers
        self._trace = trace
        self._flow = trace.flow
        self._event = event
        self._step = step

    def build(self) -> NonFinite:
        """Returns what is known of the event."""
        if is_data(self._trace, self._event):
            return self._build_input()
        if is_loaded(self._trace, self._event):
            return self._build_loaded()
        flow, event, ops = self._flow, self._event, self._flow.ops
        phase, forward = int(ops.phase[event.op]), str(self._forward["name"]) if self._forward else None
        inputs = [
            ReadTensor(slot, tensor, self._counts(tensor)) for slot, tensor in flow.reads.get(event.op, ())
        ]
        cause = find_cause(self._trace, event, inputs, forward) if event.kind == PRODUCER else None
        site = self._site(event.tensor)
        is_made = event.kind != SOURCE
        lines = [row["source"] for row in (self._find_op(int(ops.op_id[event.op])), self._forward) if row]
        return NonFinite(
            **tell_place(ops.placed, int(ops.call[event.op]), int(ops.where[event.op])),
            op=flow.name_op(event.op),
            op_nth=int(flow.ops.nth[event.op]),
            forward_op=forward,
            phase=PHASES[phase] if phase >= 0 else None,
            follows=self._find_phase_before(),
            step=self._step,
            role=OP_OUTPUT if is_made else (site.role if site else None),
            slot=event.slot,
            kind=event.kind,
            source=self._find_parameter(inputs) if is_made else _name_source(site),
            source_line=next(filter(None, lines), None),
            has_lines=self._tables.has_lines,
            cause=cause.name if cause else None,
            count=event.counts.nan + event.counts.inf,
            nan_count=event.counts.nan,
            inf_count=event.counts.inf,
            are_negative=event.counts.are_negative,
            numel=event.counts.numel,
            first_index=event.counts.first_index,
            inputs=tuple(self._describe(each) for each in inputs),
            chain=tuple(self._chain(phase)),
            replaced_by=tuple(
                dict.fromkeys(flow.describe_op(op) for op in event.absorbed_by if self._is_written_by(op))
            ),
            hint=cause.text if cause else self._hint(),
            remedy=cause.remedy if cause else None,
        )

    def _build_input(self) -> NonFinite:
        """Returns what is known of values that the program has given to a model."""
        flow, event, placed = self._flow, self._event, self._flow.ops.placed
        assert event.given is not None
        given, argument = event.given, self._argument(event.given)
        readers = (op for op in flow.order if any(tensor == given for _, tensor in flow.reads.get(op, ())))
        reader = next(readers, event.op)  # else an op reads another view of it
        numel = math.prod(flow.tensors.shapes[given])
        counts = self._counts(given)
        if counts is None or counts.numel != numel or not (counts.nan or counts.inf):
            # It was measured before they were written into it.
            counts = event.counts._replace(numel=numel, first_index=None)
        hint = "the program gave them to the model"
        if event.kind != SOURCE and flow.bare_names[event.op] != "set":  # a worker's tensor is set
            hint += f"; {flow.describe_op(event.op)} wrote them"
        return self._build_held(
            reader,
            counts,
            role=INPUT,
            slot=argument.slot,
            source=f"{argument.slot} of {placed.name(int(placed.where[argument.call])).name}",
            hint=hint,
            remedy="look at the data of this step",
        )

    def _build_loaded(self) -> NonFinite:
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
            next(reads, event.op),
            event.counts,
            role=site.role,
            slot=site.slot,
            source=site.name,
            hint="the program wrote them into it before the forward",
            remedy="check what it was loaded from, such as a checkpoint",
        )

    def _build_held(self, reader: int, counts: Counts, **told: Any) -> NonFinite:
        """Returns what is known of values that no op of the step has made; `told` are the other fields."""
        flow, ops = self._flow, self._flow.ops
        ran = self._find_op(int(ops.op_id[reader]))
        return NonFinite(
            **tell_place(ops.placed, int(ops.call[reader]), int(ops.where[reader])),
            op=flow.name_op(reader),
            op_nth=int(ops.nth[reader]),
            phase=FORWARD,
            follows=self._find_phase_before(),
            step=self._step,
            kind=SOURCE,
            source_line=ran["source"] if ran else None,
            has_lines=self._tables.has_lines,
            count=counts.nan + counts.inf,
            nan_count=counts.nan,
            inf_count=counts.inf,
            are_negative=counts.are_negative,
            numel=counts.numel,
            first_index=counts.first_index,
            chain=tuple(self._chain(PHASES.index(FORWARD), reader)),
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
            return self._describe_writer(event.tensor) or (
                unknown if is_parameter else "no op of this step has made it: it is data, or was made before"
            )
        if event.unseen is None:
            return self._describe_unwritten() or (
                "it makes no NaN of finite numbers: they were written from outside of torch, as through NumPy"
            )
        if event.unseen < 0 or event.unseen in self._trace.counts.dropped:
            return self._describe_dropped()
        written = self._describe_writer(event.unseen)
        return "it read a tensor that was not measured, and may have held them" + (
            f": {written}" if written else ""
        )

    def _describe_dropped(self) -> str:
        """Returns what is known of what the op read of steps that are not in the recording any more."""
        made = self._trace.counts.describe_dropped(self._event.op)
        unknown = "it read a tensor of an earlier step, which may have held them; nothing is known of it here"
        return unknown if made is None else f"it read a tensor of an earlier step: {made}"

    def _describe_unwritten(self) -> str | None:
        """Returns which tensor that the op read is memory to which ops have not written in full; None if none is."""
        read = [tensor for _, tensor in self._flow.reads.get(self._event.op, ())]
        for tensor in read if self._event.unwritten is None else [self._event.unwritten]:
            base = self._find_base(tensor)
            writer = self._find_writer(base)
            if writer is not None and bare_name(writer["name"]) in UNINITIALIZED:
                name = self._name(base) or "a tensor that it read"
                return f"{name} is memory of torch.{bare_name(writer['name'])}, and no op has written to all of it"
        return None

    def _describe_writer(self, tensor: int) -> str | None:
        """Returns which op made the values of a tensor in an earlier step, or wrote it; None if none did that was seen.

        What an optimizer has written is told as that: the step of its gradients has an answer of its own.
        """
        writer, site = self._find_writer(tensor), self._site(tensor)
        is_of_optimizer = writer is not None and writer["phase"] == OPTIMIZER
        if not is_of_optimizer and (site is None or site.role not in MODEL_STATE):
            maker = self._makers.find(int(self._flow.tensors.tensor_id[tensor]), self._step)
            if maker is not None:
                return self._describe_maker(maker)
        if writer is None:
            return None
        phase = f", {writer['phase']}" if writer["phase"] else ""
        return f"{forms_of_op(writer['name'])[-1]} wrote it in step {writer['step']}{phase}"

    def _find_writer(self, tensor: int) -> Mapping[str, Any] | None:
        """Returns the op that wrote a tensor, in whatever step, as a row of `ops`."""
        return self._tables.find_writer(int(self._flow.tensors.tensor_id[tensor]))

    def _describe_maker(self, maker: Maker) -> str:
        flow, op = maker.trace.flow, maker.event.op
        phase, row = int(flow.ops.phase[op]), self._find_op(int(flow.ops.op_id[op]))
        when = f", {PHASES[phase]}" if phase >= 0 else ""
        line = f" at {row['source']}" if row and row["source"] else ""
        return f"{flow.describe_op(op)} made it in step {maker.step}{when}{line}"

    def _counts(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor, or of what it is a view of."""
        flow = self._flow
        for _ in range(len(flow.tensors)):
            op = int(flow.tensors.producer[tensor])
            if op < 0:
                return self._trace.counts.of_leaf(tensor)
            counts = self._trace.counts.of_output(tensor)
            shown = flow.shown_by(tensor)
            if counts is not None and counts.numel < math.prod(flow.tensors.shapes[tensor]):
                return self._bound(tensor, counts)
            if counts is not None or shown is None:
                return counts
            tensor = shown
        return None

    def _bound(self, tensor: int, last: Counts) -> Counts | None:
        """Returns what a tensor may hold of which an op has written a part; None if nothing is known of the rest."""
        flow, counts = self._flow, self._trace.counts
        storage, numel = flow.regions[tensor].storage, math.prod(flow.tensors.shapes[tensor])
        parts = []
        for part in (at for at, region in enumerate(flow.regions) if region.storage == storage):
            is_leaf = flow.tensors.producer[part] < 0
            measured = counts.of_leaf(part) if is_leaf else counts.of_output(part)
            is_earlier = measured is not None and (is_leaf or measured.order <= last.order)
            if measured is not None and is_earlier and not measured.nan:
                parts.append(measured)
        if all(part.numel < numel for part in parts):
            return None
        low = min((part.min for part in parts if part.min is not None), default=None)
        high = max((part.max for part in parts if part.max is not None), default=None)
        return last._replace(nan=0, inf=0, numel=numel, min=low, max=high, first_index=None, is_bound=True)

    def _describe(self, read: ReadTensor) -> str:
        flow = self._flow
        shape = ", ".join(map(str, flow.tensors.shapes[read.tensor]))
        text = f"{flow.tensors.dtypes[read.tensor]}[{shape}]"
        counts = read.counts
        if counts is not None and counts.nan:
            text += f", {describe_counts(counts.nan, counts.inf)}"
        elif counts is not None and counts.min is not None and counts.max is not None:
            within = "within " if counts.is_bound else ""
            text += f", {within}{counts.min + 0.0:.4g} .. {counts.max + 0.0:.4g}"  # -0 is 0
        held = self._name_held(read.tensor)
        op = int(flow.tensors.producer[read.tensor])
        made = f"from {flow.describe_op(op)}" if op >= 0 else None
        return ", ".join(each for each in (text, held or made) if each)

    def _name_held(self, tensor: int) -> str | None:
        """Returns the name of the parameter, buffer or input that a tensor is, or shows; None if it is another."""
        base = self._find_base(tensor)
        return None if self._flow.tensors.producer[base] >= 0 else self._name(base)

    def _find_base(self, tensor: int) -> int:
        """Returns the tensor of which a view of views shows a part; the tensor itself if it is no view."""
        while (shown := self._flow.shown_by(tensor)) is not None:
            tensor = shown
        return tensor

    def _name(self, tensor: int) -> str | None:
        """Returns the role and name of a tensor of a model: `buffer scale`; None if it is another tensor."""
        site = self._site(tensor)
        role = BY_NAME.get((site.role if site else None) or "")
        return None if role is None or role.name == LEAF else f"{role.of_one} {_name_source(site)}"

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

    def _is_written_by(self, op: int) -> bool:
        """Returns whether an op has written something: a view only shows it."""
        return any(self._flow.shown_by(tensor) is None for _, tensor in self._flow.returns.get(op, ()))

    def _chain(self, phase: int, first: int | None = None) -> Iterator[str]:
        """Yields the modules through which the values went in a phase, with the first op of each.

        Args:
            phase: that of the op that made them.
            first: the op with which the chain begins; None: what read them first.
        """
        flow, written = self._flow, {op for op, _ in self._trace.counts.outputs}
        phases = {phase, -1} if phase >= 0 else {PHASES.index(FORWARD), -1}
        carried = [op for op in self._event.carried_by if op in written and flow.ops.phase[op] in phases]
        if first is not None:
            ran = {op: at for at, op in enumerate(flow.order)}
            carried = [op for op in carried if ran[op] >= ran[first]]
        for _, ops in groupby(carried, key=lambda op: int(flow.ops.where[op])):
            yield flow.describe_op(next(ops))


def _name_source(site: Site | None) -> str:
    """Returns the path of a parameter or buffer, or what else held the values."""
    return (site.name or "a tensor of the program") if site else "a tensor"
