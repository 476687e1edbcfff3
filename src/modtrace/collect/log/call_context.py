"""The calling context tree. Entering a module that was reached before is one look-up in it."""

import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Optional

from torch import nn

from ...recording.module_path import path_below
from ...torch_internals.dynamo import is_compiled
from ..names.module_names import ModuleNames, NamedModule
from ..names.walk import walk


class CallContext(dict[int, "CallContext"]):
    """A module as reached through one chain of callers: a dictionary of the contexts below it, by `id` of the module.

    The running call is a pointer into this tree. Entering a module is one dictionary look-up, which also shows that the
    module is known and was reached in this way before.
    """

    __slots__ = (
        "above", "codes", "compiled", "index", "is_scope", "key", "named", "outermost", "owners", "ref",
        "seen_as",
    )  # fmt: skip

    def __init__(self, named: NamedModule | None, above: Optional["CallContext"], index: int) -> None:
        self.ref: Callable[[], nn.Module | None] = lambda: None  # the module that was called last
        self.key = -1  # the module's id; -1 for an outermost context, so that leaving it takes the slow path
        self.outermost = -1
        self.named = named
        self.above = above
        self.index = index
        self.codes: set[CodeType] = set()  # the functions that were seen to run ops in its calls
        self.compiled = False  # whether its calls run as compiled regions
        self.is_scope = False  # whether it is code that the user named, and not a module
        #: The root and path of the module below its caller, if it has several; None otherwise.
        self.seen_as: tuple[NamedModule, str] | None = None
        #: The context around it when it was first an outermost call outside of a backward.
        self.owners: tuple[NamedModule, ...] | None = None

    __hash__ = object.__hash__  # type: ignore[assignment]  # compared by identity

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def path(self) -> str:
        """The module's path; for a shared module, its alias below the caller."""
        named = self.named
        assert named is not None
        if self.seen_as is not None:
            return self.seen_as[1]
        if not named.aliases or self.above is None or self.above.named is None:
            return named.path
        return path_below(self.above.path, named.path, named.aliases)

    @property
    def root(self) -> NamedModule:
        """The root that the path starts at; for a module in two models, the root of its caller."""
        assert self.named is not None
        return self.named.root if self.seen_as is None else self.seen_as[0]

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it was freed, or if the context is that of a named scope."""
        return None if self.named is None else self.named.module

    def upwards(self) -> Iterator["CallContext"]:
        """Yields this context and those of its callers, innermost first, without the context outside of modules."""
        at: CallContext | None = self
        while at is not None and at.named is not None:
            yield at
            at = at.above


class ContextTree:
    """All contexts, by number. Callers of its methods hold the tracker's lock."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self.contexts: list[CallContext] = []  # all contexts by their numbers
        self.outside = CallContext(None, None, -1)
        self._outermost: dict[int, CallContext] = {}
        self._of_module: dict[int, list[CallContext]] = {}  # the contexts of each module, by module_id

    def find(self, module: nn.Module, above: CallContext | None, frame: FrameType | None) -> CallContext:
        """Returns the context of a module below `above` (None if it is outermost), and creates it at the first call."""
        key = id(module)
        known = self._outermost.get(key) if above is None else above.get(key)
        if known is not None and known.ref() is module:
            return known
        named = self._names.find(module, None if above is None else above.named, frame)
        context = self._take(key, named, above)
        context.ref = weakref.ref(module)
        context.compiled = is_compiled(module)
        if above is not None and above.named is not None and named.root is not above.root:
            context.seen_as = _seen_below(above, module)
        return context

    def find_scope(self, named: NamedModule, above: CallContext | None) -> CallContext:
        """Returns the context of a named scope. Its key is odd, so it never equals the `id` of a module."""
        key = 2 * named.module_id + 1
        known = self._outermost.get(key) if above is None else above.get(key)
        if known is None:
            known = self._take(key, named, above)
            known.is_scope = True
        return known

    def contexts_of(self, named: NamedModule) -> list[CallContext]:
        """Returns all contexts in which a module was called."""
        module = named.module
        contexts = () if module is None else self._of_module.get(named.module_id, ())
        return [context for context in contexts if context.ref() is module]

    def _take(self, key: int, named: NamedModule, above: CallContext | None) -> CallContext:
        """Returns a new context, or the context of a freed module with the same name."""
        holder = self._outermost if above is None else above
        contexts = self._of_module.setdefault(named.module_id, [])
        context = next(
            (context for context in contexts if context.above is above and context.ref() is None), None
        )
        if context is None:
            context = CallContext(named, above, len(self.contexts))
            self.contexts.append(context)
            contexts.append(context)
        elif holder.get(context.outermost) is context:
            del holder[context.outermost]
        context.outermost = key
        context.key = -1 if above is None else key
        holder[key] = context
        return context


def _seen_below(above: CallContext, module: nn.Module) -> tuple[NamedModule, str] | None:
    """Returns root and path of a module as registered below its caller; None if it is not registered there."""
    caller = above.module
    if caller is not None:
        for below, _, path, _ in walk(caller, above.path, ""):
            if below is module:
                return above.root, path
    return None
