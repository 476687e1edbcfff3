from collections.abc import Callable, Mapping
from typing import Any

def open(path: str) -> None: ...
def load(device: int, image: bytes, names: tuple[str, ...]) -> tuple[int, ...]: ...
def measure(
    task: tuple[Any, ...], program: tuple[int, ...], stream: int, scratch: tuple[int, int]
) -> bool: ...

class Launcher:
    def __new__(
        cls,
        types: tuple[type, ...],
        kinds: tuple[int, ...],
        dispatch_keys: Callable[[Any], Any],
        tracing_state: Callable[[], Any],
        current_stream: Callable[[int], int],
        kind: type,
        paths: Mapping[Any, tuple[Any, ...]],
    ) -> Launcher: ...
    def measure(self, tensor: Any, batches: Mapping[Any, Mapping[Any, Batch]] | None) -> Any: ...

class Batch:
    def __new__(cls, program: tuple[int, ...]) -> Batch: ...
    measured: list[Any]
    def sizes(self) -> tuple[int, int]: ...
    def launch(self, stream: int, table: int, device_table: int, parts: int, counters: int) -> bool: ...
