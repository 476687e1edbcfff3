"""The follower of steps begins while other threads run."""

from types import SimpleNamespace
from typing import Any

from modtrace.collect.log.listeners import Subscribers
from modtrace.collect.names.module_names import ModuleNames
from modtrace.collect.steps.follower import StepFollower


class Opened:
    """A segment that is open."""

    task = -1


class Entered:
    """A finder that only notes what was entered."""

    def __init__(self) -> None:
        self.segments: list[Any] = []

    def enter(self, segment: Any, in_step: bool, now_ns: int) -> Any:
        self.segments.append(segment)
        return SimpleNamespace(segments=[segment], is_open=True)

    def leave(self, segment: Any) -> None:
        pass

    def take_ended(self) -> None:
        pass


def test_segment_that_another_thread_opens_at_the_start_is_entered_once() -> None:
    follower, finder = StepFollower(), Entered()
    follower._finder = finder  # type: ignore[assignment]
    subscribers = Subscribers(ModuleNames(), remove_hooks=lambda: None)
    ran, opened_meanwhile = Opened(), Opened()

    def running() -> list[Any]:
        [opened] = subscribers.segment_opened
        opened(opened_meanwhile, False)  # type: ignore[arg-type]
        return [ran, opened_meanwhile]

    follower.start(subscribers, running)
    assert finder.segments == [opened_meanwhile, ran]
