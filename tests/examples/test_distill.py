"""The example of distillation: a student learns what the attention inside of a compiled teacher returns."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import distill
    finally:
        sys.path.remove(str(EXAMPLES))
    return distill


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_student_learns_the_teachers_attention(example: Any) -> None:
    torch.manual_seed(0)
    text = example.read_text()
    teacher, student = example.GPT(4, 32, 16), example.GPT(2, 32, 16)
    losses = example.distill(teacher, student, text, 30, 16, "aot_eager")
    assert losses[-1].attention < 0.7 * losses[0].attention
    assert losses[-1].logits < losses[0].logits


def test_compiled_teacher_is_the_eager_one_bit_by_bit(example: Any) -> None:
    losses = {}
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        teacher, student = example.GPT(2, 16, 8), example.GPT(1, 16, 8)
        losses[backend] = example.distill(teacher, student, example.read_text(), 3, 8, backend)
    assert losses["eager"] == losses["aot_eager"]


def test_the_script_prints_the_losses(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--steps=4", "--layers=2", "--width=16", "--context=8", "--backend=aot_eager"])
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step 0",
        "step 1",
        "step 2",
        "step 3",
    ]


@pytest.mark.compile
def test_the_script_runs_with_inductor() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "distill.py"), "--steps=40", "--layers=2", "--width=32"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert float(last.split()[3].rstrip(",")) < float(first.split()[3].rstrip(","))
