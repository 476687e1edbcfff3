"""The table of statistics is whole: what it names is computed, and what is computed stands in it."""

from functools import cached_property
from typing import Any

import numpy as np
import pytest

from helpers.tier2_reference import value_rows
from modtrace.analysis.values.history_statistics import stat_names, to_stat
from modtrace.recording.schema import schema
from modtrace.recording.statistics.known import HISTOGRAM, STATISTICS, SUMS, TIER_1, names_of
from modtrace.recording.statistics.moments import DERIVED, RAW, StatColumns
from modtrace.recording.statistics.tier2 import OF_TIER_2, Tier2Columns, read_tier2
from modtrace.recording.triggers.step_conditions import _statistic, read_measured
from modtrace.recording.triggers.trigger_kinds import TRIGGER_STATISTICS, Above

#: What is no statistic by its name: they take an argument, or say what was measured.
OTHERS = {"is_measured", "channel_max"}


def properties(kind: type) -> set[str]:
    return {name for name, each in vars(kind).items() if isinstance(each, (property, cached_property))}


def test_each_property_of_statistics_stands_in_the_table() -> None:
    assert (properties(StatColumns) | properties(Tier2Columns)) - OTHERS == (
        STATISTICS.keys() - set(schema("values").names)
    )


def test_each_list_of_statistics_is_a_part_of_the_table() -> None:
    assert (*RAW, *DERIVED) == names_of(TIER_1)
    assert {*OF_TIER_2} == {*names_of(SUMS)} - set(schema("values").names)


@pytest.mark.parametrize("name", STATISTICS)
def test_each_statistic_is_computed_of_a_tensor(name: str) -> None:
    columns = read_tier2(value_rows([[1.0, -2.0, 0.0, 4.0]]))
    found: Any = getattr(columns.stats if hasattr(columns.stats, name) else columns, name)
    assert np.isfinite(np.asarray(found, np.float64)).all()


@pytest.mark.parametrize("name", STATISTICS)
def test_each_statistic_is_one_of_a_history(name: str) -> None:
    assert name in stat_names()
    assert ("stats=2" in to_stat(name).how) == (STATISTICS[name].needs != TIER_1)


@pytest.mark.parametrize("name", TRIGGER_STATISTICS)
def test_each_statistic_of_triggers_is_a_number_of_what_they_read(name: str) -> None:
    table = value_rows([[1.0, -2.0, 0.0, 4.0]]).combine_chunks()
    columns = {each: table[each].combine_chunks() for each in table.column_names}
    measured = read_measured([columns])
    assert measured is not None
    assert np.isfinite(_statistic(name, measured.columns)).all()


@pytest.mark.parametrize("name", [*names_of(HISTOGRAM), "quantile:0.99", "underflow:fp16", "overflow:bf16"])
def test_statistic_that_a_trigger_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        Above(name, 1)
    assert str(refused.value).startswith(
        f"Above({name!r}): a trigger does not compute this statistic, which needs {HISTOGRAM}. "
        "Read it from the recording with history(). There are: mean, std,"
    )
