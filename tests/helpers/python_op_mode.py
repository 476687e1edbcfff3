"""What `_op_mode.c` and `_places.c` do, in Python: their specification."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from helpers.python_tensor_ids import ArgumentReader, TensorIds
from modtrace.collect.log.thread_log import ThreadLog
from modtrace.collect.ops.mode import GRAD_MODE, NO_NODE, NOT_ADDING, PACKS, RAISED, OpMode, tensors_in
from modtrace.collect.ops.schemas import OpSchema
from modtrace.collect.scopes.tracker import ScopeTracker
from modtrace.torch_internals.autograd import graph_task_id, sequence_nr
from modtrace.torch_internals.saved import saved_tensors_hooks


class PythonOpMode(OpMode):
    """Sees ops as `OpMode` does, and asks Python alone. Only its events lie in the columns of the C code."""

    def __init__(self, tracker: ScopeTracker, failed: Callable[[Exception, str], None]) -> None:
        super().__init__(tracker, failed)
        self.ids: Any = TensorIds()
        self._reader = ArgumentReader(self.ids)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = self.schema_of(func)
        if self.is_off or (schema.may_be_ours and schema.is_ours(args)):
            return schema.call(*args, **kwargs) if kwargs else schema.call(*args)
        op = self.next
        self.next = op + 1
        self.is_running = True
        ids = self.ids
        try:
            key = self._reader.read(schema.index, args, kwargs)
            arguments = self.texts.numbers.get(key)
            if arguments is None:
                arguments = self.texts.add(schema, key)
            log = self._tracker.logs.current
            if ids.leaves:
                self.report_leaves(log, schema.only_written(kwargs or {}))
            at, node, flags = self._locate(log)
            for begins in self.before:
                begins(op, schema, args, kwargs or {})
        except Exception as error:
            self.fail(error, f"the op {schema.name}")
            return schema.call(*args, **kwargs) if kwargs else schema.call(*args)
        # What a storage gained since the last op is counted with this one.
        uses, live, sequence = ids.used_count, ids.lowest_bytes, sequence_nr()
        unseen = self._versions_of_written(schema, args, kwargs or {}) if schema.is_foreach else ()
        start = time.perf_counter_ns()
        try:
            output = schema.call(*args, **kwargs) if kwargs else schema.call(*args)
        except BaseException as error:
            end = time.perf_counter_ns()
            self._write(schema, args, kwargs or {}, None)
            self.append_event(
                op, schema.index, arguments, uses, ids.next, start, end, at, sequence, flags | RAISED,
                live, ids.live_bytes, node, ids.take_allocated(),
            )  # fmt: skip
            self.is_running = False
            if isinstance(error, RuntimeError):
                self._raised(op, error)
            raise
        end = time.perf_counter_ns()
        try:
            if schema.writes:
                self._write(schema, args, kwargs or {}, op)
                self._recount(unseen)
            elif schema.is_collective:  # it declares no argument that it writes to: that is what it returns
                for tensor, _ in tensors_in(output, ""):
                    self._write_tensor(tensor, op)
            if isinstance(output, torch.Tensor):
                self._make(output, op, "", () if schema.is_changing_view else args)
            elif output is not None:
                for tensor, slot in tensors_in(output, ""):
                    self._make(tensor, op, slot, args)
            self.append_event(
                op, schema.index, arguments, uses, ids.next, start, end, at, sequence, flags,
                live, ids.live_bytes, node, ids.take_allocated(),
            )  # fmt: skip
            self.is_running = False
            for ended in self.after:
                ended(op, schema, output)
        except Exception as error:
            self.fail(error, f"the op {schema.name}")
        return output

    def _locate(self, log: ThreadLog) -> tuple[int, int, int]:
        """Records where an op runs, as far as this is known at once. The rest is looked up for many ops together.

        Returns:
            the event of the running segment, the number of the running node, and flags.
        """
        where, backward, node, flags = log.segment, None, NO_NODE, 0
        if torch.is_grad_enabled():
            flags = GRAD_MODE | PACKS if saved_tensors_hooks(True) is not None else GRAD_MODE
        task = graph_task_id()
        at = len(log.contexts) - 1
        if where is None or log.task != task:
            where, backward, node, more = self._locate_elsewhere(log, task, flags)
            flags |= more
        else:
            if sys._getframe(2).f_code not in log.context.codes and not log.pinned:
                where = self._check_frames(log, sys._getframe(2))
                at = len(log.contexts) - 1
            flags |= NOT_ADDING
        self._start_run(where, backward, log)
        return at, node, flags

    def _write(self, schema: OpSchema, args: Any, kwargs: Any, op: int | None) -> None:
        """Records the writes of an op to its arguments.

        `op` is None if it has raised, and has maybe resized them; the same holds of an op that changes what a tensor
        shows (`set_`).
        """
        if schema.is_changing_view:
            op = None
        for tensor in schema.find_written(args, kwargs):
            self._write_tensor(tensor, op)

    def _write_tensor(self, tensor: torch.Tensor, op: int | None) -> None:
        try:
            if op is None:
                self.ids.resized(tensor.untyped_storage())
            else:
                self.ids.write(tensor, op)
        except Exception:
            return  # it is unreadable: every time it is met it is another tensor

    def _make(self, tensor: torch.Tensor, op: int, slot: str, given: Any) -> None:
        try:
            self.ids.make(tensor, op, slot, given)
        except Exception as error:  # it has no storage, or a subclass of the user's raises
            self.ids.note_unreadable(tensor, op, slot, error)
