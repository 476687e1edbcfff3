"""Names who made the first NaN or infinite values: the op where ops were measured, else the module."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from ...recording.module_path import join
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import BY_NAME, LEAF, OP_OUTPUT
from ...surface import choose_phrase
from ..graph.parts import forms_of_op
from ..step.calls import RowFinder, column_of
from ..step.ops import PlaceName
from ..values.around import add_surroundings
from ..values.nonfinite import OVERFLOW, PRODUCER, SOURCE, NonFinite, find_first_nonfinite
from .causes import Cause, ReadTensor, find_cause
from .scan import Scanned, scan_steps
from .step_flow import Counts, read_step_flow
from .trace import Origin, Trace, trace_step


def find_first(
    data: RecordingData,
    selects: Callable[[str], bool] = lambda _: True,
    *,
    innocent: set[bytes] | None = None,
) -> NonFinite | None:
    """Returns who made the first NaN or infinite values; None if there are none but those that are meant.

    Args:
        data: the recording.
        selects: of what was made by ops, whether it counts, by the path of the module.
        innocent: is added to, for the next part of the same recording: steps like these hold only what is meant.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    scanned = scan_steps(data)
    innocent = set() if innocent is None else innocent
    made = next((each for each in _find_made(data, scanned, innocent) if selects(each.path or "")), None)
    measured = find_first_nonfinite(data, left_out=scanned.of_ops)
    if measured is not None and not data.table("ops").num_rows:
        measured = replace(measured, remedy=_name_ops())
    found = min(
        (each for each in (made, measured) if each is not None), key=lambda each: each.step, default=None
    )
    return None if found is None else add_surroundings(data, found)


def _name_ops() -> str:
    return choose_phrase(
        python="record(ops=True), on a long run with keep_last=20, names the op that made them; this module may only "
        "have been given them",
        command_line="modtrace record --ops, on a long run with --keep-last 20, names the op that made them; this "
        "module may only have been given them",
    )


def find_made(data: RecordingData) -> Iterator[NonFinite]:
    """Yields who made NaN or infinite values in the order in which they came up, as far as ops were measured.

    Values that are meant are left out, as the `-inf` of masks, and so are those that the model itself looks for and
    replaces, and gradients that overflow before a GradScaler skips the step.
    """
    return _find_made(data, scan_steps(data), set())


def _find_made(data: RecordingData, scanned: Scanned, innocent: set[bytes]) -> Iterator[NonFinite]:
    for step, sites in scanned.suspicious:
        if sites in innocent:
            continue
        trace = trace_step(read_step_flow(data, step))
        guilty = [event for event in trace.events if not event.is_guarded(trace.names)]
        if not guilty:
            innocent.add(sites)
        told = [_Answer(data, trace, event).build(step) for event in guilty]
        found = [each for each in told if not (trace.unscales and _is_expected(each))]
        yield from (replace(each, others=len(found) - 1) for each in found)


def _is_expected(found: NonFinite) -> bool:
    """Returns whether a gradient overflowed: a GradScaler that looks at it skips the step and lowers its scale.

    NaN, and what is infinite at any scale, does not go away by that.
    """
    return found.phase == BACKWARD and not found.nan_count and found.cause in (None, OVERFLOW)


