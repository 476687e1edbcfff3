"""A recording that is written step by step, for what follows it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from builders import RecordingBuilder
from modtrace.store.writer import FolderWriter


class GrowingRun:
    """A recording that is written step by step, until all of its steps are."""

    def __init__(self, to: Path, steps: int = 6, **meta: Any) -> None:
        build = RecordingBuilder(**meta)
        net = build.module("", "Net")
        for step in range(steps):
            build.step(step, 100 * step, 100 * step + 90)
            build.output(build.call(net, 100 * step, 100 * step + 60, nth=0), [1.0, 2.0])
        self._data, self._next = build.data(), 0
        self._writer = FolderWriter(to, self._data.meta, strict=True)
        for name in ("modules", "sites"):
            self._write(name, self._data.table(name))
        self.go_on()

    def _write(self, name: str, table: pa.Table) -> None:
        for batch in table.to_batches():
            self._writer.write(name, dict(zip(table.column_names, batch.columns, strict=True)))

    def go_on(self) -> None:
        for name in ("calls", "values", "steps"):
            table = self._data.table(name)
            self._write(name, table.filter(pc.equal(table["step"], self._next)))
        self._next += 1
        self._writer.end_step(0, force=True)

    def close(self) -> None:
        self._writer.close()
