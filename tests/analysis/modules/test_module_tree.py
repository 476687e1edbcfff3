"""The module tree: which node a call belongs to, and what its times are."""

import pytest

from builders import RecordingBuilder
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.modules.module_tree import ModuleNode, ModuleTree, build_module_tree, iterate_nodes
from modtrace.analysis.tables.times import PhaseTimes


def totals(tree: ModuleTree) -> dict[str, tuple[int, int, int]]:
    """Forward calls, total and self time by path."""
    return {
        node.path: (node.forward.calls, node.forward.total_ns, node.forward.self_ns)
        for _, node in iterate_nodes(tree.roots)
    }


def node_at(tree: ModuleTree, path: str) -> ModuleNode:
    [node] = [node for _, node in iterate_nodes(tree.roots) if node.path == path]
    return node


def test_node_has_the_times_of_its_calls() -> None:
    build = RecordingBuilder(argv=("train.py",), marks=("incomplete from step 1",))
    net = build.module("", "Net", parameters=30)
    head = build.module("head", "Linear", parent=net, parameters=20)
    build.step(0, 0, 1000)
    outer = build.call(net, 100, 500)
    inner = build.call(head, 200, 300, parent=outer)
    outer_backward = build.backward(outer, 500, 900)
    build.backward(inner, 600, 850, parent=outer_backward)

    tree = build_module_tree(build.data())

    assert tree.roots == (
        ModuleNode(
            path="",
            root="Net",
            label="Net",
            type="Net",
            module_id=0,
            parameters=30,
            called=True,
            forward=PhaseTimes(calls=1, total_ns=400, self_ns=300, share=0.4),
            backward=PhaseTimes(calls=1, total_ns=400, self_ns=150, share=0.4),
            children=(
                ModuleNode(
                    path="head",
                    root="Net",
                    label="head",
                    type="Linear",
                    module_id=1,
                    parameters=20,
                    called=True,
                    forward=PhaseTimes(calls=1, total_ns=100, self_ns=100, share=0.1),
                    backward=PhaseTimes(calls=1, total_ns=250, self_ns=250, share=0.25),
                ),
            ),
        ),
    )
    assert tree.command == ("train.py",)
    assert tree.marks == ("incomplete from step 1",)
    assert tree.backward_recorded


def test_recursive_call_is_counted_as_a_call_but_its_time_once_also_through_another_module() -> None:
    build, net, outer = begin_net()
    cell = build.module("cell", "TreeCell", parent=net)
    other = build.module("other", "Cell", parent=net)
    first = build.call(cell, 100, 800, parent=outer)
    second = build.call(cell, 200, 500, parent=first)
    through = build.call(other, 250, 450, parent=second)
    build.call(cell, 300, 400, parent=through)
    build.call(cell, 600, 700, parent=first)
    build.call(cell, 820, 830, parent=outer)

    assert totals(build_module_tree(build.data())) == {
        "": (1, 900, 190),
        "cell": (5, 710, 610),
        "other": (1, 200, 100),
    }


def test_shared_module_stands_under_each_parent_that_ran_it() -> None:
    build, net, outer = begin_net()
    x = build.module("x", "Half", parent=net)
    shared = build.module("x.l", "Linear", parent=x, aliases=["y.l"], parameters=10)
    y = build.module("y", "Half", parent=net, parameters=10)
    in_x = build.call(shared, 10, 30, parent=build.call(x, 0, 100, parent=outer))
    in_y = build.call(shared, 210, 250, parent=build.call(y, 200, 300, parent=outer))
    build.backward(in_y, 910, 917)
    build.backward(in_x, 920, 925)

    tree = build_module_tree(build.data())

    assert totals(tree) == {
        "": (1, 900, 700),
        "x": (1, 100, 80),
        "x.l": (1, 20, 20),
        "y": (1, 100, 60),
        "y.l": (1, 40, 40),
    }
    own, other = node_at(tree, "x.l"), node_at(tree, "y.l")
    assert (own.label, own.same_as, own.backward.total_ns) == ("l", None, 5)
    assert (other.label, other.same_as, other.backward.total_ns) == ("l", "x.l", 7)
    assert (own.parameters, other.parameters) == (10, 10)


