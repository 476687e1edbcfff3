"""Reports NaN and infinite values while a run continues, for `record(on_nonfinite=...)`."""

import contextlib
import sys
from collections.abc import Callable

import numpy as np

from ..analysis.provenance.earlier_steps import EarlierSteps
from ..analysis.provenance.reach import Innocent
from ..analysis.provenance.search import LiveStep, find_first
from ..analysis.values.nonfinite import NonFinite
from ..recording.arrow.arrays import from_numpy, to_numpy
from ..recording.failure_reporter import warn_of_error
from ..recording.meta import RunMeta
from ..recording.phase import BACKWARD, OPTIMIZER
from ..recording.protocols import RecordingData
from ..recording.role import PARAMETER_GRAD
from ..recording.statistics.moments import nonfinite_rows, sites_of_roles
from ..recording.suggestions import count_of
from ..recording.triggers.step_conditions import NonFiniteFinding, Use
from ..recording.triggers.step_tables import StepData
from ..recording.triggers.watch import TriggerFinding
from ..views.common.headline import name_rank
from ..views.text.nonfinite import describe_made, describe_place, render_nonfinite

#: The largest number of reports that are printed in full; the others are counted.
_MOST_REPORTS = 5


class NonFiniteReports:
    """The reports of one recording: one for each place, and at the end the number of steps with such values."""

    def __init__(self, meta: RunMeta, *, strict: bool, measures_all: bool) -> None:
        """Creates the reports of one recording.

        Args:
            meta: the description of the run; of several ranks, each report names its own.
            strict: whether to raise internal errors.
            measures_all: whether all outputs of ops are measured in every step.
        """
        self._rank = name_rank(meta)
        self._strict = strict
        self._earlier = EarlierSteps(is_complete=measures_all)
        self._innocent = Innocent()
        self._has_failed = False
        self._places: set[str] = set()
        self._steps: list[int] = []  # the steps with a finding
        self._untold = 0

    def find(self, data: StepData, selects: Callable[..., bool], *, use: Use) -> NonFiniteFinding | None:
        """Returns what made the first NaN or infinite values in the rows of a step; None if there is nothing to report.

        Args:
            data: the rows of the step.
            selects: whether a module counts, by its path.
            use: what becomes of the gradients.
        """
        if self._has_failed:
            return None
        try:
            live = LiveStep(self._innocent, self._earlier, use, data.values_before)
            found = find_first(data, selects, live=live)
            if found is None or _is_unused(found, data, use.is_used):
                return None
            text = render_nonfinite(found)
        except Exception as error:
            if self._strict:
                raise
            self._fail(error)
            return None
        return NonFiniteFinding(describe_place(found), describe_made(found), text)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        text = "modtrace met an internal error while it looked for NaN, and looks no more; the run goes on, recorded"
        warn_of_error(text, error, strict="record(strict=True)")

    def report(self, finding: TriggerFinding) -> None:
        """Prints a report, unless its place was reported before or the step before had such values, too."""
        if finding.step not in self._steps[-1:]:
            self._steps.append(finding.step)
        place, reason, text = finding.finding
        if not finding.is_new or place in self._places:
            return
        self._places.add(place)
        if len(self._places) > _MOST_REPORTS:
            self._untold += 1
        else:
            self._print(text or f"non-finite values in step {finding.step}: {reason}\n")

    def close(self) -> None:
        """Prints the number of steps with NaN or infinite values, if there were several."""
        if len(self._steps) > 1:
            steps = count_of(len(self._steps), "step")
            others = f", at {count_of(self._untold, 'more place')}" if self._untold else ""
            self._print(f"non-finite values in {steps}, {self._steps[0]} to {self._steps[-1]}{others}\n")

    def _print(self, text: str) -> None:
        """Prints to standard error, which may be closed."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"modtrace: {self._rank}{text}")
            sys.stderr.flush()


def _is_unused(found: NonFinite, data: RecordingData, is_used: bool | None) -> bool:
    """Returns whether the answer is about a gradient that no optimizer uses, as in a step that a GradScaler skips.

    If an op was found, the search has already considered the GradScaler. Otherwise the gradients that were measured
    when an optimizer stepped decide; if none were measured, it matters whether an optimizer stepped.
    """
    if found.op is not None or (found.phase != BACKWARD and found.role != PARAMETER_GRAD):
        return False
    if is_used is False:
        return True
    values, gradients = data.table("values"), sites_of_roles(data.table("sites"), [PARAMETER_GRAD])
    used = values.filter(from_numpy(np.isin(to_numpy(values["site_id"]), gradients)))
    if used.num_rows:
        return not len(nonfinite_rows(used))
    return is_used is None and OPTIMIZER not in data.table("calls")["phase"].unique().to_pylist()
