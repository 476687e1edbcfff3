"""Gives every module that runs a path as in `state_dict`, whenever the module is first seen."""

import threading
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...recording.module_path import join
from ...torch_internals.call_frames import frames, module_given_first, module_of_method
from ...torch_internals.modules import id_of_hooks, is_replica
from ..identity_map import IdentityMap
from .walk import MAX_PATHS, count_elements, descendants, walk
from .wrappers import class_name, free_name, is_wrapped

#: The type that is shown for code that the user named, which is no module.
SCOPE = "scope"


class NamedModule:
    """One module and its names. `module_id` never changes; the path may, when more of the model is seen."""

    __slots__ = (
        "aliases", "buffers", "given", "module_id", "name", "parameters", "parent", "path", "raw_path",
        "ref", "root", "slots", "type_name", "unregistered",
    )  # fmt: skip

    def __init__(self, module_id: int, type_name: str) -> None:
        self.module_id = module_id
        self.type_name = type_name
        self.ref: weakref.ref[nn.Module] | None = None
        self.root: NamedModule = self
        self.parent: NamedModule | None = None
        self.path = ""
        self.raw_path = ""
        self.aliases: list[str] = []
        self.name: str | None = None
        self.given = False  # whether the user named it as a root, which it then remains
        self.unregistered = False
        self.parameters: int | None = None
        self.buffers: int | None = None
        self.slots: dict[str, list[NamedModule]] = {}  # unregistered modules below it, by type

    @property
    def shown(self) -> str:
        """The path; for a root, its name."""
        return self.path or self.name or self.type_name

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it was freed."""
        return None if self.ref is None else self.ref()

    def row(self) -> dict[str, Any]:
        """Returns the module's row in the table `modules`."""
        return {
            "module_id": self.module_id,
            "root_id": self.root.module_id,
            "path": self.path,
            "raw_path": self.raw_path,
            "aliases": list(self.aliases),
            "name": self.name if self.root is self else None,
            "type": self.type_name,
            "parent_id": self.parent.module_id if self.parent is not None else None,
            "parameters": self.parameters,
            "buffers": self.buffers,
        }


class ParameterOwner(NamedTuple):
    """A module that holds a parameter, and the name it has there."""

    module: NamedModule
    name: str

    def holds(self, parameter: torch.Tensor) -> bool:
        """Returns whether the module still holds the parameter.

        A weak reference to the parameter would make `torch.utils.swap_tensors` fail.
        """
        ref, name = self.module.ref, self.name  # plainly: a step asks for every parameter
        module = None if ref is None else ref()
        held: Any = {} if module is None else module._parameters  # that of a scripted module is no dict
        return name in held and held[name] is parameter


