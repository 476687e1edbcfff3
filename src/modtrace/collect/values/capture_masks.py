"""Finds the captures that want a tensor, by its role, path, module and step; each capture is one bit."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from ...measure.measurers.want import USUAL, Want
from ...recording.module_path import join, path_below
from ...recording.options.capture import Capture
from ...recording.options.schedule import ALL_STEPS, StepPredicate
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT, ROLES
from ..log.call_context import CallContext
from ..names.module_names import ModuleNames, NamedModule, ParameterOwner

#: A set of captures: bit n stands for the n-th `Capture`.
Mask = int

#: The code of each role.
ROLE_CODE = {role: code for code, role in enumerate(ROLES)}

#: The number of low bits that hold a role's code in a mark; the captures' bits are above.
ROLE_BITS = (len(ROLES) - 1).bit_length()
ROLE_CODES = (1 << ROLE_BITS) - 1


def mark_of(mask: Mask, code: int) -> int:
    """Returns a number that combines the code of a role and the captures that want it."""
    return mask << ROLE_BITS | code


class Asked(NamedTuple):
    """What captures want of the tensors that a call takes or returns, and of their gradients."""

    mark: int  # the role and the captures that want it (see `mark_of`); 0: none
    grad_mark: int
    want: Want
    grad_want: Want
    keeps: bool  # whether tensors or gradients are copied, so that they need a name


class CaptureMasks:
    """Finds which captures of one recorder want which tensors."""

    def __init__(
        self,
        captures: Sequence[Capture],
        names: ModuleNames,
        *,
        fired: Callable[[], int | None] = lambda: None,
        raised: Callable[[str, Exception], None] = lambda what, error: None,
    ) -> None:
        """Reads the captures.

        Args:
            captures: the captures; their positions are their bits.
            fired: returns the last step in which a trigger fired.
            raised: receives the name and the error of a user's function that has raised.
        """
        self.captures = tuple(captures)
        self._names = names
        self._fired = fired
        self._raised = raised
        self._all: Mask = (1 << len(captures)) - 1
        self._of_role = [_to_mask(role in capture.roles for capture in captures) for role in ROLES]
        self._is_open = all(_means_everything(capture) for capture in captures)
        self._open_roles = [
            all(_means_everything(capture) for capture in captures if role in capture.roles) for role in ROLES
        ]
        # A schedule may answer differently in this recording, so answers from another one are not reused.
        schedules = (capture.schedule for capture in captures)
        self._schedules = [
            schedule.afresh() if isinstance(schedule, StepPredicate) else schedule for schedule in schedules
        ]
        self._is_always = all(
            capture.schedule == ALL_STEPS and not capture.on_trigger for capture in captures
        )
        self._asked: dict[tuple[CallContext, str, Mask], Asked | None] = {}
        self._asked_at = -1
        self._of_op: dict[tuple[str, str | None, int], Mask] = {}
        self._wants: dict[Mask, Want] = {}
        self._reported: set[int] = set()
        self.parameter_paths: dict[str, None] = {}  # the names of all parameters seen so far

    # Which tensors are wanted at all.

    def of_role(self, role: str) -> Mask:
        """Returns the captures that want tensors of a role."""
        return self._of_role[ROLE_CODE[role]]

    def is_open(self, role: str) -> bool:
        """Returns whether all captures of a role want every tensor of it."""
        return self._open_roles[ROLE_CODE[role]]

    @property
    def in_micro_batches(self) -> Mask:
        """The captures that want what each backward adds to a parameter's gradient."""
        return _to_mask(capture.micro_batches for capture in self.captures)

    def want(self, mask: Mask) -> Want:
        """Returns what the captures of a mask want of a tensor, taken together."""
        found = self._wants.get(mask)
        if found is None:
            found = Want(stats=0)
            for capture in self.chosen(mask):
                found |= _want_of(capture)
            if found.stats < 2:
                found = found._replace(channel_dim=USUAL.channel_dim)
            found = self._wants[mask] = USUAL if found == USUAL else found  # for comparing with `is`
        return found

    def chosen(self, mask: Mask) -> list[Capture]:
        """Returns the captures of a mask as objects."""
        return [capture for at, capture in enumerate(self.captures) if mask >> at & 1]

    # In which steps they are wanted.

    def in_steps(self, numbers: Sequence[int]) -> Mask:
        """Returns the captures that want any of these steps; a running step has several possible numbers."""
        if self._is_always:
            return self._all if numbers else 0
        mask = 0
        for number in numbers:
            mask |= self.in_step(number)
            if mask == self._all:
                break
        return mask

    def in_step(self, number: int) -> Mask:
        """Returns the captures that want a step."""
        if self._is_always:
            return self._all
        fired = self._fired()
        mask = 0
        for at, (capture, schedule) in enumerate(zip(self.captures, self._schedules, strict=True)):
            behind = capture.on_trigger and fired is not None and fired < number <= fired + capture.on_trigger
            if behind or number in schedule:
                mask |= 1 << at
            if isinstance(schedule, StepPredicate) and schedule.error is not None:
                self._report(at, f"steps, asked for step {schedule.raised_at},", schedule.error)
        return mask

    # At which modules, parameters and ops they are wanted.

    def asked(self, context: CallContext, role: str, active: Mask) -> Asked | None:
        """Returns what the active captures want of a module's tensors of a role; None for nothing. This takes 0.1 us.

        Args:
            role: `INPUT` or `OUTPUT`.
        """
        if self._asked_at != self._names.revision:  # a name learnt late may match a pattern
            self._asked, self._asked_at = {}, self._names.revision
        key = context, role, active
        if key not in self._asked:
            self._asked[key] = self._ask(*key)
        return self._asked[key]

    def _ask(self, context: CallContext, role: str, active: Mask) -> Asked | None:
        grad_role = GRAD_INPUT if role == INPUT else GRAD_OUTPUT
        if not (self.is_open(role) and self.is_open(grad_role)):
            active &= self._select(context.path, _paths_of(context), context.module)
        mask, grad_mask = active & self.of_role(role), active & self.of_role(grad_role)
        return self._together(mask, role, grad_mask, grad_role) if mask or grad_mask else None

    def asked_inside(self, named: NamedModule, active: Mask | None) -> Asked:
        """Returns what captures want of a module's output inside of compiled code; `active` is None for all of them."""
        mask, grad_mask = (
            self.of_op("", named.path, named, role) & (self._all if active is None else active)
            for role in (OUTPUT, GRAD_OUTPUT)
        )
        return self._together(mask, OUTPUT, grad_mask, GRAD_OUTPUT)

    def _together(self, mask: Mask, role: str, grad_mask: Mask, grad_role: str) -> Asked:
        marks = [of and mark_of(of, ROLE_CODE[name]) for of, name in ((mask, role), (grad_mask, grad_role))]
        want, grad_want = self.want(mask), self.want(grad_mask)
        return Asked(marks[0], marks[1], want, grad_want, want.keeps or grad_want.keeps)

    def of_owner(self, owner: ParameterOwner) -> Mask:
        """Returns the captures that want a parameter or a buffer, in any role."""
        if self._is_open:
            return self._all
        modules = (owner.module.path, *owner.module.aliases)
        paths = [join(path, owner.name) for path in modules]
        self.parameter_paths.update(dict.fromkeys(paths))
        return self._select(paths[0], (*modules, *paths), owner.module.module)

    def of_unowned(self, name: str) -> Mask:
        """Returns the captures that want a parameter which no module owns, in any role."""
        self.parameter_paths[name] = None
        return self._all if self._is_open else self._select(name, (name,), None)

    def of_op(self, name: str, path: str | None, named: NamedModule | None, role: str) -> Mask:
        """Returns the captures that want tensors of an op; `path` is None if the op ran outside of modules."""
        mask = self._of_role[ROLE_CODE[role]]
        if not mask or self.is_open(role):
            return mask
        key = (name, path, -1 if named is None else named.module_id)  # two roots may have the same paths
        known = self._of_op.get(key)
        if known is None:
            module = None if named is None else named.module
            known = self._select(path or "", (path,) if path is not None else (), module)
            globs = (capture.ops or ("*",) for capture in self.captures)
            known &= _to_mask(any(fnmatchcase(name, glob) for glob in of_one) for of_one in globs)
            self._of_op[key] = known
        return known & mask

    def _select(self, path: str, paths: Sequence[str], module: nn.Module | None) -> Mask:
        return _to_mask(
            (capture.paths.is_all or capture.paths.selects(*paths))
            and _is_of_types(capture, module)
            and self._is_chosen(at, capture, path, module)
            for at, capture in enumerate(self.captures)
        )

    def _is_chosen(self, at: int, capture: Capture, path: str, module: nn.Module | None) -> bool:
        if capture.where is None:
            return True
        try:
            return bool(capture.where(path, module))
        except Exception as error:
            self._report(at, f"where, asked for {path!r},", error)
            return False

    def _report(self, at: int, what: str, error: Exception) -> None:
        if at not in self._reported:
            self._reported.add(at)
            with suppress(Warning):  # the user's warning filter may turn warnings into errors
                self._raised(f"Capture: the function {what}", error)


