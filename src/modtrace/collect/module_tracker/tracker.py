"""Defines the tracker for users: which modules run in which phase, with hooks around each of them."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ...errors import MisuseError
from ...recording.failure_reporter import warn_of_error
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import is_dynamo_compiling, keep_out_of_dynamo
from ..compile.hooks import compile_safe_hooks
from ..log.call_context import ContextTree
from ..log.listeners import Listener
from ..names.given_models import roots_of
from ..names.module_names import ModuleNames
from ..scopes import process
from ..scopes.locate import NOWHERE
from ..scopes.named_scopes import NamedScopes, OpenScope
from ..scopes.tracker import ScopeTracker
from ..steps.follower import StepFollower
from .answers import Call, Where
from .methods import Handle, Methods
from .stack_names import RootLabels, StackNames
from .user_hooks import POST_BW, POST_FW, PRE_BW, PRE_FW, Hook, UserHooks

#: The name that `parents` always contains.
GLOBAL = "Global"


class ModuleTracker:
    """Answers which modules run, forward and backward: a context manager that can replace two of PyTorch's.

    It has all features of `torch.utils.module_tracker.ModuleTracker` and of
    `torch.distributed._tools.mod_tracker.ModTracker`, at a twentieth of their cost. It registers two global module
    hooks, which all trackers and recordings of the process share, and no hook on a tensor. All answers are for the
    calling thread.

        with modtrace.ModuleTracker() as tracker:
            model(x).sum().backward()      # anything that runs in there may ask `tracker.parents`

    If it is entered again inside its own context, it goes on; the outermost exit ends it.
    """

    def __init__(self, root: object = None, *, additions: bool = False, strict: bool = False) -> None:
        """Creates a tracker, which tracks nothing before it is entered.

        Args:
            root: a module, a list of modules, or a dict from names to modules, which are roots and known from the
                start. None: roots are found as they run. A root without a name is named after its class.
            additions: distinguishes sums of gradients by the engine from the work of the module that ran last
                (`where().accumulation`), for about 10 us a call and backward.
            strict: raises internal errors instead of warning.

        Raises:
            TypeError: `root` contains something that is not a module.
        """
        self._roots = roots_of(root)
        self._strict = strict
        self._labels = RootLabels(self._roots)
        self._steps = StepFollower()
        self._hooks = UserHooks()
        self._methods = Methods()
        self._listener = _Listener(additions)
        self._depth = 0
        self._tracker: ScopeTracker | None = None  # set while the tracker is entered and has not failed
        self._scopes: NamedScopes | None = None  # set while the tracker is entered
        names = ModuleNames()
        #: The names in the tracker's contexts; after leaving, those of the last block.
        self._names = StackNames(names, ContextTree(names), self._labels)

    def __enter__(self) -> "ModuleTracker":
        self._depth += 1
        if self._depth > 1:
            return self
        keep_out_of_dynamo(ModuleTracker.where, NamedScope.__enter__, NamedScope.__exit__)
        keep_out_of_dynamo(NamedScopes.enter, NamedScopes.enter_call, NamedScopes.leave)
        self._listener.tracker = self
        try:
            tracker = process.acquire(self._listener, strict=self._strict)
            for name, module in self._roots:
                tracker.names.add_root(module, name)
            self._labels.begin()
            self._names = StackNames(tracker.names, tracker.tree, self._labels)
            self._steps = StepFollower()
            self._steps.start(tracker.subscribers, tracker.running_segments)
            self._tracker, self._scopes = tracker, NamedScopes(tracker)
            self._hooks.start(tracker)
            self._methods.start(self._scopes)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._depth > 1:
            self._depth -= 1
        elif self._depth:
            self._stop()

    def _stop(self) -> None:
        self._depth = 0
        self._methods.stop()
        self._hooks.stop()
        self._end()
        self._scopes = None
        self._steps.stop()
        process.release(self._listener)
        self._listener.tracker = None

    # Answers about what runs.

    @property
    def parents(self) -> set[str]:
        """The names of the modules that run, forward or backward, and always "Global".

        A name is the class of the root and the path from it, as `Mod.c.0`; the second root of a class is `Mod#1`.
        """
        return {GLOBAL, *self.where().stack}

    @property
    def is_bw(self) -> bool:
        """True if a backward runs on this thread. A recompute runs inside one; `phase` distinguishes them."""
        return graph_task_id() != -1

    @property
    def phase(self) -> str | None:
        """`forward`, `backward`, `recompute` or `optimizer`; None outside of all of them."""
        return self.where().phase

    @property
    def stack(self) -> tuple[str, ...]:
        """The names of the modules that run, outermost first."""
        return self.where().stack

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the running modules as in `state_dict`, outermost first; a root is `""`."""
        return self.where().paths

    @property
    def current(self) -> str | None:
        """The name of the innermost module that runs."""
        return self.where().current

    @property
    def call(self) -> Call | None:
        """The innermost call that runs."""
        return self.where().call

    def where(self) -> Where:
        """Returns all answers for this moment at once, for tools that need several of them at every op."""
        tracker = self._tracker
        found = NOWHERE if tracker is None else tracker.where()
        return Where(found, self._names, self._steps)

    def get_known_fqn(self, module: nn.Module) -> str | None:
        """Returns the name of a module; None if neither it nor a module in which it is registered has run."""
        return self._names.known(module)

    # Hooks of the user.

    def register_user_hooks(
        self,
        pre_fw_hook: Callable[..., Any] | None = None,
        post_fw_hook: Callable[..., Any] | None = None,
        pre_bw_hook: Callable[..., Any] | None = None,
        post_bw_hook: Callable[..., Any] | None = None,
        *,
        with_kwargs: bool = False,
        with_slots: bool = False,
        several: bool = False,
    ) -> Handle:
        """Registers hooks around every forward and every backward of every module, including recomputes.

        What the hooks return is ignored; what they raise propagates to the caller of the module or of `backward()`.
        `phase` distinguishes a recompute from the forward. The module's name is in `parents`.

        Args:
            pre_fw_hook: `(module, args)`, with the args that the module gets.
            post_fw_hook: `(module, args, output)`; the output is None if an exception leaves the call.
            pre_bw_hook: `(module, grad_output)`, called just before the first node of the call runs, with the gradients
                that this node receives. For a call that only passes a tensor on: with the gradients of what it has
                passed on. The module is None if it is dead by then.
            post_bw_hook: `(module, grad_input)`, called when the last node of the call has run and its gradients have
                been delivered. There is one gradient for each tensor among args and kwargs that needs one, in order:
                what this call contributes, as in torch's full backward hooks; None if none came, or if the tensor
                occurred before. If several calls end at one node, `current` is the innermost of them in the hooks of
                all. It is not called if the backward raises. Gradients of leaves share memory with `.grad`: copy what
                you keep.
            with_kwargs: passes the keyword arguments to the forward hooks, after args.
            with_slots: passes a dict from slots to gradients to the backward hooks: `"[0].hidden_states"`.
            several: allows these hooks beside others of their kind.

        Returns:
            a handle whose `remove()` removes only these hooks.

        Raises:
            AssertionError: there is a hook of this kind, and `several` is False.
        """
        given = {PRE_FW: pre_fw_hook, POST_FW: post_fw_hook, PRE_BW: pre_bw_hook, POST_BW: post_bw_hook}
        hooks = {
            kind: Hook(hook, with_kwargs, with_slots, not several)
            for kind, hook in given.items()
            if hook is not None
        }
        self._hooks.add(hooks)
        return Handle(partial(self._hooks.remove, hooks))

    def clear_user_hooks(self) -> None:
        """Removes every user hook."""
        self._hooks.clear()

    #: Hooks on the submodules of one model, for which no tracker has to be entered.
    compile_safe_hooks = staticmethod(compile_safe_hooks)

    # Code for which torch runs no hook.

    def scope(self, name: str, module: nn.Module | None = None) -> "NamedScope":
        """Names the code in a `with` block, such as a loss, or a method of a module other than `forward`.

        Args:
            name: the name that occurs in `parents`, below the module or below what runs, as `Mod.name`.
            module: the module whose code it is. It occurs in `parents` too, and modules that the code calls get their
                right names. Such a scope is one call of the module, so put it around one use and not around a loop.

        Raises:
            MisuseError: the tracker is not entered.
        """
        return NamedScope(self, name, module)

    def methods(self, module: nn.Module, *names: str) -> Handle:
        """Runs each call of some methods of a module in a scope: `tracker.methods(model, "encode", "generate")`.

        A call of `model.encode` occurs in `parents` as `Mod` and `Mod.encode()`. `"forward"` is for code that calls
        `module.forward(...)` itself; it counts as a call of the module. It works while the tracker is entered.

        Returns:
            a handle whose `remove()` stops following the methods.

        Raises:
            AttributeError: the module has no such method.
            TypeError: `module` is not a module, or the attribute is not a method.
        """
        return self._methods.add(module, names)

    def _get_mod_name(self, module: nn.Module) -> str:
        """Returns the name of a module, known or not. `DebugMode` of torch 2.13 calls this method of its tracker."""
        known = self.get_known_fqn(module)
        if known is None and self._tracker is not None:
            with self._tracker.subscribers.guard(module):
                known = self._names.name_of(self._tracker.names.find(module, None, None))
        return known or type(module).__name__

    def _end(self) -> None:
        """Stops answering, and opens no more scopes."""
        self._tracker = None
        if self._scopes is not None:
            self._scopes.is_stopped = True

    def _failed(self, error: Exception, where: str) -> None:
        self._methods.stop()
        self._hooks.stop()
        if self._tracker is None:
            return
        self._end()
        if not self._strict:
            text = f"{where}: modtrace met an internal error and stopped tracking; the run goes on"
            warn_of_error(text, error, strict="ModuleTracker(strict=True)")


