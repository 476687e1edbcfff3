"""The stages of a pipeline have the modules of one model, whatever each of them calls its own."""

from collections.abc import Sequence
from typing import Any

import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.tables.ranks import RanksData
from modtrace.analysis.tables.stages import name_stages

Rank = tuple[int, TypedRecording]


def rank_with_stages(rank: int, stages: dict[int, Sequence[str]], *, batches: int = 2) -> Rank:
    """A rank with some stages, whose modules with parameters have these paths."""
    build = RecordingBuilder(rank=rank, world_size=2, complete=True)
    build.step(0, 0, 1_000)
    for stage, paths in stages.items():
        root = build.module("", "Net", name=f"Net#{stage}")
        known = {"": root}
        for path in paths:
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                above, here = ".".join(parts[: depth - 1]), ".".join(parts[:depth])
                if here not in known:
                    known[here] = build.module(here, "Linear", parent=known[above])
        for batch in range(batches):
            start = 100 * batch + 10 * stage
            call = build.call(root, start, start + 9, stage=stage, nth=batch)
            build.output(call, [float(stage)])
            for path in paths:
                inner = build.call(known[path], start + 1, start + 2, parent=call, stage=stage, nth=batch)
                build.output(inner, [float(10 * stage + batch), 1.0])
        for path in paths:
            build.parameter(known[path], "weight", [float(stage)])
    return rank, build.data()


def rank_with_leaf(
    stage: int, kind: str, numbers: Sequence[float] | None, *, measured: Sequence[float] | None = None
) -> Rank:
    """A rank with one stage, in which `leaf` of this type returns the numbers whatever it is given, twice.

    Without numbers it is not called; `measured` is its parameter.
    """
    build = RecordingBuilder(rank=stage, world_size=2, complete=True)
    build.step(0, 0, 1_000)
    root = build.module("", "Net")
    layer = build.module(
        f"layers.{stage}", "Linear", parent=build.module("layers", "ModuleList", parent=root)
    )
    leaf = build.module("leaf", kind, parent=root)
    if measured is not None:
        build.parameter(leaf, "weight", measured)
    for batch in range(2):
        start = 100 * batch + 10 * stage
        call = build.call(root, start, start + 9, stage=stage, nth=batch)
        if numbers is not None:
            inner = build.call(leaf, start + 1, start + 2, parent=call, stage=stage, nth=batch)
            given = build.site(leaf, "input", nth=batch)
            build.value(given, [float(10 * stage + batch)], call=inner)
            build.output(inner, numbers)
            tensor = build.tensor([2], producer=build.op(inner, "aten.cos.default", start + 1, start + 2))
            build.use(tensor, op=build.op(call, "aten.mul.Tensor", start + 3, start + 4))
        build.output(
            build.call(layer, start + 5, start + 6, parent=call, stage=stage, nth=batch), [stage + 7.0]
        )
    return stage, build.data()


def leaves_of(*ranks: Rank) -> list[tuple[str, str]]:
    """The paths and types of all modules but the layers of ranks with leaves."""
    rows = RanksData(ranks).table("modules").to_pylist()
    return sorted((row["path"], row["type"]) for row in rows if row["path"] and "layers" not in row["path"])


def parameters_of(*ranks: Rank) -> dict[str, float]:
    """The paths of the parameters of all ranks, and their numbers."""
    data = RanksData(ranks)
    paths = {row["module_id"]: row["path"] for row in data.table("modules").to_pylist()}
    sites = {row["site_id"]: row for row in data.table("sites").to_pylist()}
    values = [(sites[row["site_id"]], row["sum"]) for row in data.table("values").to_pylist()]
    return {paths[site["module_id"]]: number for site, number in values if site["role"] == "parameter"}


@pytest.mark.parametrize(
    ("first", "second", "paths"),
    [
        (["embed", "blocks.0"], ["blocks.1", "head"], ["embed", "blocks.0", "blocks.1", "head"]),
        (["0", "1"], ["0", "1", "2"], ["0", "1", "2", "3", "4"]),
        (["layers.0.up", "layers.1.up"], ["layers.0.up"], ["layers.0.up", "layers.1.up", "layers.2.up"]),
        (["up", "block.up"], ["up", "down"], ["up", "block.up", "stages.1.up", "down"]),
    ],
)
def test_modules_of_stages_have_the_paths_of_one_model(
    first: list[str], second: list[str], paths: list[str]
) -> None:
    found = parameters_of(rank_with_stages(0, {0: first}), rank_with_stages(1, {1: second}))
    assert found == dict(zip(paths, [0.0] * len(first) + [1.0] * len(second), strict=True))


def test_copy_of_a_module_in_a_later_stage_is_that_module() -> None:
    """As a table of rotary embeddings, which the layers of each stage need."""
    ranks = [rank_with_leaf(stage, "Rotary", [1.0, 2.0]) for stage in range(2)]
    assert leaves_of(*ranks) == [("leaf", "Rotary")]
    data = RanksData(ranks)
    paths = {row["module_id"]: row["path"] for row in data.table("modules").to_pylist()}
    calls = {row["call_id"]: paths[row["module_id"]] for row in data.table("calls").to_pylist()}
    assert [*calls.values()].count("leaf") == 2
    ops = [(calls[row["call_id"]], row["name"], row["nth"]) for row in data.table("ops").to_pylist()]
    assert ops.count(("leaf", "aten.cos.default", 0)) == 2
    assert [row[1] for row in ops].count("aten.cos.default") == 2
    assert [row[1] for row in ops].count("aten.mul.Tensor") == 4
    assert {*paths.values()} == {"", "layers", "layers.0", "layers.1", "leaf"}