def test_inside_of_a_shared_module_stands_where_the_shared_module_was_run() -> None:
    build, net = typed_net()
    build.module("x", "Half", parent=net)
    block = build.module("x.b", "Block", parent=1, aliases=["y.b"])
    items = build.module("x.b.items", "ModuleList", parent=block, aliases=["y.b.items"])
    layer = build.module("x.b.items.0", "Linear", parent=items, aliases=["y.b.items.0"])
    y = build.module("y", "Half", parent=net)
    build.step(0, 0, 1000)
    in_y = build.call(y, 0, 100, parent=build.call(net, 0, 500))
    build.call(layer, 20, 30, parent=build.call(block, 10, 50, parent=in_y))

    tree = build_module_tree(build.data())

    assert totals(tree) == {
        "": (1, 500, 400),
        "y": (1, 100, 60),
        "y.b": (1, 40, 30),
        "y.b.items": (0, 10, 0),
        "y.b.items.0": (1, 10, 10),
    }
    assert node_at(tree, "y.b.items").same_as == "x.b.items"
    assert node_at(tree, "y.b.items.0").label == "0"


def test_recompute_stands_where_the_call_it_repeats_stands() -> None:
    build, net = typed_net()
    build.module("x", "Half", parent=net)
    shared = build.module("x.l", "Linear", parent=1, aliases=["y.l"])
    y = build.module("y", "Half", parent=net)
    build.step(0, 0, 1000)
    in_y = build.call(shared, 10, 30, parent=build.call(y, 0, 100, parent=build.call(net, 0, 200)))
    build.recompute(in_y, 300, 325)
    build.call(shared, 400, 410, phase="recompute")  # it is not known what it repeats

    tree = build_module_tree(build.data())

    assert node_at(tree, "y.l").recompute.total_ns == 25
    assert node_at(tree, "x.l").recompute.total_ns == 10


def test_backward_of_an_earlier_steps_forward_is_shown_in_its_own_step() -> None:
    build, net = typed_net()
    build.module("x", "Half", parent=net)
    shared = build.module("x.l", "Linear", parent=1, aliases=["y.l"])
    y = build.module("y", "Half", parent=net)
    build.step(0, 0, 100)
    in_y = build.call(shared, 10, 30, parent=build.call(y, 0, 50, parent=build.call(net, 0, 60)))
    build.step(1, 100, 200)
    build.backward(in_y, 110, 150)

    tree = build_module_tree(build.data())

    assert [
        (node.path, node.backward.calls, node.backward.total_ns) for _, node in iterate_nodes(tree.roots)
    ] == [
        ("", 0, 40),
        ("y", 0, 40),
        ("y.l", 1, 40),
    ]
    assert totals(tree) == {"": (0, 0, 0), "y": (0, 0, 0), "y.l": (0, 0, 0)}


def test_wrapper_and_wrapped_are_one_node() -> None:
    build = RecordingBuilder()
    wrapper = build.module("", "OptimizedModule", parameters=5)
    net = build.module("", "GPT", parent=wrapper, raw_path="_orig_mod", parameters=5)
    head = build.module("head", "Linear", parent=net, raw_path="_orig_mod.head")
    build.step(0, 0, 1000)
    outside = build.call(wrapper, 0, 500)
    inside = build.call(net, 100, 400, parent=outside)
    build.call(head, 200, 300, parent=inside)

    tree = build_module_tree(build.data())

    assert totals(tree) == {"": (1, 500, 400), "head": (1, 100, 100)}
    assert (tree.roots[0].type, tree.roots[0].label) == ("OptimizedModule(GPT)", "OptimizedModule")
    assert tree.roots[0].parameters == 5


def test_wrapper_below_the_root_is_one_node_with_what_it_wraps() -> None:
    build, net = typed_net(1000)
    wrapper = build.module("block", "CheckpointWrapper", parent=net)
    block = build.module("block", "Block", parent=wrapper, raw_path="block._checkpoint_wrapped_module")
    outside = build.call(wrapper, 10, 90, parent=build.call(net, 0, 100))
    inside = build.call(block, 20, 80, parent=outside)
    build.recompute(inside, 200, 250)

    tree = build_module_tree(build.data())

    assert totals(tree) == {"": (1, 100, 20), "block": (1, 80, 80)}
    assert node_at(tree, "block").type == "CheckpointWrapper(Block)"
    assert node_at(tree, "block").recompute == PhaseTimes(calls=1, total_ns=50, self_ns=50, share=0.05)


