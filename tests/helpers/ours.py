"""Counts what modtrace keeps alive."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any


def objects_of_ours() -> Counter[str]:
    """The living instances of modtrace's classes, by class, once nobody's garbage is left."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("modtrace.") and not isinstance(each, type):
            found[kind.__name__] += 1
    return found


def settled(rec: Any, run_on: Callable[[], object]) -> Counter[str]:
    """What is there when the steps that ended are written, and the spans of dead graphs let go.

    Args:
        rec: the recording that runs.
        run_on: has a step begin, which ends the one before.
    """
    from modtrace.collect.scopes import process

    for _ in range(2):
        rec.data  # noqa: B018 (writes what has ended)
        run_on()
    rec.data  # noqa: B018 (or what has ended may be written while it is counted)
    tracker = process.current()
    assert tracker is not None
    for log in tracker.logs.all:
        log.prune_at = 0  # it waits until its spans have doubled
        log.prune()
    return objects_of_ours() + tracker_sizes()


def assert_bounded(counts: list[Counter[str]], slack: int = 2) -> None:
    """Each number stays as it is; `slack` for what a step that has just ended is still held by."""
    for name in set().union(*counts):
        found = [each[name] for each in counts]
        assert max(found) - min(found) <= slack, f"{name}: {found}"


def tracker_sizes() -> Counter[str]:
    """How long the lists and dictionaries of the process's tracker are."""
    from modtrace.collect.scopes import process

    tracker = process.current()
    assert tracker is not None
    sizes = Counter(
        {
            "contexts": len(tracker.tree.contexts),
            "logs": len(tracker.logs.all),
            "modules": len(tracker.names.modules),
            "parameter names": len(tracker.names._owners),
            "contexts by module": len(tracker.tree._of_module),
            "threads with optimizers": len(tracker.optimizers.starts),
            "optimizer starts": sum(len(starts) for starts in tracker.optimizers.starts.values()),
            "running backwards": len(tracker.backwards.all_running),
        }
    )
    for log in tracker.logs.all:
        sizes[f"spans of thread {log.number}"] = len(log.spans)
        sizes[f"suspended of thread {log.number}"] = len(log.suspended)
    return sizes
