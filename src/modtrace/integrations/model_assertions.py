"""Assertions about models for tests: that a model computes what it did before, and that all it computes is finite."""

import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from ..analysis.divergence.compare import compare_recordings
from ..analysis.divergence.environment import compare_environments
from ..analysis.provenance.search import find_first
from ..analysis.tables.missing_rows import require_rows
from ..collect.recorder.environment import describe_cpu
from ..errors import ModtraceWarning, RecordingError
from ..recording.json_text import parse_json
from ..recording.meta import RunMeta
from ..recording.protocols import RecordingData
from ..recording.role import LEAF, OP_OUTPUT, OUTPUT
from ..recording.statistics.fingerprints import SKETCH_FLOOR
from ..replay.recorded_run import record_from_seed, record_in_float64
from ..store.copy import write_recording
from ..store.golden import are_same, read_golden, to_golden, write_golden, write_whole
from ..views.text.comparison import render_comparison
from ..views.text.nonfinite import render_nonfinite

#: The relative error that is tolerated in the environment of the golden recording, where equal models give equal bits.
#: It is the least that sketches show.
SAME_ENVIRONMENT = SKETCH_FLOOR

#: The least relative error that is tolerated in another environment. The oldest kernels of a CPU and its newest ones
#: gave outputs up to 1.3e-6 apart, in a CNN, two transformers with 8 layers and an LSTM.
OTHER_ENVIRONMENT = 5e-6

#: This multiple of what a model's own rounding makes is tolerated there, if that is more: with batch norm in training,
#: the same kernels gave outputs 9.5e-6 apart, and float32 gave 8.7e-6 against float64.
_OF_ROUNDING = 4.0

#: A larger difference between the model and its copy in float64 is not only rounding, but random numbers, for example.
_MOST_ROUNDING = 0.05

#: The flag that changes no number, because each run sets its seed.
_SEED = "seed"