def test_container_that_is_never_called_has_the_times_of_what_ran_inside() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net", parameters=100)
    layers = build.module("layers", "ModuleList", parent=net, parameters=90)
    one = build.module("layers.0", "Linear", parent=layers, parameters=30)
    build.module("layers.1", "Linear", parent=layers, parameters=30)  # never called: left out
    two = build.module("layers.2", "Linear", parent=layers, parameters=30)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 500)
    build.call(one, 0, 100, parent=outer)
    build.call(two, 200, 250, parent=outer)

    tree = build_module_tree(build.data())

    assert totals(tree) == {
        "": (1, 500, 350),
        "layers": (0, 150, 0),
        "layers.0": (1, 100, 100),
        "layers.2": (1, 50, 50),
    }
    assert not node_at(tree, "layers").called
    assert node_at(tree, "layers").parameters == 90
    assert node_at(tree, "layers").forward.share == 0.15


def test_two_models_are_two_trees() -> None:
    build = RecordingBuilder()
    student = build.module("", "GPT", name="student")
    build.module("head", "Linear", parent=student)
    teacher = build.module("", "GPT", name="teacher")
    teachers_head = build.module("head", "Linear", parent=teacher)
    build.step(0, 0, 1000)
    inside_student = build.call(student, 0, 500)
    inside_teacher = build.call(teacher, 100, 300, parent=inside_student)
    build.call(teachers_head, 150, 200, parent=inside_teacher)

    tree = build_module_tree(build.data())

    assert [(node.root, node.path, node.forward.total_ns) for _, node in iterate_nodes(tree.roots)] == [
        ("student", "", 500),
        ("teacher", "", 200),
        ("teacher", "head", 50),
    ]
    assert [root.label for root in tree.roots] == ["student", "teacher"]
    assert tree.roots[0].forward.self_ns == 300
    assert tree.forward == PhaseTimes(calls=1, total_ns=500, self_ns=300, share=0.5)


def test_module_that_is_not_in_the_table_is_shown_as_unknown() -> None:
    build, net = typed_net(1000)
    build.call(77, 10, 20, parent=build.call(net, 0, 100))
    build.call(78, 200, 250)
    build.call(None, 300, 310)

    tree = build_module_tree(build.data())

    assert totals(tree) == {
        "": (1, 100, 90),
        "(unknown#77)": (1, 10, 10),
        "(unknown#78)": (1, 50, 50),
        "(unknown)": (1, 10, 10),
    }
    assert {root.label for root in tree.roots} == {"Net", "(unknown#78)", "(unknown)"}
    assert node_at(tree, "").children[0].label == "(unknown#77)"


def test_last_row_of_a_module_wins() -> None:
    build, net = typed_net()
    part = build.module("(Linear#0)", "Linear", parent=net)
    build.module("head", "Linear", parent=net, module_id=part)
    build.step(0, 0, 100)
    build.call(part, 0, 10)

    assert totals(build_module_tree(build.data())) == {"": (0, 10, 0), "head": (1, 10, 10)}


def test_call_whose_end_was_not_seen_counts_as_a_call_without_time_and_one_that_raised_is_counted() -> None:
    build, net = typed_net(1000)
    head = build.module("head", "Linear", parent=net)
    outer = build.call(net, 0, None)
    build.call(head, 100, 200, parent=outer, raised=True)
    build.call(head, 300, None, parent=outer)

    tree = build_module_tree(build.data())

    assert tree.roots[0].forward == PhaseTimes(calls=1, share=0.0, unfinished=1)
    assert node_at(tree, "head").forward == PhaseTimes(
        calls=2, total_ns=100, self_ns=100, share=0.1, unfinished=1, raised=1
    )
    assert tree.outside_ns is None


def test_own_time_is_not_negative_where_children_ran_in_several_threads() -> None:
    build, net, outer = begin_net(100, 50)
    head = build.module("head", "Linear", parent=net)
    build.call(head, 0, 40, parent=outer, thread=1)
    build.call(head, 0, 40, parent=outer, thread=2)

    assert totals(build_module_tree(build.data())) == {"": (1, 50, 0), "head": (2, 80, 80)}


def test_optimizer_and_time_outside_modules_are_told_apart() -> None:
    build, net = typed_net()
    build.step(0, 1000, 2000)
    outer = build.call(net, 1100, 1400)
    build.call(net, 1300, 1450, thread=1)  # overlaps in another thread
    build.backward(outer, 1500, 1700)
    build.optimizer(1800, 1900)

    tree = build_module_tree(build.data())

    assert tree.optimizer == PhaseTimes(calls=1, total_ns=100, self_ns=100, share=0.1)
    assert tree.outside_ns == 1000 - 350 - 200 - 100
    assert tree.step is not None and tree.step.duration_ns == 1000


