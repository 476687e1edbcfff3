"""Finds NaN and infinite values that were not meant."""

from collections.abc import Iterator

from ...errors import NothingRecordedError
from ...recording.options.capture import DEFAULT_ROLES
from ..provenance.search import find_all
from ..tables.sampled_steps import SampledSteps
from ..values.nonfinite import PRODUCER, NonFinite, describe_counts
from .check import check
from .finding import CannotCheck, Finding
from .needs import lacks_values


@check("nonfinite", about="NaN and infinite values that are no masks", needs="values")
def NONFINITE(run: SampledSteps) -> Iterator[Finding]:
    """Finds what made the first NaN or infinite values."""
    try:
        found = next(find_all(run.data), None)
    except NothingRecordedError as error:
        lack = lacks_values(run, "values", *DEFAULT_ROLES)
        raise (lack if lack.remedy else CannotCheck(str(error))) from error
    if found is not None:
        yield _to_finding(found)


def _to_finding(found: NonFinite) -> Finding:
    values = describe_counts(found.nan_count, found.inf_count, are_negative=found.are_negative)
    where = found.path or found.root or "what runs outside of modules"
    verb = "makes" if found.kind == PRODUCER else "has"
    what = f"{found.op} in {where}" if found.op else f"the {found.role} of {where}"
    return Finding(
        severity="error",
        text=f"{what} {verb} {values} in step {found.step}",
        remedy=found.hint or "ask modtrace nonfinite RUN (first_nonfinite()) for the way they took",
        root=found.root,
        path=found.path,
        op=found.op,
        step=found.step,
    )
