"""What a check finds, and what it cannot check."""

from dataclasses import dataclass
from typing import Literal

#: How grave a finding is. `error`: what runs is not what was meant; `warning`: it may be; `note`: worth knowing.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run."""

    check: str = ""  # the name of the check that found it
    severity: Severity
    text: str  # one sentence with the place and the numbers
    remedy: str  # what to do, in the imperative
    evidence: tuple[str, ...] = ()  # further facts, a sentence each
    rests_on: str = ""  # what was looked at: `48 training steps, 2 to 49`
    root: str | None = None  # the name of the model
    path: str | None = None  # the path of the module
    op: str | None = None
    parameter: str | None = None  # the name in its module
    step: int | None = None  # the first one that shows it
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Unchecked:
    """A check for which the recording has not what it needs."""

    check: str
    why: str  # a clause: `no gradients were recorded`
    remedy: str  # how to record it; "" if there is nothing to record


class CannotCheck(Exception):
    """A check raises it if the recording has not what it needs."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the checks of a recording found, worst first, and what they could not check."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]  # the checks that were run
    unchecked: tuple[Unchecked, ...]

    def describe_unchecked(self) -> list[str]:
        """Returns a line for each reason why checks could not run: `not checked: update-size: ...; record ...`."""
        reasons: dict[str, list[str]] = {}
        for one in self.unchecked:
            reasons.setdefault(one.why + (f"; {one.remedy}" if one.remedy else ""), []).append(one.check)
        return [f"not checked: {', '.join(names)}: {reason}" for reason, names in reasons.items()]

    @property
    def ok(self) -> bool:
        """True if something was checked and no error was found."""
        return bool(self.checked) and not any(found.severity == "error" for found in self.findings)
