"""Runs checks on each rank of a run, and gives what all find once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...recording.protocols import RecordingData
from ...recording.suggestions import ranges_of
from .finding import SEVERITIES, Finding, Findings, Unchecked


def check_ranks(
    ranks: Sequence[tuple[int, RecordingData]], run: Callable[[RecordingData], Findings]
) -> Findings:
    """Returns the findings of several ranks; one that several ranks have stands once, with their numbers.

    Args:
        ranks: the ranks with their recordings, ascending, at least one.
        run: runs the checks on one recording.
    """
    of_ranks = [(rank, run(data)) for rank, data in ranks]
    if len(of_ranks) == 1:
        return of_ranks[0][1]
    alike: dict[tuple[object, ...], list[tuple[int, Finding]]] = {}
    for rank, found in of_ranks:
        for finding in found.findings:
            place = finding.check, finding.severity, finding.root, finding.path, finding.parameter, finding.op
            alike.setdefault(place, []).append((rank, finding))
    findings = [_with_ranks(group, len(of_ranks)) for group in alike.values()]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    checked = dict.fromkeys(name for _, found in of_ranks for name in found.checked)
    unchecked: dict[str, Unchecked] = {}
    for _, found in of_ranks:
        for one in found.unchecked:
            if one.check not in checked:
                unchecked.setdefault(one.check, one)
    return Findings(findings=tuple(findings), checked=tuple(checked), unchecked=tuple(unchecked.values()))


def _with_ranks(found: Sequence[tuple[int, Finding]], count: int) -> Finding:
    rank, first = found[0]
    if len(found) == count:
        return first
    on = f"on rank {rank}" if len(found) == 1 else f"on the ranks {ranges_of(rank for rank, _ in found)}"
    return replace(first, rank=rank, text=f"{first.text} ({on} of {count})")
