"""The tree of callers: where each module has been reached, so that entering it again is one look-up."""

from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Optional

from torch import nn

from ..recording.module_path import path_below
from ..torch_internals import is_compiled
from .names import ModuleNames, NamedModule, walk


class Place(dict[int, "Place"]):
    """A module as reached through one chain of callers; the places below it, by `id` of their module.

    The running call is a pointer into this tree: entering a module is one dictionary look-up, which at the
    same time says that the module is known and that it was reached this way before.
    """

    __slots__ = (
        "above",
        "codes",
        "compiled",
        "index",
        "is_scope",
        "key",
        "named",
        "outermost",
        "owners",
        "seen_as",
    )

    def __init__(self, key: int, named: NamedModule | None, above: Optional["Place"], index: int) -> None:
        self.key = key  # id of the module; -1 for an outermost place, so that leaving it takes the slow way
        self.outermost = key
        self.named = named
        self.above = above
        self.index = index
        self.codes: set[CodeType] = set()  # functions that were seen to run ops inside of its calls
        self.compiled = False  # its calls run as compiled regions
        self.is_scope = False  # a stretch of code that the user named, no module
        self.seen_as: tuple[NamedModule, str] | None = (
            None  # root and path below its caller, where it has others too
        )
        self.owners: tuple[NamedModule, ...] | None = (
            None  # what was around it, once it was outermost in no backward
        )

    __hash__ = object.__hash__  # type: ignore[assignment]  # a place is itself, whatever is below it

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def path(self) -> str:
        """The module's path as seen from here: of a shared module the alias below the caller."""
        named = self.named
        assert named is not None
        if self.seen_as is not None:
            return self.seen_as[1]
        if not named.aliases or self.above is None or self.above.named is None:
            return named.path
        return path_below(self.above.path, named.path, named.aliases)

    @property
    def root(self) -> NamedModule:
        """The root that the path is from: of a module in two models the one that its caller is in."""
        assert self.named is not None
        return self.named.root if self.seen_as is None else self.seen_as[0]

    @property
    def module(self) -> nn.Module | None:
        """The module, None if it is dead or the place is no module's."""
        return None if self.named is None or self.named.ref is None else self.named.ref()

    def upwards(self) -> Iterator["Place"]:
        """This place and those of its callers, innermost first; none at the outside."""
        at: Place | None = self
        while at is not None and at.named is not None:
            yield at
            at = at.above

    def is_caller_of(self, named: NamedModule) -> bool:
        """Whether it has called the module itself, with no other between."""
        return named.key in self or any(each.named is named for each in self.values())


class PlaceTree:
    """All places, by number. Taken under the tracker's lock."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self.places: list[Place] = []  # by number
        self.outside = Place(0, None, None, -1)
        self._outermost: dict[int, Place] = {}
        self._of_key: dict[int, list[Place]] = {}
        self._retired: dict[tuple[Place | None, int], Place] = {}
        names.on_death(self._forget)

    def find(self, module: nn.Module, above: Place | None, frame: FrameType | None) -> Place:
        """The place of a module below its caller, None: at the outside; made when met for the first time."""
        key = id(module)
        known = self._outermost.get(key) if above is None else above.get(key)
        if known is not None:
            return known
        named = self._names.find(module, None if above is None else above.named, frame)
        place = self._take(key, named, above)
        place.compiled = is_compiled(module)
        if above is not None and above.named is not None and named.root is not above.root:
            place.seen_as = _seen_below(above, module)
        return place

    def find_scope(self, named: NamedModule, above: Place | None) -> Place:
        """The place of a named stretch of code. Its key is odd, so it is no module's `id`."""
        key = 2 * named.module_id + 1
        known = self._outermost.get(key) if above is None else above.get(key)
        if known is None:
            known = self._take(key, named, above)
            known.is_scope = True
        return known

    def places_of(self, named: NamedModule) -> list[Place]:
        """Where a module has been called."""
        return [place for place in self._of_key.get(named.key, ()) if place.named is named]

    def _take(self, key: int, named: NamedModule, above: Place | None) -> Place:
        place = self._retired.pop((above, named.module_id), None)
        if place is None:
            place = Place(key, named, above, len(self.places))
            self.places.append(place)
        place.outermost = key
        place.key = -1 if above is None else key
        (self._outermost if above is None else above)[key] = place
        self._of_key.setdefault(key, []).append(place)
        return place

    def _forget(self, key: int) -> None:
        for place in self._of_key.pop(key, ()):
            holder = self._outermost if place.above is None else place.above
            if holder.get(key) is place:
                del holder[key]
            assert place.named is not None
            self._retired[(place.above, place.named.module_id)] = place


def _seen_below(above: Place, module: nn.Module) -> tuple[NamedModule, str] | None:
    """The root and the path of a module as registered below its caller; None if it is not."""
    caller = above.module
    if caller is not None:
        for each, _, path, _ in walk(caller, above.path, ""):
            if each is module:
                return above.root, path
    return None
