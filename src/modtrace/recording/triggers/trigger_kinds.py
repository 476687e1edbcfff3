"""Defines the conditions on which `record(keep_last=...)` writes the held steps: on numbers of a step, and signals."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, get_args

from ..options.capture import Capture, Patterns
from ..options.path_filter import PathFilter
from ..role import FINITE_ROLES, OUTPUT
from ..statistics.known import HISTOGRAM, OF_FORMATS, QUANTILE, SUMS, TIER_1, names_of
from ..statistics.moments import RAW
from ..suggestions import did_you_mean

#: The prefix of the names of scalars: `Above("log.loss", 10)` is about `rec.log(loss=...)`.
LOGGED = "log."

#: The actions of `NonFinite(then=...)` and `record(on_nonfinite=...)`.
REPORT, DUMP, STOP = THEN = ("report", "dump", "stop")

#: The statistics that a trigger can check: raw ones come last, and none needs histograms.
TRIGGER_STATISTICS = tuple(sorted(names_of(TIER_1, SUMS), key=RAW.__contains__))

#: The number of earlier steps that a band needs, or the whole window if that is smaller.
_USUALLY_NEEDED = 10

#: Signals after which the process continues: those meant for users, and those that do not end it by default.
_HARMLESS = frozenset({"SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGTSTP"})


class _Trigger:
    """Base of the triggers. Its `repr`, which recordings show, lists only arguments that differ from the defaults."""

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        shown = (f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class NonFinite(_Trigger):
    """Fires when a measured tensor, or a logged number with "loss" in its name, is NaN or infinite.

    Without `include`, `exclude` and `roles`, or with `then`, the values must have come to something that matters, as
    `modtrace nonfinite` decides it: the `-inf` of a mask, and gradients that overflow before a GradScaler skips the
    step, are no reason. Otherwise any value at the given places is one.

    Args:
        include: selects modules and parameters, as for `record()`; None for all. Logged numbers belong to no module
            and are checked only if neither this nor `roles` is given.
        exclude: leaves out modules and parameters, such as a module that returns a mask with `-inf`. It does not
            leave out logged numbers.
        roles: as in `Capture`; None for all except inputs, buffers and what single ops return or read, where
            infinities are often intended.
        then: what happens besides: `"report"` prints what made the values to standard error; `"stop"` raises
            `NonFiniteError` before the optimizer uses them, else when the step ends; `"dump"` says that the held steps
            are written, which needs `keep_last`. None: the held steps are written, or, without `keep_last`, nothing
            happens. Gradients that no optimizer has used are neither reported nor a reason to stop.
    """

    include: Patterns = None
    exclude: Patterns = None
    roles: str | Sequence[str] | None = None
    then: str | None = None

    def __post_init__(self) -> None:
        selection_of(self)
        if self.then is not None:
            _check_then(self.then, "then")

    @property
    def asks_for_origin(self) -> bool:
        """Whether it fires only for values that matter: it has no filter, or an action."""
        return self.then is not None or (self.include, self.exclude, self.roles) == (None, None, None)


@dataclass(frozen=True, repr=False)
class Above(_Trigger):
    """Fires when a statistic of a tensor, or a logged number, is larger than a limit.

    NaN is not larger than any limit; `NonFinite` finds it.

    Args:
        stat: `mean`, `std`, `rms`, `l2`, `abs_max`, `min`, `max`, `crest`, ...; with `Capture(stats=2)` also
            `mean_abs`, `zero_fraction` and `kurtosis`; `"log.loss"` for numbers logged by `rec.log(loss=...)`.
        limit: the largest value for which it does not fire.
        include: selects modules and parameters, as for `record()`.
        exclude: leaves out modules and parameters that `include` selects.
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
class OutOfBand(_Trigger):
    """Fires when a statistic leaves the band of its values in the last steps.

    Each tensor has its own band: the median of its values, plus and minus `factor` times the standard deviation that
    normally distributed numbers with the same median absolute deviation have. Numbers that are not finite are outside.

    Args:
        stat: as for `Above`.
        factor: half the width of the band, in standard deviations.
        window: the number of last steps that count.
        at_least: the number of steps before anything is outside; None: 10, or `window` if that is smaller.
        include: selects modules and parameters, as for `record()`.
        exclude: leaves out modules and parameters that `include` selects.
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
        """The number of earlier steps without which no number can be outside."""
        return min(_USUALLY_NEEDED, self.window) if self.at_least is None else self.at_least


@dataclass(frozen=True, repr=False)
class OnSignal(_Trigger):
    """Fires when the process receives a signal, within half a second, whether or not a step ends.

    The former effect of the signal remains. A signal that would end the process ends it by `SystemExit`, so that the
    rows of the open step are written too. `SIGUSR1` and `SIGUSR2` have no other effect.

    Args:
        name: the name of the signal.
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
        """The signal as a member of `signal.Signals`."""
        return signal.Signals[self.name]

    @property
    def is_harmless(self) -> bool:
        """True if the process continues after the signal."""
        return self.name in _HARMLESS


Trigger: TypeAlias = NonFinite | Above | OutOfBand | OnSignal

#: The classes of `Trigger`.
TRIGGERS: tuple[type[Trigger], ...] = get_args(Trigger)


