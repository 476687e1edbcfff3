"""Triggers fire in the step in which their condition becomes true, and say which tensor it is about."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import raw_statistics
from modtrace.recording.arrow.batches import to_columns
from modtrace.recording.meta import Note, RunMeta
from modtrace.recording.options.capture import Capture
from modtrace.recording.statistics.band import StepBand
from modtrace.recording.triggers.trigger_kinds import (
    Above,
    NonFinite,
    OnSignal,
    OutOfBand,
    Trigger,
    check_keep_last,
    paths_of,
    to_triggers,
)
from modtrace.recording.triggers.watch import TriggerWatch

NAN, INF = math.nan, math.inf

STATS = (Capture(),)

MODULES = {
    "module_id": [0, 1, 2],
    "path": ["", "blocks.0", "blocks.1"],
    "name": ["Net", None, None],
    "type": ["Net", "Linear", "Linear"],
}

#: By site_id: outputs of the root and of both blocks, a weight, an op's output, a buffer.
SITES = {
    "site_id": [0, 1, 2, 3, 4, 5],
    "module_id": [0, 1, 2, 1, 1, 0],
    "nth": [0, 0, 1, None, 0, None],
    "role": ["output", "output", "output", "parameter", "op_output", "buffer"],
    "slot": ["", "", "[0]", "weight", "", "mask"],
    "op": [None, None, None, None, "aten.add.Tensor", None],
}

#: The tensors of a step: (site, numbers) in the order of measuring.
Tensors = Sequence[tuple[int, Sequence[float] | None]]


def values(step: int, tensors: Tensors) -> dict[str, Any]:
    statistics = [raw_statistics(numbers) for _, numbers in tensors]
    columns = {name: [each[name] for each in statistics] for name in statistics[0]}
    return {
        "step": [step] * len(tensors),
        "site_id": [site for site, _ in tensors],
        "op_id": [7 if site == 4 else None for site, _ in tensors],
        "order": list(range(len(tensors))),
        **columns,
    }


def watch(*triggers: Trigger) -> TriggerWatch:
    made = TriggerWatch(triggers)
    for table, columns in (("modules", MODULES), ("sites", SITES)):
        made.see(table, to_columns(table, columns))
    return made


def end(watched: TriggerWatch, step: int, tensors: Tensors = (), **scalars: float) -> list[Note]:
    if tensors:
        watched.see("values", to_columns("values", values(step, tensors)))
    if scalars:
        rows = {"step": [step] * len(scalars), "name": [*scalars], "value": [*scalars.values()]}
        watched.see("scalars", to_columns("scalars", rows))
    return watched.end_step(step)


def reason(watched: TriggerWatch, tensors: Tensors = (), **scalars: float) -> str:
    """Why the only trigger fires; "" if it does not."""
    fired = end(watched, 0, tensors, **scalars)
    return fired[0].reason if fired else ""


# When it fires.


def test_condition_that_stays_true_fires_once_and_again_after_a_step_without_it() -> None:
    watched = watch(NonFinite())
    good, bad = [(0, [1.0])], [(0, [NAN])]
    fired = [end(watched, step, each) for step, each in enumerate([good, bad, bad, good, bad, bad])]
    expected = "Net output holds 1 NaN"
    assert [each for notes in fired for each in notes] == [
        Note(step=1, kind="NonFinite", reason=expected),
        Note(step=4, kind="NonFinite", reason=expected),
    ]


def test_step_in_which_nothing_was_measured_does_not_arm_it_again() -> None:
    watched = watch(NonFinite(roles="output"))
    steps: list[Tensors] = [[(0, [NAN])], [], [(0, None)], [(0, [])], [(3, [1.0])], [(0, [NAN])]]
    assert [len(end(watched, step, each)) for step, each in enumerate(steps)] == [1, 0, 0, 0, 0, 0]


def test_every_trigger_has_an_edge_of_its_own() -> None:
    watched = watch(NonFinite(), Above("abs_max", 10))
    first, second = end(watched, 3, [(0, [1.0, 20.0])]), end(watched, 4, [(0, [20.0]), (1, [INF])])
    assert [(each.step, each.kind) for each in first + second] == [(3, "Above"), (4, "NonFinite")]


@given(st.lists(st.sampled_from([1.0, NAN, None])))
def test_it_fires_where_what_is_known_turns_from_good_to_bad(numbers: list[float | None]) -> None:
    watched, expected, was_bad = watch(NonFinite()), [], False
    found = []
    for step, number in enumerate(numbers):
        found += [note.step for note in end(watched, step, [(0, [number])] if number is not None else ())]
        if number is not None:
            expected += [step] if number != number and not was_bad else []
            was_bad = number != number
    assert found == expected


def test_scaler_is_not_asked_whether_it_skips_a_step_in_which_all_is_finite() -> None:
    watched = TriggerWatch([NonFinite(then="report")], lambda data, selects, *, use: None)
    for table, columns in (("modules", MODULES), ("sites", SITES)):
        watched.see(table, to_columns(table, columns))
    watched.may_skip(0, lambda: pytest.fail("it was asked, which waits for a device"))
    assert end(watched, 0, [(0, [1.0]), (4, [1.0])]) == []


# What each of them looks at.


def test_first_tensor_by_order_of_measuring_is_named_with_its_counts() -> None:
    tensors: Tensors = [(0, [1.0]), (2, [NAN, INF, 1.0, -INF]), (1, [NAN])]
    assert reason(watch(NonFinite()), tensors) == "blocks.1@1 output[0] holds 1 NaN, 2 inf, and 1 more"
    watched = watch(NonFinite())
    watched.see("values", to_columns("values", values(0, tensors) | {"order": [0, 2, 1]}))
    assert watched.end_step(0)[0].reason == "blocks.0 output holds 1 NaN, and 1 more"


def test_parameter_is_named_by_its_own_path() -> None:
    assert reason(watch(NonFinite()), [(3, [NAN])]) == "blocks.0.weight parameter holds 1 NaN"


def test_infinities_of_ops_and_buffers_are_meant_unless_their_roles_are_given() -> None:
    tensors: Tensors = [(4, [-INF]), (5, [-INF])]
    assert reason(watch(NonFinite()), tensors) == ""
    found = reason(watch(NonFinite(roles=["op_output", "buffer"])), tensors)
    assert found == "blocks.0 aten.add.Tensor op_output holds 1 inf, and 1 more"


def test_infinity_in_a_parameter_that_an_op_reads_is_meant_unless_its_role_is_given() -> None:
    rows = to_columns("values", values(0, [(3, [-INF])]) | {"op_id": [7]})
    for trigger, expected in (
        (NonFinite(), []),
        (NonFinite(roles="parameter"), ["blocks.0.weight parameter holds 1 inf"]),
    ):
        watched = watch(trigger)
        watched.see("values", rows)
        assert [each.reason for each in watched.end_step(0)] == expected


def test_logged_numbers_are_looked_at_unless_modules_or_roles_are_chosen() -> None:
    assert reason(watch(NonFinite()), loss=NAN) == "log.loss is nan"
    assert reason(watch(NonFinite(include="blocks.*")), loss=NAN) == ""
    assert reason(watch(NonFinite(roles="output")), loss=NAN) == ""
    assert reason(watch(NonFinite(exclude="blocks.*")), loss=INF) == "log.loss is inf"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"include": "blocks.0"}, "blocks.0 output holds 1 NaN, and 1 more"),  # its weight is meant with it
        ({"include": "blocks.0.weight"}, "blocks.0.weight parameter holds 1 NaN"),
        ({"exclude": "blocks.0"}, "Net output holds 1 NaN, and 1 more"),
        ({"include": re.compile("1$")}, "blocks.1@1 output[0] holds 1 NaN"),
        ({"include": ""}, "Net output holds 1 NaN"),
        ({"include": "blocks.7"}, ""),
    ],
)
def test_modules_and_parameters_are_chosen_by_path(chosen: dict[str, Any], expected: str) -> None:
    tensors: Tensors = [(0, [NAN]), (1, [NAN]), (2, [NAN]), (3, [NAN])]
    assert reason(watch(NonFinite(**chosen)), tensors) == expected


def test_module_that_gets_its_name_late_is_chosen_by_it() -> None:
    watched = watch(NonFinite(include="encoder.*"))
    assert reason(watched, [(1, [NAN])]) == ""
    watched.see(
        "modules", to_columns("modules", {"module_id": [1], "path": ["encoder.0"], "type": ["Linear"]})
    )
    assert reason(watched, [(1, [NAN])]) == "encoder.0 output holds 1 NaN"


def test_sites_that_come_later_are_looked_at() -> None:
    watched = watch(NonFinite())
    assert reason(watched, [(0, [1.0])]) == ""
    more = {"site_id": [6], "module_id": [2], "nth": [0], "role": ["grad_output"], "slot": [""]}
    watched.see("sites", to_columns("sites", more))
    assert reason(watched, [(6, [INF])]) == "blocks.1 grad_output holds 1 inf"


def test_above_compares_a_statistic_and_nan_is_above_nothing() -> None:
    assert (
        reason(watch(Above("rms", 2)), [(0, [2.0]), (1, [3.0, -3.0])]) == "blocks.0 output: rms 3 is above 2"
    )
    assert reason(watch(Above("rms", 2)), [(0, [2.0]), (1, [NAN])]) == ""
    assert reason(watch(Above("nonfinite", 0)), [(1, [NAN])]) == "blocks.0 output: nonfinite 1 is above 0"
    assert reason(watch(Above("std", 0)), [(0, [1.0])]) == ""  # of one number there is none


def test_above_and_out_of_band_look_at_outputs_unless_other_roles_are_given() -> None:
    assert reason(watch(Above("max", 1)), [(3, [5.0])]) == ""
    found = reason(watch(Above("max", 1, roles="parameter")), [(3, [5.0])])
    assert found == "blocks.0.weight parameter: max 5 is above 1"


def test_above_takes_the_last_number_that_was_logged_in_the_step() -> None:
    assert reason(watch(Above("log.loss", 3)), loss=3.5) == "log.loss 3.5 is above 3"
    assert reason(watch(Above("log.loss", 3)), accuracy=3.5) == ""
    watched = watch(Above("log.loss", 3))
    for value in (9.0, 1.0):
        rows = {"step": [0], "name": ["loss"], "value": [value]}
        watched.see("scalars", to_columns("scalars", rows))
    assert watched.end_step(0) == []


def test_parts_of_one_tensor_are_judged_together() -> None:
    """Gradients of micro-batches: the mean of the parts' RMS would be 2."""
    assert reason(watch(Above("rms", 2.1)), [(0, [1.0]), (1, [0.5]), (0, [3.0])]) == (
        "Net output: rms 2.23607 is above 2.1"
    )
    assert reason(watch(Above("max", 2)), [(1, []), (0, [1.0]), (0, [3.0]), (1, [2.5])]) == (
        "Net output: max 3 is above 2, and 1 more"
    )
    assert reason(watch(Above("max", 2)), [(1, [2.5]), (0, [1.0]), (0, [3.0])]) == (
        "blocks.0 output: max 2.5 is above 2, and 1 more"
    )


