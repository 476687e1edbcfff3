"""Makes scopes of a module's plain methods, which run no hook."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ..torch_internals import is_dynamo_compiling, keep_out_of_dynamo


class ScopeOpener(Protocol):
    """Who opens scopes, and closes them."""

    def _enter_scope(self, name: str, module: nn.Module | None, frame: types.FrameType) -> Any: ...

    def _enter_call(self, module: nn.Module, frame: types.FrameType) -> Any: ...

    def _leave_scope(self, scope: Any, output: Any, *, raised: bool) -> None: ...


class Methods:
    """The methods that one tracker follows. They are wrapped while it is entered."""

    def __init__(self) -> None:
        self._wraps: list[_Wrap] = []
        self._opener: ScopeOpener | None = None

    def add(self, module: nn.Module, names: tuple[str, ...]) -> "MethodsHandle":
        """Follows more of them.

        Raises:
            AttributeError: the module has no such method.
            TypeError: it is no module, or what has the name is no method.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"methods({module!r}): give a torch.nn.Module and the names of methods of it")
        if not names:
            raise TypeError(f"methods({type(module).__name__}): name at least one method, such as 'encode'")
        wraps = [_Wrap(module, name) for name in names]
        self._wraps += wraps
        if self._opener is not None:
            for wrap in wraps:
                wrap.start(self._opener)
        return MethodsHandle(self, wraps)

    def remove(self, wraps: "list[_Wrap]") -> None:
        """Follows these no more."""
        for wrap in reversed(wraps):
            wrap.stop()
        self._wraps = [wrap for wrap in self._wraps if wrap not in wraps]

    def start(self, opener: ScopeOpener) -> None:
        """Wraps them all."""
        self._opener = opener
        for wrap in self._wraps:
            wrap.start(opener)

    def stop(self) -> None:
        """Puts them back as they were."""
        self._opener = None
        for wrap in reversed(self._wraps):
            wrap.stop()


class MethodsHandle:
    """Methods that were given together."""

    def __init__(self, methods: Methods, wraps: "list[_Wrap]") -> None:
        self._methods = methods
        self._wraps = wraps

    def remove(self) -> None:
        """Makes them plain methods again; a second time does nothing."""
        self._methods.remove(self._wraps)


class _Wrap:
    """One method of one module.

    It is wrapped in the module's class, for this one module: what stands in an instance would be copied with it, by
    `copy.deepcopy`, by DataParallel and into a pickle, and the copy would run the method of the original. Only what
    stands in the instance already is wrapped there.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        found = getattr(module, name, None)
        if found is None:
            raise AttributeError(f"methods(): {type(module).__name__} has no method {name!r}")
        if not callable(found) or isinstance(found, nn.Module):
            raise TypeError(
                f"methods(): {name!r} of {type(module).__name__} is no method but {type(found).__name__}"
            )
        self._module = weakref.ref(module)
        self._name = name
        self._opener: ScopeOpener | None = None
        self._holder: Any = None
        self._wrapper: Any = None
        self._original: Any = None

    def start(self, opener: ScopeOpener) -> None:
        """Wraps it."""
        module = self._module()
        if module is None or self._holder is not None:
            return
        self._opener = opener
        in_instance = self._name in module.__dict__
        holder = module if in_instance else type(module)
        original = vars(holder).get(self._name, _INHERITED)
        if not in_instance and not isinstance(
            original if original is not _INHERITED else getattr(holder, self._name), types.FunctionType
        ):
            holder, in_instance = module, True  # a static or class method, or something callable
        self._holder, self._original = holder, original
        self._wrapper = self._make_wrapper(getattr(holder, self._name), in_instance)
        _put(holder, self._name, self._wrapper)

    def stop(self) -> None:
        """Puts it back, unless somebody else has wrapped it since: then ours stays, and passes on."""
        self._opener = None
        holder, self._holder = self._holder, None
        if holder is not None and vars(holder).get(self._name) is self._wrapper:
            if self._original is _INHERITED:
                _take(holder, self._name)
            else:
                _put(holder, self._name, self._original)
        self._wrapper = self._original = None

    def _make_wrapper(self, function: Callable[..., Any], in_instance: bool) -> Callable[..., Any]:
        wrapped = self

        if in_instance:

            @functools.wraps(function)
            def call_bound(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling():
                    return function(*args, **kwargs)
                return wrapped._call(function, wrapped._module(), args, kwargs)

            keep_out_of_dynamo(call_bound, with_callees=False)
            return call_bound

        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or self is not wrapped._module():
                return function(self, *args, **kwargs)
            return wrapped._call(function, self, (self, *args), kwargs)

        keep_out_of_dynamo(call, with_callees=False)
        return call

    def _call(self, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        opener = self._opener
        if opener is None or module is None:
            return function(*args, **kwargs)
        if self._name == "forward":
            scope = opener._enter_call(module, sys._getframe(2))
        else:
            scope = opener._enter_scope(f"{self._name}()", module, sys._getframe(2))
        try:
            output = function(*args, **kwargs)
        except BaseException:
            opener._leave_scope(scope, None, raised=True)
            raise
        opener._leave_scope(scope, output, raised=False)
        return output


class _Inherited:
    """Nothing stood there."""


_INHERITED = _Inherited()


def _put(holder: Any, name: str, what: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, what)
    else:
        holder.__dict__[name] = what


def _take(holder: Any, name: str) -> None:
    if isinstance(holder, type):
        delattr(holder, name)
    else:
        del holder.__dict__[name]
