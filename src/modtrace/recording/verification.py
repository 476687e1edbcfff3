"""Defines the result of proving a recording, which `modtrace.verify` returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    why: str  # what was checked, or the first fault if it failed


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The results of all checks on the recording of one model."""

    model: str  # the class of the model, or the user's name for it
    checks: tuple[Check, ...]
    #: By rule, such as "overwritten", how many of the tensors that ops read need not affect their results.
    exempt: Mapping[str, int] = field(default_factory=dict)
    unchecked: tuple[tuple[str, str], ...] = ()  # what could not be checked, each with the reason
    is_deterministic: bool = True  # whether two unrecorded runs agreed; else see `unchecked`

    @property
    def ok(self) -> bool:
        """True if every check has passed; what could not be checked does not count."""
        return all(check.passed for check in self.checks)

    def check(self, name: str) -> Check:
        """Returns the check with this name.

        Raises:
            KeyError: there is no such check.
        """
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: the outcome (ok, FAILED, exempt or unchecked), the name, and the details."""
        rows = [("ok" if check.passed else "FAILED", check.name, check.why) for check in self.checks]
        rows += [("exempt", rule, str(count)) for rule, count in self.exempt.items()]
        return rows + [("unchecked", what, why) for what, why in self.unchecked]

    @property
    def headline(self) -> str:
        """The result in one line."""
        failed = [check.name for check in self.checks if not check.passed]
        result = f"FAILED: {', '.join(failed)}" if failed else "its recording is proved"
        own = "" if self.is_deterministic else "; the model is not deterministic by itself"
        return f"{self.model}: {result}{own}"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"{state:{widths[0]}}  {what:{widths[1]}}  {why}".rstrip() for state, what, why in rows]
        return "\n".join([self.headline, *lines])
