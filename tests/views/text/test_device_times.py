"""Tables of times that are those of a device say so."""

from golden import assert_golden
from helpers.typed_device_times import device_bound
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.analysis.ops.op_table import build_op_table
from modtrace.analysis.timeline.timeline import build_timeline
from modtrace.views.common.headline import NO_DEVICE_TIMES
from modtrace.views.formats.perfetto import describe_missing, iterate_perfetto
from modtrace.views.text.op_table import render_op_table
from modtrace.views.text.show_module_tree import render_module_tree


def test_module_tree_and_ops_with_times_of_a_device():
    tree, ops = build_module_tree(device_bound()), build_op_table(device_bound(), by="op")
    assert_golden("device_times.txt", f"{render_module_tree(tree)}\n{render_op_table(ops)}")


def test_times_that_no_device_has_given_are_missed():
    data = device_bound(with_times=False)
    text = render_module_tree(build_module_tree(data))
    assert NO_DEVICE_TIMES in text and "device forward" not in text
    assert NO_DEVICE_TIMES in render_op_table(build_op_table(data))
    assert describe_missing(build_timeline(data)) == f"{NO_DEVICE_TIMES}."
    assert describe_missing(build_timeline(device_bound())) is None


def test_trace_has_a_lane_named_device():
    assert '"name":"device"' in "".join(iterate_perfetto(build_timeline(device_bound())))
