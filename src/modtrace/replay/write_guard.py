"""Reports each tensor that an op is about to write to, so that its content can be copied before."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..collect.ops.mode import tensors_in
from ..collect.ops.schemas import OpSchema
from ..torch_internals.dynamo import keep_out_of_dynamo
from ..torch_internals.modes import UnwrappedMode


class WriteGuard(UnwrappedMode):
    """A mode below the recorder, which continues after the recorder has failed.

    It does not see what compiled code and other threads write.
    """

    def __init__(self, about_to_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        keep_out_of_dynamo(WriteGuard.__torch_dispatch__)
        self._tell = about_to_write
        self._schemas: dict[int, OpSchema] = {}  # by `id` of the op, which the schema holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = self._schemas.get(id(func))
        if schema is None:
            schema = self._schemas[id(func)] = OpSchema(func, len(self._schemas))
        kwargs = kwargs or {}
        if schema.writes or schema.is_collective:
            for tensor in _written(schema, args, kwargs):
                self._tell(tensor)
        return schema.call(*args, **kwargs)


def _written(schema: OpSchema, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an op writes to. The schema of a collective does not say; all its tensors are yielded."""
    given: list[Any] = [args, kwargs]
    if not schema.is_collective:
        given = [
            args[each.key] if isinstance(each.key, int) and each.key < len(args) else kwargs.get(each.name)
            for each in schema.written
        ]
    for tensor, _ in tensors_in(given, ""):
        yield tensor
