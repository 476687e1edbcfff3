"""Parts of a tensor against the whole of the other recording."""

from collections.abc import Sequence

import numpy as np
import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.alignment.align import align
from modtrace.analysis.divergence.errors import METRICS, find_joined_errors

PARTS = ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])
WHOLE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
RULES = [f"{name}=qkv" for name in "qkv"]


def recording(**outputs: Sequence[float] | None) -> TypedRecording:
    """Modules of these names that each return these numbers."""
    build = RecordingBuilder()
    net = build.module("", "Net")
    modules = {
        name: build.module(name, "Linear", parent=net, parameters=12 if name == "qkv" else 4)
        for name in outputs
    }
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 900, nth=0)
    for at, (name, numbers) in enumerate(outputs.items()):
        call = build.call(modules[name], 100 * at + 10, 100 * at + 90, parent=outer, nth=0)
        size = len(numbers) if numbers is not None else 2
        build.output(call, numbers, shape=[1, size], numel=size)
    return build.data()


def errors(*parts: Sequence[float] | None, whole: Sequence[float] = WHOLE) -> list[tuple[float, str]]:
    a, b = recording(**dict(zip("qkv", parts, strict=True))), recording(qkv=whole)
    found = find_joined_errors(a, b, align(a, b, rules=RULES))
    return [(float(error), METRICS[code]) for error, code in zip(found.error, found.metric, strict=True)]


def test_parts_that_make_up_the_whole_are_equal() -> None:
    assert errors(*PARTS) == [(0.0, "statistics")] * 3


def test_by_statistics_all_parts_have_the_error_of_all_together() -> None:
    assert errors(*PARTS, whole=[*WHOLE[:-1], 8.0]) == [(pytest.approx(2 / 8), "statistics")] * 3


def test_part_that_was_not_measured_leaves_all_of_them_unknown() -> None:
    found = errors(PARTS[0], None, PARTS[2])
    assert [metric for _, metric in found] == ["nothing"] * 3
    assert np.isnan([error for error, _ in found]).all()


def test_nan_in_one_part_alone_is_a_difference() -> None:
    assert errors(PARTS[0], [3.0, float("nan")], PARTS[2]) == [(float("inf"), "nonfinite")] * 3


def test_nan_in_a_part_and_in_the_whole_is_none() -> None:
    nan = float("nan")
    found = errors(PARTS[0], [3.0, nan], PARTS[2], whole=[1.0, 2.0, 3.0, nan, 5.0, 6.0])
    assert [metric for _, metric in found] == ["statistics"] * 3


def test_whole_of_the_first_recording_is_paired_the_other_way_round() -> None:
    a, b = recording(qkv=[*WHOLE[:-1], 8.0]), recording(**dict(zip("qkv", PARTS, strict=True)))
    found = find_joined_errors(a, b, align(a, b, rules=[r"qkv=q", r"qkv=k", r"qkv=v"]))
    assert found.error.tolist() == [pytest.approx(2 / 8)] * 3
    assert len(set(found.rows_a.tolist())) == 1
