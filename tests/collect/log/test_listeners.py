"""Which events a listener receives."""

from typing import Any

from modtrace.collect.log.listeners import _EVENTS, Listener, Subscribers
from modtrace.collect.names.module_names import ModuleNames


class Optimizers(Listener):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def optimizer_began(self, start_ns: int) -> None:
        self.heard.append(f"began at {start_ns}")

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        self.heard.append(f"ended at {end_ns}")


def make_subscribers() -> Subscribers:
    return Subscribers(ModuleNames(), remove_hooks=lambda: None)


def bound(subscribers: Subscribers) -> dict[str, list[Any]]:
    listed = {event: getattr(subscribers, event) for event in _EVENTS}
    return {event: methods for event, methods in listed.items() if methods}


def test_only_the_events_that_a_listener_overrides_are_bound() -> None:
    subscribers, listener = make_subscribers(), Optimizers()
    subscribers.add(listener)
    assert bound(subscribers) == {
        "optimizer_began": [listener.optimizer_began],
        "optimizer_ended": [listener.optimizer_ended],
    }


def test_listener_may_want_some_events_alone() -> None:
    subscribers, listener = make_subscribers(), Optimizers()
    subscribers.add(listener, "optimizer_ended", "entering")
    assert bound(subscribers) == {"optimizer_ended": [listener.optimizer_ended]}


def test_listener_that_is_removed_receives_nothing_and_others_go_on() -> None:
    subscribers, one, other = make_subscribers(), Optimizers(), Optimizers()
    subscribers.add(one)
    subscribers.add(other, first=True)
    assert subscribers.optimizer_began == [other.optimizer_began, one.optimizer_began]
    subscribers.remove(one, "optimizer_began")
    for began in subscribers.optimizer_began:
        began(5)
    for ended in subscribers.optimizer_ended:
        ended(5, 7, 0)
    assert (one.heard, other.heard) == (["ended at 7"], ["began at 5", "ended at 7"])
    subscribers.remove(one)
    subscribers.remove(other)
    assert bound(subscribers) == {}


def test_lists_stay_the_same_objects_for_the_hooks_that_hold_them() -> None:
    subscribers, listener = make_subscribers(), Optimizers()
    held = subscribers.optimizer_began
    subscribers.add(listener)
    subscribers.remove(listener)
    subscribers.add(listener)
    assert held == [listener.optimizer_began]
    subscribers.clear()
    assert held == []


def test_every_event_has_its_list() -> None:
    assert [event for event in _EVENTS if getattr(make_subscribers(), event, None) != []] == []


def test_begin_of_a_call_on_another_thread_is_not_received_without_its_end() -> None:
    subscribers, bound_first = make_subscribers(), []

    class Segments(Listener):
        def __getattribute__(self, name: str) -> Any:
            bound_first.append(name)
            return super().__getattribute__(name)

        def segment_opened(self, segment: Any, in_step: bool) -> None: ...

        def segment_closed(self, segment: Any) -> None: ...

    subscribers.add(Segments())
    assert bound_first == ["segment_closed", "segment_opened"]


def test_user_that_comes_after_the_failure_is_told_to_take_another_tracker() -> None:
    subscribers, before, after = make_subscribers(), Optimizers(), Optimizers()
    assert subscribers.add_user(before, strict=False)
    subscribers.fail(ValueError("boom"), None)
    assert not subscribers.add_user(after, strict=True)
    assert subscribers.users == {before: False}
    assert subscribers.optimizer_began == [before.optimizer_began]
    assert not subscribers.strict
