"""Summarizes the statistics at a module over its calls and slots."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...recording.statistics.moments import Stats, merge

#: The kinds of rows that a summary distinguishes; recomputed outputs are counted apart from forward ones.
Kind = Literal["output", "recomputed output", "gradient", "parameter", "parameter gradient"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotValues:
    """The statistics of one slot of a module's output, over all its calls; the slot is "" for a plain tensor."""

    slot: str
    output: Stats | None
    gradient: Stats | None


@dataclass(frozen=True, kw_only=True)
class NonFiniteCount:
    """The counts of NaN and infinite numbers in a module's own tensors of one kind."""

    kind: Kind
    nan_count: int
    inf_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSummary:
    """The statistics at a module. Each measurement counts once; None means that nothing was measured."""

    output: Stats | None = None  # statistics of the outputs of all forward calls, in all slots
    gradient: Stats | None = None  # statistics of the outputs' gradients
    parameters: Stats | None = None  # statistics of the parameters of the module and of modules inside it
    parameter_gradients: Stats | None = None
    slots: tuple[SlotValues, ...] = ()
    nonfinite: tuple[NonFiniteCount, ...] = ()  # counts in the module's own tensors; only kinds with some
    nonfinite_inside: int = 0  # the number of non-finite elements in tensors of modules inside it

    @property
    def gradient_to_parameter(self) -> float | None:
        """The ratio of the gradients' RMS to the parameters' RMS; None if not known."""
        if self.parameters is None or self.parameter_gradients is None:
            return None
        rms = self.parameters.rms
        return self.parameter_gradients.rms / rms if rms else None

    @property
    def at_calls(self) -> bool:
        """True if something was measured at the module's calls, or it holds values that are not finite."""
        return self.output is not None or self.gradient is not None or bool(self.nonfinite)


def merge_summaries(summaries: Iterable[ValueSummary | None]) -> ValueSummary | None:
    """Returns one summary for several equal modules. A tensor that several of them share counts for each."""
    known = [summary for summary in summaries if summary is not None]
    if not known:
        return None
    output = _merge_known(summary.output for summary in known)
    gradient = _merge_known(summary.gradient for summary in known)
    return ValueSummary(
        output=output,
        gradient=gradient,
        parameters=_merge_known(summary.parameters for summary in known),
        parameter_gradients=_merge_known(summary.parameter_gradients for summary in known),
        slots=tuple(_merge_slots([slot for summary in known for slot in summary.slots], output, gradient)),
        nonfinite=tuple(_add_counts([count for summary in known for count in summary.nonfinite])),
        nonfinite_inside=sum(summary.nonfinite_inside for summary in known),
    )


def _merge_slots(
    slots: Sequence[SlotValues], output: Stats | None, gradient: Stats | None
) -> Iterator[SlotValues]:
    """Yields one for each slot; that of the only one has the statistics of all outputs and gradients."""
    names = dict.fromkeys(slot.slot for slot in slots)
    for name in names:
        if len(names) > 1:
            output = _merge_known(slot.output for slot in slots if slot.slot == name)
            gradient = _merge_known(slot.gradient for slot in slots if slot.slot == name)
        yield SlotValues(slot=name, output=output, gradient=gradient)


def _add_counts(counts: Sequence[NonFiniteCount]) -> Iterator[NonFiniteCount]:
    """Yields the counts of each kind together."""
    for kind in sorted({count.kind for count in counts}, key=KINDS.index):
        of_kind = [count for count in counts if count.kind == kind]
        yield NonFiniteCount(
            kind=kind,
            nan_count=sum(count.nan_count for count in of_kind),
            inf_count=sum(count.inf_count for count in of_kind),
        )


def _merge_known(many: Iterable[Stats | None]) -> Stats | None:
    known = [stats for stats in many if stats is not None]
    return merge(known) if known else None
