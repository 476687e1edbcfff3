"""Runs checks on each rank of a run and between ranks, and gives what several ranks have once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ...recording.protocols import RecordingData
from ...recording.suggestions import name_ranks
from ..ranks.first_nonfinite import find_first_of_ranks
from ..values.nonfinite import NonFinite
from .between_ranks import RANK_CHECKS
from .check import RunCheck, run_checks
from .finding import SEVERITIES, CannotCheck, Finding, Findings, Unchecked
from .nonfinite_values import NONFINITE


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

    Of equal severity, what few ranks have comes before what most have. NaN and infinite values are told of the ranks
    where they came up first, as these may have given them to the others.

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
            if finding.check == NONFINITE.name:
                continue
            place = finding.check, finding.severity, finding.root, finding.path, finding.parameter, finding.op
            alike.setdefault(place, []).append((rank, finding))
    count = len(of_ranks)
    groups = sorted(alike.values(), key=lambda group: min(len(group), (count + 1) // 2))
    own = [_with_ranks(group, count) for group in groups]
    checked = dict.fromkeys(name for _, found in of_ranks for name in found.checked)
    unchecked = {
        one.check: one for _, found in of_ranks for one in found.unchecked if one.check not in checked
    }
    between: list[Finding] = []
    for name, find in RANK_CHECKS.items():
        if (only and name not in only) or name in ignore:
            continue
        try:
            between += [replace(finding, check=name) for finding in find((ranks, missing))]
            checked[name] = None
        except CannotCheck as reason:
            unchecked[name] = Unchecked(check=name, why=reason.why, remedy=reason.remedy)
    findings = [*_find_first_nonfinite(ranks, of_ranks), *between, *own]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Findings(findings=tuple(findings), checked=tuple(checked), unchecked=tuple(unchecked.values()))


def _find_first_nonfinite(
    ranks: Sequence[tuple[int, RecordingData]], of_ranks: Sequence[tuple[int, Findings]]
) -> Iterator[Finding]:
    """Yields the finding of the ranks where NaN or infinite values came up first, if any rank has some."""
    having = {
        rank: finding
        for rank, found in of_ranks
        for finding in found.findings
        if finding.check == NONFINITE.name
    }
    if not having:
        return
    answers = find_first_of_ranks([(rank, data) for rank, data in ranks if rank in having]).answers
    first = [rank for rank, found in answers if _place(found) == _place(answers[0].found)]
    later = [rank for rank in having if rank not in first]
    finding = _with_ranks([(rank, having[rank]) for rank in first], len(of_ranks))
    more = [f"{name_ranks(later)} had such values later, and may have been given them"] if later else []
    yield replace(finding, evidence=(*finding.evidence, *more))


def _place(found: NonFinite) -> tuple[object, ...]:
    return found.step, found.phase, found.root, found.path, found.op, found.role, found.slot


def _with_ranks(found: Sequence[tuple[int, Finding]], count: int) -> Finding:
    rank, first = found[0]
    if len(found) == count:
        return first
    on = name_ranks([rank for rank, _ in found])
    return replace(first, rank=rank, text=f"{first.text} (on {on} of {count})")
