"""Tells of each tensor that an op is about to write to, so that its content can be copied just before."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..collect.ops.mode import UnwrappedMode, tensors_in
from ..collect.ops.schemas import OpPlan
from ..torch_internals import keep_out_of_dynamo


class WriteGuard(UnwrappedMode):
    """A mode that stands below the recorder, and goes on when that has failed.

    It does not hear of what compiled code and other threads write.
    """

    def __init__(self, about_to_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        keep_out_of_dynamo(WriteGuard.__torch_dispatch__)
        self._tell = about_to_write
        self._plans: dict[int, OpPlan] = {}  # by `id` of the op, which the plan holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = OpPlan(func, len(self._plans))
        kwargs = kwargs or {}
        if plan.writes or plan.is_collective:
            for tensor in _written(plan, args, kwargs):
                self._tell(tensor)
        return plan.call(*args, **kwargs)


def _written(plan: OpPlan, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an op writes to; of a collective, whose schema says nothing of that, all that it is given."""
    given: list[Any] = [args, kwargs]
    if not plan.is_collective:
        given = [
            args[each.key] if isinstance(each.key, int) and each.key < len(args) else kwargs.get(each.name)
            for each in plan.written
        ]
    for tensor, _ in tensors_in(given, ""):
        yield tensor
