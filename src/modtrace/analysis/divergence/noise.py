"""Tells how much of a difference is noise: given, measured by further runs, or assumed from dtypes."""

from dataclasses import dataclass, replace

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.statistics.moments import Numbers
from .decode import EPSILONS
from .measured import ComparedRows

GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"

#: Rounding is assumed to be at most so many times eps * sqrt(reduction length).
FACTOR = 2.0

#: Fewer tensors with unequal dtypes are not a run in another dtype.
_FEW = 0.1

#: Two tensors that are noise alone are apart by the root of 2 of their size, or 1.2 times that by sketches.
#: One that is the negative of the other is twice its size apart, which is no chance.
MOST_NOISE = 1.7

#: A further run differs by other random rounding: up to so many times what was measured is noise.
_RUNS_FACTOR = 4.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """What of the error of each pair is noise."""

    kind: str  # GIVEN, MEASURED or ASSUMED
    text: str  # the same as a sentence
    local: Numbers  # what its op or module makes by itself
    inherited: Numbers  # what it may have inherited at most, of the noise of all before it
    plain: Numbers  # the same, if no summands cancel
    gain: Numbers  # how many times larger what it has inherited may become, as its summands cancel
    most: Numbers | float = np.inf  # the largest that noise is assumed to be

    def add_rounding(self, epsilons: Numbers) -> "Noise":
        """Returns the same with what rounding to other dtypes explains, if noise is assumed.

        Args:
            epsilons: of each pair eps of the dtype to which what it was computed from was rounded; 0 for none.
        """
        if self.kind != ASSUMED:
            return self
        rounding = np.minimum(FACTOR * epsilons * self.gain, self.most)
        return replace(self, local=np.maximum(self.local, rounding))

    def multiply(self, gain: Numbers) -> "Noise":
        """Returns the same where what each pair was computed from has so many times its noise, if that is assumed."""
        if self.kind != ASSUMED:
            return self
        return replace(self, local=np.maximum(self.local, np.minimum(self.local * gain, self.most)))


def give_noise(tolerance: float, count: int) -> Noise:
    """Returns a tolerance as the noise of all pairs."""
    level = np.full(count, float(tolerance))
    text = f"noise: a relative error of {tolerance:g} is tolerated"
    return Noise(
        kind=GIVEN,
        text=text,
        local=level,
        inherited=np.zeros(count),
        plain=np.zeros(count),
        gain=np.ones(count),
    )


def measure_noise(levels: list[Numbers], cancellation: Numbers) -> Noise:
    """Returns the noise that further runs of the same configuration show.

    Args:
        cancellation: how many times larger the summands of each tensor are.
        levels: of each further run the error of each pair; NaN where the run has no such tensor.
    """
    highest = np.fmax.reduce(levels)
    known = highest[np.isfinite(highest)]
    # Infinite: the run shows that it differs, and not how far. Whatever is there is noise.
    level = _RUNS_FACTOR * np.where(np.isnan(highest), known.max(initial=0.0), highest)
    runs = f"{len(levels)} further run{'s' if len(levels) > 1 else ''}"
    most = known.max(initial=0.0)
    text = f"noise: measured by {runs}, up to {most:.1e}; {_RUNS_FACTOR:.0f} times that of a site is noise"
    return Noise(
        kind=MEASURED,
        text=text,
        local=level,
        inherited=np.where(np.isinf(level), np.inf, np.minimum(level * cancellation, 1.0)),
        plain=level,
        gain=cancellation,
    )


def assume_noise(
    a: ComparedRows, b: ComparedRows, cancellation: Numbers, most: Numbers | float = MOST_NOISE
) -> Noise:
    """Returns what rounding explains: eps of the coarser dtype, and of sums as long as the tensor's largest axis.

    Results are rounded to their dtype, and added up in float32 at least.

    Args:
        a: the tensors of one recording.
        b: those of the other.
        cancellation: how many times larger the summands of each tensor are.
        most: the largest noise of each.
    """
    coarser = _find_coarser_epsilons(a, b)
    length = np.maximum(_longest_axes(a), _longest_axes(b))
    local = FACTOR * (coarser + np.minimum(coarser, 2.0**-23) * np.sqrt(length))
    before = np.maximum.accumulate(local) if len(local) else local
    text = f"noise: assumed, {FACTOR:g} eps of the dtype x sqrt(sum length): {_range(local)}"
    inherited = before * np.sqrt(1 + np.arange(len(local)))
    return Noise(
        kind=ASSUMED,
        text=text,
        local=np.minimum(local * cancellation, most),
        inherited=np.minimum(inherited * cancellation, most),
        plain=inherited,
        gain=cancellation,
        most=most,
    )


def _find_coarser_epsilons(a: ComparedRows, b: ComparedRows) -> Numbers:
    """Returns eps of the coarser dtype of each pair; of the finer one where few tensors have unequal dtypes.

    A run in another dtype has that nearly everywhere. An op that changes the dtype in one of the runs is no noise.
    """
    one, other = _epsilons(a), _epsilons(b)
    are_unequal = one != other
    if are_unequal.sum() < _FEW * max(int((one > 0).sum()), 1):
        return np.where(are_unequal, np.minimum(one, other), one)
    return np.maximum(one, other)


def _epsilons(measured: ComparedRows) -> Numbers:
    of_code = np.array([*(EPSILONS.get(each, 0.0) for each in measured.dtypes), 0.0])
    return of_code[measured.dtype]


def _longest_axes(measured: ComparedRows) -> Numbers:
    found = [np.empty(0)]
    for chunk in measured.shapes.chunks:
        offsets, sizes = to_numpy(chunk.offsets), to_numpy(chunk.values)
        longest = np.ones(len(chunk))
        filled = np.flatnonzero(offsets[1:] > offsets[:-1])
        if len(filled):
            longest[filled] = np.maximum.reduceat(sizes[: offsets[-1]], offsets[:-1][filled])
        found.append(longest)
    return np.maximum(np.concatenate(found), 1)


def _range(local: Numbers) -> str:
    used = local[local > 0]
    if not len(used):
        return "none, for integers are exact"
    low, high = used.min(), used.max()
    return f"{low:.1e}" if high < 1.5 * low else f"{low:.0e} to {high:.0e}"