def test_times_are_without_what_modtrace_spent_measuring() -> None:
    build, net = typed_net()
    head = build.module("head", "Linear", parent=net)
    build.step(0, 1000, 2000, overhead_ns=200)
    outer = build.call(net, 1100, 1500, overhead_ns=60)
    build.call(head, 1200, 1300, parent=outer, overhead_ns=40)
    build.backward(outer, 1600, 1700)
    build.optimizer(1800, 1900)

    tree = build_module_tree(build.data())

    assert totals(tree) == {"": (1, 340, 280), "head": (1, 60, 60)}
    assert tree.roots[0].forward.share == 340 / 800
    assert tree.step is not None and (tree.step.duration_ns, tree.step.overhead_ns) == (800, 200)
    assert tree.outside_ns == 800 - 340 - 100 - 100


def test_measuring_is_never_more_than_the_time_that_it_is_part_of() -> None:
    build, net = typed_net()
    build.step(0, 0, 1000, overhead_ns=990)
    build.call(net, 0, 100, overhead_ns=150)
    build.call(net, 200, None, overhead_ns=5)

    tree = build_module_tree(build.data())
    assert tree.roots[0].forward.total_ns == 0
    assert tree.outside_ns is None

    build.begin_step(1)
    build.step(1, 1000, 2000, overhead_ns=990)
    build.call(net, 1000, 1100, overhead_ns=20)
    tree = build_module_tree(build.data())
    assert (tree.roots[0].forward.total_ns, tree.outside_ns) == (80, None)


def test_threads_that_measured_at_once_take_nothing_from_the_time_outside() -> None:
    build, net = typed_net()
    build.step(0, 0, 1000, overhead_ns=50)
    build.call(net, 0, 500, thread=0, overhead_ns=50)
    build.call(net, 0, 500, thread=1, overhead_ns=50)

    assert build_module_tree(build.data()).outside_ns == 500


def test_last_complete_training_step_with_calls_is_shown_where_none_is_chosen() -> None:
    build, net = typed_net(100)
    build.call(net, 0, 10)
    build.step(1, 100, 200)
    build.call(net, 100, 120)
    build.step(2, 200, 300)  # without calls
    build.step(3, 300, 400, kind="eval")
    build.call(net, 300, 330)
    build.begin_step(4)
    build.call(net, 400, 440)

    tree = build_module_tree(build.data())

    assert tree.step is not None
    assert (tree.step.step, tree.step.kind, tree.step.complete) == (1, "train", True)
    assert (tree.step.first, tree.step.last, tree.step.count, tree.step.partial) == (0, 3, 4, 1)
    assert totals(tree) == {"": (1, 20, 20)}
    assert totals(build_module_tree(build.data(), step=0)) == {"": (1, 10, 10)}


def test_last_evaluation_step_is_shown_where_nothing_is_trained() -> None:
    build, net = typed_net()
    for step in range(3):
        build.step(step, 100 * step, 100 * step + 50, kind="eval")
        build.call(net, 100 * step, 100 * step + 10)

    tree = build_module_tree(build.data())

    assert tree.step is not None and (tree.step.step, tree.step.kind) == (2, "eval")
    assert not tree.backward_recorded


def test_step_that_is_not_complete_is_shown_if_there_is_no_other() -> None:
    build, net = typed_net()
    build.begin_step(4)
    build.call(net, 0, 10)

    tree = build_module_tree(build.data())

    assert tree.step is not None
    assert (tree.step.step, tree.step.kind, tree.step.complete) == (4, None, False)
    assert tree.roots[0].forward == PhaseTimes(calls=1, total_ns=10, self_ns=10, share=None)
    assert tree.outside_ns is None


@pytest.mark.parametrize(("steps", "text"), [((0, 1, 2, 5, 7, 8), r"0\.\.2, 5, 7\.\.8"), ((), "none")])
def test_step_that_does_not_exist_names_those_there_are(steps: tuple[int, ...], text: str) -> None:
    build = RecordingBuilder()
    for step in steps:
        build.step(step, 0, 1)

    with pytest.raises(ValueError, match=rf"^no step 3 in this recording; there are: {text}$"):
        build_module_tree(build.data(), step=3)


def test_recording_or_step_without_calls_is_an_empty_tree() -> None:
    build = RecordingBuilder()
    tree = build_module_tree(build.data())
    assert (tree.step, tree.roots, tree.outside_ns) == (None, (), None)

    build.module("", "Net")
    build.step(0, 0, 100)
    tree = build_module_tree(build.data())
    assert (tree.roots, tree.outside_ns) == ((), 100)
