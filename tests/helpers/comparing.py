"""Compares where modtrace says each op of a step belongs with what the graph itself says."""

from helpers.keeping import tracking
from helpers.truth import Comparison, Truth


def compare(model, run, *, additions=True):
    """Runs a step (`run()` gives the loss) under both, and gives the comparison."""
    with tracking(model, events=additions, additions=additions) as tracker:
        truth = Truth(model)
        comparison = Comparison(tracker, truth)
        try:
            with truth, comparison:
                loss = run()
                loss.backward()
        finally:
            truth.close()
    return comparison
