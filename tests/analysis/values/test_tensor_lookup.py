"""A whole tensor is found by its place and step; whatever is not there, the error says what is."""

from typing import Any

import numpy as np
import pytest
import torch

from builders import RecordingBuilder
from modtrace.analysis.values.selection import Selection
from modtrace.analysis.values.tensor_lookup import find_tensor
from modtrace.api.recording import Recording
from modtrace.recording.raw_tensor import RawTensor


class KeptRecording:
    """A typed recording with tensors of one number, which stands in the reference."""

    def __init__(self, build: RecordingBuilder) -> None:
        data = build.data()
        self.meta = data.meta
        self.table = data.table

    def tensor(self, blob: str) -> RawTensor:
        data = np.array([float(blob.removeprefix("blob:"))], np.float32).tobytes()
        return RawTensor(dtype="float32", shape=(1,), data=memoryview(data))


def blob(number: float) -> dict[str, Any]:
    return {"blob": f"blob:{number}"}


@pytest.fixture
def rec() -> Recording:
    """Two steps: `attn` returns one tensor, `norm` two, `mlp` is called twice, all with one parameter."""
    build = RecordingBuilder()
    gpt = build.module("", "GPT")
    attn, norm, mlp = (build.module(name, "Linear", parent=gpt) for name in ("b.attn", "b.norm", "b.mlp"))
    for step in range(2):
        start = step * 1000
        build.step(step, start, start + 900)
        outer = build.call(gpt, start, start + 800)
        calls = [
            build.call(module, start + at * 100, start + at * 100 + 90, parent=outer, nth=nth)
            for at, (module, nth) in enumerate(((attn, 0), (norm, 0), (mlp, 0), (mlp, 1)))
        ]
        build.output(outer, [1.0])  # measured, and not kept
        build.output(calls[0], [1.0], **blob(10 + step))
        build.gradient(calls[0], [1.0], **blob(20 + step))
        build.output(calls[1], [1.0], "[0]", **blob(30 + step))
        build.output(calls[1], [1.0], "[1]", **blob(40 + step))
        build.output(calls[2], [1.0], **blob(50 + step))
        build.output(calls[3], [1.0], **blob(60 + step))
        if step == 0:
            build.parameter(attn, "weight", [1.0], **blob(70))
    return Recording(KeptRecording(build))


@pytest.mark.parametrize(
    ("site", "options", "expected"),
    [
        ("b.attn", {"step": 0}, 10),
        ("b.attn", {"step": 1}, 11),
        ("b.attn", {"step": 1, "role": "grad_output"}, 21),
        ("b.norm", {"step": 0, "slot": "[1]"}, 40),
        ("b.mlp", {"step": 1, "call": 1}, 61),
        ("b.attn.weight", {"role": "parameter"}, 70),
        ("**.attn", {"step": 0, "phase": "forward"}, 10),
    ],
)
def test_tensor_is_found(rec: Recording, site: str, options: dict[str, Any], expected: float) -> None:
    assert rec.tensor(site, **options).tolist() == [expected]
    assert isinstance(rec.tensor(site, **options), torch.Tensor)


def test_site_may_be_given_by_its_id(rec: Recording) -> None:
    values = rec.table("values").to_pylist()
    [row] = [row for row in values if row["blob"] == "blob:41"]
    assert rec.tensor(row["site_id"], 1).tolist() == [41]
    assert [step for step, _ in rec.tensors(np.int64(row["site_id"]), steps="1:")] == [1]


def test_tensors_come_with_their_steps(rec: Recording) -> None:
    assert [(step, each.tolist()) for step, each in rec.tensors("b.attn")] == [(0, [10]), (1, [11])]
    assert [step for step, _ in rec.tensors("b.mlp", steps="1:")] == [1, 1]


