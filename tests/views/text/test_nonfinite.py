"""The first non-finite values as text and JSON."""

import json
from dataclasses import replace

import pytest

from golden import assert_golden
from modtrace.analysis.values.nonfinite import Aftermath, Measured, NonFinite
from modtrace.views.text.nonfinite import render_nonfinite, render_nonfinite_json

MEASURED = Measured(tensors=12_345, unmeasured=0, steps=30, last_step=29)
FOUND = NonFinite(
    root="GPT",
    path="blocks.1.attn",
    call=0,
    phase="forward",
    step=7,
    role="output",
    slot="",
    count=15,
    nan_count=12,
    inf_count=3,
    numel=4096,
)


def second_line(found: NonFinite) -> str:
    return render_nonfinite(found, MEASURED).splitlines()[1]


def test_what_and_where_with_a_hint_and_marks() -> None:
    found = replace(
        FOUND,
        call=1,
        slot="['logits']",
        hint="the weights it used hold non-finite values: blocks.1.attn.qkv.weight (3 NaN)",
    )
    marks = ("values of steps before 5 were dropped",)
    assert_golden("nonfinite.txt", render_nonfinite(found, MEASURED, marks=marks))


def test_it_is_red_on_a_terminal() -> None:
    assert "\x1b[1;31m12 NaN, 3 inf\x1b[0m" in render_nonfinite(FOUND, MEASURED, color=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "  output of blocks.1.attn in GPT, 4.10K elements"),
        ({"call": 2}, "  output of blocks.1.attn@2 in GPT, 4.10K elements"),
        ({"path": "", "numel": 1}, "  output of GPT, 1 element"),
        (
            {"role": "grad_output", "slot": "[1]"},
            "  gradient of the output [1] of blocks.1.attn in GPT, 4.10K elements",
        ),
        (
            {"role": "parameter", "slot": "weight", "call": None},
            "  parameter weight of blocks.1.attn in GPT, 4.10K elements",
        ),
        (
            {"role": "parameter_grad", "slot": "weight", "call": None},
            "  gradient of the parameter weight of blocks.1.attn in GPT, 4.10K elements",
        ),
        (
            {"role": "parameter", "slot": "param_groups[0].params[3]", "path": None, "root": None},
            "  parameter param_groups[0].params[3], 4.10K elements",
        ),
        ({"role": None, "path": None}, "  a tensor of an unknown site, 4.10K elements"),
        (
            {"kind": "first seen", "op": "aten.add.Tensor"},
            "  first seen at add in blocks.1.attn of GPT, 4.10K elements",
        ),
        (
            {"kind": "producer", "op": "aten.add.Tensor"},
            "  made by add in blocks.1.attn of GPT, 4.10K elements",
        ),
        ({"path": "a\x1b"}, "  output of a\\x1b in GPT, 4.10K elements"),
    ],
)
def test_tensor_is_named_by_role_slot_module_and_call(changes: dict[str, object], expected: str) -> None:
    assert second_line(replace(FOUND, **changes)) == expected  # type: ignore[arg-type]


def test_first_of_the_elements_is_told() -> None:
    line = second_line(replace(FOUND, first_index=(0, 3, 17)))
    assert line == "  output of blocks.1.attn in GPT, 4.10K elements, the first at [0,3,17]"
    made = second_line(replace(FOUND, op="aten.log.default", kind="producer", first_index=(5,)))
    assert made == "  made by log in blocks.1.attn of GPT, 4.10K elements, the first at [5]"


def test_phase_that_is_not_known_is_left_out() -> None:
    text = render_nonfinite(replace(FOUND, phase=None, nan_count=0), MEASURED)
    assert text.splitlines()[0] == "first non-finite values: 3 inf in step 7"


def test_finite_values_are_counted() -> None:
    assert render_nonfinite(None, MEASURED) == (
        "no non-finite values in 12,345 measured tensors of 30 steps\n"
    )
    assert render_nonfinite(None, Measured(tensors=3, unmeasured=2, steps=1, last_step=0)) == (
        "no non-finite values in 3 measured tensors of 1 step;"
        " 2 more could not be measured (column `note` of `values`)\n"
    )


def test_finite_values_of_a_part_are_said_to_be_of_a_part() -> None:
    assert render_nonfinite(None, MEASURED, marks=("values.arrow is cut",)) == (
        "no non-finite values in what is there of the recording: 12,345 measured tensors of 30 steps, "
        "the last of them step 29\n! values.arrow is cut\n"
    )


def test_parameters_are_those_before_an_optimizer_which_evaluations_may_have_used_first() -> None:
    after = Aftermath(
        loss=True, gradients=0, measured_gradients=0, parameters_step=12, last_parameters_step=12
    )
    reached = "reached the loss, the parameters before the optimizer of step 12"
    assert reached in render_nonfinite(replace(FOUND, after=after))


def test_json_has_every_field() -> None:
    assert json.loads(render_nonfinite_json(None, MEASURED)) == {
        "first": None,
        "measured": {
            "tensors": 12345,
            "unmeasured": 0,
            "steps": 30,
            "last_step": 29,
            "nonfinite": 0,
            "recorded_steps": 0,
            "chosen_steps": None,
            "held": None,
        },
        "marks": [],
    }
    assert json.loads(render_nonfinite_json(FOUND, MEASURED))["first"] == {
        "root": "GPT",
        "path": "blocks.1.attn",
        "call": 0,
        "op": None,
        "phase": "forward",
        "step": 7,
        "role": "output",
        "slot": "",
        "kind": None,
        "source": None,
        "count": 15,
        "nan_count": 12,
        "inf_count": 3,
        "numel": 4096,
        "first_index": None,
        "inputs": [],
        "chain": [],
        "hint": None,
        "op_nth": None,
        "forward_op": None,
        "follows": None,
        "source_line": None,
        "has_lines": False,
        "are_negative": False,
        "micro_batch": None,
        "micro_batches": 1,
        "cause": None,
        "remedy": None,
        "replaced_by": [],
        "others": 0,
        "growth": [],
        "after": None,
    }