@pytest.mark.parametrize(
    ("stat", "expected"),
    [("mean_abs", 1.75), ("zero_fraction", 0.5), ("kurtosis", 4 * 337 / 25**2), ("crest", 4 / 2.5)],
)
def test_statistics_of_tier_2_are_those_of_all_parts_together(stat: str, expected: float) -> None:
    """0, 3 | -4, 0 and a third part without numbers; the last tensor was measured by tier 1 alone."""
    watched = watch(Above(stat, expected - 0.001), Above(stat, expected + 0.001))
    rows = values(0, [(0, [0.0, 3.0]), (0, [-4.0, 0.0]), (0, []), (1, [9.0, 0.0])])
    rows |= {"sumabs": [3.0, 4.0, 0.0, None], "zero_count": [1, 1, 0, None], "sum4": [81.0, 256.0, 0.0, None]}
    watched.see("values", to_columns("values", rows))
    [note] = watched.end_step(0)
    assert note.reason == f"Net output: {stat} {expected:g} is above {expected - 0.001:g}"


def test_tensor_that_tier_2_did_not_measure_is_not_outside_of_its_band() -> None:
    watched = watch(OutOfBand("mean_abs", at_least=2, window=4))
    for step, (numbers, sums) in enumerate(
        [([2.0], (2.0, 0, 16.0))] * 4 + [([2.0], (None, None, None)), ([9.0], (9.0, 0, 6561.0))]
    ):
        rows = values(step, [(0, numbers)])
        rows |= {name: [each] for name, each in zip(("sumabs", "zero_count", "sum4"), sums, strict=True)}
        watched.see("values", to_columns("values", rows))
        fired = [(each.step, each.reason) for each in watched.end_step(step)]
        expected = "Net output: mean_abs 9 is outside of 2 +- 0.016 (its last 4 steps)"
        assert fired == ([(5, expected)] if step == 5 else [])