ModTracker = ModuleTracker


class NamedScope:
    """A `with` block that has a name while it runs."""

    def __init__(self, tracker: ModuleTracker, name: str, module: nn.Module | None) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"scope({name!r}): give a name, a text that is not empty")
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"scope({name!r}): module={module!r} is no torch.nn.Module")
        self._tracker = tracker
        self._name = name
        self._module = module
        self._entered: dict[int, list[tuple[NamedScopes, OpenScope | None]]] = {}  # the open scopes by thread

    def __enter__(self) -> "NamedScope":
        if is_dynamo_compiling():
            return self
        scopes = self._tracker._scopes
        if not self._tracker._depth or scopes is None:
            raise MisuseError(
                f"scope({self._name!r}) outside of its `with ModuleTracker()` block: nothing is tracked there."
            )
        opened = scopes.enter(self._name, self._module, sys._getframe(1))
        self._entered.setdefault(threading.get_ident(), []).append((scopes, opened))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if is_dynamo_compiling():
            return
        entered = self._entered.get(threading.get_ident())
        if entered:
            scopes, opened = entered.pop()
            scopes.leave(opened, None, raised=kind is not None)


class _Listener(Listener):
    """Receives the events of the process's tracker."""

    def __init__(self, additions: bool) -> None:
        self.wants_additions = additions
        self.tracker: ModuleTracker | None = None  # set while the tracker is entered

    def failed(self, error: Exception, where: str) -> None:
        if self.tracker is not None:
            self.tracker._failed(error, where)

    def forked(self) -> None:
        if self.tracker is not None:
            self.tracker._end()
