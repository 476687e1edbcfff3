"""Whole tensors of many sites as one array."""

from typing import Any

import numpy as np
import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.values.selection import Selection
from modtrace.analysis.values.stack import Stack, build_stack
from modtrace.recording.raw_tensor import RawTensor


class WithTensors(TypedRecording):
    """A typed recording that has tensors too, by their references."""

    def __init__(self, data: TypedRecording, tensors: dict[str, RawTensor]) -> None:
        super().__init__(data._rows, data.meta)
        self._tensors = tensors

    def tensor(self, blob: str) -> RawTensor:
        return self._tensors[blob]


def raw(array: Any, dtype: str | None = None) -> RawTensor:
    numbers = np.asarray(array)
    data = memoryview(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8))
    return RawTensor(dtype=dtype or numbers.dtype.name, shape=numbers.shape, data=data)


class Run:
    """Three blocks that return tensors, step by step."""

    def __init__(self) -> None:
        self.build = RecordingBuilder()
        net = self.build.module("", "Net")
        self.blocks = [self.build.module(f"blocks.{at}", "Block", parent=net) for at in range(3)]
        self.tensors: dict[str, RawTensor] = {}

    def step(self, step: int, outputs: list[dict[str, RawTensor]], *, calls: int = 1) -> None:
        self.build.step(step, 100 * step, 100 * step + 99)
        made = [
            (self.build.call(block, 100 * step + 9 * at + nth, 100 * step + 9 * at + nth + 1, nth=nth), at)
            for at, block in enumerate(self.blocks[: len(outputs)])
            for nth in range(calls)
        ]
        for call, at in reversed(made):  # not in the order of the layers
            for slot, tensor in outputs[at].items():
                blob = f"{len(self.tensors)}"
                self.tensors[blob] = tensor
                self.build.output(call, [1.0], slot, blob=blob)

    def stack(self, step: int | None = None, **wanted: Any) -> Stack:
        return build_stack(WithTensors(self.build.data(), self.tensors), step, Selection(**wanted))


def test_tensors_of_a_family_are_one_array_with_a_layer_axis() -> None:
    run = Run()
    run.step(0, [{"": raw(np.full((2, 2), float(at)))} for at in range(3)])

    found = run.stack(path="blocks.*")
    assert found.sites == ("blocks.0", "blocks.1", "blocks.2")
    assert (found.step, found.role) == (0, "output")
    assert found.values.dtype == np.float64
    assert found.values.tolist() == [[[at, at], [at, at]] for at in (0.0, 1.0, 2.0)]


def test_of_a_structure_the_first_slot_is_taken() -> None:
    run = Run()
    run.step(0, [{"[1]": raw([9, 9]), "[0]": raw([at])} for at in range(2)])

    assert run.stack().values.tolist() == [[0], [1]]
    assert run.stack().sites == ("blocks.0[0]", "blocks.1[0]")
    assert run.stack(slot="[1]").values.tolist() == [[9, 9], [9, 9]]


def test_parameters_of_a_module_stand_beside_each_other() -> None:
    run = Run()
    run.build.step(0, 0, 99)
    for at, name in enumerate(("weight", "bias")):
        run.tensors[name] = raw([at])
        run.build.parameter(run.blocks[0], name, [1.0], blob=name)

    found = run.stack(role="parameter")
    assert found.sites == ("blocks.0.weight", "blocks.0.bias")
    assert found.values.tolist() == [[0], [1]]


def test_of_each_op_the_first_slot_is_taken() -> None:
    run = Run()
    run.build.step(0, 0, 99)
    call = run.build.call(run.blocks[0], 0, 5, nth=0)
    for at, (op, slot) in enumerate((("aten.split", "[0]"), ("aten.split", "[1]"), ("aten.relu", ""))):
        row = {"site_id": at, "module_id": run.blocks[0], "nth": 0, "role": "op_output", "slot": slot}
        run.build._rows["sites"].append(row | {"op": op, "op_nth": 0})
        run.tensors[str(at)] = raw([at])
        run.build.value(at, [1.0], call=call, op_id=at, blob=str(at))

    found = run.stack(role="op_output")
    assert found.sites == ("blocks.0/aten.split[0]", "blocks.0/aten.relu")
    assert found.values.tolist() == [[0], [2]]


def test_the_step_is_the_only_one_or_said() -> None:
    run = Run()
    run.step(3, [{"": raw([1])}])
    assert run.stack().step == 3
    run.step(5, [{"": raw([2])}])

    assert run.stack(5).values.tolist() == [[2]]
    with pytest.raises(
        ValueError, match=r"^stack\(\): tensors of 2 steps are there \(3, 5\)\. Give step=\.$"
    ):
        run.stack()


def test_bfloat16_is_float32() -> None:
    run = Run()
    run.step(0, [{"": raw(np.array([0x3F80, 0xC000, 0x7FC0], np.uint16), "bfloat16")}])

    found = run.stack().values
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[1.0, -2.0, np.nan]])


def test_scalars_and_empty_tensors_stack() -> None:
    for array, shape in ((np.float32(2), (1,)), (np.empty((0, 3)), (1, 0, 3))):
        run = Run()
        run.step(0, [{"": raw(array)}])
        assert run.stack().values.shape == shape


def test_what_does_not_stack_is_said() -> None:
    run = Run()
    run.step(0, [{"": raw([1, 2])}, {"": raw([[1]])}])
    with pytest.raises(ValueError) as raised:
        run.stack()
    assert str(raised.value) == (
        "blocks.1 has the shape [1, 1], and blocks.0 has [2]: they do not stack. "
        "Choose sites of one shape with path= or slot=."
    )
    run = Run()
    run.step(0, [{"": raw(np.array([1], np.uint8), "float8_e4m3fn")}])
    with pytest.raises(
        ValueError, match=r"^blocks\.0: numpy has no float8_e4m3fn\. Read each with rec\.tensor\(\)"
    ):
        run.stack()


def test_several_calls_of_a_module_are_not_one_tensor() -> None:
    run = Run()
    run.step(7, [{"": raw([1])}], calls=2)

    with pytest.raises(ValueError, match=r"^blocks\.0: 2 tensors in step 7\. Choose one with call="):
        run.stack()
    assert run.stack(call=1).values.tolist() == [[1]]


def test_where_no_tensors_were_kept_it_is_said() -> None:
    run = Run()
    run.build.step(0, 0, 100)
    run.build.output(run.build.call(run.blocks[0], 0, 5, nth=0), [1.0])

    with pytest.raises(ValueError, match=r"^no whole tensors were recorded\."):
        run.stack()
