"""Counts what modtrace keeps alive."""

import gc
from collections import Counter


def objects_of_ours() -> Counter[str]:
    """The living instances of modtrace's classes, by class, once nobody's garbage is left."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("modtrace.") and not isinstance(each, type):
            found[kind.__name__] += 1
    return found


#: What hangs on spans, which are pruned only when they have doubled.
_SPAN_KINDS = ("Segment", "Structure", "CallRef", "Region", "BackwardSpan", "spans of thread")


def assert_bounded(counts: list[Counter[str]], slack: int = 2) -> None:
    """Each number stays as it is; `slack` for what a step that has just ended is still held by."""
    for name in set().union(*counts):
        found = [each[name] for each in counts]
        allowed = 256 if name.startswith(_SPAN_KINDS) else slack
        assert max(found) - min(found) <= allowed, f"{name}: {found}"


def tracker_sizes() -> Counter[str]:
    """How long the lists and dictionaries of the process's tracker are."""
    from modtrace.collect import scopes

    tracker = scopes.current()
    assert tracker is not None
    sizes = Counter(
        {
            "places": len(tracker.places),
            "logs": len(tracker.logs),
            "modules": len(tracker.names.modules),
            "parameter names": len(tracker.names._parameter_names),
            "places by module": len(tracker._places_of),
            "retired places": len(tracker._retired),
            "threads with optimizers": len(tracker._optimizer_starts),
            "optimizer starts": sum(len(starts) for starts in tracker._optimizer_starts.values()),
            "running backwards": len(tracker.backwards._running),
        }
    )
    for log in tracker.logs:
        sizes[f"spans of thread {log.number}"] = len(log.spans)
        sizes[f"suspended of thread {log.number}"] = len(log.suspended)
    return sizes
