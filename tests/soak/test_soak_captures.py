"""Capturing everything takes no more after 10,000 steps than after 2,000: `make soak`. A sample of 125 runs always."""

import shutil
import sys
from collections import Counter

import pytest

import modtrace
from helpers.capture_runs import LARGE, run_apart
from helpers.capture_soak import KB, KINDS, MB, Training, counts_of
from helpers.ours import assert_bounded
from modtrace import Capture, TensorOptions
from modtrace.store.tensor_ring import TensorRing

#: Segments of steps that have ended are looked at when there are 32; all others are let go at once.
SEGMENTS = 40

#: The names in the file of whole tensors that is being written: up to 8,400 of 260 bytes.
NAMES = 2.2 * MB

EACH = pytest.mark.parametrize("kind", KINDS)

#: A sample of them, which runs always; the others with `make soak`.
SAMPLED = ("to a folder",)
SAMPLE = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SAMPLED else pytest.mark.soak) for kind in KINDS]
)
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the process from /proc")


@SAMPLE
def test_a_hundred_and_twenty_five_captured_steps_leave_as_much_as_eighty(tmp_path, kind):
    counts = []
    with KINDS[kind](tmp_path) as rec:
        training = Training(rec, kind)
        for step in (80, 125):
            training.run_to(step)
            counts.append(counts_of(training))
        training.close()
    assert_bounded(counts, slack=SEGMENTS)
    assert_all_the_same(counts)


@pytest.mark.soak
@ON_LINUX
@EACH
def test_ten_thousand_captured_steps_take_as_much_as_two_thousand(tmp_path, kind, capsys):
    found = run_apart("long", kind, tmp_path, 2000, 5)
    shutil.rmtree(tmp_path)  # gigabytes
    with capsys.disabled():
        sizes = ", ".join(f"{each / MB:.2f}" for each in found["resident"])
        print(f"\n{kind}: resident MB after each 2,000 steps: {sizes}; rows {found['rows']:,}")
    counts = [Counter(each) for each in found["counts"]]
    assert_bounded(counts, slack=SEGMENTS)
    assert_all_the_same(counts)
    assert (
        len(found["marks"]) <= 22
    )  # twenty of what did not fit, one of further ones, and that it is not closed
    assert found["resident"][-1] - found["resident"][0] < 1.5 * MB + NAMES


def assert_all_the_same(counts):
    """Whether nothing of the process's own is opened, or kept of the user's."""
    for name in ("threads", "open files", "torch tensors"):
        assert len({each[name] for each in counts}) == 1, f"{name}: {[each[name] for each in counts]}"


@pytest.mark.soak
@ON_LINUX
def test_updates_take_one_copy_of_the_parameters_and_all_else_takes_little(capsys):
    found = {what: run_apart("large", what) for what in LARGE}
    grown = {what: each["grown"] for what, each in found.items()}
    parameters = found["all"]["parameters"]
    with capsys.disabled():
        sizes = ", ".join(f"{what} {each / MB:.1f}" for what, each in grown.items())
        print(f"\nparameters of {parameters / MB:.1f} MB; MB more than before: {sizes}")
    assert parameters == 64 * MB
    assert grown["all but updates"] - grown["nothing"] < 8 * MB
    assert abs(grown["all"] - grown["all but updates"] - parameters) < 8 * MB


@pytest.mark.parametrize("when_full", ["block", "drop"])
def test_whole_tensors_of_a_step_go_through_a_buffer_that_is_smaller(tmp_path, monkeypatch, when_full):
    taken = []
    append = TensorRing.append

    def watched(ring, part):
        append(ring, part)
        parts = [*ring._parts] or [part]
        taken.append(part.start + part.size_bytes - parts[0].start)

    monkeypatch.setattr(TensorRing, "append", watched)
    values = Capture(roles=("input", "output", "grad_output"), include="blocks.0.**", tensors=True)
    options = TensorOptions(max_bytes=16 * KB, when_full=when_full)
    with modtrace.record(to=tmp_path / "run.modtrace", strict=True, values=values, tensors=options) as rec:
        training = Training(None)
        training.run_to(8)
        dropped = rec._writer._tensors.dropped.tensors
    kept = rec.frame("values")["blob"].notna()
    assert max(taken) <= 16 * KB
    assert len(taken) == rec.frame("values")["blob"].nunique()
    assert kept.all() if when_full == "block" else (~kept).sum() >= dropped
