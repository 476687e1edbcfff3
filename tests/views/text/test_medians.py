"""Views of several steps: their medians, how far steps lie apart, and what differs between them."""

import json
from pathlib import Path

from builders import RecordingBuilder
from golden import assert_golden
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.analysis.ops.memory_table import build_memory_table
from modtrace.analysis.ops.op_table import build_op_table
from modtrace.views.text.memory_table import render_memory_table
from modtrace.views.text.op_table import render_op_table
from modtrace.views.text.show_module_tree import render_module_tree
from modtrace.views.text.show_module_tree_json import render_module_tree_json

US = 1_000


def experts(steps: int = 12) -> RecordingBuilder:
    """Steps of a router and two experts, of which the second is called in every third step, once or twice.

    In step 9 the first expert takes ten times as long.
    """
    build = RecordingBuilder(argv=("train.py",), options={"ops": True})
    net = build.module("", "Router", parameters=300)
    listed = build.module("experts", "ModuleList", parent=net, parameters=300)
    first, second = (
        build.module(f"experts.{at}", "Linear", parent=listed, parameters=150) for at in range(2)
    )
    for step in range(steps):
        start = 10_000 * US * step
        longer = 10 if step == 9 else 1
        build.step(step, start, start + (900 + 3000 * (longer > 1)) * US, overhead_ns=20 * US)
        outer = build.call(
            net, start, start + (600 + 3000 * (longer > 1)) * US, allocated_bytes=4096, peak_bytes=4096
        )
        call = build.call(
            first,
            start,
            start + (300 + 5 * step) * longer * US,
            parent=outer,
            allocated_bytes=2048,
            peak_bytes=2048,
        )
        build.op(
            call,
            "aten.addmm.default",
            start,
            start + 200 * longer * US,
            flops=6000,
            saved_bytes=1024 * longer,
        )
        for nth in range(step % 3 // 2 * (1 + step // 6)):
            begin = start + (400 + 50 * nth) * US
            call = build.call(
                second, begin, begin + 40 * US, parent=outer, nth=nth, allocated_bytes=1024, peak_bytes=1024
            )
            build.op(call, "aten.addmm.default", begin, begin + 30 * US, flops=3000, saved_bytes=512)
        build.backward(outer, start + 3600 * US, start + 3700 * US)
        build.optimizer(start + 700 * US, start + 800 * US)
        build.output(outer, [0.5, 2.0])
    return build


def test_tree() -> None:
    assert_golden("medians.txt", render_module_tree(build_module_tree(experts().data()), width=100))


def test_tree_in_a_narrow_terminal() -> None:
    text = render_module_tree(build_module_tree(experts().data()), types=False, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert_golden("medians_narrow.txt", text)
    assert text in Path("docs/module-tree.md").read_text(encoding="utf-8")


def test_ops() -> None:
    assert_golden("medians_ops.txt", render_op_table(build_op_table(experts().data(), by="call")))


def test_memory() -> None:
    assert_golden("medians_memory.txt", render_memory_table(build_memory_table(experts().data(), ops=True)))


def test_json_has_the_steps_and_the_quartiles_of_each_module() -> None:
    found = json.loads(render_module_tree_json(build_module_tree(experts().data())))
    assert found["step"]["step"] == 11
    assert found["step"]["sample"]["steps"] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    [root] = found["roots"]
    assert root["forward"]["over_steps"] == {
        "steps": 10,
        "calls": {"least": 1, "low": 1, "median": 1, "high": 1, "most": 1},
        "total_ns": {"least": 600_000, "low": 600_000, "median": 600_000, "high": 600_000, "most": 3_600_000},
        "self_ns": root["forward"]["over_steps"]["self_ns"],
    }
    second = root["children"][0]["children"][1]
    assert second["forward"]["over_steps"]["steps"] == 4
    assert second["forward"]["over_steps"]["calls"]["most"] == 2
