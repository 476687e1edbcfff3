"""The module tree as JSON."""

import json

from builders import RecordingBuilder
from modtrace.analysis.module_tree import build_module_tree
from modtrace.views.json_text import render_module_tree_json

NONE = {
    "calls": 0,
    "total_ns": 0,
    "self_ns": 0,
    "share": None,
    "unfinished": 0,
    "raised": 0,
    "shortest_ns": None,
    "longest_ns": None,
}


def test_tree_is_nested_json_with_times_in_nanoseconds() -> None:
    build = RecordingBuilder(argv=("train.py",), marks=("incomplete",))
    net = build.module("", "Net", parameters=5)
    head = build.module("head", "Linear", parent=net, parameters=None)
    build.step(3, 0, 1000)
    build.call(head, 100, 200, parent=build.call(net, 0, 500))
    build.optimizer(600, 700)

    found = json.loads(render_module_tree_json(build_module_tree(build.data())))

    outer = NONE | {"calls": 1, "total_ns": 500, "self_ns": 400, "share": 0.5}
    inner = NONE | {"calls": 1, "total_ns": 100, "self_ns": 100, "share": 0.1}
    common = {
        "root": "Net",
        "called": True,
        "same_as": None,
        "backward": NONE,
        "recompute": NONE,
        "count": 1,
        "role": "module",
    }
    assert found == {
        "command": ["train.py"],
        "marks": ["incomplete"],
        "step": {
            "step": 3,
            "kind": "train",
            "start_ns": 0,
            "end_ns": 1000,
            "first": 3,
            "last": 3,
            "count": 1,
        },
        "forward": outer,
        "backward": NONE,
        "recompute": NONE,
        "optimizer": inner,
        "outside_ns": 400,
        "backward_recorded": False,
        "types": [
            {"type": "Net", "modules": 1, "forward": outer, "backward": NONE, "recompute": NONE},
            {"type": "Linear", "modules": 1, "forward": inner, "backward": NONE, "recompute": NONE},
        ],
        "roots": [
            common
            | {"path": "", "label": "Net", "type": "Net", "module_id": 0, "parameters": 5, "forward": outer}
            | {
                "children": [
                    common
                    | {"path": "head", "label": "head", "type": "Linear", "module_id": 1, "parameters": None}
                    | {"forward": inner, "children": []}
                ]
            },
        ],
    }


def test_siblings_are_separated() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 100)
    outer = build.call(net, 0, 50)
    for label in "abc":
        build.call(build.module(label, "Linear", parent=net), 0, 1, parent=outer)

    [root] = json.loads(render_module_tree_json(build_module_tree(build.data())))["roots"]
    assert [child["label"] for child in root["children"]] == ["a", "b", "c"]


def test_empty_recording_is_valid_json() -> None:
    found = json.loads(render_module_tree_json(build_module_tree(RecordingBuilder().data())))
    assert (found["step"], found["roots"], found["types"]) == (None, [], [])


def test_deep_tree_is_written_without_overflow() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 20_000)
    module, call = build.module("", "Net"), None
    for depth in range(3000):
        call = build.call(module, depth, 20_000 - depth, parent=call)
        module = build.module("m" * (depth + 1), "Layer", parent=module)

    text = render_module_tree_json(build_module_tree(build.data()))
    assert text.count('"children": [') == 3000
    assert text.endswith("[" + "]}" * 3000 + "]}\n")
