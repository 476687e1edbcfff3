"""Runs a user's hooks around every forward and every backward."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ...torch_internals.dynamo import keep_out_of_dynamo
from ..backward.backward_call import BackwardCall
from ..log.listeners import Listener
from ..log.thread_log import ThreadLog
from ..scopes.tracker import ScopeTracker

PRE_FW, POST_FW, PRE_BW, POST_BW = "pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook"


class Hook(NamedTuple):
    """A hook as it was registered."""

    call: Callable[..., Any]
    with_kwargs: bool
    with_slots: bool
    alone: bool  # whether it must be the only one of its kind, as in PyTorch's ModTracker


class UserHooks(Listener):
    """The hooks of one tracker. They are kept from one `with` block to the next."""

    def __init__(self) -> None:
        self._hooks: dict[str, list[Hook]] = {PRE_FW: [], POST_FW: [], PRE_BW: [], POST_BW: []}
        self._tracker: ScopeTracker | None = None
        self._events: set[str] = set()  # the events to which the hooks are subscribed
        #: Whether outputs of calls are recorded for the hooks; None if they receive no backward.
        self._outputs: bool | None = None

    def add(self, hooks: dict[str, Hook]) -> None:
        """Adds hooks by kind.

        Raises:
            AssertionError: another hook is registered as the only one of this kind.
        """
        for kind, hook in hooks.items():
            if hook.alone and any(other.alone for other in self._hooks[kind]):
                raise AssertionError(
                    f"a {kind} is registered already, and there is one of each kind. Call clear_user_hooks() first, "
                    "or register with several=True"
                )
        for kind, hook in hooks.items():
            self._hooks[kind] = [*self._hooks[kind], hook]
        self._install()

    def remove(self, hooks: dict[str, Hook]) -> None:
        """Removes hooks that were added. Hooks that have been removed before are ignored."""
        for kind, hook in hooks.items():
            self._hooks[kind] = [other for other in self._hooks[kind] if other is not hook]
        self._install()

    def clear(self) -> None:
        """Removes all hooks."""
        self._hooks = {kind: [] for kind in self._hooks}
        self._install()

    def start(self, tracker: ScopeTracker) -> None:
        """Runs the hooks from now on."""
        keep_out_of_dynamo(UserHooks.entering, UserHooks.leaving, with_callees=False)
        keep_out_of_dynamo(UserHooks.call_began, UserHooks.call_ended, with_callees=False)
        self._tracker = tracker
        self._install()

    def stop(self) -> None:
        """Stops running the hooks."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._subscribe(tracker, set(), None)

    def _install(self) -> None:
        if self._tracker is not None:
            hooks = self._hooks
            events = {name for name, kind in (("entering", PRE_FW), ("leaving", POST_FW)) if hooks[kind]}
            outputs = any(hook.with_slots for hook in hooks[PRE_BW])
            self._subscribe(self._tracker, events, outputs if hooks[PRE_BW] or hooks[POST_BW] else None)

    def _subscribe(self, tracker: ScopeTracker, events: set[str], outputs: bool | None) -> None:
        """Subscribes only to the events that the hooks need, because an event without listeners costs nothing."""
        had_events, self._events = self._events, events
        had_outputs, self._outputs = self._outputs, outputs
        for event in events - had_events:
            tracker.subscribers.add(self, event)
        for event in had_events - events:
            tracker.subscribers.remove(self, event)
        if outputs == had_outputs:
            return
        if had_outputs is None:
            tracker.backwards.listeners.append(self)
        elif outputs is None:
            tracker.backwards.listeners.remove(self)
        if outputs is not None:
            tracker.call_tensors.want(outputs)
        if had_outputs is not None:
            tracker.call_tensors.unwant(had_outputs)

    # Event handlers. Exceptions of the user's hooks reach the user.

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        if log.context.outermost != id(module):
            return  # the call is not followed: a graph module of torch.compile, or the tracker has failed
        for hook in self._hooks[PRE_FW]:
            if hook.with_kwargs:
                hook.call(module, args, log.kwargs_of(sys._getframe(2)))
            else:
                hook.call(module, args)

    def leaving(
        self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        for hook in self._hooks[POST_FW]:
            if hook.with_kwargs:
                hook.call(module, args, kwargs, output)
            else:
                hook.call(module, args, output)

    @property
    def wants_gradients(self) -> bool:
        return bool(self._hooks[POST_BW])

    def call_began(self, call: BackwardCall, received: Any, number: int) -> None:
        if self._tracker is None:
            return  # the tracker was left inside this backward
        for hook in self._hooks[PRE_BW]:
            hook.call(call.module, call.outputs_by_slot(received, number) if hook.with_slots else received)

    def call_ended(self, call: BackwardCall, gradients: Any) -> None:
        if self._tracker is None:
            return
        for hook in self._hooks[POST_BW]:
            hook.call(call.module, call.inputs_by_slot(gradients) if hook.with_slots else gradients)
