"""Runs the plain methods of a module, for which torch runs no hook, in scopes."""

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ...torch_internals.dynamo import is_dynamo_compiling, keep_out_of_dynamo
from ...torch_internals.module_copies import Attribute, leave_out_of_copies
from ...torch_internals.modules import id_of_hooks, is_replica
from ...torch_internals.own_frames import leave_out_own_frames
from ...torch_internals.patches import MISSING, replace
from ..scopes.named_scopes import NamedScopes, OpenScope


class Methods:
    """The methods that one tracker follows. They are wrapped while the tracker is entered."""

    def __init__(self) -> None:
        self._wraps: list[_Wrap] = []
        self._scopes: NamedScopes | None = None  # set while the methods are wrapped

    def add(self, module: nn.Module, names: tuple[str, ...]) -> "Handle":
        """Follows more methods.

        Raises:
            AttributeError: the module has no such method.
            TypeError: `module` is not a module, or the attribute is not a method.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"methods({module!r}): give a torch.nn.Module and the names of methods of it")
        if not names:
            raise TypeError(f"methods({type(module).__name__}): name at least one method, such as 'encode'")
        wraps = [_Wrap(module, name) for name in names]
        self._wraps = [wrap for wrap in self._wraps if wrap.ref() is not None] + wraps
        if self._scopes is not None:
            for wrap in wraps:
                wrap.start(self._scopes)
        return Handle(functools.partial(self.remove, wraps))

    def remove(self, wraps: "list[_Wrap]") -> None:
        """Stops following these methods."""
        for wrap in reversed(wraps):
            wrap.stop()
        self._wraps = [wrap for wrap in self._wraps if wrap not in wraps]

    def start(self, scopes: NamedScopes) -> None:
        """Wraps all methods."""
        self._scopes = scopes
        for wrap in self._wraps:
            wrap.start(scopes)

    def stop(self) -> None:
        """Restores all methods."""
        self._scopes = None
        for wrap in reversed(self._wraps):
            wrap.stop()


class Handle:
    """Methods or hooks that were added together."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Removes all of these methods or hooks. A second call does nothing."""
        self._remove()


class _Wrap:
    """One method of one module that one tracker follows."""

    def __init__(self, module: nn.Module, name: str) -> None:
        found = getattr(module, name, None)
        if found is None:
            raise AttributeError(f"methods(): {type(module).__name__} has no method {name!r}")
        if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
            raise TypeError(
                f"methods(): {name!r} of {type(module).__name__} is a coroutine or a generator, which is over before "
                "its body runs. Put `with tracker.scope(...)` into its body"
            )
        if not callable(found) or isinstance(found, nn.Module):
            raise TypeError(
                f"methods(): {name!r} of {type(module).__name__} is no method but {type(found).__name__}"
            )
        self.ref = weakref.ref(module)
        self.key = id(module)
        self.name = name
        self.scopes: NamedScopes | None = None
        self._wrapper: _Wrapper | None = None

    def start(self, scopes: NamedScopes) -> None:
        """Wraps the method."""
        module = self.ref()
        if module is None or self._wrapper is not None:
            return
        self.scopes = scopes
        self._wrapper = _wrapper_of(module, self.name)
        self._wrapper.add(self)

    def stop(self) -> None:
        """Stops following the method, which is restored if no other tracker follows it."""
        self.scopes = None
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            wrapper.remove(self)

    def is_for(self, module: Any) -> bool:
        """Returns whether `module` has this method, or is a replica of the module that DataParallel made."""
        original = self.ref()
        return module is original or (
            original is not None and is_replica(module) and id_of_hooks(module) == id_of_hooks(original)
        )


#: The wrappers in use, by the `id` of the class or module that holds the method, and the name of the method.
_wrappers: "dict[tuple[int, str], _Wrapper]" = {}


def _wrapper_of(module: nn.Module, name: str) -> "_Wrapper":
    """Returns the wrapper of a method, which is in the class, for all trackers that follow the method.

    An attribute of an instance would be copied by `copy.deepcopy`, by DataParallel and into a pickle, and the copy
    would run the method of the original. So the instance holds the wrapper only if it holds the method already, or if
    the method is a static or a class method.
    """
    kind = type(module)
    is_plain = isinstance(inspect.getattr_static(kind, name, None), types.FunctionType)
    holder: Any = kind if is_plain and name not in module.__dict__ else module
    return _wrappers.get((id(holder), name)) or _Wrapper(holder, name)


class _Wrapper:
    """Replaces a method while a tracker follows it."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder = holder
        self._name = name
        self._followed: dict[int, list[_Wrap]] = {}  # the trackers' wraps by `id` of the module
        function = getattr(holder, name)
        followed = self

        if isinstance(holder, type):

            @functools.wraps(function)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling():
                    return function(self, *args, **kwargs)
                try:
                    return followed.run(functools.partial(function, self), self, args, kwargs)
                except BaseException as error:
                    leave_out_own_frames(error)
                    raise
        else:

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling():
                    return function(*args, **kwargs)
                try:
                    return followed.run(function, holder, args, kwargs)
                except BaseException as error:
                    leave_out_own_frames(error)
                    raise

        keep_out_of_dynamo(call, _Wrapper.run, with_callees=False)
        before = vars(holder).get(name, MISSING)
        self._patches = ExitStack()
        replace(holder, name, call, self._patches)
        self._end: Callable[[], None] | None = None  # no longer leaves the wrapper out of copies
        if isinstance(holder, nn.Module):
            self._end = leave_out_of_copies(holder, attributes=[Attribute(name, call, before)])
        _wrappers[id(holder), name] = self

    def add(self, wrap: _Wrap) -> None:
        """Adds a tracker that follows the method."""
        self._followed[wrap.key] = [*self._followed.get(wrap.key, ()), wrap]

    def remove(self, wrap: _Wrap) -> None:
        """Removes a tracker that follows the method. After the last one the method is restored.

        If other code has wrapped the method since, our wrapper stays below and only calls the method.
        """
        left = [other for other in self._followed.pop(wrap.key, ()) if other is not wrap]
        if left:
            self._followed[wrap.key] = left
        if self._followed:
            return
        _wrappers.pop((id(self._holder), self._name), None)
        if self._end is not None:
            self._end()
        self._patches.close()

    def run(self, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Calls the method in a scope of each tracker that follows it for this module."""
        frame = sys._getframe(2)
        following = self._followed.get(id(module), [])
        if is_replica(module):
            following = [wrap for wraps in self._followed.values() for wrap in wraps]
        opened: list[tuple[NamedScopes, OpenScope | None]] = []
        try:
            for wrap in following:
                scopes = wrap.scopes
                if scopes is not None and wrap.is_for(module):
                    if self._name == "forward":
                        opened.append((scopes, scopes.enter_call(module, frame, args, kwargs)))
                    else:
                        scope = scopes.enter(f"{self._name}()", module, frame, args, kwargs)
                        opened.append((scopes, scope))
            output = function(*args, **kwargs)
        except BaseException:
            for scopes, scope in reversed(opened):
                scopes.leave(scope, None, raised=True)
            raise
        for scopes, scope in reversed(opened):
            scopes.leave(scope, output, raised=False)
        return output