class _Answer:
    """Tells one event."""

    def __init__(self, data: RecordingData, trace: Trace, event: Origin) -> None:
        self._data = data
        self._trace = trace
        self._flow = trace.flow
        self._event = event

    def build(self, step: int) -> NonFinite:
        """Returns what is known of the event."""
        flow, event, place = self._flow, self._event, self._place(self._event.op)
        phase, forward = int(flow.ops.phase[event.op]), self._forward_op()
        inputs = [
            ReadTensor(slot, tensor, self._counts(tensor)) for slot, tensor in flow.reads.get(event.op, ())
        ]
        cause = self._cause(inputs, forward)
        is_made = event.kind != SOURCE
        return NonFinite(
            root=place.root,
            path=place.path,
            call=self._call(),
            op=self._op_name(event.op),
            op_nth=int(flow.ops.nth[event.op]),
            forward_op=forward,
            phase=PHASES[phase] if phase >= 0 else None,
            follows=self._find_phase_before(),
            step=step,
            role=OP_OUTPUT if is_made else flow.roles.get(self._site(event.tensor)),
            slot=event.slot,
            kind=event.kind,
            source=None if is_made else self._name_site(self._site(event.tensor)),
            source_line=self._source_line(),
            cause=cause.name if cause else None,
            count=event.counts.nan + event.counts.inf,
            nan_count=event.counts.nan,
            inf_count=event.counts.inf,
            numel=event.counts.numel,
            first_index=event.counts.first_index,
            inputs=tuple(self._describe(each) for each in inputs),
            chain=tuple(self._chain()),
            replaced_by=tuple(
                dict.fromkeys(self._link(op) for op in event.absorbed_by if flow.returns.get(op))
            ),
            hint=cause.text if cause else self._hint(),
            remedy=cause.remedy if cause else None,
        )

    def _cause(self, inputs: list[ReadTensor], forward: str | None) -> Cause | None:
        if self._event.kind == PRODUCER:
            return find_cause(self._trace, self._event, inputs, forward)
        return None

    def _op_name(self, op: int) -> str:
        return self._flow.ops.names[int(self._flow.ops.name[op])]

    def _place(self, op: int) -> PlaceName:
        return self._flow.ops.placed.name(int(self._flow.ops.where[op]))

    def _call(self) -> int | None:
        placed, call = self._flow.ops.placed, int(self._flow.ops.call[self._event.op])
        if call < 0:
            return None
        nth = int(placed.column("nth")[placed.origin[call]])
        return nth if nth >= 0 else None

    def _find_phase_before(self) -> str | None:
        """Returns the phase that ran last in the step before an op; None if none did."""
        order, phase = self._flow.order, self._flow.ops.phase
        before = order[: order.index(self._event.op)]
        code = next((int(phase[op]) for op in reversed(before) if phase[op] >= 0), -1)
        return PHASES[code] if code >= 0 else None

    def _forward_op(self) -> str | None:
        row = self._forward_row()
        name: str | None = None if row < 0 else self._data.table("ops")["name"][row].as_py()
        return name

    def _forward_row(self) -> int:
        forward = self._flow.forward_op[self._event.op]
        if forward is None:
            return -1
        return int(RowFinder(column_of(self._data.table("ops"), "op_id"))(np.array([forward]))[0])

    def _source_line(self) -> str | None:
        row = self._forward_row()
        if row < 0:
            op = self._flow.ops.op_id[self._event.op]
            row = int(RowFinder(column_of(self._data.table("ops"), "op_id"))(np.array([op]))[0])
        line: str | None = self._data.table("ops")["source"][row].as_py()
        return line

    def _site(self, tensor: int) -> int:
        site: int | None = self._flow.tensors.table["site_id"][tensor].as_py()
        return -1 if site is None else site

    def _name_site(self, site_id: int) -> str:
        """Returns the path of a parameter or buffer, or what else a site is."""
        sites, modules = self._data.table("sites"), self._data.table("modules")
        site = sites.filter(column_of(sites, "site_id") == site_id).to_pylist()
        if not site:
            return "a tensor"
        paths = {row["module_id"]: row["path"] for row in modules.select(["module_id", "path"]).to_pylist()}
        path = paths.get(site[0]["module_id"])
        return join(path or "", site[0]["slot"]) or "a tensor that no op had made"

    def _hint(self) -> str | None:
        event = self._event
        if event.kind == PRODUCER:
            return None
        if event.kind == SOURCE:
            written = self._tell_writer(event.tensor)
            return written or "it held them before the recording, or an op wrote them that was not seen"
        if event.unseen is None:
            return (
                "it makes no NaN of finite numbers: they were written from outside of torch, as through NumPy"
            )
        if event.unseen in {-1, *self._flow.dropped}:
            return (
                "it read a tensor of an earlier step, which may have held them; nothing is known of it here"
            )
        written = self._tell_writer(event.unseen)
        return "it read a tensor that was not measured, and may have held them" + (
            f": {written}" if written else ""
        )

    def _tell_writer(self, tensor: int) -> str | None:
        """Returns which op wrote a tensor, and when; None if none did that was seen."""
        tensors, ops = self._data.table("tensors"), self._data.table("ops")
        is_it = column_of(tensors, "tensor_id") == self._flow.tensors.tensor_id[tensor]
        written_by = column_of(tensors.filter(is_it), "producer_op")
        row = int(RowFinder(column_of(ops, "op_id"))(written_by)[0]) if len(written_by) else -1
        if row < 0:
            return None
        writer = ops.slice(row, 1).to_pylist()[0]
        phase = f", {writer['phase']}" if writer["phase"] else ""
        return f"{forms_of_op(writer['name'])[-1]} wrote it in step {writer['step']}{phase}"

    def _counts(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor, or of what it is a view of."""
        flow = self._flow
        for _ in range(len(flow.tensors)):
            op = int(flow.tensors.producer[tensor])
            if op < 0:
                return flow.counts_of_leaf(tensor)
            counts = flow.measured.get((op, flow.tensors.slots[flow.tensors.slot[tensor]]))
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
        made = f"from {self._link(op)}" if op >= 0 else None
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
        role = BY_NAME.get(self._flow.roles.get(site, ""))
        if self._flow.tensors.producer[tensor] >= 0 or role is None or role.name == LEAF:
            return None
        return f"{role.of_one} {self._name_site(site)}"

    def _link(self, op: int) -> str:
        name, place = forms_of_op(self._op_name(op))[-1], self._place(op)
        return f"{name} in {place.name}" if place.path is not None else f"{name} {place.name}"

    def _chain(self) -> Iterator[str]:
        """Yields the modules through which the values went in this phase, with the first op of each."""
        flow = self._flow
        phase, written = flow.ops.phase[self._event.op], {op for op, _ in flow.measured}
        carried = [op for op in self._event.carried_by if op in written and flow.ops.phase[op] in (phase, -1)]
        for _, ops in groupby(carried, key=lambda op: int(flow.ops.where[op])):
            yield self._link(next(ops))
