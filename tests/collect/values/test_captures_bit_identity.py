"""No capture changes a bit of a run, or is seen by a mode: every role, tier, hash, sketch, sample and whole tensor."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import modtrace
from collect.recorder.test_bit_identity import CHECKPOINTS, train_gpt
from collect.recorder.test_bit_identity import RUNS as RUNS_OF_CALLS
from collect.values.test_values_bit_identity import RUNS as RUNS_OF_VALUES
from helpers.captured_ranks import EVERYTHING, run_rank
from helpers.twins import assert_untouched
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace import Capture


def largest(tensor: torch.Tensor) -> float:
    """A function as a user writes it: it runs ops of torch's, and draws a number."""
    return float(tensor.detach().float().abs().sum() + torch.rand(()) * 0)


#: What is captured, by name.
CAPTURES: dict[str, Any] = {
    "everything": EVERYTHING,
    "lazily": [Capture(roles="all", tensors="lazy"), Capture(roles="output", stats=0, hash=True)],
}

RUNS = [pytest.param(run, id=run.__name__.replace("_", " ")) for run in (*RUNS_OF_CALLS, *RUNS_OF_VALUES)]
TORCHS_OWN = pytest.mark.filterwarnings("ignore:(?!.*modtrace)")


@pytest.mark.parametrize("values", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("run", RUNS)
@TORCHS_OWN
def test_capturing_changes_no_bit_of(run: Any, values: Any) -> None:
    assert assert_untouched(run, values=values).table("values").num_rows > 0


@pytest.mark.parametrize(
    "run", RUNS_OF_VALUES, ids=[run.__name__.replace("_", " ") for run in RUNS_OF_VALUES]
)
@TORCHS_OWN
def test_capturing_every_op_to_a_folder_changes_no_bit_of(run: Any, tmp_path: Path) -> None:
    rec = assert_untouched(run, values=EVERYTHING, ops=True, to=tmp_path / "run.modtrace")
    assert rec.table("values").num_rows > 0


@pytest.mark.parametrize("values", CAPTURES.values(), ids=CAPTURES)
@CHECKPOINTS
def test_training_a_gpt_gives_the_same_bits_whatever_is_captured(reentrant: bool | None, values: Any) -> None:
    rec = assert_untouched(lambda: train_gpt(reentrant=reentrant), values=values)
    roles = {site["role"] for site in rec.table("sites").to_pylist()}
    assert roles >= {"input", "output", "grad_output", "grad_input", "parameter", "parameter_grad", "update"}


@pytest.mark.parametrize("mode_type", [SeesOps, SeesFunctions])
@pytest.mark.parametrize(
    "run", RUNS_OF_VALUES, ids=[run.__name__.replace("_", " ") for run in RUNS_OF_VALUES]
)
@TORCHS_OWN
def test_mode_of_the_users_sees_nothing_of_captures_in(run: Any, mode_type: Any) -> None:
    def seen(recording: Any, *, is_outside: bool = False) -> list[str]:
        torch.manual_seed(0)
        mode = mode_type()
        outer, inner = (recording, mode) if is_outside else (mode, recording)
        with outer, inner:
            run()
        return mode.seen

    plain = seen(nullcontext())
    assert plain
    assert seen(modtrace.record(strict=True, values=EVERYTHING)) == plain
    assert seen(modtrace.record(strict=True, values=EVERYTHING), is_outside=True) == plain


def test_a_function_that_runs_ops_and_draws_numbers_changes_no_bit() -> None:
    capture = Capture(roles=("output", "grad_output"), function=largest)
    assert_untouched(lambda: train_gpt(reentrant=False), values=capture)


# Two processes.


def test_ranks_that_train_together_have_the_same_bits_with_everything_captured(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        same, compared, rows, roles, marks = json.loads((tmp_path / f"{rank}.json").read_text())
        assert same
        assert compared > 20
        assert rows > 100
        assert roles == [
            "grad_input", "grad_output", "input", "loss", "optimizer_state", "output", "parameter", "parameter_grad",
            "update",
        ]  # fmt: skip
        assert marks == []
