"""How many times larger than a tensor what it was added up from is."""

from collections.abc import Sequence

import numpy as np
import pytest

from builders import TypedRecording
from helpers.typed_steps import typed_net
from modtrace.analysis.divergence.noise import find_cancellation
from modtrace.analysis.divergence.paired_run import PairedRun, find_unpaired_ops
from modtrace.analysis.tables.run import read_run_tables


def factors(data: TypedRecording) -> list[float]:
    rows = np.arange(data.table("values").num_rows)
    tables = read_run_tables(data, [0])
    is_unpaired = find_unpaired_ops(tables, np.empty(0, np.int64), ())
    run = PairedRun(tables=tables, rows=rows, is_unpaired=is_unpaired)
    return [float(factor) for factor in find_cancellation(run)]


def op_after_another(name: str, made: Sequence[float], returned: Sequence[float]) -> TypedRecording:
    """An op that reads what `addmm` made, in a module called once."""
    build, net = typed_net(100)
    call = build.call(net, 0, 90, nth=0)
    first = build.op(call, "aten.addmm.default", 10, 20)
    second = build.op(call, name, 30, 40)
    build.use(build.tensor([len(made)], producer=first), op=second)
    build.tensor([len(returned)], producer=second)
    for op, numbers in ((first, made), (second, returned)):
        build.value(build.site(net, "op_output", nth=0), numbers, call=call, op_id=op)
    return build.data()


@pytest.mark.parametrize("name", ["aten.sub.Tensor", "aten.add_.Tensor", "aten.sum.dim_IntList"])
def test_what_is_added_up_to_less_has_the_rounding_of_its_summands(name: str) -> None:
    assert factors(op_after_another(name, [300.0, -400.0], [0.3, -0.4])) == pytest.approx([1.0, 1000.0])


def test_mean_is_compared_by_the_size_of_an_element() -> None:
    assert factors(op_after_another("aten.mean.default", [3.0, -3.0, 3.0, -3.0], [0.01])) == pytest.approx(
        [1.0, 300.0]
    )


def test_product_and_sum_without_cancellation_have_no_factor() -> None:
    assert factors(op_after_another("aten.mul.Tensor", [300.0, -400.0], [0.3, -0.4])) == [1.0, 1.0]
    assert factors(op_after_another("aten.add.Tensor", [1.0, 2.0], [10.0, 20.0])) == [1.0, 1.0]


def test_gradient_of_the_weights_of_a_norm_has_twice_the_rounding_of_the_gradient_that_it_adds_up() -> None:
    build, net = typed_net(100)
    call = build.call(net, 0, 90, nth=0)
    makers = [build.op(call, "aten.mm.default", at, at + 1) for at in (10, 20)]
    backward = build.op(call, "aten.native_layer_norm_backward.default", 30, 40)
    for maker, slot, numbers in zip(makers, ("grad_out", "input"), ([3.0, -4.0], [3e6, 4e6]), strict=True):
        build.use(build.tensor([2], producer=maker), op=backward, slot=slot)
        build.value(build.site(net, "op_output", nth=0), numbers, call=call, op_id=maker)
    for slot, numbers in (("[0]", [1e-3, 1e-3]), ("[1]", [0.03, 0.04]), ("[2]", [6.0, 8.0])):
        build.tensor([2], producer=backward, slot=slot)
        site = build.site(net, "op_output", nth=0, slot=slot)
        build.value(site, numbers, call=call, op_id=backward)
    assert factors(build.data()) == pytest.approx([1.0, 1.0, 1.0, 200.0, 1.0])


def test_factor_of_a_tensor_that_is_zero_is_bounded() -> None:
    assert factors(op_after_another("aten.sub.Tensor", [3.0, 4.0], [0.0, 0.0])) == [1.0, 1e12]


def test_gradient_that_is_zero_but_for_rounding_is_compared_with_others_of_its_module() -> None:
    build, net = typed_net(100)
    key = build.module("key", "Linear", parent=net)
    build.parameter_grad(key, "weight", [3.0, 4.0])
    build.parameter_grad(key, "bias", [3e-6, 4e-6])
    build.value(build.site(key, "update", "weight"), [0.03, 0.04], phase="optimizer")
    build.value(build.site(key, "update", "bias"), [0.03, 0.04], phase="optimizer")
    build.parameter_grad(net, "alone", [1e-9, 1e-9])
    assert factors(build.data()) == pytest.approx([1.0, 1e6, 1.0, 1e6, 1.0])


def test_update_that_is_less_than_a_rounding_of_its_parameter_is_compared_with_that() -> None:
    build, net = typed_net(100)
    build.parameter(net, "weight", [3.0, 4.0])
    build.value(build.site(net, "update", "weight"), [3e-5, 4e-5], phase="optimizer")
    assert factors(build.data()) == pytest.approx([1.0, 1e5])
