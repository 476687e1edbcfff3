"""What a proof of a recording has found, as text and JSON."""

import json
from dataclasses import replace

import pytest

from modtrace.recording.verification import Check, Verification
from modtrace.views.text.verification import render_verification, render_verification_json

FOUND = Verification(
    model="GPT",
    checks=(
        Check(name="op count", passed=True, why="12 ops, as another counter has seen them"),
        Check(
            name="replay in order", passed=False, why="op 3 (aten.mm.default in fc, forward): its output ..."
        ),
    ),
    exempt={"overwritten": 2},
    unchecked=(("backward", "no output with real numbers requires a gradient"),),
)

TEXT = (
    "GPT: FAILED: replay in order\n"
    "ok         op count         12 ops, as another counter has seen them\n"
    "FAILED     replay in order  op 3 (aten.mm.default in fc, forward): its output ...\n"
    "exempt     overwritten      2\n"
    "unchecked  backward         no output with real numbers requires a gradient\n"
)


def test_a_line_for_each_check_exemption_and_gap() -> None:
    assert render_verification(FOUND) == TEXT


def test_printing_it_gives_the_same_lines() -> None:
    assert f"{FOUND}\n" == TEXT


def test_failure_is_red_on_a_terminal() -> None:
    assert "\x1b[1;31mFAILED\x1b[0m   " in render_verification(FOUND, color=True)


def test_proved_recording_is_true_and_says_so() -> None:
    proved = replace(FOUND, checks=FOUND.checks[:1], unchecked=())
    assert proved and proved.ok
    assert render_verification(proved).splitlines()[0] == "GPT: its recording is proved"


def test_failed_check_makes_it_false() -> None:
    assert not FOUND and not FOUND.ok


def test_check_is_found_by_its_name() -> None:
    assert FOUND.check("op count").passed
    with pytest.raises(KeyError):
        FOUND.check("op cuont")


def test_json_has_all_of_it() -> None:
    assert json.loads(render_verification_json(FOUND)) == {
        "ok": False,
        "model": "GPT",
        "checks": [
            {"name": "op count", "passed": True, "why": "12 ops, as another counter has seen them"},
            {
                "name": "replay in order",
                "passed": False,
                "why": "op 3 (aten.mm.default in fc, forward): its output ...",
            },
        ],
        "exempt": {"overwritten": 2},
        "unchecked": [["backward", "no output with real numbers requires a gradient"]],
        "is_deterministic": True,
    }


def test_names_cannot_steer_the_terminal() -> None:
    named = replace(FOUND, model="\x1b[2J")
    assert render_verification(named).splitlines()[0] == "\\x1b[2J: FAILED: replay in order"