def _want_of(capture: Capture) -> Want:
    return Want(
        stats=capture.stats,
        channel_dim=capture.channel_dim,
        hash=capture.hash,
        sketch=capture.sketch,
        sample=capture.sample,
        tensors=capture.tensors is True,
        lazy=capture.tensors == "lazy",
        functions=() if capture.function is None else (capture.function,),
    )


def _paths_of(context: CallContext) -> tuple[str, ...]:
    """Returns the equally near paths of a shared module, of which only one is shown as the path of its caller."""
    shown, named, above = context.path, context.named, context.above
    if named is None or context.seen_as is not None:
        return (shown,)
    caller = "" if above is None or above.named is None else above.path
    return tuple(
        alias for alias in (named.path, *named.aliases) if path_below(caller, alias, (shown,)) == alias
    )


def _to_mask(chosen: Iterable[bool]) -> Mask:
    """Returns the mask of the captures for whose positions `chosen` is True."""
    return sum(1 << at for at, is_chosen in enumerate(chosen) if is_chosen)


def _means_everything(capture: Capture) -> bool:
    return capture.means_all_modules and not capture.ops


def _is_of_types(capture: Capture, module: nn.Module | None) -> bool:
    if not capture.types:
        return True
    types: Any = capture.types
    names: set[Any] = set() if module is None else {kind.__name__ for kind in type(module).__mro__}
    return any(kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in types)
