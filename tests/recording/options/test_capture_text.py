"""Captures as the command line has them."""

import pytest

from modtrace.recording.options.capture import Capture
from modtrace.recording.options.capture_text import parse_capture


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "roles=output,grad_output stats=2 hash steps=::10",
            Capture(roles=("output", "grad_output"), stats=2, hash=True, steps="::10"),
        ),
        ("roles=all", Capture(roles="all")),
        (
            "include=blocks.*,head exclude='re:ln[12]{1,2}$'",
            Capture(include=["blocks.*", "head"], exclude="re:ln[12]{1,2}$"),
        ),
        ("include=head include=blocks.0", Capture(include=["head", "blocks.0"])),
        ("roles=op_output ops=aten.mm*,aten.bmm*", Capture(roles="op_output", ops=["aten.mm*", "aten.bmm*"])),
        ("tensors=lazy sample=64 types=Linear", Capture(tensors="lazy", sample=64, types=("Linear",))),
        ("tensors sketch micro_batches", Capture(tensors=True, sketch=True, micro_batches=True)),
    ],
)
def test_a_text_is_read(text: str, expected: Capture) -> None:
    found = parse_capture(text)
    assert isinstance(found, Capture)
    assert found.to_json() == expected.to_json()


def test_the_word_stats_means_the_usual_statistics() -> None:
    assert parse_capture(" stats ") == "stats"


@pytest.mark.parametrize(
    "text, error",
    [
        (
            "role=output",
            "capture='role=output' cannot be read: a capture has no 'role'. Did you mean 'roles'? There are: roles,",
        ),
        (" ", "capture=' ' says nothing: give words such as 'roles=output stats=2', or 'stats'"),
        ("stats=two", "capture='stats=two' cannot be read: stats=two is no number"),
        ("steps", "capture='steps' cannot be read: 'steps' needs a value, as in steps=..."),
        (
            "hash=1",
            "capture='hash=1' cannot be read: 'hash' takes no value, because its name alone turns it on",
        ),
        (
            "roles='output",
            'capture="roles=\'output" cannot be read: it cannot be parted into words: No closing quotation',
        ),
        ("roles=nothing", "capture='roles=nothing' cannot be read: roles: there is no role 'nothing'."),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_capture(text)
    assert str(raised.value).startswith(error)
