"""The options of `record(values=...)`: which tensors are measured in which steps, and what is kept of them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from ..role import GRAD_OUTPUT, LEAF, LOSS, OP_OUTPUT, OP_ROLES, OUTPUT, PARAMETER, PARAMETER_GRAD, ROLES
from ..suggestions import did_you_mean
from .path_filter import PathFilter, to_path_filter
from .schedule import NO_STEPS, Schedule, to_schedule

#: What `record(values="stats")` measures.
STATS = "stats"

#: The roles that `Capture(include=...)` selects, and any other capture that chooses among modules.
_ROLES_OF_MODULES = (OUTPUT, GRAD_OUTPUT, PARAMETER, PARAMETER_GRAD)

#: The roles that `Capture()` selects if it does not choose among modules, as a loss belongs to no module.
DEFAULT_ROLES = (*_ROLES_OF_MODULES, LOSS)

#: The largest sample of one tensor.
_MOST_SAMPLES = 65_536

_MOST_CAPTURES = 40  # each capture is one bit of a mask

#: Selects modules and parameters: see `Capture`.
Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | None

#: Selects steps: see `Capture`.
Steps = str | range | slice | Sequence[int] | Callable[[int], bool] | None


#: What is measured of compiled code: only the output of a region as a whole, or also outputs of the modules inside.
COMPILED = BOUNDARY, INSIDE = ("boundary", "inside")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Selects tensors and steps, and what is kept of these tensors.

    `record(values=[Capture(...), Capture(...)])` takes several. What two of them want of one tensor is kept once.

    Args:
        roles: one or several of `input`, `output`, `grad_output`, `grad_input` (of module calls), `parameter`,
            `parameter_grad`, `buffer`, `optimizer_state`, `update` (of an optimizer's step), `op_output`, `leaf`
            (with `record(ops=True)`), `loss` (the roots of backwards that have one element, whatever `include` and the
            like choose); `"all"` for all roles that are recorded. By default outputs, parameters and their gradients,
            and losses unless the capture chooses among modules.
        include: selects modules and parameters by path: a glob over the whole path (`*` stays within one part,
            `**` crosses dots), a compiled regular expression or a text `re:...`, which are searched, or a list of
            those; None for all. A parameter is selected by its own path or by its module's, an op by its module's.
        exclude: leaves out modules and parameters that `include` selects.
        types: selects modules of these classes and their subclasses, given as classes or as names of classes
            (`"Linear"`), with their parameters and ops.
        where: a function that takes path and module (None if there is none) and returns whether it is selected. It
            is called once for each module and parameter.
        ops: selects outputs of ops by the names of the ops, with globs such as `"aten.*softmax*"`.
        steps: `"START:STOP[:EVERY]"`, a range or a slice, a list of numbers, a function of the step's number; None
            for all steps.
        on_trigger: the number of steps to measure after each step in which a trigger of `record(triggers=...)` has
            fired. No other steps are measured unless `steps` selects them.
        stats: 1 for count, minimum, maximum, sum, sum of squares, NaN and infinite elements; 2 for these and the
            histogram of exponents, sums of magnitudes and of fourth powers, zeros, the index of the largest
            magnitude and the largest magnitude of each channel; 0 for none.
        channel_dim: the dimension of the channels, for `stats=2`.
        hash: keeps a hash of 64 bits, which shows whether two tensors are equal.
        sketch: keeps 64 numbers, which show how far two tensors are apart.
        sample: the number of elements to keep, at positions that depend only on the number of elements.
        tensors: keeps the whole tensor. `True` copies it when it is seen; `"lazy"` keeps a reference, and copies it
            before the optimizer steps or when the step ends, unless it was written to before (a note in the row
            says so then).
        function: a function that is called with each tensor, detached and outside of your modes. What it returns (a
            number, text, list, dict, or a tensor that becomes one of these) is kept as JSON.
        micro_batches: measures, for `parameter_grad`, also what each backward adds to a gradient.

    Raises:
        TypeError, ValueError: an argument is something else, or cannot be read.
    """

    roles: str | Sequence[str] = DEFAULT_ROLES
    include: Patterns = None
    exclude: Patterns = None
    types: type | str | Sequence[type | str] = ()
    where: Callable[[str, Any], bool] | None = None
    ops: str | Sequence[str] = ()
    steps: Steps = None
    on_trigger: int = 0
    stats: int = 1
    channel_dim: int = -1
    hash: bool = False
    sketch: bool = False
    sample: int = 0
    tensors: bool | str = False
    function: Callable[[Any], Any] | None = None
    micro_batches: bool = False
    paths: PathFilter = field(init=False, repr=False, compare=False)
    schedule: Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        has_usual_roles = self.roles is DEFAULT_ROLES
        self._set("roles", _checked_roles(self.roles))
        self._set("types", _checked_types(self.types))
        self._set("ops", _checked_ops(self.ops))
        self._set("paths", to_path_filter(self.include, self.exclude))
        if has_usual_roles and not self.means_all_modules:
            self._set("roles", _ROLES_OF_MODULES)
        self._check_numbers()
        self._check_switches()
        self._check_sense()
        waits = self.on_trigger and self.steps is None
        self._set("schedule", NO_STEPS if waits else to_schedule(self.steps))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        if self.stats not in (0, 1, 2):
            raise ValueError(f"stats={self.stats!r}: give 0 for none, 1 for the usual ones, 2 for all")
        if not isinstance(self.channel_dim, Integral):
            raise TypeError(f"channel_dim={self.channel_dim!r}: give the number of a dimension, such as -1")
        if not isinstance(self.on_trigger, Integral) or self.on_trigger < 0:
            raise ValueError(f"on_trigger={self.on_trigger!r}: give a number of steps, 0 for no waiting")
        if not isinstance(self.sample, Integral) or not 0 <= self.sample <= _MOST_SAMPLES:
            raise ValueError(f"sample={self.sample!r}: give a number of values, at most {_MOST_SAMPLES:,}")
        for name in ("stats", "channel_dim", "on_trigger", "sample"):
            self._set(name, int(getattr(self, name)))  # numpy numbers cannot be written as JSON

    def _check_switches(self) -> None:
        if not (isinstance(self.tensors, (bool, str)) and self.tensors in (True, False, "lazy")):
            raise ValueError(
                f"tensors={self.tensors!r}: give True (--capture tensors), False or 'lazy' (--capture tensors=lazy)"
            )
        for name in ("hash", "sketch", "micro_batches"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: give True or False")
        for name in ("where", "function"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name}={value!r}: give a function")

    def _check_sense(self) -> None:
        if self.ops and OP_OUTPUT not in self.roles:
            raise ValueError(f"ops={self.ops!r} chooses among what ops return: it takes the role 'op_output'")
        if self.micro_batches and PARAMETER_GRAD not in self.roles:
            raise ValueError(
                "micro_batches=True is about parameters' gradients: it takes the role 'parameter_grad'"
            )

    @property
    def measures_all(self) -> bool:
        """Whether the capture measures all outputs of ops, in every step."""
        is_always = self.steps is None and not self.on_trigger and self.stats > 0
        return is_always and OP_OUTPUT in self.roles and not self.ops and self.means_all_modules

    @property
    def means_all_modules(self) -> bool:
        """True if the capture does not choose among modules."""
        return self.paths.is_all and not self.types and self.where is None

    @property
    def wants_ops(self) -> bool:
        """True if the capture selects tensors that ops return or read."""
        return not OP_ROLES.isdisjoint(self.roles)

    def to_json(self) -> dict[str, Any]:
        """Returns the capture's arguments as JSON values for meta.json; functions are given by their names."""
        arguments: dict[str, Any] = {"roles": list(self.roles), "stats": self.stats}
        arguments |= {
            name: patterns for name, patterns in self.paths.to_json().items() if patterns is not None
        }
        if self.steps is not None:
            arguments["steps"] = str(self.schedule)
        for name in ("on_trigger", "hash", "sketch", "sample", "tensors", "micro_batches"):
            if getattr(self, name):
                arguments[name] = getattr(self, name)
        for name in ("types", "ops"):
            if getattr(self, name):
                arguments[name] = [_name_of(item) for item in getattr(self, name)]
        for name in ("where", "function"):
            if getattr(self, name) is not None:
                arguments[name] = _name_of(getattr(self, name))
        return arguments


def to_captures(
    values: object, include: object = None, exclude: object = None, *, ops: bool
) -> tuple[Capture, ...]:
    """Returns the captures for the arguments `record(values=..., include=..., exclude=...)`; none for `values=None`.

    Args:
        values: `"stats"`, a capture, or several captures.
        include: selects modules and parameters, as for `Capture`.
        exclude: leaves out modules and parameters, as for `Capture`.
        ops: whether ops are recorded.

    Raises:
        TypeError, ValueError: `values` is something else, or requires something that is not recorded.
    """
    if values is None:
        if include is not None or exclude is not None:
            raise ValueError(
                "include and exclude (--include, --exclude) choose what is measured, and values=None (--values none) "
                "measures nothing"
            )
        return ()
    if isinstance(values, str) and values == STATS:
        return _usual(include, exclude, ops)
    if include is not None or exclude is not None:
        raise ValueError(
            "with values=Capture(...) say include and exclude there: Capture(include=...) (--capture 'include=...')"
        )
    entries = values if isinstance(values, (list, tuple)) else (values,)
    if not entries:
        raise ValueError(f"values={values!r}: give at least one Capture, or None to measure nothing")
    if len(entries) > _MOST_CAPTURES:
        raise ValueError(
            f"values (--capture) holds {len(entries)} captures, and {_MOST_CAPTURES} are the most"
        )
    captures: list[Capture] = []
    for entry in entries:
        captures += (
            _usual(None, None, ops) if isinstance(entry, str) and entry == STATS else (_one(entry, ops),)
        )
    return tuple(captures)


def to_json(captures: Sequence[Capture]) -> dict[str, Any]:
    """Returns the description of captures for meta.json; for `"stats"`, the arguments of `record()`."""
    if not captures:
        return {"values": None}
    first, *others = captures
    usual = _usual(first.include, first.exclude, ops=bool(others))
    if list(usual) == list(captures):
        chosen = {name: patterns for name, patterns in first.paths.to_json().items() if patterns is not None}
        return {"values": STATS, **chosen}
    return {"values": [capture.to_json() for capture in captures]}


def _usual(include: Any, exclude: Any, ops: bool) -> tuple[Capture, ...]:
    of_modules = Capture(include=include, exclude=exclude)
    return (of_modules, Capture(roles=(OP_OUTPUT, LEAF))) if ops else (of_modules,)


def _one(given: object, ops: bool) -> Capture:
    if not isinstance(given, Capture):
        raise ValueError(
            f"values={given!r}: give {STATS!r}, modtrace.Capture(...), a list of those, or None to measure nothing"
        )
    if ops or not given.wants_ops:
        return given
    if set(given.roles) == set(ROLES):  # "all" stands for the roles that are recorded
        return replace(given, roles=[role for role in ROLES if role not in OP_ROLES])
    role = next(role for role in given.roles if role in OP_ROLES)
    raise ValueError(
        f"Capture(roles={role!r}) (--capture roles={role}) looks at what ops return: it takes record(ops=True) (--ops)"
    )


def _checked_roles(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        given = ROLES if given == "all" else (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"roles={given!r}: give one such as 'output', a list of them, or 'all'")
    roles = tuple(given)
    if not roles:
        raise ValueError("roles=(): give at least one, such as 'output'")
    for role in roles:
        if role not in ROLES:
            hint = did_you_mean(role, ROLES)
            raise ValueError(f"roles: there is no role {role!r}.{hint} There are: {', '.join(ROLES)}")
    return tuple(dict.fromkeys(roles))


def _checked_ops(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"ops={given!r}: give names of ops or globs such as 'aten.*softmax*', or a list of those"
        )
    return names


def _checked_types(given: Any) -> tuple[type | str, ...]:
    kinds = tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    for kind in kinds:
        if not isinstance(kind, (str, type)):
            raise TypeError(f"types: {kind!r} is neither a class nor the name of one")
    return kinds


def _name_of(given: Any) -> str:
    return given if isinstance(given, str) else str(getattr(given, "__qualname__", given))
