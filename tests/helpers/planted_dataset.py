"""A dataset of any size in the schema of recordings, with an answer planted to each question of datasets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from modtrace.recording.arrow.arrays import Coded
from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schema
from modtrace.store.parquet import write_parquet

MS = 1_000_000
ROLES = ("output", "grad_output", "parameter", "parameter_grad", "optimizer_state")
ROWS_OF_A_MODULE = len(ROLES) + 2  # forward and backward


@dataclass(frozen=True)
class PlantedRun:
    """A run of `ranks` x `steps` of a model with `modules` layers in one root; at least 4 ranks, 40 steps, 8 layers."""

    ranks: int = 4
    steps: int = 40
    modules: int = 8
    run_id: str = "planted"

    @property
    def rows(self) -> int:
        """Roughly the number of rows."""
        return self.ranks * self.steps * (self.modules * ROWS_OF_A_MODULE + 5)

    def answers(self) -> dict[str, dict[str, Any]]:
        """Returns what the first row of the answer to each question has."""
        return {
            "nonfinite": {"step": self.steps // 2, "rank": 2, "module": "blocks.5", "role": "output"},
            "replicas": {
                "step": self.steps // 4,
                "module": "blocks.3",
                "role": "parameter",
                "rank_alone": 3,
                "agreed_before": True,
            },
            "missing-steps": {
                "rank": 1,
                "missing": 3,
                "first_missing": self.steps - 3,
                "latest_of_rank": self.steps - 4,
            },
            "slowest-ranks": {"rank": 2, "slowest_in": self.steps},
            "waiting": {"rank": 0, "name": "all_reduce", "calls": self.steps, "longest_at": "blocks.4"},
            "slowest-modules": {"module": "blocks.7", "calls": 2 * (self.ranks * self.steps - 3)},
            "gradients": {"steps": self.steps, "largest_in_step": self.steps // 3, "steps_of_5_x": 1},
            "scalars": {"name": "loss", "lowest_in_step": self.steps - 2, "lowest": 0.25},
            "magnitudes": {
                "role": "grad_output",
                "module": "blocks.6",
                "step": 7,
                "rank": 1,
                "largest": 500.0,
            },
        }

    def write(self, path: str | Path) -> None:
        """Writes the dataset, a rank after the other."""
        for rank in range(self.ranks):
            write_parquet(_Rank(self, rank), path)


class _Rank:
    """The recording of a rank, of which each table is made when it is read."""

    def __init__(self, run: PlantedRun, rank: int) -> None:
        self.meta = RunMeta(run_id=run.run_id, rank=rank, world_size=run.ranks)
        self._run, self._rank = run, rank
        self._steps = run.steps - (3 if rank == 1 else 0)

    def tensor(self, blob: str) -> Any:
        raise NotImplementedError

    def table(self, name: str) -> pa.Table:
        make = getattr(self, f"_{name}_table", None)
        batches = [] if make is None else [to_batch(name, columns) for columns in make()]
        return pa.Table.from_batches(batches, schema(name))

    def _modules_table(self) -> Iterator[Mapping[str, Any]]:
        n = self._run.modules
        yield {
            "module_id": np.arange(n + 1),
            "root_id": np.zeros(n + 1, int),
            "path": ["", *(f"blocks.{i}" for i in range(n))],
            "raw_path": ["", *(f"blocks.{i}" for i in range(n))],
            "aliases": [[]] * (n + 1),
            "name": ["Net", *[None] * n],
            "type": ["Net", *["Block"] * n],
            "parent_id": [None, *[0] * n],
        }

    def _sites_table(self) -> Iterator[Mapping[str, Any]]:
        n, kinds = self._run.modules, len(ROLES)
        of_calls = [0, 0, None, None, None]
        slots = ["", "[0]", "weight", "weight", "weight.exp_avg"]
        yield {
            "site_id": np.arange(n * kinds),
            "module_id": np.repeat(np.arange(1, n + 1), kinds),
            "nth": of_calls * n,
            "role": list(ROLES) * n,
            "slot": slots * n,
        }

    def _blocks(self) -> Iterator[range]:
        """Yields the steps of each batch."""
        each = max(1, 200_000 // (self._run.modules * len(ROLES)))
        for start in range(0, self._steps, each):
            yield range(start, min(start + each, self._steps))

    def _values_table(self) -> Iterator[Mapping[str, Any]]:
        n, kinds, run = self._run.modules, len(ROLES), self._run
        rng = np.random.default_rng(self._rank)
        sites = np.arange(n * kinds)
        phases = np.array([0, 1, 0, 1, 0])
        for steps in self._blocks():
            many = len(steps)
            step, site = np.repeat(np.array(steps), n * kinds), np.tile(sites, many)
            module, kind, numel = site // kinds, site % kinds, 4096
            is_shared = kind >= 2  # a parameter, its gradient or its state: the same on all ranks
            scale = np.exp(rng.standard_normal(len(step)) / 8)
            scale[is_shared] = 1 + (step[is_shared] * 7 + site[is_shared]) % 100 / 1000
            scale[(kind == 3) & (step == run.steps // 3)] *= 20
            top = 3 * scale
            nans = np.zeros(len(step), int)
            nans[(step >= run.steps // 2) & (module >= 5) & (kind == 0) & (self._rank == 2)] = 3
            nans[(step > run.steps // 2) & (kind == 0)] = 3
            top[(step == 7) & (module == 6) & (kind == 1) & (self._rank == 1)] = 500.0
            odd = (step >= run.steps // 4) & (module == 3) & (kind == 2) & (self._rank == 3)
            hashes = step * 1_000_003 + site * 2 + odd
            yield {
                "step": step,
                "phase": phases[kind],
                "site_id": site,
                "order": np.tile(sites, many),
                "shape": np.full((len(step), 2), 64),
                "dtype": Coded(["float32"], np.zeros(len(step), int)),
                "numel": np.full(len(step), numel),
                "count": np.full(len(step), numel),
                "min": np.where(nans > 0, np.nan, -2.5 * scale),
                "max": np.where(nans > 0, np.nan, top),
                "sum": scale,
                "sumsq": numel * scale**2,
                "nan_count": nans,
                "inf_count": np.zeros(len(step), int),
                "hash": _binary(hashes, is_shared),
            }

    def _calls_table(self) -> Iterator[Mapping[str, Any]]:
        n = self._run.modules
        rng = np.random.default_rng(100 + self._rank)
        a_step = 2 * n + 2  # root and layers, forward and backward
        for steps in self._blocks():
            many = len(steps)
            step = np.repeat(np.array(steps), a_step)
            nth = np.tile(np.arange(a_step), many)
            module, phase = nth % (n + 1), nth // (n + 1)
            call = step * a_step + nth
            took = (MS + rng.integers(0, MS // 10, len(step))) * np.where(module == 8, 5, 1)
            by_phase = took.reshape(many, 2, n + 1)
            by_phase[:, :, 0] = by_phase[:, :, 1:].sum(2) + MS
            start = step * 40 * MS * n + nth * 6 * MS
            yield {
                "call_id": call,
                "step": step,
                "module_id": module,
                "nth": np.zeros(len(step), int),
                "parent_call_id": np.ma.masked_array(step * a_step + phase * (n + 1), module == 0),
                "phase": phase,
                "thread": np.zeros(len(step), int),
                "start_ns": start,
                "end_ns": start + took,
                "raised": np.zeros(len(step), bool),
                "compiled": np.zeros(len(step), bool),
            }

    def _steps_table(self) -> Iterator[Mapping[str, Any]]:
        n = self._steps
        start = np.arange(n) * 100 * MS
        yield {
            "step": np.arange(n),
            "kind": Coded(["train"], np.zeros(n, int)),
            "start_ns": start,
            "end_ns": start + 80 * MS,
            "overhead_ns": np.zeros(n, int),
        }

    def _collectives_table(self) -> Iterator[Mapping[str, Any]]:
        n = self._steps
        start = np.arange(n) * 100 * MS
        # All steps take as long, because the others wait for rank 2.
        waits = np.full(n, 0 if self._rank == 2 else (12 if self._rank == 0 else 9) * MS)
        waits[n // 2] += 5 * MS if self._rank != 2 else 0
        paths = ["blocks.2"] * n
        paths[n // 2] = "blocks.4"
        yield {
            "step": np.arange(n),
            "path": paths,
            "phase": np.ones(n, int),
            "name": Coded(["all_reduce"], np.zeros(n, int)),
            "group": Coded(["0:default_pg"], np.zeros(n, int)),
            "seq_id": np.arange(n),
            "bytes_read": np.full(n, 1 << 20),
            "bytes_written": np.full(n, 1 << 20),
            "start_ns": start,
            "end_ns": start + waits,
            "wait_ns": waits,
        }

    def _scalars_table(self) -> Iterator[Mapping[str, Any]]:
        value = 1 + 1 / (1 + np.arange(self._steps))
        if self._steps > self._run.steps - 2:
            value[self._run.steps - 2] = 0.25
        yield {"step": np.arange(self._steps), "name": ["loss"] * self._steps, "value": value}


def _binary(numbers: np.ndarray, is_there: np.ndarray) -> pa.Array:
    """Returns each number as eight bytes; null where there is none."""
    offsets = np.arange(0, 8 * len(numbers) + 1, 8, dtype=np.int32)
    validity = pa.py_buffer(np.packbits(is_there, bitorder="little").tobytes())
    buffers = [validity, pa.py_buffer(offsets.tobytes()), pa.py_buffer(numbers.astype("<i8").tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(numbers), buffers)
