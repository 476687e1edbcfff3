"""Runs checks on each rank of a run and between ranks, and gives what several ranks have once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...recording.protocols import RecordingData
from ...recording.suggestions import ranges_of
from .between_ranks import RANK_CHECKS
from .check import RunCheck, run_checks
from .finding import SEVERITIES, CannotCheck, Finding, Findings, Unchecked


def check_ranks(
    ranks: Sequence[tuple[int, RecordingData]],
    missing: tuple[int, ...],
    checks: Sequence[RunCheck],
    *,
    only: Collection[str] = (),
    ignore: Collection[str] = (),
    thresholds: Mapping[str, float] | None = None,
) -> Findings:
    """Returns the findings of several ranks; one that several ranks have stands once, with their numbers.

    Args:
        ranks: the ranks with their recordings, ascending, at least one.
        missing: the ranks of the run that have no recording.
        checks: the checks to choose from; those between ranks are added.
        only, ignore, thresholds: as for `run_checks`.

    Raises:
        ValueError: there is no such check or threshold.
    """
    of_ranks = [
        (
            rank,
            run_checks(
                data, checks, only=only, ignore=ignore, thresholds=thresholds, other_names=[*RANK_CHECKS]
            ),
        )
        for rank, data in ranks
    ]
    if len(of_ranks) == 1:
        return of_ranks[0][1]
    alike: dict[tuple[object, ...], list[tuple[int, Finding]]] = {}
    for rank, found in of_ranks:
        for finding in found.findings:
            place = finding.check, finding.severity, finding.root, finding.path, finding.parameter, finding.op
            alike.setdefault(place, []).append((rank, finding))
    findings = [_with_ranks(group, len(of_ranks)) for group in alike.values()]
    checked = dict.fromkeys(name for _, found in of_ranks for name in found.checked)
    unchecked = {
        one.check: one for _, found in of_ranks for one in found.unchecked if one.check not in checked
    }
    for name, find in RANK_CHECKS.items():
        if (only and name not in only) or name in ignore:
            continue
        try:
            findings += [replace(finding, check=name) for finding in find((ranks, missing))]
            checked[name] = None
        except CannotCheck as reason:
            unchecked[name] = Unchecked(check=name, why=reason.why, remedy=reason.remedy)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Findings(findings=tuple(findings), checked=tuple(checked), unchecked=tuple(unchecked.values()))


def _with_ranks(found: Sequence[tuple[int, Finding]], count: int) -> Finding:
    rank, first = found[0]
    if len(found) == count:
        return first
    on = f"on rank {rank}" if len(found) == 1 else f"on the ranks {ranges_of(rank for rank, _ in found)}"
    return replace(first, rank=rank, text=f"{first.text} ({on} of {count})")