# The band.


def test_statistic_outside_of_its_band_fires() -> None:
    watched = watch(OutOfBand("rms", factor=8, window=20, at_least=10))
    for step in range(20):
        assert end(watched, step, [(0, [1.0 + step % 3 / 10]), (1, [5.0])]) == []
    [note] = end(watched, 20, [(0, [4.0]), (1, [5.0])])
    assert note == Note(
        step=20,
        kind="OutOfBand",
        reason="Net output: rms 4 is outside of 1.1 +- 1.18608 (its last 20 steps)",
    )


def test_nothing_is_outside_before_there_are_enough_steps() -> None:
    watched = watch(OutOfBand("rms", at_least=10))
    jumps = [end(watched, step, [(0, [10.0**step])]) for step in range(10)]
    assert jumps == [[]] * 10
    assert len(end(watched, 10, [(0, [1e10])])) == 1


def test_statistic_that_hardly_moved_may_move_a_little() -> None:
    watched = watch(OutOfBand("rms", factor=8, at_least=2, window=4))
    for step in range(4):
        end(watched, step, [(0, [2.0])])
    assert end(watched, 4, [(0, [2.015])]) == []
    assert end(watched, 5, [(0, [2.1])])[0].reason.startswith("Net output: rms 2.1 is outside of 2 +- 0.016")