@pytest.mark.parametrize(
    ("site", "options", "text"),
    [
        ("b.attn", {}, "tensor('b.attn'): tensors of 2 steps were kept: 0, 1. Give step=."),
        ("b.mlp", {"step": 0}, "tensor('b.mlp'): tensors of 2 calls were kept in step 0: 0, 1. Give call=."),
        (
            "b.norm",
            {"step": 0},
            "tensor('b.norm'): 2 sites are meant: b.norm[0], b.norm[1]. Give the path of one",
        ),
        (
            "b.*",
            {"step": 0, "call": 0},
            "tensor('b.*'): 4 sites are meant: b.attn, b.norm[0], b.norm[1], b.mlp.",
        ),
        (
            "b.attm",
            {"step": 0},
            "path='b.attm' matches no module of which a whole tensor with role='output' was kept; "
            "the nearest are: b.attn",
        ),
        ("b.attn", {"step": 7}, "step=7: nothing was kept there; there are: 0, 1"),
        (
            "b.attn",
            {"role": "input"},
            "role='input' was not kept whole; kept whole were: grad_output, output, parameter. "
            "Record with values=modtrace.Capture(roles='input', tensors=True) "
            "(modtrace record --capture 'roles=input tensors').",
        ),
        ("b.attn", {"role": "outputs"}, "role='outputs': give one of input, output"),
        ("b.attn", {"step": 0, "slot": "[3]"}, "slot='[3]': no such row with role='output'"),
        ("b.attn", {"step": 0, "call": 3}, "call=3: no such row with role='output'"),
        (99, {}, "tensor(99): no tensor of this site_id was kept; there are: "),
        (1, {"step": 7}, "step=7: nothing was kept there; there are: 0, 1"),
        ("", {"step": 0}, "path='' matches no module of which a whole tensor with role='output' was kept"),
    ],
)
def test_error_says_what_is_there(rec: Recording, site: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        rec.tensor(site, **options)
    assert text in str(raised.value)


def test_site_of_another_type_is_refused(rec: Recording) -> None:
    with pytest.raises(
        TypeError, match=r"^tensor\(1.5\): give the path of a module or parameter, or a site_id$"
    ):
        rec.tensor(1.5, 0)  # type: ignore[arg-type]


def test_recording_without_tensors_says_how_to_keep_some() -> None:
    build = RecordingBuilder()
    call = build.call(build.module("", "GPT"), 0, 1)
    build.output(call, [1.0])
    with pytest.raises(ValueError, match=r"^no whole tensors were recorded. Record with values="):
        find_tensor(build.data(), "", None, Selection())


def test_several_tensors_of_one_call_are_read_one_by_one() -> None:
    """Each micro-batch adds to a parameter's gradient."""
    build = RecordingBuilder()
    head = build.module("", "Linear")
    build.step(0, 0, 10)
    for number in (3, 4):
        build.parameter_grad(head, "weight", [1.0], **blob(number))
    rec = Recording(KeptRecording(build))
    text = r"2 tensors were kept in step 0. Read them one by one with tensors\(\).$"
    with pytest.raises(ValueError, match=text):
        rec.tensor("weight", role="parameter_grad")
    found = rec.tensors("weight", role="parameter_grad")
    assert [(step, each.tolist()) for step, each in found] == [(0, [3]), (0, [4])]


def test_tensor_that_several_rows_share_is_one() -> None:
    """What two calls returned is the same memory, written once."""
    build = RecordingBuilder()
    head = build.module("", "Linear")
    build.step(0, 0, 10)
    for nth in range(2):
        build.output(build.call(head, nth, nth + 1, nth=nth), [1.0], **blob(3))
    rec = Recording(KeptRecording(build))
    assert rec.tensor("").tolist() == [3]
    assert [(step, each.tolist()) for step, each in rec.tensors("")] == [(0, [3])]


def test_tensors_come_in_the_order_of_measuring_and_not_of_writing() -> None:
    build = RecordingBuilder()
    head = build.module("", "Linear")
    build.step(0, 0, 10)
    for number, order in ((3, 8), (4, 5)):
        build.parameter_grad(head, "weight", [1.0], order=order, **blob(number))
    found = Recording(KeptRecording(build)).tensors("weight", role="parameter_grad")
    assert [(step, each.tolist()) for step, each in found] == [(0, [4]), (0, [3])]
