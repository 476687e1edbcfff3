"""Types a recording by hand: modules, calls, steps and values in, a `RecordingData` out.

    build = RecordingBuilder()
    gpt = build.module("", "GPT", parameters=120)
    head = build.module("head", "Linear", parent=gpt, parameters=100)
    step = build.step(0, 0, 1000)
    outer = build.call(gpt, 0, 600)
    head_call = build.call(head, 100, 500, parent=outer)
    build.optimizer(800, 900)
    linear = build.op(head_call, "aten.addmm.default", 110, 160, flops=1200, saved_bytes=64)
    build.use(build.tensor([2, 4], producer=linear), op=build.op(outer, "aten.relu.default", 510, 520))
    build.output(outer, [0.5, float("nan")])
    build.parameter(head, "weight", [1.0, -1.0])
    data = build.data()

Times are nanoseconds; `end_ns=None` is a call whose end was not seen. Ids count up from 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schema, schemas


class TypedRecording:
    """A `RecordingData` of rows that were typed by hand."""

    def __init__(self, rows: Mapping[str, Sequence[Mapping[str, Any]]], meta: RunMeta) -> None:
        self.meta = meta
        self._rows = rows

    def table(self, name: str) -> pa.Table:
        fields, rows = schema(name), self._rows.get(name, ())
        if not rows:
            return fields.empty_table()
        columns = {
            each: [row.get(each) for row in rows]
            for each in dict.fromkeys(each for row in rows for each in row)
        }
        return pa.Table.from_batches([to_batch(name, columns)])


class RecordingBuilder:
    """Collects rows; every method gives the id of what it added."""

    def __init__(self, **meta: Any) -> None:
        """`meta` are fields of `RunMeta`."""
        self._meta = RunMeta(**meta)
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in schemas()}
        self._root_of: dict[int, int] = {}
        self._step = 0

    def module(
        self,
        path: str,
        type: str,
        *,
        parent: int | None = None,
        name: str | None = None,
        raw_path: str | None = None,
        aliases: Sequence[str] = (),
        parameters: int | None = 0,
        module_id: int | None = None,
    ) -> int:
        """A module; without a parent it is a root, shown by its name (its type if none is given).

        A `module_id` that is there already adds a later row of that module.
        """
        rows = self._rows["modules"]
        if module_id is None:
            module_id = len(self._root_of)
        root_id = self._root_of[module_id] = module_id if parent is None else self._root_of[parent]
        row = {
            "module_id": module_id,
            "root_id": root_id,
            "path": path,
            "raw_path": path if raw_path is None else raw_path,
            "aliases": list(aliases),
            "name": name or (type if parent is None else None),
            "type": type,
            "parent_id": parent,
            "parameters": parameters,
            "buffers": 0,
        }
        rows.append(row)
        return module_id

    def begin_step(self, step: int) -> int:
        """The calls that follow belong to this step; it is complete only if `step` is called too."""
        self._step = step
        return step

    def step(
        self, step: int, start_ns: int, end_ns: int, *, kind: str = "train", **columns: int | None
    ) -> int:
        """A complete step, with further columns; the calls that follow belong to it."""
        row = {"step": step, "kind": kind, "start_ns": start_ns, "end_ns": end_ns}
        self._rows["steps"].append(row | {"overhead_ns": None} | columns)
        return self.begin_step(step)

    def call(
        self,
        module: int | None,
        start_ns: int,
        end_ns: int | None,
        *,
        parent: int | None = None,
        phase: str = "forward",
        forward: int | None = None,
        recompute_of: int | None = None,
        nth: int | None = None,
        thread: int = 0,
        raised: bool = False,
        compiled: bool = False,
        overhead_ns: int | None = None,
        device: tuple[int, int] | None = None,
        flops: int | None = None,
        allocated_bytes: int | None = None,
        peak_bytes: int | None = None,
        saved_bytes: int | None = None,
        stage: int | None = None,
        training: bool | None = None,
    ) -> int:
        """A call of a module within the current step; `forward` is the `forward_call_id` of a backward.

        `device` is when a device began and ended it; `stage` that of a pipeline.
        """
        rows = self._rows["calls"]
        row = {
            "call_id": len(rows),
            "step": self._step,
            "module_id": module,
            "nth": nth,
            "parent_call_id": parent,
            "phase": phase,
            "forward_call_id": forward,
            "recompute_of": recompute_of,
            "thread": thread,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "overhead_ns": overhead_ns,
            "device_start_ns": device and device[0],
            "device_end_ns": device and device[1],
            "raised": raised,
            "compiled": compiled,
            "flops": flops,
            "allocated_bytes": allocated_bytes,
            "peak_bytes": peak_bytes,
            "saved_bytes": saved_bytes,
            "stage": stage,
            "training": training,
        }
        rows.append(row)
        return len(rows) - 1

    def backward(
        self, forward: int, start_ns: int, end_ns: int | None, *, parent: int | None = None, **more: Any
    ) -> int:
        """The backward of a forward call; `more` goes to `call`."""
        module = self._rows["calls"][forward]["module_id"]
        return self.call(module, start_ns, end_ns, parent=parent, phase="backward", forward=forward, **more)

    def recompute(
        self, forward: int, start_ns: int, end_ns: int | None, *, parent: int | None = None, **more: Any
    ) -> int:
        """The recompute of a forward call; `more` goes to `call`."""
        module = self._rows["calls"][forward]["module_id"]
        return self.call(
            module, start_ns, end_ns, parent=parent, phase="recompute", recompute_of=forward, **more
        )

    def compilation(
        self,
        module: int | None,
        function: str,
        compile_id: str,
        *,
        call: int | None = None,
        phase: str = "forward",
        ops: int | None = 1,
        guards: int | None = 10,
        failed_guards: Sequence[str] = (),
        graph_breaks: Sequence[str] = (),
        error: str | None = None,
        took_ns: int = 1000,
    ) -> int:
        """A compilation of torch.compile within the current step; `function` is its name and `file:line`."""
        rows = self._rows["compilations"]
        row = {
            "compilation_id": len(rows),
            "step": self._step,
            "call_id": call,
            "module_id": module,
            "phase": phase,
            "compile_id": compile_id,
            "function": function,
            "ops": ops,
            "guards": guards,
            "failed_guards": list(failed_guards) or None,
            "graph_breaks": list(graph_breaks),
            "error": error,
            "start_ns": 1000 * len(rows),
            "end_ns": 1000 * len(rows) + took_ns,
        }
        rows.append(row)
        return len(rows) - 1

    def interval(
        self,
        kind: str,
        start_ns: int,
        end_ns: int,
        *,
        name: str | None = None,
        thread: int = 0,
        overhead_ns: int | None = None,
    ) -> None:
        """A backward, a wait for data, or writing, of the current step."""
        row = {"step": self._step, "kind": kind, "name": name, "thread": thread}
        row |= {"start_ns": start_ns, "end_ns": end_ns, "overhead_ns": overhead_ns}
        self._rows["intervals"].append(row)

    def optimizer(self, start_ns: int, end_ns: int, **more: Any) -> int:
        """An optimizer's step; `more` goes to `call`."""
        return self.call(None, start_ns, end_ns, phase="optimizer", **more)

    def op(
        self,
        call: int | None,
        name: str,
        start_ns: int,
        end_ns: int | None,
        *,
        phase: str | None = None,
        nth: int | None = None,
        args: str = "",
        sequence_nr: int | None = None,
        sequence_thread: int | None = None,
        forward: int | None = None,
        thread: int = 0,
        is_view: bool = False,
        flops: int | None = 0,
        bytes_read: int | None = 0,
        bytes_written: int | None = 0,
        saved_bytes: int | None = 0,
        raised: bool = False,
        accumulation: bool | None = None,
        device: tuple[int, int] | None = None,
    ) -> int:
        """An op of a call within the current step; without a call it ran outside of all of them.

        Its phase is the call's, and it is the call's next of its name, if nothing else is given; `forward` is
        its `forward_op_id`, and `device` when a device began and ended it.
        """
        rows = self._rows["ops"]
        if phase is None and call is not None:
            phase = self._rows["calls"][call]["phase"]
        if nth is None:
            nth = sum((row["call_id"], row["name"], row["step"]) == (call, name, self._step) for row in rows)
        row = {
            "op_id": len(rows),
            "step": self._step,
            "call_id": call,
            "phase": phase,
            "name": name,
            "nth": nth,
            "args": args,
            "sequence_nr": sequence_nr,
            "sequence_thread": sequence_thread,
            "forward_op_id": forward,
            "thread": thread,
            "is_view": is_view,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "flops": flops,
            "bytes_read": bytes_read,
            "bytes_written": bytes_written,
            "saved_bytes": saved_bytes,
            "raised": raised,
            "accumulation": accumulation,
            "device_start_ns": device and device[0],
            "device_end_ns": device and device[1],
        }
        rows.append(row)
        return len(rows) - 1

    def tensor(
        self,
        shape: Sequence[int],
        *,
        producer: int | None = None,
        producer_call: int | None = None,
        slot: str = "",
        site: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        storage: int | None = None,
        version: int | None = None,
        requires_grad: bool = False,
    ) -> int:
        """A contiguous tensor, made by the op `producer`, returned by a call, or a leaf at a site.

        Without a `storage` it has one of its own.
        """
        rows = self._rows["tensors"]
        row = {
            "tensor_id": len(rows),
            "site_id": site,
            "shape": list(shape),
            "stride": [int(np.prod(shape[at + 1 :])) for at in range(len(shape))],
            "offset": 0,
            "conj": False,
            "neg": False,
            "dtype": dtype,
            "device": device,
            "layout": "strided",
            "requires_grad": requires_grad,
            "storage": len(rows) if storage is None else storage,
            "version": version,
            "producer_op": producer,
            "producer_call": producer_call,
            "slot": slot,
        }
        rows.append(row)
        return len(rows) - 1

    def use(self, tensor: int, *, op: int | None = None, call: int | None = None, slot: str = "[0]") -> None:
        """An op, or a call, that reads a tensor as its argument `slot`."""
        row = {"consumer_op": op, "consumer_call": call, "slot": slot, "tensor_id": tensor}
        self._rows["uses"].append(row)

    def site(self, module: int | None, role: str, slot: str = "", *, nth: int | None = None) -> int:
        """A place where a tensor is seen; the same one again has the same id."""
        rows = self._rows["sites"]
        row = {"module_id": module, "nth": nth, "role": role, "slot": slot}
        for known in rows:
            if known | row == known:
                return int(known["site_id"])
        rows.append({"site_id": len(rows)} | row)
        return len(rows) - 1

    def value(
        self,
        site: int,
        numbers: Sequence[float] | None = (),
        *,
        call: int | None = None,
        phase: str | None = "forward",
        order: int | None = None,
        numel: int | None = None,
        note: str | None = None,
        **raw: Any,
    ) -> int:
        """The statistics of a tensor of these numbers, in the current step; None: it was not measured.

        Without an `order` it is the step's next measurement; `raw` are columns that differ from what the
        numbers give.
        """
        rows = self._rows["values"]
        if order is None:
            order = 1 + max((row["order"] for row in rows if row["step"] == self._step), default=-1)
        size = len(numbers) if numbers is not None else 0
        row = {
            "step": self._step,
            "phase": phase,
            "site_id": site,
            "call_id": call,
            "order": order,
            "shape": [size],
            "dtype": "float32",
            "numel": size if numel is None else numel,
            "note": note,
        }
        rows.append(row | raw_statistics(numbers) | raw)
        return len(rows) - 1

    def output(self, call: int, numbers: Sequence[float] | None, slot: str = "", **more: Any) -> int:
        """A row of a tensor that a forward call or a recompute returned; `more` goes to `value`."""
        made = self._rows["calls"][call]
        site = self.site(made["module_id"], "output", slot, nth=made["nth"])
        return self.value(site, numbers, call=call, phase=made["phase"], **more)

    def gradient(self, call: int, numbers: Sequence[float] | None, slot: str = "", **more: Any) -> int:
        """A row of the gradient at what a forward call returned."""
        made = self._rows["calls"][call]
        site = self.site(made["module_id"], "grad_output", slot, nth=made["nth"])
        return self.value(site, numbers, call=call, phase="backward", **more)

    def parameter(self, module: int | None, name: str, numbers: Sequence[float] | None, **more: Any) -> int:
        """A row of a parameter, as an optimizer's step found it."""
        return self.value(self.site(module, "parameter", name), numbers, phase="optimizer", **more)

    def parameter_grad(
        self, module: int | None, name: str, numbers: Sequence[float] | None, **more: Any
    ) -> int:
        """A row of a parameter's gradient, as an optimizer's step found it."""
        return self.value(self.site(module, "parameter_grad", name), numbers, phase="optimizer", **more)

    def scalar(self, name: str, value: float) -> None:
        """A number that the user logged in the current step."""
        self._rows["scalars"].append({"step": self._step, "name": name, "value": value})

    def collective(self, name: str, seq_id: int | None, start_ns: int, **more: Any) -> None:
        """A collective of the group `world` in the current step."""
        row = {"step": self._step, "name": name, "group": "world", "seq_id": seq_id, "start_ns": start_ns}
        self._rows["collectives"].append(row | more)

    def data(self) -> TypedRecording:
        """The recording."""
        return TypedRecording(self._rows, self._meta)


def raw_statistics(numbers: Sequence[float] | None) -> dict[str, Any]:
    """The raw statistics as columns of `values`, computed in float64."""
    if numbers is None:
        return {
            "count": None,
            "min": None,
            "max": None,
            "sum": None,
            "sumsq": None,
            "nan_count": 0,
            "inf_count": 0,
        }
    array = np.asarray(numbers, np.float64)
    with np.errstate(all="ignore"):
        return {
            "count": len(array),
            "min": float(array.min()) if len(array) else None,
            "max": float(array.max()) if len(array) else None,
            "sum": float(array.sum()),
            "sumsq": float(np.square(array).sum()),
            "nan_count": int(np.isnan(array).sum()),
            "inf_count": int(np.isinf(array).sum()),
        }