@pytest.mark.parametrize(("window", "needed"), [(2, 2), (5, 5), (10, 10), (50, 10)])
def test_ten_steps_must_be_known_or_the_window_if_it_is_shorter(window: int, needed: int) -> None:
    for known in (needed - 1, needed):
        watched = watch(OutOfBand("log.loss", window=window))
        for step in range(known):
            assert end(watched, step, loss=1.0) == []
        assert len(end(watched, known, loss=9.0)) == (known == needed)


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_number_that_is_not_finite_is_outside_and_does_not_move_the_band(number: float) -> None:
    watched = watch(OutOfBand("log.loss", at_least=2, window=4))
    for step in range(4):
        assert end(watched, step, loss=1.0 + step / 10) == []
    for step in range(4, 8):
        assert len(end(watched, step, loss=number)) == (step == 4)
    assert end(watched, 8, loss=1.2) == []
    [note] = end(watched, 9, loss=5.0)
    assert note.reason == "log.loss 5 is outside of 1.2 +- 0.59304 (its last 4 steps)"


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(2, 6),
)
def test_band_is_that_of_the_median_and_the_median_absolute_deviation(
    steps: list[list[float]], window: int
) -> None:
    band = StepBand(factor=3.0, window=window, at_least=2)
    rows = band.rows_of(["a", "b", "c"])
    for numbers in steps[:-1]:
        band.add(rows, np.array(numbers))
    found = band.judge(rows, np.array(steps[-1]))
    for at in range(3):
        before = [numbers[at] for numbers in steps[:-1]][-window:]
        if len(before) < 2:
            assert not found.is_outside[at]
            continue
        middle = float(np.median(before))
        mad = float(np.median(np.abs(np.array(before) - middle)))
        width = 3 * max(1.4826 * mad, 1e-3 * abs(middle))
        assert found.middle[at] == middle
        assert found.width[at] == pytest.approx(width)
        assert bool(found.is_outside[at]) == (abs(steps[-1][at] - middle) > found.width[at])


# What may be given.


def test_default_is_non_finite_values_where_steps_are_held_and_nothing_elsewhere() -> None:
    assert to_triggers(None, keep_last=20, captures=STATS) == (NonFinite(),)
    assert to_triggers(None, keep_last=None, captures=STATS) == ()
    assert to_triggers([], keep_last=20, captures=STATS) == ()
    assert to_triggers(OnSignal(), keep_last=None, captures=STATS) == (OnSignal("SIGUSR1"),)


def test_what_looks_at_logged_numbers_needs_nothing_measured() -> None:
    for trigger in (NonFinite(), Above("log.loss", 3), OutOfBand("log.loss")):
        assert to_triggers(trigger, keep_last=None, captures=()) == (trigger,)
        assert to_triggers(trigger, keep_last=2, captures=(Capture(roles="input"),)) == (trigger,)


def test_repr_says_what_was_given_and_no_more() -> None:
    assert repr(NonFinite()) == "NonFinite()"
    assert repr(Above("rms", 3.0, include="head")) == "Above(stat='rms', limit=3.0, include='head')"
    assert repr(OutOfBand(window=5)) == "OutOfBand(window=5)"
    assert repr(OutOfBand(window=9, at_least=2)) == "OutOfBand(window=9, at_least=2)"


