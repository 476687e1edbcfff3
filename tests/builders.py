"""Types a recording by hand: modules, calls, steps and values in, a `RecordingData` out.

    build = RecordingBuilder()
    gpt = build.module("", "GPT", parameters=120)
    head = build.module("head", "Linear", parent=gpt, parameters=100)
    step = build.step(0, 0, 1000)
    outer = build.call(gpt, 0, 600)
    build.call(head, 100, 500, parent=outer)
    build.optimizer(800, 900)
    build.output(outer, [0.5, float("nan")])
    build.parameter(head, "weight", [1.0, -1.0])
    data = build.data()

Times are nanoseconds; `end_ns=None` is a call whose end was not seen. Ids count up from 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from modtrace.recording.batches import to_batch
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schema


class TypedRecording:
    """A `RecordingData` of rows that were typed by hand."""

    def __init__(self, rows: Mapping[str, Sequence[Mapping[str, Any]]], meta: RunMeta) -> None:
        self.meta = meta
        self._rows = rows

    def table(self, name: str) -> pa.Table:
        fields, rows = schema(name), self._rows.get(name, ())
        if not rows:
            return fields.empty_table()
        columns = {each: [row[each] for row in rows] for each in rows[0]}
        return pa.Table.from_batches([to_batch(name, columns)])


class RecordingBuilder:
    """Collects rows; every method gives the id of what it added."""

    def __init__(self, **meta: Any) -> None:
        """`meta` are fields of `RunMeta`."""
        self._meta = RunMeta(**meta)
        self._rows: dict[str, list[dict[str, Any]]] = {
            table: [] for table in ("modules", "sites", "calls", "values", "steps", "scalars")
        }
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
        self, step: int, start_ns: int, end_ns: int, *, kind: str = "train", overhead_ns: int | None = None
    ) -> int:
        """A complete step; the calls that follow belong to it."""
        row = {"step": step, "kind": kind, "start_ns": start_ns, "end_ns": end_ns}
        self._rows["steps"].append(row | {"overhead_ns": overhead_ns})
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
        overhead_ns: int | None = None,
    ) -> int:
        """A call of a module within the current step; `forward` is the `forward_call_id` of a backward."""
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
            "raised": raised,
        }
        rows.append(row)
        return len(rows) - 1

    def backward(self, forward: int, start_ns: int, end_ns: int | None, *, parent: int | None = None) -> int:
        """The backward of a forward call."""
        module = self._rows["calls"][forward]["module_id"]
        return self.call(module, start_ns, end_ns, parent=parent, phase="backward", forward=forward)

    def recompute(self, forward: int, start_ns: int, end_ns: int | None, *, parent: int | None = None) -> int:
        """The recompute of a forward call."""
        module = self._rows["calls"][forward]["module_id"]
        return self.call(module, start_ns, end_ns, parent=parent, phase="recompute", recompute_of=forward)

    def optimizer(self, start_ns: int, end_ns: int) -> int:
        """An optimizer's step."""
        return self.call(None, start_ns, end_ns, phase="optimizer")

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
