"""Healthy trainings have no error and at most one warning; `benchmarks/healthy_runs.py` runs all of them."""

import pytest

from helpers.healthy_training import RUNS, record_run

#: Some of each kind that are fast.
SAMPLE = (
    "Mixtral, one batch",
    "ViT, one batch",
    "ResNet, images, SGD",
    "ResNet with evaluations",
    "LSTM, text, clipping",
    "CNN, float16 with a GradScaler",
    "GAN, images",
    "diffusion, images, bfloat16",
    "Q-learning with a target network",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_healthy_training_has_no_error_and_at_most_one_warning(name: str) -> None:
    found = record_run(name, 16).findings().findings
    assert [finding.text for finding in found if finding.severity == "error"] == []
    assert len([finding.text for finding in found if finding.severity == "warning"]) <= 1


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_every_healthy_training_has_no_error_and_at_most_one_warning(name: str) -> None:
    test_healthy_training_has_no_error_and_at_most_one_warning(name)
