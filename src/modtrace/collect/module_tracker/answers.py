"""Defines a tracker's answers about one moment on one thread. Names and numbers are found on request."""

from typing import NamedTuple

from ..log.segments import CallRef
from ..scopes.locate import Location
from ..steps.follower import StepFollower
from .stack_names import NamedStack, StackNames


class Call(NamedTuple):
    """One execution of a module: in backward, the forward call; in a recompute, the call that is repeated."""

    name: str  #: the name as in `parents`: `Mod.c.0`
    path: str  #: the path as in `state_dict`: `c.0`; a root has `""`
    nth: int | None  #: the number of earlier calls of the module in its step; None: not known
    step: int | None  #: the number of its step, counted from 0 by the rules of docs/vocabulary.md
    compiled: bool  #: whether it runs code of `torch.compile`, inside which calls are not seen


class Where:
    """The running call and its surroundings at one moment on one thread.

    Creating it takes 1 us; names and numbers are found when they are read.
    """

    __slots__ = ("_found", "_names", "_stack", "_steps", "accumulation", "known", "phase")

    def __init__(self, found: Location, names: StackNames, steps: StepFollower) -> None:
        self._found = found
        self._names = names
        self._steps = steps
        self._stack: NamedStack | None = None
        #: `forward`, `backward`, `recompute` or `optimizer`; None outside of all phases.
        self.phase: str | None = found.phase
        #: False if a backward node runs whose call is not known.
        self.known: bool = found.known
        #: True while the engine adds gradients of one tensor; None if this is not known (without `additions=True`).
        self.accumulation: bool | None = found.accumulation

    @property
    def stack(self) -> tuple[str, ...]:
        """The names of the running modules, as in `parents`, outermost first. A recursive module occurs repeatedly."""
        return self._named.names

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the running modules as in `state_dict`, such as `c.0`, outermost first; a root is `""`."""
        return self._named.paths

    @property
    def current(self) -> str | None:
        """The last name of the stack, which is that of the innermost module; None if no module runs."""
        stack = self.stack
        return stack[-1] if stack else None

    @property
    def call(self) -> Call | None:
        """The innermost call; None outside of any module, and while the gradient of a parameter is accumulated."""
        call = self._call
        if call is None:
            return None
        nth, step = None, None
        if not call.context.is_scope:
            step, nth = self._steps.count(call)
        return Call(self._named.names[-1], self._named.paths[-1], nth, step, self.compiled)

    @property
    def compiled(self) -> bool:
        """True if code of `torch.compile` runs, inside which modules are not seen."""
        call = self._call
        return call is not None and any(context.compiled for context in call.context.upwards())

    @property
    def trigger(self) -> str | None:
        """In a recompute, the name of the module whose backward requested it; None otherwise."""
        call = self._call
        trigger = None if call is None else call.segment.trigger
        return None if trigger is None else self._names.of(trigger.context, trigger.segment).names[-1]

    @property
    def parameter(self) -> str | None:
        """The path of the parameter whose gradient is being accumulated, or None."""
        parameter = self._found.parameter
        return None if parameter is None else self._names.parameter_name(parameter)

    @property
    def _call(self) -> CallRef | None:
        return self._found.met_in if self._found.accumulation else self._found.call

    @property
    def _named(self) -> NamedStack:
        if self._stack is None:
            call, parameter = self._call, self._found.parameter
            if parameter is not None:
                self._stack = self._names.of_parameter(parameter)
            call = call or self._found.nested_in
            if self._stack is None:
                self._stack = NamedStack() if call is None else self._names.of(call.context, call.segment)
        return self._stack

    def __repr__(self) -> str:
        return f"Where(phase={self.phase!r}, stack={self.stack!r})"
