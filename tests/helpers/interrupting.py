"""A recording in memory whose writing is interrupted."""

from typing import Any

from modtrace.recording.in_memory.recording import MemoryRecording


class Interrupting(MemoryRecording):
    """Is interrupted when it is given the calls of a step, once."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at: int | None = step

    def write(self, table: str, columns: Any) -> None:
        if table == "calls" and columns["step"].to_pylist()[0] == self._at:
            self._at = None
            raise KeyboardInterrupt
        super().write(table, columns)
