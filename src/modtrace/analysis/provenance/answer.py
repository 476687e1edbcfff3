"""Explains what made NaN or infinite values in one step, why, and where they went."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import BY_NAME, INPUT, LEAF, OP_OUTPUT, PARAMETER
from ..graph.parts import forms_of_op
from ..tables.one_step import Argument
from ..tables.op_rules import MOVES, UNINITIALIZED
from ..tables.ops import bare_name
from ..tables.sites import Site
from ..values.nonfinite import PRODUCER, SOURCE, NonFinite, describe_counts
from .causes_and_remedies import ReadTensor, find_cause
from .makers import Makers
from .step_counts import Counts
from .traced import MODEL_STATE, Origin, Trace

_FORWARD, _OPTIMIZER = PHASES.index(FORWARD), PHASES.index(OPTIMIZER)


def build_answer(trace: Trace, event: Origin, makers: Makers) -> NonFinite:
    """Returns the explanation of one event of a step."""
    answer = _Answer(trace, event, makers)
    # An op outside of modules and optimizers may only have moved values there that the program had.
    ops = trace.step.ops
    ran_outside = int(ops.call[event.op]) < 0 and ops.phase[event.op] < 0
    is_moved = ran_outside and trace.step.bare_names[event.op] in MOVES
    if event.given is not None and (event.kind == SOURCE or is_moved):
        return answer.build_input(event.given)
    if event.loaded is not None and event.kind == PRODUCER and is_moved:
        return answer.build_loaded(event.loaded)
    return answer.build()


class _Answer:
    """Explains one event: NaN or infinite values that came up at one op."""

    def __init__(self, trace: Trace, event: Origin, makers: Makers) -> None:
        self._makers = makers
        self._trace = trace
        self._step = trace.step
        self._event = event

    def build(self) -> NonFinite:
        """Returns the explanation of values that an op made, or that were in a tensor that it read."""
        step, event = self._step, self._event
        phase, forward = int(step.ops.phase[event.op]), str(self._forward["name"]) if self._forward else None
        inputs = [ReadTensor(slot, tensor, self._counts(tensor)) for slot, tensor in step.reads[event.op]]
        # A single number that is lifted stands in the program, as in `x[3] = -inf`.
        is_written = event.is_meant and step.bare_names[event.op] == "lift_fresh" and event.counts.numel == 1
        is_explained = event.kind == PRODUCER or is_written
        cause = find_cause(self._trace, event, inputs, forward) if is_explained else None
        site = step.sites[event.tensor]
        is_made = event.kind != SOURCE
        lines = [row["source"] for row in (self._find_op(event.op), self._forward) if row]
        return NonFinite(
            **self._locate(event.op, event.counts),
            forward_op=forward,
            phase=PHASES[phase] if phase >= 0 else None,
            role=OP_OUTPUT if is_made else (site.role if site else None),
            slot=event.slot,
            kind=event.kind,
            source=self._find_parameter(inputs) if is_made else _name_source(site),
            source_line=next(filter(None, lines), None),
            cause=cause.name if cause else None,
            inputs=tuple(self._describe(read) for read in inputs),
            chain=tuple(self._chain(phase)),
            replaced_by=tuple(
                dict.fromkeys(map(step.describe_op, self._trace.find_ops(self._trace.replacers, event)))
            ),
            hint=cause.text if cause else self._hint(),
            remedy=cause.remedy if cause else None,
        )

    def build_input(self, given: int) -> NonFinite:
        """Returns the explanation of values in a tensor that the program gave to a model."""
        step, event, argument = self._step, self._event, self._find_argument(given)
        readers = step.sort_ops(step.flow.readers[given])
        numel = int(step.tensors.numel[given])
        counts = self._counts(given)
        if counts is None or counts.numel != numel or not (counts.nan or counts.inf):
            # The tensor was measured before the values were written into it.
            counts = event.counts._replace(numel=numel, first_index=None)
        hint = "the program gave them to the model"
        made = self._find_maker(event.tensor) if event.kind == SOURCE and event.tensor != given else None
        if made:
            hint = f"{made}; the program computed this input from it"
        elif event.kind != SOURCE and step.bare_names[event.op] != "set":  # `set` comes from a worker
            hint += f"; {step.describe_op(event.op)} wrote them"
        return self._build_held(
            next(iter(readers), event.op),  # if no op reads `given` itself, one reads a view of it
            counts,
            role=INPUT,
            slot=argument.slot,
            source=f"{argument.slot} of {step.calls.name(int(step.calls.where[argument.call])).name}",
            hint=hint,
            remedy="look at what that op read" if made else "look at the data of this step",
        )

    def build_loaded(self, loaded: int) -> NonFinite:
        """Returns the explanation of values that the program wrote into a parameter or buffer."""
        step, event = self._step, self._event
        site, flow = step.sites[loaded], step.flow
        assert site is not None
        storage = step.tensors.storage
        readers = flow.reader[storage[flow.read] == storage[loaded]]
        readers = step.sort_ops(readers[step.ops.phase[readers] == _FORWARD])
        return self._build_held(
            next(iter(readers), event.op),
            event.counts,
            role=site.role,
            slot=site.slot,
            source=site.name,
            hint="the program wrote them into it before the forward",
            remedy="check what it was loaded from, such as a checkpoint",
        )

    def _build_held(self, reader: int, counts: Counts, **fields: Any) -> NonFinite:
        """Returns the explanation of values that no op of the step made; `fields` are its other fields."""
        row = self._find_op(reader)
        return NonFinite(
            **self._locate(reader, counts),
            phase=FORWARD,
            kind=SOURCE,
            source_line=row["source"] if row else None,
            chain=tuple(self._chain(_FORWARD, reader)),
            **fields,
        )

    def _locate(self, op: int, counts: Counts) -> dict[str, Any]:
        """Returns the fields that say where an op ran, and how many NaN and infinite values there are."""
        step = self._step
        follows = int(step.follows[self._event.op])
        return {
            **step.locate_op(op),
            "op": step.name_op(op),
            "op_nth": int(step.ops.nth[op]),
            "follows": None if follows < 0 else PHASES[follows],
            "step": step.number,
            "has_lines": step.run.has_lines,
            "count": counts.nan + counts.inf,
            "nan_count": counts.nan,
            "inf_count": counts.inf,
            "are_negative": counts.are_negative,
            "numel": counts.numel,
            "first_index": counts.first_index,
        }

    @cached_property
    def _forward(self) -> Mapping[str, Any] | None:
        """The op whose derivative the event's op computes, as a row of `ops`."""
        forward = int(self._step.forward_op[self._event.op])
        return None if forward < 0 else self._step.run.find_op(forward)

    def _find_op(self, op: int) -> Mapping[str, Any] | None:
        return self._step.run.find_op(int(self._step.ops.op_id[op]))

    def _hint(self) -> str | None:
        event = self._event
        if event.kind == PRODUCER:
            return None
        if event.kind == SOURCE:
            site = self._step.sites[event.tensor]
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
            made = self._trace.counts.describe_dropped(event.op)
            if made is not None:
                return f"it read a tensor of an earlier step: {made}"
            return (
                "it read a tensor of an earlier step, which may have held them; nothing is known of it here"
            )
        written = self._describe_writer(event.unseen)
        return "it read a tensor that was not measured, and may have held them" + (
            f": {written}" if written else ""
        )

    def _describe_unwritten(self) -> str | None:
        """Returns which tensor that the op read is memory that was not written in full; None if there is none."""
        read = [tensor for _, tensor in self._step.reads[self._event.op]]
        for tensor in read if self._event.unwritten is None else [self._event.unwritten]:
            base = self._find_base(tensor)
            writer = self._find_writer(base)
            if writer is not None and bare_name(writer["name"]) in UNINITIALIZED:
                name = self._name(base) or "a tensor that it read"
                return f"{name} is memory of torch.{bare_name(writer['name'])}, and no op has written to all of it"
        return None

    def _describe_writer(self, tensor: int) -> str | None:
        """Returns which op made the values of a tensor in an earlier step, or wrote it; None if that was not seen.

        For a tensor that an optimizer wrote, the writer is named, because the step of its gradients has its own answer.
        """
        writer, site = self._find_writer(tensor), self._step.sites[tensor]
        is_of_optimizer = writer is not None and writer["phase"] == OPTIMIZER
        may_be_told = not is_of_optimizer and (site is None or site.role not in MODEL_STATE)
        if may_be_told and (made := self._find_maker(tensor)) is not None:
            return made
        if writer is None:
            return None
        phase_text = f", {writer['phase']}" if writer["phase"] else ""
        return f"{forms_of_op(writer['name'])[-1]} wrote it in step {writer['step']}{phase_text}"

    def _find_maker(self, tensor: int) -> str | None:
        """Returns which op made the values of a tensor in an earlier step; None if that is not known."""
        maker = self._makers.find(int(self._step.tensors.tensor_id[tensor]), self._step.number)
        if maker is None:
            return None
        made_in, op = maker.trace.step, maker.event.op
        phase, row = int(made_in.ops.phase[op]), made_in.run.find_op(int(made_in.ops.op_id[op]))
        when = f", {PHASES[phase]}" if phase >= 0 else ""
        line = f" at {row['source']}" if row and row["source"] else ""
        return f"{made_in.describe_op(op)} made it in step {made_in.number}{when}{line}"

    def _find_writer(self, tensor: int) -> Mapping[str, Any] | None:
        """Returns the op that wrote a tensor, in any step, as a row of `ops`."""
        return self._step.run.find_writer(int(self._step.tensors.tensor_id[tensor]))

    def _counts(self, tensor: int | None) -> Counts | None:
        """Returns the measurement of a tensor, or of the tensor of which it is a view."""
        step, counts = self._step, self._trace.counts
        for _ in range(len(step.tensors)):
            if tensor is None:
                return None
            if step.tensors.producer[tensor] < 0:
                return counts.of_leaf(tensor)
            measured = counts.of_output(tensor)
            if measured is not None:
                is_part = measured.numel < step.tensors.numel[tensor]
                return self._bound(tensor, measured) if is_part else measured
            tensor = step.find_shown(tensor)
        return None

    def _bound(self, tensor: int, last: Counts) -> Counts | None:
        """Returns bounds on a tensor of which an op wrote only a part; None if the rest was not measured."""
        step, counts = self._step, self._trace.counts
        storage, numel = step.tensors.storage, int(step.tensors.numel[tensor])
        parts = []
        for part in np.flatnonzero(storage == storage[tensor]).tolist():
            is_leaf = step.tensors.producer[part] < 0
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
        step, counts = self._step, read.counts
        row = step.tensors.table.slice(read.tensor, 1)
        shape = ", ".join(map(str, row["shape"][0].as_py()))
        text = f"{row['dtype'][0].as_py()}[{shape}]"
        if counts is not None and counts.nan:
            text += f", {describe_counts(counts.nan, counts.inf)}"
        elif counts is not None and counts.min is not None and counts.max is not None:
            within = "within " if counts.is_bound else ""
            text += f", {within}{counts.min + 0.0:.4g} .. {counts.max + 0.0:.4g}"  # + 0.0 avoids -0
        base, op = self._find_base(read.tensor), int(step.tensors.producer[read.tensor])
        held = None if step.tensors.producer[base] >= 0 else self._name(base)
        origin = held or (f"from {step.describe_op(op)}" if op >= 0 else None)
        return f"{text}, {origin}" if origin else text

    def _find_base(self, tensor: int) -> int:
        """Returns the tensor at the end of a chain of views; the tensor itself if it is no view."""
        while (shown := self._step.find_shown(tensor)) is not None:
            tensor = shown
        return tensor

    def _name(self, tensor: int) -> str | None:
        """Returns the role and name of a tensor of a model: `buffer scale`; None if it is another tensor."""
        site = self._step.sites[tensor]
        role = BY_NAME.get((site.role if site else None) or "")
        return None if role is None or role.name == LEAF else f"{role.of_one} {_name_source(site)}"

    def _find_parameter(self, inputs: list[ReadTensor]) -> str | None:
        """Returns the parameter that an op of an optimizer updates; None for another op, or if it updates several."""
        if self._step.ops.phase[self._event.op] != _OPTIMIZER:
            return None
        sites = [self._step.sites[read.tensor] for read in inputs]
        names = {site.name for site in sites if site is not None and site.role == PARAMETER}
        return names.pop() if len(names) == 1 else None

    def _find_argument(self, given: int) -> Argument:
        """Returns the call to which a tensor was given that no op of the step made, and its position there."""
        if given in self._step.given:
            return self._step.given[given]
        site, calls = self._step.sites[given], self._step.calls
        assert site is not None  # the tensor is an input that was first seen at a module inside the model
        return Argument(int(np.flatnonzero(calls.in_step & (calls.module == site.module_id))[0]), site.slot)

    def _chain(self, phase: int, first: int | None = None) -> Iterator[str]:
        """Yields the modules through which the values went in a phase, each with its first op.

        Args:
            phase: the phase of the op that made the values.
            first: the op with which the chain begins; None for the first op that read the values.
        """
        step, written = self._step, self._trace.counts.first_order
        phases = {phase, -1} if phase >= 0 else {_FORWARD, -1}
        carriers = self._trace.find_ops(self._trace.carriers, self._event)
        carried = [op for op in carriers if written[op] >= 0 and step.ops.phase[op] in phases]
        if first is not None:
            carried = [op for op in carried if step.position[op] >= step.position[first]]
        for _, ops in groupby(carried, key=lambda op: int(step.ops.where[op])):
            yield step.describe_op(next(ops))


def _name_source(site: Site | None) -> str:
    """Returns the path of a parameter or buffer, or a description of another tensor that held the values."""
    return (site.name or "a tensor of the program") if site else "a tensor"
