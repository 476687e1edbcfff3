"""Recording every op changes no bit of a run, shows nothing to modes of the user's, and keeps nothing alive longer."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import modtrace
from collect.ops.test_user_modes import RUNS as MODE_RUNS
from collect.ops.test_user_modes import Tagged, seen
from collect.recorder.test_bit_identity import CHECKPOINTS, RUNS, train_gpt
from helpers.twins import assert_untouched
from helpers.user_modes import SeesFunctions, SeesOps

VALUES = pytest.mark.parametrize("values", [None, "stats"], ids=["", "values"])


@VALUES
@CHECKPOINTS
def test_training_a_gpt_with_every_op_recorded_gives_the_same_bits(reentrant, values):
    recording = assert_untouched(lambda: train_gpt(reentrant=reentrant), ops=True, values=values)
    assert len(recording.table("ops")) > 1000


MARKED_RUNS = [pytest.param(run, id=run.__name__.replace("_", " ")) for run in RUNS]


@VALUES
@pytest.mark.parametrize("run", MARKED_RUNS)
def test_recording_ops_changes_no_bit_of(run, values):
    recording = assert_untouched(run, ops=True, values=values)
    assert len(recording.table("ops")) > 0


@pytest.mark.parametrize(("place", "values"), [("around", "stats"), ("inside", None)])
@pytest.mark.parametrize("mode_type", [SeesOps, SeesFunctions])
@pytest.mark.parametrize("run", MODE_RUNS.values(), ids=MODE_RUNS)
def test_mode_sees_nothing_of_ours_in(run, values, mode_type, place):
    plain = seen(mode_type, run, "none")
    assert seen(mode_type, run, place, ops=True, values=values) == plain
    assert plain


@VALUES
def test_tensor_subclass_is_asked_nothing_by_us(values):
    asked = []
    for recording in (nullcontext(), modtrace.record(strict=True, ops=True, values=values)):
        Tagged.seen = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with recording:
            model(torch.ones(3, 4).as_subclass(Tagged)).sum().backward()
        asked.append(Tagged.seen)
    assert asked[0] == asked[1]
    assert len(asked[0]) > 3
