"""What has the steps that `record(keep_last=...)` holds written: conditions on a step's numbers, and signals."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, get_args

from ..options.capture import Capture, Patterns
from ..options.path_filter import PathFilter
from ..role import FINITE_ROLES, OUTPUT
from ..statistics.known import HISTOGRAM, OF_FORMATS, QUANTILE, SUMS, TIER_1, names_of
from ..statistics.moments import RAW
from ..suggestions import did_you_mean

#: What the names of numbers that a user logs begin with: `Above("log.loss", 10)` is about `rec.log(loss=...)`.
LOGGED = "log."

#: What a trigger can be about: it reads the sums of tier 2 and no histograms. Raw ones are listed last.
TRIGGER_STATISTICS = tuple(sorted(names_of(TIER_1, SUMS), key=RAW.__contains__))

#: A number is compared with the band of at least this many steps, or of the whole window if that is shorter.
_USUALLY_NEEDED = 10

#: Signals behind which the process goes on: those that are there for users, and those that do not end it anyway.
_HARMLESS = frozenset({"SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGTSTP"})


class _Condition:
    """Says what differs from what is usual, so that it can be read where the recording is shown."""

    def __repr__(self) -> str:
        told = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if _is_told(self, each))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(told)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class NonFinite(_Condition):
    """Fires when a tensor that is measured, or a number that is logged, is NaN or infinite.

    Args:
        include: which modules and parameters, as for `record()`; None for all. What is logged belongs to no
            module: it is looked at only where neither this nor `roles` is given.
        exclude: what is left out although it is included: a module that returns a mask with `-inf` in it. It
            leaves out nothing that is logged.
        roles: as in `Capture`; None for all but inputs, buffers and what single ops return or read, where
            infinities are often meant.
    """

    include: Patterns = None
    exclude: Patterns = None
    roles: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        selection_of(self)


@dataclass(frozen=True, repr=False)
class Above(_Condition):
    """Fires when a statistic of a tensor, or a number that is logged, is larger than a limit.

    NaN is not larger than anything: `NonFinite` finds it.

    Args:
        stat: `mean`, `std`, `rms`, `l2`, `abs_max`, `min`, `max`, `crest`, ...; with `Capture(stats=2)` also
            `mean_abs`, `zero_fraction` and `kurtosis`; `"log.loss"` for what `rec.log(loss=...)` is given.
        limit: the largest value that is no reason.
        include: which modules and parameters, as for `record()`.
        exclude: the same for what is left out although it is included.
        roles: as in `Capture`.
    """

    stat: str
    limit: float
    include: Patterns = None
    exclude: Patterns = None
    roles: str | Sequence[str] = OUTPUT

    def __post_init__(self) -> None:
        _check_stat(self)
        if (
            isinstance(self.limit, bool)
            or not isinstance(self.limit, (int, float))
            or self.limit != self.limit
        ):
            raise ValueError(f"Above(limit={self.limit!r}): give a number")


@dataclass(frozen=True, repr=False)
class OutOfBand(_Condition):
    """Fires when a statistic leaves the band in which it was in the last steps.

    The band is the median of those steps, plus and minus `factor` times what would be the standard deviation of
    normally distributed numbers with their median absolute deviation; each tensor has its own. Numbers that are
    not finite are outside.

    Args:
        stat: as for `Above`.
        factor: half the width of the band.
        window: how many of the last steps count.
        at_least: how many there must be before anything is outside; None: 10, or `window` if that is fewer.
        include: which modules and parameters, as for `record()`.
        exclude: the same for what is left out although it is included.
        roles: as in `Capture`.
    """

    stat: str = "rms"
    factor: float = 8.0
    window: int = 50
    at_least: int | None = None
    include: Patterns = None
    exclude: Patterns = None
    roles: str | Sequence[str] = OUTPUT

    def __post_init__(self) -> None:
        _check_stat(self)
        if isinstance(self.factor, bool) or not isinstance(self.factor, (int, float)) or not self.factor > 0:
            raise ValueError(f"OutOfBand(factor={self.factor!r}): give a positive number")
        if not isinstance(self.window, int) or self.window < 2:
            raise ValueError(f"OutOfBand(window={self.window!r}): give a number of steps, at least 2")
        if not isinstance(self.needs, int) or not 2 <= self.needs <= self.window:
            raise ValueError(
                f"OutOfBand(at_least={self.at_least!r}, window={self.window!r}): "
                "give numbers of steps, at least 2, and a window that holds so many"
            )

    @property
    def needs(self) -> int:
        """Returns how many steps there must be before anything is outside."""
        return min(_USUALLY_NEEDED, self.window) if self.at_least is None else self.at_least


@dataclass(frozen=True, repr=False)
class OnSignal(_Condition):
    """Fires when the process gets a signal, within half a second, whether or not a step ends.

    What the signal did before it does as well. One that would end the process ends it by `SystemExit`, so that what
    the open step has left is written too; `SIGUSR1` and `SIGUSR2` do nothing else.

    Args:
        name: of the signal.
    """

    name: str = "SIGUSR1"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in signal.Signals.__members__:
            raise ValueError(
                f"OnSignal({self.name!r}): there is no such signal here; give one such as 'SIGUSR1'"
            )
        if self.name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"OnSignal({self.name!r}): no process ever hears of this one; take 'SIGUSR1'")

    @property
    def number(self) -> signal.Signals:
        """The signal."""
        return signal.Signals[self.name]

    @property
    def is_harmless(self) -> bool:
        """Returns whether the process goes on behind it."""
        return self.name in _HARMLESS


Trigger: TypeAlias = NonFinite | Above | OutOfBand | OnSignal

#: The classes of `Trigger`.
TRIGGERS: tuple[type[Trigger], ...] = get_args(Trigger)


def to_triggers(given: object, *, keep_last: int | None, captures: Sequence[Capture]) -> tuple[Trigger, ...]:
    """Returns what `record(triggers=...)` means: one or several; None is `NonFinite()` where steps are held.

    Args:
        captures: what is measured.

    Raises:
        TypeError: something in it is no trigger.
        ValueError: it can never fire, for nothing that it looks at is measured.
    """
    if given is None:
        return () if keep_last is None else (NonFinite(),)
    triggers = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in triggers:
        if not isinstance(each, TRIGGERS):
            names = ", ".join(kind.__name__ for kind in TRIGGERS)
            raise TypeError(f"triggers={each!r}: give modtrace's {names}, or a list of those")
        _check_measured(each, captures)
    return triggers


def _check_measured(trigger: Trigger, captures: Sequence[Capture]) -> None:
    """Refuses what looks at roles none of which is measured, or not as its statistic needs it."""
    if isinstance(trigger, OnSignal) or trigger.roles is None:
        return
    stat = "nonfinite" if isinstance(trigger, NonFinite) else trigger.stat
    tier = 2 if stat in names_of(SUMS) else 1
    roles = selection_of(trigger).roles
    if is_logged(stat) or any(
        each.stats >= tier and not {*each.roles}.isdisjoint(roles) for each in captures
    ):
        return
    if not captures:
        raise ValueError(f"triggers={trigger!r} looks at what is measured, and values=None measures nothing")
    said = f"roles={roles[0]!r}" if len(roles) == 1 else f"roles={list(roles)!r}"
    raise ValueError(
        f"triggers={trigger!r} looks at {' and '.join(roles)}, and no capture measures {stat} there. "
        f"Add modtrace.Capture({said}, stats={tier}) to values"
    )


def check_keep_last(keep_last: object) -> None:
    """Refuses what is no number of steps.

    Raises:
        ValueError: it is none.
    """
    if keep_last is not None and (
        isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1
    ):
        raise ValueError(f"keep_last={keep_last!r}: give a number of steps, or None to write every step")


def is_logged(stat: str) -> bool:
    """Returns whether a trigger is about numbers that a user logs."""
    return stat.startswith(LOGGED)


def selection_of(trigger: NonFinite | Above | OutOfBand) -> Capture:
    """Returns which tensors a trigger is about: the `roles` and `paths` of the capture that says the same."""
    roles = FINITE_ROLES if trigger.roles is None else trigger.roles
    return Capture(roles=roles, include=trigger.include, exclude=trigger.exclude)


def paths_of(triggers: Sequence[Trigger]) -> list[PathFilter]:
    """Returns which modules and parameters each is about, of those that look at tensors."""
    return [selection_of(each).paths for each in triggers if not isinstance(each, OnSignal)]


def _check_stat(trigger: Above | OutOfBand) -> None:
    stat, kind = trigger.stat, type(trigger).__name__
    if isinstance(stat, str) and is_logged(stat) and stat != LOGGED:
        if trigger.include is not None or trigger.exclude is not None:
            raise ValueError(
                f"{kind}({stat!r}): a number that is logged belongs to no module; leave out include"
            )
        return
    if stat not in TRIGGER_STATISTICS:
        there = f"There are: {', '.join(TRIGGER_STATISTICS)}; 'log.NAME' is what rec.log(NAME=...) is given"
        if str(stat).partition(":")[0] in (*names_of(HISTOGRAM), *OF_FORMATS, QUANTILE):
            raise ValueError(
                f"{kind}({stat!r}): a trigger does not compute this statistic, which needs {HISTOGRAM}. "
                f"Read it from the recording with history(). {there}"
            )
        hint = did_you_mean(stat, TRIGGER_STATISTICS)
        raise ValueError(f"{kind}({stat!r}): there is no such statistic.{hint} {there}")
    selection_of(trigger)


def _is_told(condition: Any, field: Any) -> bool:
    return bool(getattr(condition, field.name) != field.default)
