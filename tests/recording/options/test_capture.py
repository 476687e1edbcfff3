"""What `record(values=...)` may be told."""

import json
import re
from typing import Any

import numpy as np
import pytest

from modtrace.recording.options.capture import STATS, Capture, to_captures, to_json
from modtrace.recording.role import ROLES

USUAL = Capture()
OF_OPS = Capture(roles=("op_output", "leaf"))


def test_the_usual_statistics_are_those_of_outputs_and_parameters_with_their_gradients_and_of_losses() -> (
    None
):
    assert USUAL.roles == ("output", "grad_output", "parameter", "parameter_grad", "loss")
    assert (USUAL.stats, USUAL.hash, USUAL.sketch, USUAL.sample, USUAL.tensors) == (1, False, False, 0, False)


@pytest.mark.parametrize(
    "chosen", [{"include": "head"}, {"exclude": "head"}, {"types": "Linear"}, {"where": len}]
)
def test_capture_that_chooses_among_modules_has_losses_only_if_it_names_them(chosen: dict[str, Any]) -> None:
    assert Capture(**chosen).roles == ("output", "grad_output", "parameter", "parameter_grad")
    assert Capture(roles=USUAL.roles, **chosen).roles == USUAL.roles


def test_stats_is_one_capture_and_with_ops_another_that_no_pattern_narrows() -> None:
    assert to_captures(STATS, ops=False) == (USUAL,)
    assert to_captures(STATS, "head", ops=True) == (Capture(include="head"), OF_OPS)


def test_none_measures_nothing() -> None:
    assert to_captures(None, ops=True) == ()


def test_several_captures_stand_beside_the_usual_one() -> None:
    hashed = Capture(roles="output", hash=True)
    assert to_captures([STATS, hashed], ops=False) == (USUAL, hashed)


def test_all_roles_are_those_that_can_be_had() -> None:
    assert to_captures(Capture(roles="all"), ops=True)[0].roles == ROLES
    without = to_captures(Capture(roles="all"), ops=False)[0].roles
    assert without == tuple(role for role in ROLES if role not in {"op_output", "leaf"})


def test_a_role_that_is_given_twice_counts_once() -> None:
    assert Capture(roles=["output", "input", "output"]).roles == ("output", "input")


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"roles": "outputs"}, "roles: there is no role 'outputs'. Did you mean 'output'? There are: input,"),
        ({"roles": ("output", "nothing")}, "roles: there is no role 'nothing'. There are: input, output,"),
        ({"roles": ()}, "roles=(): give at least one, such as 'output'"),
        ({"stats": 3}, "stats=3: give 0 for none, 1 for the usual ones, 2 for all"),
        ({"sample": -1}, "sample=-1: give a number of values, at most 65,536"),
        ({"sample": 65_537}, "sample=65537: give a number of values, at most 65,536"),
        ({"on_trigger": -1}, "on_trigger=-1: give a number of steps, 0 for no waiting"),
        (
            {"tensors": "copy"},
            "tensors='copy': give True (--capture tensors), False or 'lazy' (--capture tensors=lazy)",
        ),
        (
            {"ops": "aten.mm*"},
            "ops=('aten.mm*',) chooses among what ops return: it takes the role 'op_output'",
        ),
        (
            {"roles": "update", "micro_batches": True},
            "micro_batches=True is about parameters' gradients: it takes the role 'parameter_grad'",
        ),
        ({"steps": "x"}, "steps='x' is not START:STOP[:EVERY]"),
        ({"include": []}, "include=[] holds no pattern"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Capture(**arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"function": 3}, "function=3: give a function"),
        ({"where": "head"}, "where='head': give a function"),
        ({"types": 3.5}, "types: 3.5 is neither a class nor the name of one"),
        ({"types": (3,)}, "types: 3 is neither a class nor the name of one"),
    ],
)
def test_what_is_of_another_kind_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        Capture(**arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"values": "all"}, "values='all': give 'stats', modtrace.Capture(...), a list of those, or None"),
        ({"values": []}, "values=[]: give at least one Capture, or None to measure nothing"),
        (
            {"values": None, "include": "head"},
            "include and exclude (--include, --exclude) choose what is measured, and values=None",
        ),
        ({"values": USUAL, "exclude": "head"}, "with values=Capture(...) say include and exclude there"),
        (
            {"values": OF_OPS},
            "Capture(roles='op_output') (--capture roles=op_output) looks at what ops return: "
            "it takes record(ops=True)",
        ),
        ({"values": [USUAL] * 41}, "values (--capture) holds 41 captures, and 40 are the most"),
    ],
)
def test_what_record_cannot_do_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        to_captures(**arguments, ops=False)


def test_meta_says_what_was_asked_for() -> None:
    assert to_json(to_captures(STATS, "blocks.*", ops=True)) == {"values": "stats", "include": ["blocks.*"]}
    assert to_json(()) == {"values": None}
    asked = Capture(roles="update", steps="::10", stats=2, types=("Linear", dict), where=len, on_trigger=3)
    assert to_json([asked, Capture(hash=True, tensors="lazy")]) == {
        "values": [
            {
                "roles": ["update"],
                "stats": 2,
                "steps": "0::10",
                "on_trigger": 3,
                "types": ["Linear", "dict"],
                "where": "len",
            },
            {
                "roles": ["output", "grad_output", "parameter", "parameter_grad", "loss"],
                "stats": 1,
                "hash": True,
                "tensors": "lazy",
            },
        ]
    }


def test_meta_can_be_written_of_numbers_of_numpys() -> None:
    asked = Capture(roles="output", stats=np.int64(2), sample=np.int16(3), on_trigger=np.uint8(1))
    assert json.dumps(to_json([asked])) == (
        '{"values": [{"roles": ["output"], "stats": 2, "on_trigger": 1, "sample": 3}]}'
    )
