"""Recordings of architectures in which values hide what ops read are proved; what is not deterministic is told."""

import pytest

import modtrace
from helpers.hiding_architectures import HIDING, reformer

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", HIDING)
def test_recording_of_an_architecture_that_hides_what_an_op_reads_is_proved(seeded, name):
    model, inputs = HIDING[name]()
    found = modtrace.verify(model, (), inputs)
    assert found, f"\n{found}"
    assert found.is_deterministic
    assert found.unchecked == ()


def test_reformer_is_told_to_be_not_deterministic_by_itself(seeded):
    model, inputs = reformer()
    found = modtrace.verify(model, (), inputs)
    assert found, f"\n{found}"
    assert not found.is_deterministic
    assert found.headline == (
        "ReformerModelWithLMHead: its recording is proved; the model is not deterministic by itself"
    )
    assert [what for what, _ in found.unchecked] == ["outputs", "gradients", "nothing left behind"]
    assert all(why.startswith("two unrecorded runs differ already: ") for _, why in found.unchecked)
    assert "determinism" not in [each.name for each in found.checks]
