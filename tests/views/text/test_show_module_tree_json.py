"""The module tree as JSON."""

import json
from dataclasses import replace

from builders import RecordingBuilder
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.views.text.show_module_tree_json import render_module_tree_json

NONE = {
    "calls": 0,
    "total_ns": 0,
    "self_ns": 0,
    "share": None,
    "unfinished": 0,
    "raised": 0,
    "shortest_ns": None,
    "longest_ns": None,
    "over_steps": None,
}


def test_tree_is_nested_json_with_times_in_nanoseconds() -> None:
    build = RecordingBuilder(argv=("train.py",), marks=("incomplete",))
    net = build.module("", "Net", parameters=5)
    head = build.module("head", "Linear", parent=net, parameters=None)
    build.step(3, 0, 1000)
    build.call(head, 100, 200, parent=build.call(net, 0, 500))
    build.optimizer(600, 700)
    build.interval("backward", 500, 600)
    build.interval("data", 1000, 2000)
    build.step(4, 2000, 2100)
    build.call(net, 2000, 2090)
    build.optimizer(2090, 2100)

    alone, data = build_module_tree(build.data(), step=3), build.data()
    assert alone.cycles is None  # which are of the run, and of no single step
    found = json.loads(render_module_tree_json(replace(alone, cycles=build_module_tree(data).cycles)))

    outer = NONE | {"calls": 1, "total_ns": 500, "self_ns": 400, "share": 0.5}
    inner = NONE | {"calls": 1, "total_ns": 100, "self_ns": 100, "share": 0.1}
    common = {
        "root": "Net",
        "called": True,
        "same_as": None,
        "backward": NONE,
        "recompute": NONE,
        "values": None,
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
            "overhead_ns": 0,
            "first": 3,
            "last": 4,
            "count": 2,
            "partial": 0,
            "sample": None,
        },
        "values_step": 3,
        "forward": outer,
        "backward": NONE,
        "recompute": NONE,
        "optimizer": inner,
        "outside_ns": 400,
        "outside_share": 0.4,
        "elsewhere": {},
        "unlike": [],
        "outliers": [],
        "cycles": {
            "cycles": 1,
            "cycle_ns": 2000,
            "measuring_ns": 0,
            "parts_ns": {"data": 1000, "forward": 500, "backward": 100, "optimizer": 100, "rest": 300},
            "slowest": "Net",
            "slowest_ns": 245,
        },
        "backward_recorded": False,
        "ops_recorded": False,
        "device_times": False,
        "device_step_ns": None,
        "lacks_device_times": False,
        "notes": [],
        "nonfinite_steps": [],
        "compilations": None,
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


def test_values_are_there_with_what_is_derived_from_them() -> None:
    build, net = typed_net(100)
    call = build.call(net, 0, 50)
    build.output(call, [3.0, -4.0], "[0]")
    build.gradient(call, [float("nan"), float("inf")], "[0]")
    build.parameter(net, "weight", [4.0])
    build.parameter_grad(net, "weight", [2.0])

    [root] = json.loads(render_module_tree_json(build_module_tree(build.data())))["roots"]

    output = {
        "count": 2,
        "min": -4.0,
        "max": 3.0,
        "sum": -1.0,
        "sumsq": 25.0,
        "nan_count": 0,
        "inf_count": 0,
        "mean": -0.5,
        "std": 24.5**0.5,
        "rms": 12.5**0.5,
        "l2": 5.0,
        "abs_max": 4.0,
    }
    gradient = dict.fromkeys(output, "NaN") | {"count": 2, "nan_count": 1, "inf_count": 1}
    assert root["values"] == {
        "output": output,
        "gradient": gradient,
        "parameters": root["values"]["parameters"],
        "parameter_gradients": root["values"]["parameter_gradients"],
        "slots": [{"slot": "[0]", "output": output, "gradient": gradient}],
        "nonfinite": [{"kind": "gradient", "nan_count": 1, "inf_count": 1}],
        "nonfinite_inside": 0,
        "gradient_to_parameter": 0.5,
    }
    assert root["values"]["parameters"]["rms"] == 4.0
    assert root["values"]["parameters"]["std"] == "NaN"


def test_infinities_are_written_so_that_any_reader_of_json_takes_them() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.output(build.call(build.module("", "Net"), 0, 50), [float("inf"), float("-inf")])

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    text = render_module_tree_json(build_module_tree(build.data()))
    [root] = json.loads(text, parse_constant=refuse)["roots"]
    output = root["values"]["output"]
    assert (output["min"], output["max"], output["sum"]) == ("-Infinity", "Infinity", "NaN")


def test_siblings_are_separated() -> None:
    build, net, outer = begin_net(100, 50)
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
    for depth in range(1500):
        call = build.call(module, depth, 20_000 - depth, parent=call)
        module = build.module("m" * (depth + 1), "Layer", parent=module)

    text = render_module_tree_json(build_module_tree(build.data()))
    assert text.count('"children": [') == 1500
    assert text.endswith("[" + "]}" * 1500 + "]}\n")
