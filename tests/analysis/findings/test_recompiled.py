"""Code that is compiled anew in many steps is named, with the reason; what is compiled at first is not."""

import modtrace
from builders import RecordingBuilder
from modtrace.analysis.findings.finding import Finding


def _find(compiled: dict[int, list[str]], steps: int = 20) -> tuple[Finding, ...]:
    """Returns what is found if in these steps one compilation ran, for these reasons."""
    build = RecordingBuilder()
    model = build.module("", "Net")
    for step in range(steps):
        start_ns = step * 10_000_000
        build.step(step, start_ns, start_ns + 10_000_000)
        build.call(model, start_ns, start_ns + 5_000_000)
        if step in compiled:
            build.compilation(
                model, "forward train.py:31", f"0/{step}", failed_guards=compiled[step], took_ns=5_000_000
            )
    return modtrace.Recording(build.data()).findings(only=["recompiled"]).findings


def test_code_that_is_compiled_again_and_again_is_named() -> None:
    reasons = [f"0/{step}: self.step == {step}" for step in range(20)]
    (found,) = _find({step: [reasons[step - 1]] for step in range(1, 20)})
    assert found.text == (
        "torch.compile compiles again in 18 of 18 steps, first in step 2: 50 % of their time"
    )
    assert found.evidence[0] == "mostly forward train.py:31"
    assert found.evidence[1].startswith("1 x because this failed: self.step == ")
    assert found.step == 2


def test_what_is_compiled_at_first_or_once_more_is_left_alone() -> None:
    assert _find({0: [], 1: ["0/0: x.size()[0] == 4"], 9: ["0/1: x.size()[0] == 3"]}) == ()
    assert _find({step: [] for step in range(20)}) == ()  # other code each time
