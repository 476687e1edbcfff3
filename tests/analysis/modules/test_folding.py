"""Folding: siblings that are alike keep their lines, what is inside them is shown once."""

from math import nan

import pytest

from builders import RecordingBuilder
from helpers.typed_steps import begin_net
from modtrace.analysis.modules.folding import fold
from modtrace.analysis.modules.module_tree import ModuleTree, build_module_tree, iterate_nodes
from modtrace.analysis.tables.times import PhaseTimes


def lines(tree: ModuleTree) -> list[tuple[int, str, str, int, int]]:
    """Level, path, role, count and forward time of every node."""
    return [
        (level, node.path, node.role, node.count, node.forward.total_ns)
        for level, node in iterate_nodes(tree.roots)
    ]


def build_stack(blocks: int, *, odd: int | None = None) -> ModuleTree:
    """A stack of blocks with a Linear in each (two in the block `odd`); block i takes 100 + i."""
    build, net, outer = begin_net(10_000, 9000)
    stack = build.module("b", "ModuleList", parent=net)
    for index in range(blocks):
        block = build.module(f"b.{index}", "Block", parent=stack, parameters=10)
        start_ns = 200 * index
        call = build.call(block, start_ns, start_ns + 100 + index, parent=outer)
        for part in ("fc", "fc2") if index == odd else ("fc",):
            linear = build.module(f"b.{index}.{part}", "Linear", parent=block, parameters=10)
            build.call(linear, start_ns, start_ns + 10, parent=call)
    return build_module_tree(build.data())


def test_alike_siblings_keep_their_lines_and_share_what_is_inside() -> None:
    assert lines(fold(build_stack(3))) == [
        (0, "", "module", 1, 9000),
        (1, "b", "module", 1, 303),
        (2, "b.0", "module", 1, 100),
        (2, "b.1", "module", 1, 101),
        (2, "b.2", "module", 1, 102),
        (2, "b.0..2", "inside", 3, 303),
        (3, "b.0..2.fc", "module", 3, 30),
    ]


def test_first_sibling_with_nan_is_not_folded_into_those_before_it() -> None:
    build, net, outer = begin_net(10_000, 9000)
    for index in range(4):
        block = build.module(str(index), "Block", parent=net)
        linear = build.module(f"{index}.fc", "Linear", parent=block)
        call = build.call(block, 200 * index, 200 * index + 100, parent=outer)
        build.output(
            build.call(linear, 200 * index, 200 * index + 10, parent=call), [nan if index > 1 else 1.0]
        )
    tree = build_module_tree(build.data())
    assert [(node.path, node.role) for _, node in iterate_nodes(fold(tree).roots)] == [
        ("", "module"),
        ("0", "module"),
        ("1", "module"),
        ("0..1", "inside"),
        ("0..1.fc", "module"),
        ("2", "module"),
        ("3", "module"),
        ("2..3", "inside"),
        ("2..3.fc", "module"),
    ]
    assert [node.path for _, node in iterate_nodes(fold(tree, listed=1).roots)] == [
        *("", "0..1", "0..1.fc", "2..3", "2..3.fc"),
    ]


def test_many_siblings_become_one_line_with_the_shortest_and_longest() -> None:
    tree = fold(build_stack(13))

    assert lines(tree) == [
        (0, "", "module", 1, 9000),
        (1, "b", "module", 1, 1378),
        (2, "b.0..12", "folded", 13, 1378),
        (3, "b.0..12.fc", "module", 13, 130),
    ]
    folded = tree.roots[0].children[0].children[0]
    assert folded.label == "0..12"
    assert folded.parameters == 130
    assert (folded.forward.calls, folded.forward.self_ns) == (13, 1248)
    assert (folded.forward.shortest_ns, folded.forward.longest_ns) == (100, 112)


def test_sibling_of_another_shape_ends_a_run() -> None:
    assert lines(fold(build_stack(5, odd=2))) == [
        (0, "", "module", 1, 9000),
        (1, "b", "module", 1, 510),
        (2, "b.0", "module", 1, 100),
        (2, "b.1", "module", 1, 101),
        (2, "b.0..1", "inside", 2, 201),
        (3, "b.0..1.fc", "module", 2, 20),
        (2, "b.2", "module", 1, 102),
        (3, "b.2.fc", "module", 1, 10),
        (3, "b.2.fc2", "module", 1, 10),
        (2, "b.3", "module", 1, 103),
        (2, "b.4", "module", 1, 104),
        (2, "b.3..4", "inside", 2, 207),
        (3, "b.3..4.fc", "module", 2, 20),
    ]


@pytest.mark.parametrize(
    ("calls", "inside"),
    [
        ({"0": 1, "1": 1, "2": 1}, False),
        ({"0": 1, "2": 1, "a": 1, "b": 1}, True),
        ({"0": 1, "1": 2}, True),
    ],
    ids=["nothing inside", "no numbers in a row", "not called the same number of times"],
)
def test_siblings_that_are_not_alike_or_hold_nothing_are_left_as_they_are(
    calls: dict[str, int], inside: bool
) -> None:
    build, net, outer = begin_net(100, 90)
    for label, count in calls.items():
        block = build.module(label, "Block", parent=net)
        linear = build.module(f"{label}.fc", "Linear", parent=block) if inside else None
        for _ in range(count):
            call = build.call(block, 0, 2, parent=outer)
            if linear is not None:
                build.call(linear, 0, 1, parent=call)
    tree = build_module_tree(build.data())

    assert lines(fold(tree)) == lines(tree)


def test_folds_inside_folds_are_summed_over_both() -> None:
    build, net, outer = begin_net()
    for index in range(2):
        block = build.module(str(index), "Block", parent=net)
        call = build.call(block, 0, 100, parent=outer)
        for expert in range(2):
            module = build.module(f"{index}.{expert}", "Expert", parent=block)
            inside = build.module(f"{index}.{expert}.fc", "Linear", parent=module)
            build.call(inside, 0, 10 + expert, parent=build.call(module, 0, 20 + expert, parent=call))

    tree = fold(build_module_tree(build.data()))

    assert lines(tree) == [
        (0, "", "module", 1, 900),
        (1, "0", "module", 1, 100),
        (1, "1", "module", 1, 100),
        (1, "0..1", "inside", 2, 200),
        (2, "0..1.0", "module", 2, 40),
        (2, "0..1.1", "module", 2, 42),
        (2, "0..1.0..1", "inside", 4, 82),
        (3, "0..1.0..1.fc", "module", 4, 42),
    ]
    [*_, inside] = tree.roots[0].children[2].children
    assert inside.forward == PhaseTimes(
        calls=4, total_ns=82, self_ns=40, share=0.082, shortest_ns=20, longest_ns=21
    )


def test_tree_of_1500_modules_in_each_other_is_built_and_folded_without_overflow() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 20_000)
    module, call = build.module("", "Net"), None
    for depth in range(1500):
        call = build.call(module, depth, 20_000 - depth, parent=call)
        module = build.module(f"{'m.' * depth}m", "Layer", parent=module)
    tree = build_module_tree(build.data())
    [(depth, deepest)] = list(iterate_nodes(tree.roots))[-1:]
    assert (depth, deepest.forward.total_ns, deepest.forward.self_ns) == (1499, 17_002, 17_002)
    assert tree.roots[0].forward.self_ns == 2

    assert lines(fold(tree)) == lines(tree)
