from collections.abc import Callable
from typing import Any

state: object

class CompiledMethod:
    def __init__(
        self,
        original: Callable[..., Any],
        listeners: list[Any],
        order: Callable[..., tuple[Any, ...]],
        kind: str,
        outputs: int,
        inputs: int,
        peer: int,
        is_message: bool,
    ) -> None: ...
    def start(self, group: Any, /, *args: Any, **kwargs: Any) -> Any: ...
    def wait(self, work: Any, /, *args: Any, **kwargs: Any) -> Any: ...

class CompiledCalls:
    is_on: bool
    step: int
    def set_up(self, state: object, exchange: object, probe: object, held: tuple[Any, ...], /) -> None: ...
    def append_group(
        self,
        group: Any,
        messages: int,
        last: int,
        is_left_out: bool,
        is_numbered: bool,
        shows_ends: bool,
        /,
    ) -> int: ...
    def forget_group(self, index: int, /) -> None: ...
    def count(self, index: int, /) -> tuple[int, int]: ...
    def keep_in(self, memory: object, address: int, size: int, /) -> None: ...
    def read(self) -> tuple[int, bytearray]: ...
    def take(self, until_ns: int, /) -> tuple[int, bytearray, list[Any], list[Any]]: ...
