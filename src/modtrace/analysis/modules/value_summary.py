"""Statistics at a module, merged over its calls and slots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...recording.statistics.moments import Stats, merge

#: The kinds of a module's rows. Recomputed outputs are separate from those that they repeat.
Kind = Literal["output", "recomputed output", "gradient", "parameter", "parameter gradient"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class SlotValues:
    """One slot of a module's output, over all its calls; "" if it returned a plain tensor."""

    slot: str
    output: Stats | None
    gradient: Stats | None


@dataclass(frozen=True, kw_only=True)
class NonFiniteCount:
    """The counts of NaN and infinite numbers in a module's own tensors of one kind."""

    kind: Kind
    nan_count: int
    inf_count: int


@dataclass(frozen=True, kw_only=True)
class ValueSummary:
    """The statistics at a module. Each measurement counts once; None means that nothing was measured."""

    output: Stats | None = None  # of all forward calls and slots
    gradient: Stats | None = None  # at the outputs
    parameters: Stats | None = None  # its own and those of what is inside it
    parameter_gradients: Stats | None = None
    slots: tuple[SlotValues, ...] = ()
    nonfinite: tuple[NonFiniteCount, ...] = ()  # of its own tensors; only kinds that have any
    nonfinite_inside: int = 0  # numbers of the tensors of what is inside it

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
    known = [each for each in summaries if each is not None]
    if not known:
        return None
    return ValueSummary(
        output=_merge_known(each.output for each in known),
        gradient=_merge_known(each.gradient for each in known),
        parameters=_merge_known(each.parameters for each in known),
        parameter_gradients=_merge_known(each.parameter_gradients for each in known),
        slots=_merge_slots([slot for each in known for slot in each.slots]),
        nonfinite=_merge_counts([count for each in known for count in each.nonfinite]),
        nonfinite_inside=sum(each.nonfinite_inside for each in known),
    )


def _merge_known(many: Iterable[Stats | None]) -> Stats | None:
    known = [each for each in many if each is not None]
    return merge(known) if known else None


def _merge_slots(slots: Sequence[SlotValues]) -> tuple[SlotValues, ...]:
    return tuple(
        SlotValues(
            slot=name,
            output=_merge_known(each.output for each in slots if each.slot == name),
            gradient=_merge_known(each.gradient for each in slots if each.slot == name),
        )
        for name in dict.fromkeys(each.slot for each in slots)
    )


def _merge_counts(counts: Sequence[NonFiniteCount]) -> tuple[NonFiniteCount, ...]:
    return tuple(
        NonFiniteCount(
            kind=kind,
            nan_count=sum(each.nan_count for each in counts if each.kind == kind),
            inf_count=sum(each.inf_count for each in counts if each.kind == kind),
        )
        for kind in KINDS
        if any(each.kind == kind for each in counts)
    )
