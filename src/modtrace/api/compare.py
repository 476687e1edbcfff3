"""The function that compares two runs: recordings, or two models that are recorded on the same input."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..analysis.divergence.answer import Comparison
from ..analysis.divergence.compare import compare_recordings
from ..analysis.tables.ranks import as_one, find_missing
from ..optional import require
from ..recording.protocols import RecordingData
from ..store.reader import open_last_attempts, read_given
from .answers import ShownComparison
from .graph import shorten


def compare(
    a: Any,
    b: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    map: str | Sequence[str] | Mapping[str, str] = (),
    noise: Any = (),
    tolerance: float | None = None,
    step: int | str | tuple[int | str, int | str] | None = None,
    allow_missing: bool = False,
    seed: int = 0,
    gradients: bool = False,
) -> Comparison:
    """Returns where two runs part first, how the difference grows, and which op or module made it.

        modtrace.compare("before.modtrace", "after.modtrace")
        modtrace.compare(model, port, (tokens,))
        modtrace.compare("run.modtrace", "run.modtrace", step=(0, 1))

    docs/compare.md explains the answer. It is true if the runs agree.

    Args:
        a: a `Recording`, the path of one, of which all ranks are compared, or a `torch.nn.Module`.
        b: another one.
        args: the positional arguments of both models, which are then recorded on them.
        kwargs: the keyword arguments of both models.
        map: rules for modules that are called otherwise in the second run: `EXPRESSION=PATH`, a regular expression over
            the paths of the first and the path in the second, where `.\\1` stands for a group; or several, or a dict.
        noise: further runs of the configuration of `a`, which show how far equal runs are apart.
        tolerance: the relative error up to which runs agree, instead of noise that is measured or assumed.
        step: the only step to compare, a number or a word such as `last-train`; a pair of them for two recordings whose
            steps have other numbers, or for two steps of one; None for all steps.
        allow_missing: what only one of the runs has does not make them disagree.
        seed: the random generators are set to it before a model runs.
        gradients: models also run backward, from `output.loss` if there is one, else from the sum of the outputs.

    Raises:
        TypeError: `a` or `b` is something else, or models are compared without arguments.
        ValueError: there is no such step, or a rule of `map` means nothing.
        NothingRecordedError: the runs have nothing in common, or nothing was measured.
        ModtraceError: a recording cannot be read.
    """
    read = partial(_read, args=args, kwargs=kwargs, seed=seed, gradients=gradients)
    first, second = (read(run, name) for run, name in ((a, "a"), (b, "b")))
    noise = noise if isinstance(noise, (list, tuple)) else [noise]
    step_a, step_b = step if isinstance(step, tuple) else (step, None)
    found = compare_recordings(
        first,
        second,
        rules=_to_rules(map),
        noise=[read(run, "noise") for run in noise],
        tolerance=tolerance,
        step=step_a,
        step_b=step_b,
        allow_missing=allow_missing,
    )
    return ShownComparison.of(found)


def _read(
    given: Any,
    name: str,
    *,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    seed: int,
    gradients: bool,
) -> RecordingData:
    """Returns a recording, or the recording of a model that is run on the arguments."""
    if isinstance(given, (str, os.PathLike)):
        ranks = open_last_attempts(given)
        return as_one(ranks, find_missing(ranks))
    if (recorded := read_given(given)) is not None:
        return recorded
    if not callable(getattr(given, "named_modules", None)):
        raise TypeError(
            f"compare({name}={shorten(given)}): give a recording, the path of one, or a torch.nn.Module"
        )
    if args is None and kwargs is None:
        raise TypeError(
            "compare() of models: give the arguments of the call too, as a tuple: compare(model, other, (x,))"
        )
    if args is not None and not isinstance(args, (tuple, list)):
        raise TypeError(
            f"compare(args=...): give a tuple, (x,) for one argument, not a {type(args).__name__}"
        )
    require("torch", "modtrace.compare() of models")
    from ..replay.recorded_run import record_from_seed

    return record_from_seed(given, args or (), kwargs or {}, seed=seed, gradients=gradients)


def _to_rules(given: str | Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Mapping):
        return tuple(f"{expression}={path}" for expression, path in given.items())
    return tuple(given)