def to_triggers(
    given: object, *, keep_last: int | None, captures: Sequence[Capture], on_nonfinite: object = None
) -> tuple[Trigger, ...]:
    """Returns the triggers of `record(triggers=...)`, as a tuple. None means `NonFinite()` if steps are held.

    Args:
        given: a trigger, or several.
        on_nonfinite: adds `NonFinite(then=...)`, in place of the one that None means.
        keep_last: the number of steps that are held.
        captures: what is measured.

    Raises:
        TypeError: an entry is not a trigger.
        ValueError: a trigger can never fire, because nothing that it checks is measured, or nothing is held that it
            could write.
    """
    implied: list[Trigger] = []
    if on_nonfinite is not None:
        implied = [NonFinite(then=_check_then(on_nonfinite, "on_nonfinite"))]
    if given is None:
        given = [NonFinite()] if keep_last is not None and not implied else []
    triggers = (*(given if isinstance(given, (list, tuple)) else (given,)), *implied)
    for trigger in triggers:
        if not isinstance(trigger, TRIGGERS):
            names = ", ".join(kind.__name__ for kind in TRIGGERS)
            raise TypeError(f"triggers={trigger!r}: give modtrace's {names}, or a list of those")
        _check_measured(trigger, captures)
        _check_then_of(trigger, keep_last, captures)
    return triggers


def _check_then(then: object, argument: str) -> str:
    if not isinstance(then, str) or then not in THEN:
        raise ValueError(f"{argument}={then!r}: give {', '.join(map(repr, THEN))}, or leave it out")
    return then


def _check_then_of(trigger: Trigger, keep_last: int | None, captures: Sequence[Capture]) -> None:
    """Refuses an action of a trigger that can never happen."""
    then = trigger.then if isinstance(trigger, NonFinite) else None
    if then is None:
        return
    argument = f"on_nonfinite={then!r}"
    if then == DUMP and keep_last is None:
        raise ValueError(
            f"{argument} writes the steps that are held, and none are: give keep_last=20 (--keep-last 20)"
        )
    if not captures:
        raise ValueError(
            f"{argument} looks at what is measured, and values=None (--values none) measures nothing"
        )


def _check_measured(trigger: Trigger, captures: Sequence[Capture]) -> None:
    """Refuses a trigger whose roles are not measured, or not by the tier that its statistic needs."""
    if isinstance(trigger, OnSignal) or trigger.roles is None:
        return
    stat = "nonfinite" if isinstance(trigger, NonFinite) else trigger.stat
    tier = 2 if stat in names_of(SUMS) else 1
    roles = selection_of(trigger).roles
    if is_logged(stat) or any(
        capture.stats >= tier and not {*capture.roles}.isdisjoint(roles) for capture in captures
    ):
        return
    if not captures:
        raise ValueError(f"triggers={trigger!r} looks at what is measured, and values=None measures nothing")
    roles_text = f"roles={roles[0]!r}" if len(roles) == 1 else f"roles={list(roles)!r}"
    raise ValueError(
        f"triggers={trigger!r} looks at {' and '.join(roles)}, and no capture measures {stat} there. "
        f"Add modtrace.Capture({roles_text}, stats={tier}) to values"
    )


def check_keep_last(keep_last: object) -> None:
    """Checks that `keep_last` is a number of steps or None.

    Raises:
        ValueError: it is something else.
    """
    if keep_last is not None and (
        isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1
    ):
        raise ValueError(f"keep_last={keep_last!r}: give a number of steps, or None to write every step")


def asks_for_origin(triggers: Sequence[Trigger]) -> bool:
    """Returns whether a trigger needs to know which op or module made NaN or infinite values."""
    return any(isinstance(trigger, NonFinite) and trigger.asks_for_origin for trigger in triggers)


def has_action(trigger: Trigger) -> bool:
    """Returns whether a trigger does more than have the held steps written."""
    return isinstance(trigger, NonFinite) and trigger.then is not None


def is_logged(stat: str) -> bool:
    """Returns whether a statistic is a number that a user logs."""
    return stat.startswith(LOGGED)


def selection_of(trigger: NonFinite | Above | OutOfBand) -> Capture:
    """Returns a capture whose `roles` and `paths` select the tensors that a trigger checks."""
    roles = FINITE_ROLES if trigger.roles is None else trigger.roles
    return Capture(roles=roles, include=trigger.include, exclude=trigger.exclude)


def paths_of(triggers: Sequence[Trigger]) -> list[PathFilter]:
    """Returns the filter of modules and parameters of each trigger that checks tensors."""
    return [selection_of(trigger).paths for trigger in triggers if not isinstance(trigger, OnSignal)]


def _check_stat(trigger: Above | OutOfBand) -> None:
    stat, kind = trigger.stat, type(trigger).__name__
    if isinstance(stat, str) and is_logged(stat) and stat != LOGGED:
        if trigger.include is not None or trigger.exclude is not None:
            raise ValueError(
                f"{kind}({stat!r}): a number that is logged belongs to no module; leave out include"
            )
        return
    if stat not in TRIGGER_STATISTICS:
        known = f"There are: {', '.join(TRIGGER_STATISTICS)}; 'log.NAME' is what rec.log(NAME=...) is given"
        if str(stat).partition(":")[0] in (*names_of(HISTOGRAM), *OF_FORMATS, QUANTILE):
            raise ValueError(
                f"{kind}({stat!r}): a trigger does not compute this statistic, which needs {HISTOGRAM}. "
                f"Read it from the recording with history(). {known}"
            )
        hint = did_you_mean(stat, TRIGGER_STATISTICS)
        raise ValueError(f"{kind}({stat!r}): there is no such statistic.{hint} {known}")
    selection_of(trigger)
