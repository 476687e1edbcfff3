"""Makes many objects of a frozen dataclass quickly."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Fields = ParamSpec("_Fields")
_Made = TypeVar("_Made")


def quick(of: Callable[_Fields, _Made]) -> Callable[_Fields, _Made]:
    """Returns a function that makes objects of a frozen dataclass in half the time, of its fields by name.

    A frozen dataclass sets each field with a call of `object.__setattr__`. This writes all of them at once, and a field
    that is not given has the default of the class. Fields without a default, or with a factory, have to be given.
    """
    new = object.__new__

    def make(*_: _Fields.args, **fields: _Fields.kwargs) -> _Made:
        made: _Made = new(of)  # type: ignore[arg-type]  # it is a class
        made.__dict__.update(fields)
        return made

    return make