def test_patterns_of_triggers_are_there_to_be_checked() -> None:
    filters = paths_of([NonFinite(include="blocks.*"), OnSignal(), Above("log.loss", 1)])
    assert [each.to_json()["include"] for each in filters] == [["blocks.*"], None]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Above("rmss", 1),
            "Above('rmss'): there is no such statistic. Did you mean 'rms'? There are: mean,",
        ),
        (lambda: Above("log.", 1), "Above('log.'): there is no such statistic."),
        (lambda: Above(3, 1), "Above(3): there is no such statistic."),  # type: ignore[arg-type]
        (lambda: Above("rms", NAN), "Above(limit=nan): give a number"),
        (lambda: Above("rms", "1"), "Above(limit='1'): give a number"),  # type: ignore[arg-type]
        (
            lambda: Above("log.loss", 1, include="head"),
            "Above('log.loss'): a number that is logged belongs to no",
        ),
        (lambda: OutOfBand(factor=0), "OutOfBand(factor=0): give a positive number"),
        (lambda: OutOfBand(factor="8"), "OutOfBand(factor='8'): give a positive number"),  # type: ignore[arg-type]
        (lambda: OutOfBand(window=50.5), "OutOfBand(window=50.5): give a number of steps, at least 2"),  # type: ignore[arg-type]
        (lambda: OutOfBand(window=1), "OutOfBand(window=1): give a number of steps, at least 2"),
        (lambda: OutOfBand(window=5, at_least=6), "OutOfBand(at_least=6, window=5): give numbers of steps"),
        (lambda: OutOfBand(at_least=2.5), "OutOfBand(at_least=2.5, window=50): give numbers of steps"),  # type: ignore[arg-type]
        (lambda: OutOfBand(at_least=1), "OutOfBand(at_least=1, window=50): give numbers of steps"),
        (lambda: NonFinite(roles="ouput"), "roles: there is no role 'ouput'. Did you mean 'output'?"),
        (lambda: NonFinite(include="a["), "include='a[' is not a glob"),
        (lambda: OnSignal("USR1"), "OnSignal('USR1'): there is no such signal here"),
        (lambda: OnSignal("SIGKILL"), "OnSignal('SIGKILL'): no process ever hears of this one"),
        (lambda: check_keep_last(0), "keep_last=0: give a number of steps, or None to write every step"),
        (lambda: check_keep_last(True), "keep_last=True: give a number of steps"),
        (lambda: check_keep_last(2.0), "keep_last=2.0: give a number of steps"),
        (
            lambda: to_triggers(Above("rms", 1), keep_last=1, captures=()),
            "triggers=Above(stat='rms', limit=1) looks at what is measured, and values=None measures nothing",
        ),
        (
            lambda: to_triggers(Above("rms", 1, roles="update"), keep_last=None, captures=STATS),
            "triggers=Above(stat='rms', limit=1, roles='update') looks at update, and no capture measures rms there. "
            "Add modtrace.Capture(roles='update', stats=1) to values",
        ),
        (
            lambda: to_triggers(NonFinite(roles=["input", "buffer"]), keep_last=None, captures=STATS),
            "triggers=NonFinite(roles=['input', 'buffer']) looks at input and buffer, and no capture measures "
            "nonfinite there. Add modtrace.Capture(roles=['input', 'buffer'], stats=1) to values",
        ),
        (
            lambda: to_triggers(
                OutOfBand("kurtosis"), keep_last=None, captures=(*STATS, Capture(roles="input", stats=2))
            ),
            "triggers=OutOfBand(stat='kurtosis') looks at output, and no capture measures kurtosis there. "
            "Add modtrace.Capture(roles='output', stats=2) to values",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        make()


def test_what_is_no_trigger_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^triggers='nan': give modtrace's NonFinite, Above, OutOfBand, OnSignal"
    ):
        to_triggers(["nan"], keep_last=2, captures=STATS)


def test_notes_survive_a_meta_file_and_odd_ones_do_no_harm() -> None:
    meta = RunMeta(notes=(Note(step=137, kind="NonFinite", reason="head output holds 1 NaN"),))
    assert RunMeta.from_json(meta.to_json()) == meta
    assert RunMeta.from_json({}).notes == ()
    odd = RunMeta.from_json({"notes": [{"step": "x", "later": 1}, "text"]})
    assert odd.notes == (Note(step=None, kind="", reason=""), Note(step=None, kind="", reason="text"))
