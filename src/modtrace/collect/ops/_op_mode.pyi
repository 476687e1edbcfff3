from array import array
from typing import Any

from ..log.thread_log import ThreadLog
from .schemas import OpSchema

state: object

class CompiledOpMode:
    next: int
    is_running: bool
    is_off: bool
    usual_mask: int
    _task: int
    _task_backward: Any
    _maker: ThreadLog | None
    _where: Any
    _backward: Any
    _log: ThreadLog | None
    @property
    def event_count(self) -> int: ...
    def set_up(self, state: object, held: tuple[Any, ...], /) -> None: ...
    def measure_with(self, *given: Any) -> None: ...
    def schema_of(self, func: Any, /) -> OpSchema: ...
    def locate(self, log: ThreadLog, /) -> tuple[int, int, int]: ...
    def append_event(self, *numbers: int) -> None: ...
    def take_events(self) -> array[int]: ...
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any: ...