class ModuleNames:
    """The names of all modules seen so far. Modules are referenced weakly; a freed module's name and id remain."""

    def __init__(self) -> None:
        self.modules: list[NamedModule] = []  # indexed by module_id
        self._named: IdentityMap[nn.Module, NamedModule] = IdentityMap()
        #: Counts the changes of rows. Anything derived from names is valid while it stays the same.
        self.revision = 0
        self._changed: dict[int, int] = {}  # from module_id to the revision of its last change
        self._owners: dict[int, list[ParameterOwner]] = {}  # keyed by the `id` of the parameter
        self.owners_revision = 0  # counts the searches for owners, as a parameter may get another owner
        self._lock = threading.RLock()
        self._by_hooks: dict[int, NamedModule] = {}  # keyed by the `id` of a module's dictionary of hooks
        self._hooks_at = -1  # the revision for which `_by_hooks` is valid
        self._scopes: dict[tuple[NamedModule | None, str], NamedModule] = {}

    def add_root(self, module: nn.Module, name: str | None = None) -> NamedModule:
        """Names a root that the user gave, and everything registered below it."""
        with self._lock:
            known = self._named.get(module)
            root = known if known is not None and known.root is known else self._register_root(module)
            root.given = True
            if name is not None and root.name != name:
                root.name = self._free_name(name, but=root)
                self._touch(root)
            return root

    def get(self, module: nn.Module) -> NamedModule | None:
        """Returns the names of a module; None if it has not been seen."""
        return self._named.get(module)

    def find(self, module: nn.Module, caller: NamedModule | None, frame: FrameType | None) -> NamedModule:
        """Returns the names of a module that is being entered. A module seen for the first time is named.

        Args:
            caller: the module that is calling it; None if it is outermost.
            frame: the Python frame of the call, which is read if there is no caller.
        """
        with self._lock:
            known = self._named.get(module) or self._original_of(module)
            if known is not None:
                return known
            while caller is not None and caller.type_name == SCOPE:
                caller = caller.parent
            if caller is None:
                return self._find_at_outside(module, frame)
            return self._find_late(module, caller) or self._name_unregistered(module, caller)

    def add_scope(self, name: str, owner: NamedModule | None) -> NamedModule:
        """Names code inside the module `owner`, or outside of all modules if that is None."""
        with self._lock:
            known = self._scopes.get((owner, name))
            if known is None:
                known = self._scopes[owner, name] = NamedModule(len(self.modules), SCOPE)
                self.modules.append(known)
                if owner is None:
                    known.name = self._free_name(name)
                    self._touch(known)
                else:
                    self._place(known, owner, join(owner.path, name), join(owner.raw_path, name))
            return known

    def owners_in(self, frame: FrameType | None, named: NamedModule) -> list[NamedModule]:
        """Returns the modules that contain `named` and whose plain methods run in these frames, outermost first."""
        owners: dict[NamedModule, None] = {}
        for owner in map(module_of_method, frames(frame)):
            known = None if owner is None else self._named.get(owner) or self._original_of(owner)
            if known is not None and known is not named and _is_under(named, known):
                owners[known] = None
        return list(owners)[::-1]

    def parameter_name(self, parameter: torch.Tensor) -> str | None:
        """Returns the path of a parameter, as in `state_dict`; None if no module seen so far owns it."""
        owners = self.owners_of(parameter) or self.owners_of(parameter, learn=True)
        return join(owners[0].module.path, owners[0].name) if owners else None

    def owners_of(self, parameter: torch.Tensor, *, learn: bool = False) -> "list[ParameterOwner]":
        """Returns the modules that hold a parameter. A tied parameter has several.

        Args:
            learn: whether to search all modules again first (1 us for each parameter).
        """
        if learn:
            with self._lock:
                self._learn_parameters()
        owners = self._owners.get(id(parameter), ())
        return [owner for owner in owners if owner.holds(parameter)]

    def paths(self) -> list[str]:
        """Returns the paths and aliases of all modules seen, and the paths of their parameters and buffers."""
        with self._lock:
            self._learn_parameters()
            owners = [owner for owners in self._owners.values() for owner in owners]
        modules = [path for named in self.modules for path in (named.path, *named.aliases)]
        parameters = [
            join(path, owner.name) for owner in owners for path in (owner.module.path, *owner.module.aliases)
        ]
        return [*modules, *parameters, *(path for named in self.modules for path in _buffer_paths(named))]

    def rows_since(self, revision: int) -> tuple[int, list[dict[str, Any]]]:
        """Returns the current revision, and the rows that have changed since `revision`."""
        with self._lock:
            changed = [number for number, when in self._changed.items() if when > revision]
            return self.revision, [self.modules[number].row() for number in sorted(changed)]

    # Finding modules.

    def _find_at_outside(self, module: nn.Module, frame: FrameType | None) -> NamedModule:
        owner = _outermost_owner(module, frame)
        if owner is not None:
            root = self._named.get(owner)
            if root is None:
                self._register_root(owner)
            else:
                self._register_below(owner, root)
            found = self._named.get(module)
            if found is not None:
                return found
        return self._rewrap(module) or self._revive_root(module) or self._register_root(module)

    def _find_late(self, module: nn.Module, caller: NamedModule) -> NamedModule | None:
        """Names a module that was registered after its root was walked. Returns None if it is not registered."""
        for ancestor in dict.fromkeys((caller, caller.root)):
            if ancestor is not caller and self._dead_slot(module, caller) is not None:
                return None  # made anew in each forward, so walking the whole root would be wasted
            owner = ancestor.module
            if owner is not None and any(descendant is module for descendant in descendants(owner)):
                self._register_below(owner, ancestor)
                return self._named.get(module)
        return None

    def _name_unregistered(self, module: nn.Module, caller: NamedModule) -> NamedModule:
        named = self._dead_slot(module, caller)
        if named is not None:
            self._bind(module, named)
            return named
        slots = caller.slots.setdefault(class_name(module), [])
        part = f"({class_name(module)}#{len(slots)})"
        named = self._new(module)
        slots.append(named)
        named.unregistered = True
        self._place(named, caller, join(caller.path, part), join(caller.raw_path, part))
        self._register_below(module, named)
        return named

    @staticmethod
    def _dead_slot(module: nn.Module, caller: NamedModule) -> NamedModule | None:
        """Returns the name of a freed unregistered module of the same class.

        If each forward makes such a module, all of them thus get the same name.
        """
        slots = caller.slots.get(class_name(module), ())
        return next((slot for slot in slots if slot.module is None), None)

    def _rewrap(self, module: nn.Module) -> NamedModule | None:
        """Returns the name of a wrapper of the same class around the same module.

        A loop that calls `torch.compile(model)` in each step needs this.
        """
        inner = next((inner for part, inner in module._modules.items() if is_wrapped(module, part)), None)
        known = None if inner is None else self._named.get(inner)
        around = None if known is None else known.parent
        if known and around and (around.path, around.type_name) == (known.path, class_name(module)):
            self._bind(module, around)
            return around
        return None

    def _revive_root(self, module: nn.Module) -> NamedModule | None:
        """Returns the name of a freed root without parameters.

        A loop that makes a criterion in each step needs this.
        """
        if module._modules or module._parameters:
            return None
        for named in self.modules:
            free = named.root is named and named.module is None and not named.given and named.parameters == 0
            if free and named.type_name == class_name(module):
                self._bind(module, named)
                return named
        return None

    def _original_of(self, module: nn.Module) -> NamedModule | None:
        """Returns the module of which a DataParallel replica is a copy; None if the module is no replica."""
        if not is_replica(module):
            return None
        if self._hooks_at != self.revision:
            held = ((named, named.module) for named in self.modules)
            self._by_hooks = {id_of_hooks(alive): named for named, alive in held if alive is not None}
            self._hooks_at = self.revision
        original = self._by_hooks.get(id_of_hooks(module))  # a replica shares it with its original
        if original is not None:
            self._named[module] = original
        return original

    # Registering modules.

    def _register_root(self, module: nn.Module) -> NamedModule:
        root = self._named.get(module) or self._new(module)
        root.name = root.name or self._free_name(class_name(module))
        self._touch(root)
        self._register_below(module, root)
        return root

    def _register_below(self, top: nn.Module, named_top: NamedModule) -> None:
        """Names everything registered below a module, including aliases."""
        aliases: dict[NamedModule, list[str]] = {}
        for module, parent, path, raw_path in walk(top, named_top.path, named_top.raw_path):
            named_parent = self._named.get(parent)
            assert named_parent is not None
            named = self._named.get(module)
            if named is None:
                self._place(self._new(module), named_parent, path, raw_path)
            elif named is named_top or (named.given and path):
                continue
            elif named.root is not named_top.root or named.unregistered:
                if named.root is named or named.unregistered:  # it was seen before its root was
                    self._move(named, named_parent, path, raw_path)
            elif path != named.path:
                aliases.setdefault(named, []).append(path)
        for named, paths in aliases.items():
            new = [path for path in paths if path not in named.aliases and path != named.path]
            if new:
                named.aliases = [*named.aliases, *new][:MAX_PATHS]
                self._touch(named)
        self._count(top, named_top)

    def _place(self, named: NamedModule, parent: NamedModule, path: str, raw_path: str) -> None:
        """Sets the parent and path of a module. No module below it has a name yet."""
        named.parent, named.root, named.name = parent, parent.root, None
        named.path, named.raw_path = path, raw_path
        self._touch(named)

    def _move(self, top: NamedModule, parent: NamedModule, path: str, raw_path: str) -> None:
        """Sets the parent and path of a module that was seen before its root, and renames all modules below."""
        if top.given:  # a wrapper of it was found, which becomes the root that the user gave
            parent.root.given, parent.root.name, top.given = True, top.name, False
            self._touch(parent.root)
        old_path, old_raw = top.path, top.raw_path
        below = [named for named in self.modules if named is not top and _is_under(named, top)]
        self._place(top, parent, path, raw_path)
        top.unregistered = False
        for inner in below:
            inner.root = parent.root
            inner.path = join(path, inner.path[len(old_path) :].lstrip("."))
            inner.raw_path = join(raw_path, inner.raw_path[len(old_raw) :].lstrip("."))
            inner.aliases = [join(path, alias[len(old_path) :].lstrip(".")) for alias in inner.aliases]
            self._touch(inner)

    def _count(self, top: nn.Module, named_top: NamedModule) -> None:
        root = named_top.root.module
        counts = count_elements(top)
        if root is not None and root is not top and not named_top.unregistered:
            counts.update(count_elements(root))  # modules that were seen late count for those above
        for key, (parameters, buffers) in counts.items():
            named = self._named.of_id(key)
            if named is not None and (named.parameters, named.buffers) != (parameters, buffers):
                named.parameters, named.buffers = parameters, buffers
                self._touch(named)

    def _new(self, module: nn.Module) -> NamedModule:
        named = NamedModule(len(self.modules), class_name(module))
        self.modules.append(named)
        self._bind(module, named)
        self._touch(named)
        return named

    def _bind(self, module: nn.Module, named: NamedModule) -> None:
        named.ref = weakref.ref(module)
        self._named[module] = named

    def _touch(self, named: NamedModule) -> None:
        self.revision += 1
        self._changed[named.module_id] = self.revision

    def _free_name(self, wanted: str, but: NamedModule | None = None) -> str:
        taken = {named.name for named in self.modules if named.root is named and named is not but}
        return free_name(wanted, taken)

    def _learn_parameters(self) -> None:
        owners: dict[int, list[ParameterOwner]] = {}
        for named in list(self.modules):
            module = named.module
            for part, parameter in () if module is None else module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append(ParameterOwner(named, part))
        self._owners = owners
        self.owners_revision += 1


def _buffer_paths(named: NamedModule) -> list[str]:
    module = named.module
    names = () if module is None else [name for name, buffer in module._buffers.items() if buffer is not None]
    return [join(path, name) for path in (named.path, *named.aliases) for name in names]


def _is_under(named: NamedModule, top: NamedModule) -> bool:
    above = named.parent
    while above is not None and above is not top:
        above = above.parent
    return above is top


def _outermost_owner(module: nn.Module, frame: FrameType | None) -> nn.Module | None:
    """Returns the outermost module that contains `module` and is the first argument of a running function.

    This finds the root of `model.encode(x)` and `encode(model, x)`, for which no hook runs.
    """
    found = None
    for owner in map(module_given_first, frames(frame)):
        if owner is not None and any(below is module for below in descendants(owner)):
            found = owner
    return found