@pytest.mark.parametrize(
    ("first", "second", "leaves"),
    [
        # It returns something else there, or another parameter was measured.
        (("Rotary", [1.0]), ("Rotary", [2.0]), [("leaf", "Rotary"), ("stages.1.leaf", "Rotary")]),
        (("Norm", [1.0], [1.0]), ("Norm", [1.0], [0.5]), [("leaf", "Norm"), ("stages.1.leaf", "Norm")]),
        # Something stands in for a module that another stage has.
        (("Identity", [1.0]), ("Norm", [2.0], [1.0]), [("leaf", "Norm")]),
        (("Norm", [2.0], [1.0]), ("Identity", [1.0]), [("leaf", "Norm")]),
        (("Identity", [1.0]), ("Identity", [2.0]), [("leaf", "Identity"), ("stages.1.leaf", "Identity")]),
        # What one of the stages does not call is left over from a copy of the whole model.
        (("Dropout", None), ("Dropout", [2.0]), [("leaf", "Dropout")]),
        (("Dropout", [2.0]), ("Dropout", None), [("leaf", "Dropout")]),
        (("Norm", None, [1.0]), ("Norm", [2.0], [0.5]), [("leaf", "Norm"), ("stages.0.leaf", "Norm")]),
    ],
)
def test_module_that_several_stages_have_is_one_unless_it_differs(
    first: tuple[Any, ...], second: tuple[Any, ...], leaves: list[tuple[str, str]]
) -> None:
    ranks = [
        rank_with_leaf(stage, kind, numbers, measured=measured[0] if measured else None)
        for stage, (kind, numbers, *measured) in enumerate((first, second))
    ]
    assert leaves_of(*ranks) == leaves


def test_stages_take_turns_on_two_ranks() -> None:
    ranks = rank_with_stages(0, {0: ["0"], 2: ["0"]}), rank_with_stages(1, {1: ["0"], 3: ["0"]})
    assert parameters_of(*ranks) == {str(stage): float(stage) for stage in range(4)}


def test_calls_of_stages_are_one_call_of_the_model() -> None:
    data = RanksData([rank_with_stages(0, {0: ["0"]}), rank_with_stages(1, {1: ["0"]})])
    paths = {row["module_id"]: row["path"] for row in data.table("modules").to_pylist()}
    calls = data.table("calls").to_pylist()
    roots = {row["call_id"]: row for row in calls if paths[row["module_id"]] == ""}
    assert [(row["nth"], row["start_ns"], row["end_ns"]) for row in roots.values()] == [
        (0, 0, 19),
        (1, 100, 119),
    ]
    inner = [(paths[row["module_id"]], row["nth"], row["parent_call_id"]) for row in calls if row["parent_call_id"]
             is not None]  # fmt: skip
    first, second = roots
    assert inner == [("0", 0, first), ("0", 1, second), ("1", 0, first), ("1", 1, second)]
    sites = {row["site_id"]: row for row in data.table("sites").to_pylist()}
    outputs = [(paths[sites[row["site_id"]]["module_id"]], row["call_id"], row["sum"])
               for row in data.table("values").to_pylist() if sites[row["site_id"]]["role"] == "output"]  # fmt: skip
    assert [row for row in outputs if row[0] == ""] == [
        ("", first, 1.0),
        ("", second, 1.0),
    ]  # of the last stage
    assert len(outputs) == 2 + 4
    assert len({row["order"] for row in data.table("values").to_pylist()}) == data.table("values").num_rows


def test_module_around_layers_of_several_stages_is_given_and_returns_what_the_model_does() -> None:
    ranks = []
    for stage in range(3):
        build = RecordingBuilder(rank=stage, world_size=3, complete=True)
        build.step(0, 0, 1_000)
        root = build.module("", "Net")
        body = build.module("body", "Body", parent=root)
        layer = build.module(f"body.{stage}", "Linear", parent=body)
        outer = build.call(root, 10 * stage, 10 * stage + 9, stage=stage, nth=0)
        call = build.call(body, 10 * stage + 1, 10 * stage + 8, stage=stage, nth=0, parent=outer)
        inner = build.call(layer, 10 * stage + 2, 10 * stage + 3, stage=stage, nth=0, parent=call)
        for of, module in ((call, body), (inner, layer)):
            build.value(build.site(module, "input", nth=0), [float(stage)], call=of)
            build.output(of, [stage + 1.0])
            build.gradient(of, [-stage - 1.0])
        ranks.append((stage, build.data()))
    data = RanksData(ranks)
    paths = {row["module_id"]: row["path"] for row in data.table("modules").to_pylist()}
    sites = {row["site_id"]: row for row in data.table("sites").to_pylist()}
    found = {
        (paths[sites[row["site_id"]]["module_id"]], sites[row["site_id"]]["role"]): row["sum"]
        for row in data.table("values").to_pylist()
    }
    assert found == {
        ("body", "input"): 0.0,
        ("body", "output"): 3.0,
        ("body", "grad_output"): -3.0,
        **{(f"body.{stage}", "input"): float(stage) for stage in range(3)},
        **{(f"body.{stage}", "output"): stage + 1.0 for stage in range(3)},
        **{(f"body.{stage}", "grad_output"): -stage - 1.0 for stage in range(3)},
    }


def test_ranks_without_stages_are_left_as_they_are() -> None:
    build = RecordingBuilder()
    build.call(build.module("", "Net"), 0, 1)
    ranks = [(0, build.data())]
    assert name_stages(ranks) == ranks
