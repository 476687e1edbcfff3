"""Defines checks, and runs them on a recording."""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import describe_error
from ...recording.protocols import RecordingData
from ...recording.suggestions import did_you_mean
from ..tables.sampled_steps import SampledSteps, sample_steps
from .finding import SEVERITIES, CannotCheck, Finding, Findings, Unchecked

#: A function that looks for one thing that may be wrong. Its keyword arguments are thresholds.
Find = Callable[..., Iterable[Finding]]


@dataclass(frozen=True)
class RunCheck:
    """One thing that may be wrong with a run, and the function that finds it."""

    name: str
    about: str  # what it finds, a clause
    needs: str  # what has to be recorded
    find: Find

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The thresholds with their defaults."""
        parameters = list(inspect.signature(self.find).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def __call__(self, run: SampledSteps, **thresholds: float) -> Iterable[Finding]:
        """Returns what is found in a recording."""
        return self.find(run, **thresholds)


def check(name: str, *, about: str, needs: str = "") -> Callable[[Find], RunCheck]:
    """Makes a check of a function, which takes a `SampledSteps` and yields each `Finding`.

    Further arguments of the function are thresholds: numbers with defaults, which users may set. The function raises
    `CannotCheck` if the recording has not what it needs.

    Args:
        name: as in `--only`: small letters with hyphens.
        about: what it finds: `parameters that never get a gradient`.
        needs: what has to be recorded: `values`; "" if calls are enough.
    """
    return lambda find: RunCheck(name, about, needs, find)


def run_checks(
    data: RecordingData,
    checks: Sequence[RunCheck],
    *,
    only: Collection[str] = (),
    ignore: Collection[str] = (),
    thresholds: Mapping[str, float] | None = None,
    other_names: Sequence[str] = (),
) -> Findings:
    """Returns what checks find in a recording, worst first; equally grave findings are in the order of the checks.

    Args:
        data: the recording.
        checks: the checks to choose from.
        only: names of the checks to run; all by default.
        ignore: names of checks not to run.
        other_names: names of checks that are run elsewhere.
        thresholds: thresholds by `check.threshold`: `{"loss-spike.factor": 8}`.

    Raises:
        ValueError: there is no such check or threshold.
    """
    given = _split_thresholds(checks, thresholds or {})
    there = [*(known.name for known in checks), *other_names]
    for argument, names in (("only", only), ("ignore", ignore)):
        for name in names:
            if name not in there:
                hint = did_you_mean(name, there) or f" There are: {', '.join(there)}"
                raise ValueError(f"{argument}={name!r}: no check of this name.{hint}")
    chosen = [one for one in checks if (not only or one.name in only) and one.name not in ignore]
    run = sample_steps(data)
    findings: list[Finding] = []
    unchecked: list[Unchecked] = []
    checked: list[str] = []
    for one in chosen:
        try:
            found = [replace(finding, check=one.name) for finding in one(run, **given.get(one.name, {}))]
        except CannotCheck as reason:
            unchecked.append(Unchecked(check=one.name, why=reason.why, remedy=reason.remedy))
            continue
        except Exception as error:  # a check, which may be the user's, does not take the others along
            unchecked.append(Unchecked(check=one.name, why=_describe_raised(error), remedy=""))
            continue
        checked.append(one.name)
        findings += found
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Findings(findings=tuple(findings), checked=tuple(checked), unchecked=tuple(unchecked))


def _describe_raised(error: Exception) -> str:
    """Returns what a check raised, and where: `raised ValueError: ..., at checks.py:12`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"it raised {describe_error(error)}, at {Path(last.filename).name}:{last.lineno}"


def _split_thresholds(
    checks: Sequence[RunCheck], thresholds: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Returns thresholds by check and name."""
    known = {f"{one.name}.{name}": (one, name) for one in checks for name in one.thresholds}
    given: dict[str, dict[str, Any]] = {}
    for name, value in thresholds.items():
        if name not in known:
            its = [one for one in known if one.startswith(f"{name.partition('.')[0]}.")]
            hint = f" There are: {', '.join(its)}" if its else did_you_mean(name, known)
            every = "" if hint else " docs/check.md lists all."
            raise ValueError(f"thresholds={{{name!r}: ...}}: no threshold of this name.{hint}{every}")
        of_check, threshold = known[name]
        # The command line gives whole numbers as floats, too.
        is_whole = isinstance(of_check.thresholds[threshold], int) and float(value).is_integer()
        given.setdefault(of_check.name, {})[threshold] = int(value) if is_whole else value
    return given
