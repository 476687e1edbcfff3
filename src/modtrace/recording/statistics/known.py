"""Lists the statistics that have names: from what each is computed, and its title in pictures."""

from collections.abc import Mapping
from typing import NamedTuple

#: The measurements from which a statistic can be computed.
TIER_1 = "tier 1"
SUMS = "the sums and counts of tier 2"
HISTOGRAM = "the histogram or the largest element of tier 2"


class Statistic(NamedTuple):
    """A statistic: the measurements that it needs, and its title in pictures."""

    needs: str
    title: str


#: Raw statistics are columns of the table `values`. Derived ones are properties of `StatColumns` or `Tier2Columns` with
#: the same name.
STATISTICS: Mapping[str, Statistic] = {
    "count": Statistic(TIER_1, "count"),
    "min": Statistic(TIER_1, "minimum"),
    "max": Statistic(TIER_1, "maximum"),
    "sum": Statistic(TIER_1, "sum"),
    "sumsq": Statistic(TIER_1, "sum of squares"),
    "nan_count": Statistic(TIER_1, "number of NaN"),
    "inf_count": Statistic(TIER_1, "number of infinite elements"),
    "mean": Statistic(TIER_1, "mean"),
    "std": Statistic(TIER_1, "standard deviation"),
    "rms": Statistic(TIER_1, "root mean square"),
    "l2": Statistic(TIER_1, "L2 norm"),
    "abs_max": Statistic(TIER_1, "largest magnitude"),
    "nonfinite": Statistic(TIER_1, "number of NaN and infinite elements"),
    "nan_fraction": Statistic(TIER_1, "share of NaN"),
    "inf_fraction": Statistic(TIER_1, "share of infinite elements"),
    "crest": Statistic(TIER_1, "largest magnitude / root mean square"),
    "sumabs": Statistic(SUMS, "sum of magnitudes"),
    "zero_count": Statistic(SUMS, "number of zeros"),
    "sum4": Statistic(SUMS, "sum of fourth powers"),
    "argmax": Statistic(HISTOGRAM, "argmax"),
    "mean_abs": Statistic(SUMS, "mean magnitude"),
    "zero_fraction": Statistic(SUMS, "share of zeros"),
    "kurtosis": Statistic(SUMS, "kurtosis"),
    "dynamic_range": Statistic(HISTOGRAM, "dynamic_range"),
}

#: Statistics of histograms that take an argument: `underflow:fp16`, `quantile:0.99`.
OF_FORMATS = ("underflow", "flushed", "overflow")
QUANTILE = "quantile"


def names_of(*needs: str) -> tuple[str, ...]:
    """Returns the statistics that need one of `needs`."""
    return tuple(name for name, statistic in STATISTICS.items() if statistic.needs in needs)


def title_of(stat: str) -> str:
    """Returns the title of a statistic; by default its name."""
    known = STATISTICS.get(stat)
    return known.title if known else stat
