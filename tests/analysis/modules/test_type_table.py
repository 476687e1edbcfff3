"""The table of module types."""

from builders import RecordingBuilder
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.analysis.modules.type_table import TypeTimes, build_type_table
from modtrace.analysis.tables.times import PhaseTimes


def test_types_are_summed_and_nested_ones_count_once() -> None:
    build = RecordingBuilder()
    net = build.module("", "Sequential")
    inner = build.module("0", "Sequential", parent=net)
    one = build.module("0.0", "Linear", parent=inner)
    two = build.module("1", "Linear", parent=net)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 500)
    build.call(one, 20, 80, parent=build.call(inner, 10, 100, parent=outer))
    last = build.call(two, 200, 300, parent=outer)
    build.call(two, 300, 400, parent=outer)
    build.backward(last, 600, 620)

    assert build_type_table(build_module_tree(build.data())) == (
        TypeTimes(
            type="Linear",
            modules=2,
            forward=PhaseTimes(calls=3, total_ns=260, self_ns=260, share=0.26),
            backward=PhaseTimes(calls=1, total_ns=20, self_ns=20, share=0.02),
        ),
        TypeTimes(
            type="Sequential",
            modules=2,
            forward=PhaseTimes(calls=2, total_ns=500, self_ns=240, share=0.5),
        ),
    )


def test_shared_module_is_one_module_and_containers_are_none() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    items = build.module("x", "ModuleList", parent=net)
    shared = build.module("x.0", "Linear", parent=items, aliases=["y.l"])
    y = build.module("y", "Half", parent=net)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 500)
    build.call(shared, 0, 10, parent=outer)
    build.call(shared, 20, 30, parent=build.call(y, 20, 40, parent=outer))

    rows = build_type_table(build_module_tree(build.data()))

    assert [(row.type, row.modules, row.forward.calls) for row in rows] == [
        ("Net", 1, 1),
        ("Linear", 1, 2),
        ("Half", 1, 1),
    ]


def test_empty_recording_has_no_types() -> None:
    assert build_type_table(build_module_tree(RecordingBuilder().data())) == ()
