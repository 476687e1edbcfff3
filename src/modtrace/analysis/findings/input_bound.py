"""Finds steps that mostly wait for their data."""

from collections.abc import Iterator

import numpy as np

from ...recording.suggestions import count_of
from ..tables.columns import column_of, dictionary_codes
from ..tables.cycles import BETWEEN, COPY, DATA, CycleSummary, summarize_cycles
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import name_steps_of

_SUBJECTS = {
    DATA: "waiting for data takes",
    COPY: "copying to the device takes",
    BETWEEN: "the time between steps is",
}
_REMEDIES = {
    DATA: "DataLoader(num_workers=4, persistent_workers=True): other processes then load while the model computes",
    COPY: "DataLoader(pin_memory=True) and x.to(device, non_blocking=True), or fewer bytes: integers, half precision",
    BETWEEN: "look at what the loop does behind optimizer.step(): data that come from no DataLoader, logging, saving",
}
_MORE_WORKERS = (
    "raise num_workers or prefetch_factor, or make a sample cheaper: decode and resize once, beforehand"
)


@check("input-bound", about="steps that mostly wait for their data")
def INPUT_BOUND(
    run: SampledSteps,
    share: float = 0.25,  # what workers can save at most; less is lost in the noise of a shared machine
    wait_ms: float = 1,  # a loader alone takes some 0.1 ms a batch
    between_share: float = 0.5,
    between_ms: float = 10,  # reading a loss, a scheduler and a progress bar take some milliseconds
) -> Iterator[Finding]:
    """Finds what holds up the steps: a data loader, copies to a device, or else what runs between steps.

    Args:
        run: the recording.
        share: how much of a cycle waits and copies have to take, from one step's start to the next.
        wait_ms: ... and how long.
        between_share: the same of what runs between steps, such as a data iterator that is no DataLoader.
        between_ms: ... and how long.
    """
    found = summarize_cycles(run)
    if found is None:
        raise CannotCheck("no two training steps follow each other, or an older version recorded them")
    for part, least, least_ms in (
        (DATA, share, wait_ms),
        (COPY, share, wait_ms),
        (BETWEEN, between_share, between_ms),
    ):
        if found.share(part) >= least and found.parts_ns[part] >= least_ms * 1e6:
            yield _to_finding(run, found, part)
            return  # one verdict: what comes first holds up the others


def _to_finding(run: SampledSteps, found: CycleSummary, part: str) -> Finding:
    loader = _name_loader(run) if part == DATA else None
    parts = [
        name for name in sorted(found.parts_ns, key=found.share, reverse=True) if found.share(name) >= 0.005
    ]
    evidence = [f"the whole step: {', '.join(f'{name} {_percent(found.share(name))}' for name in parts)}"]
    if loader is not None:
        evidence.append(f"the program waits for: {loader}")
    if found.slowest is not None:
        evidence.append(
            f"of the modules, {found.slowest} takes most: {_in_ms(found.slowest_ns)} ms of its own"
        )
    times = f"{_in_ms(found.parts_ns[part])} of {_in_ms(found.cycle_ns)} ms, mean of {count_of(found.cycles, 'step')}"
    return Finding(
        severity="note" if part == BETWEEN else "warning",
        text=f"{_SUBJECTS[part]} {_percent(found.share(part))} of a step ({times})",
        remedy=_REMEDIES[part] if loader is None or not loader.endswith(" workers") else _MORE_WORKERS,
        evidence=tuple(evidence),
        rests_on=name_steps_of(run),
    )


def _name_loader(run: SampledSteps) -> str | None:
    """Returns the name of the dataset for which the program waits longest, with the number of its workers."""
    table = run.rows("intervals")
    code, names = dictionary_codes(table["name"])
    if not names:
        return None
    waits_ns = np.zeros(len(names) + 1, np.int64)
    np.add.at(waits_ns, code, column_of(table, "end_ns") - column_of(table, "start_ns"))
    return names[int(waits_ns[:-1].argmax())]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _in_ms(time_ns: int) -> str:
    milliseconds = time_ns / 1e6
    return f"{milliseconds:,.0f}" if milliseconds >= 9.95 else f"{milliseconds:.2g}"