class ModelAssertions:
    """The fixture `modtrace` of pytest."""

    def __init__(self, *, folder: Path, test: str, update: bool, make_folder: Callable[[], Path]) -> None:
        """Creates the assertions of one test.

        Args:
            folder: where golden recordings lie.
            test: the name with which pytest runs only this test.
            update: golden recordings that differ are written again.
            make_folder: returns a new folder, in which recordings of failures are kept.
        """
        self._folder = folder
        self._test = test
        self._update = update
        self._make_folder = make_folder

    def assert_same(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        golden: str,
        ops: bool = False,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        """Asserts that the outputs of all modules in one forward are those of a golden recording.

            modtrace.assert_same(model, (tokens,), golden="tiny-gpt")

        `pytest --modtrace-update` writes the golden recording. docs/pytest.md says what it holds. The model, its
        arguments and the random generators are as before afterwards.

        Args:
            model: the model, in the mode (`eval()` or `train()`) in which it is called.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
            golden: the name of the golden recording, which is `golden/NAME.golden` beside the test.
            ops: also compares what each op returns, to name the op that differs.
            tolerance: the relative error up to which outputs agree; None: 5e-7 in the environment of the golden
                recording, and in others 5e-6, or four times the model's own rounding.
            seed: the random generators are set to it before the model runs.

        Raises:
            AssertionError: outputs differ, or there is no golden recording.
            RecordingError: the golden recording cannot be read or written.
        """
        __tracebackhide__ = True
        roles = (OUTPUT, OP_OUTPUT, LEAF) if ops else (OUTPUT,)
        data = record_from_seed(model, args, kwargs or {}, seed=seed, gradients=False, ops=ops, roles=roles)
        require_rows(data, "values")
        run = to_golden(data, _describe_run(model, data.meta))
        path = self._find_path(golden)
        if self._update:
            _update(path, run, _measure_rounding(run, model, args, kwargs or {}, seed))
            return
        if not path.exists():
            raise AssertionError(
                f"there is no golden recording {path}\n{self._advise_update('To record it')}"
            )
        expected, rounding = _read(path, run.meta)
        other = compare_environments(expected.meta, run.meta, differ=False)
        if tolerance is None:
            tolerance = max(OTHER_ENVIRONMENT, _OF_ROUNDING * rounding) if other else SAME_ENVIRONMENT
        found = compare_recordings(expected, run, tolerance=tolerance)
        if other:
            missing = [] if path.with_suffix(".json").exists() else ["its file .json is missing"]
            warnings.warn(
                _describe_other(golden, [*missing, *other], tolerance), ModtraceWarning, stacklevel=2
            )
        if not found.ok:
            kept = self._keep(golden=expected, run=data)
            command = shlex.join(
                ["modtrace", "compare", *map(str, kept.values()), f"--tolerance={tolerance:g}"]
            )
            answer = render_comparison(found, top=5)
            raise AssertionError(
                f"{type(model).__name__} differs from the golden recording {golden!r}, which is the first run here:\n"
                f"{answer.rstrip()}\n\nMore: {command}\n{self._advise_update('If it should')}"
            )

    def assert_finite(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        gradients: bool = False,
        seed: int = 0,
    ) -> None:
        """Asserts that no op of one forward makes a NaN or an infinite value, but those intended, such as masks.

            modtrace.assert_finite(model, (tokens,), gradients=True)

        The model, its arguments and the random generators are as before afterwards.

        Args:
            model: the model, in the mode (`eval()` or `train()`) in which it is called.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
            gradients: a backward runs, too, from `output.loss` if there is one, else from the sum of the outputs.
            seed: the random generators are set to it before the model runs.

        Raises:
            AssertionError: an op makes such values, or a parameter or an argument has some.
        """
        __tracebackhide__ = True
        data = record_from_seed(model, args, kwargs or {}, seed=seed, gradients=gradients)
        found = find_first(data)
        if found is not None:
            kept = self._keep(run=data)["run"]
            command = shlex.join(["modtrace", "nonfinite", str(kept), "--all"])
            answer = render_nonfinite(found).rstrip()
            raise AssertionError(f"{type(model).__name__} is not finite:\n{answer}\n\nMore: {command}")

    def _find_path(self, golden: str) -> Path:
        parts = PurePosixPath(golden).parts
        if not parts or ".." in parts or PurePosixPath(golden).is_absolute():
            raise ValueError(f"golden={golden!r}: give a name, such as 'tiny-gpt' or 'models/tiny-gpt'")
        return self._folder.joinpath(*parts[:-1], f"{parts[-1]}.golden")

    def _keep(self, **runs: RecordingData) -> dict[str, Path]:
        """Writes recordings of a failure to a new folder, and returns their paths."""
        folder = self._make_folder()
        paths = {name: folder / f"{name}.modtrace" for name in runs}
        for name, data in runs.items():
            write_recording(data, paths[name])
        return paths

    def _advise_update(self, why: str) -> str:
        return f"{why}: {shlex.join(['pytest', '--modtrace-update', self._test])}"


def _update(path: Path, run: RecordingData, rounding: float) -> None:
    """Writes a golden recording and its environment, each if it differs from the file that is there."""
    try:
        is_same = are_same(read_golden(path, RunMeta()), run)
    except (FileNotFoundError, RecordingError):
        is_same = False
    if not is_same:
        write_golden(run, path)
    flags = {
        name: flag for name, flag in (run.meta.flags or {}).items() if name != _SEED and flag is not None
    }
    environment = {
        "versions": {"torch": run.meta.versions["torch"]},
        "device": run.meta.device,
        "flags": flags,
        "rounding": rounding,
    }
    text = (json.dumps(environment, indent=2, sort_keys=True) + "\n").encode()
    file = path.with_suffix(".json")
    if not file.exists() or file.read_bytes() != text:
        write_whole(file, text)


def _read(path: Path, meta: RunMeta) -> tuple[RecordingData, float]:
    """Returns a golden recording and its rounding. Except for the environment, its run is described as `meta` is."""
    file = path.with_suffix(".json")
    environment: dict[str, Any] = {"versions": {}, "device": "", "flags": {}, "rounding": 0.0}
    if file.exists():
        try:
            given = parse_json(file.read_bytes())
            environment = {name: type(like)(given[name]) for name, like in environment.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(
                f"{file}: this is no environment of a golden recording ({error!r}). "
                "Restore it, or run pytest --modtrace-update to write it again."
            ) from error
    described = replace(
        meta,
        versions={**meta.versions, **environment["versions"]},
        device=environment["device"],
        flags={**(meta.flags or {}), **environment["flags"]},
    )
    return read_golden(path, described), environment["rounding"]


def _describe_run(model: nn.Module, meta: RunMeta) -> RunMeta:
    """Returns the description of a run. What other tests did with a GPU does not matter to a model on a CPU."""
    tensors: Iterable[torch.Tensor] = (*model.parameters(), *model.buffers())
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return replace(meta, device=describe_cpu()) if is_on_cpu else meta


def _measure_rounding(
    run: RecordingData, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> float:
    """Returns the largest relative error of an output, compared with a copy of the model in float64.

    It has two digits; 0 if such a copy does not run, or computes something else.
    """
    exact = record_in_float64(model, args, kwargs, seed=seed, roles=(OUTPUT,))
    if exact is None:
        return 0.0
    errors = compare_recordings(run, exact, tolerance=0.0).table["error"].to_pylist()
    largest = max((error for error in errors if not math.isnan(error)), default=0.0)
    return float(f"{largest:.1e}") if largest <= _MOST_ROUNDING else 0.0


def _describe_other(golden: str, lines: Sequence[str], tolerance: float) -> str:
    return (
        f"the golden recording {golden!r} was made in another environment, so a relative error of {tolerance:g} is "
        f"tolerated: {'; '.join(lines)}"
    )
