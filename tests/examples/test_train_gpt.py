"""The example script trains, and checkpointing changes nothing about what it computes."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "train_gpt.py"
SMALL = {"steps": 8, "layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 8, "print-every": 1}


def _run(*options: str) -> str:
    """What the script prints."""
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(SCRIPT))["main"]([*small, *options])
    return printed.getvalue()


def _losses(*options: str) -> list[str]:
    return re.findall(r"loss (\S+)", _run(*options))


@pytest.fixture(scope="module")
def plain() -> list[str]:
    with torch.random.fork_rng():
        return _losses()


def test_loss_falls(plain: list[str]) -> None:
    assert len(plain) == 8
    assert float(plain[-1]) < float(plain[0]) - 0.5


@pytest.mark.parametrize("checkpoint", ["--checkpoint", "--checkpoint=reentrant"])
def test_checkpointing_gives_the_same_losses(checkpoint: str, plain: list[str]) -> None:
    assert _losses(checkpoint) == plain


def test_bfloat16_trains_too_and_a_sample_is_written() -> None:
    printed = _run("--dtype", "bfloat16", "--sample", "20", "--steps", "2")
    *steps, _ = printed.split("\n", 2)
    assert [step.split()[:2] for step in steps] == [["step", "1"], ["step", "2"]]
    assert len(printed) == len("\n".join(steps)) + 1 + 20 + 1


def test_planted_overflow_makes_the_loss_nan_from_its_third_step_on(plain: list[str]) -> None:
    assert _losses("--plant", "overflow") == [*plain[:2], *["nan"] * 6]


def test_script_names_nothing_of_modtrace_in_its_code() -> None:
    code = SCRIPT.read_text().split('"""', 2)[2]
    assert "modtrace" not in code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: '0' is not a whole number above 0"),
        (["--heads", "5"], "--width 128 cannot be divided among --heads 5"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_wrong_option_is_said_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert message in capsys.readouterr().err.splitlines()[-1]
