"""What torch.compile did in a recording, from rows typed by hand."""

from builders import RecordingBuilder
from modtrace.analysis.compile.compilations import Compilations
from modtrace.analysis.modules.module_tree import build_module_tree

BREAK = 'Why\nUser stack trace:\n  File "m.py", line 17, in forward\n    if y.sum() > 0:'
BREAK_FROM_OUTSIDE = (
    'Why\n  Explanation: for this reason\nUser stack trace:\n  File "m.py", line 33, in forward\n    x = s.item(x)\n'
    '  File "m.py", line 17, in forward\n    if y.sum() > 0:'
)
SIZE = "tensor 'x' size mismatch at index 0. expected {}, actual {}"


def build() -> tuple[RecordingBuilder, int, int]:
    """A compiled model of two blocks, of which one was called in Python."""
    made = RecordingBuilder()
    net = made.module("", "Net")
    blocks = made.module("blocks", "ModuleList", parent=net)
    first = made.module("blocks.0", "Block", parent=blocks)
    made.module("blocks.0.lin", "Linear", parent=first)
    made.module("blocks.1", "Block", parent=blocks)
    made.step(0, 0, 1000)
    outer = made.call(net, 0, 900, compiled=True)
    made.call(first, 100, 200, parent=outer)
    return made, net, first


def found(made: RecordingBuilder) -> Compilations:
    compilations = build_module_tree(made.data()).compilations
    assert compilations is not None
    return compilations


def test_a_recording_without_compiled_calls_has_none() -> None:
    made = RecordingBuilder()
    made.step(0, 0, 10)
    made.call(made.module("", "Net"), 0, 5)
    assert build_module_tree(made.data()).compilations is None


def test_compilations_of_one_function_are_one_region() -> None:
    made, net, _ = build()
    made.compilation(net, "forward m.py:31", "0/0", ops=4, guards=7, took_ns=500)
    made.compilation(net, "forward m.py:31", "0/0", phase="backward", ops=None, guards=None, took_ns=300)
    made.step(1, 1000, 2000)
    made.compilation(net, "forward m.py:31", "0/1", ops=5, guards=8, took_ns=100)
    (region,) = found(made).regions
    assert (region.module, region.function, region.line and region.line.place) == (
        "Net",
        "forward",
        ("m.py", 31),
    )
    assert (region.compilations, region.backwards, region.ops, region.guards) == (2, 1, (4, 5), 8)
    assert (region.took_ns, region.steps, region.error) == (900, (0, 1), None)


def test_a_break_is_one_at_its_line_however_many_functions_met_it() -> None:
    made, net, first = build()
    made.compilation(net, "forward m.py:31", "0/0", graph_breaks=[BREAK_FROM_OUTSIDE])
    made.compilation(first, "forward m.py:15", "1/0", graph_breaks=[BREAK])
    (reason,) = found(made).graph_breaks
    assert (reason.module, reason.line and reason.line.place) == ("blocks.0", ("m.py", 17))
    assert (reason.reason, reason.times, reason.others) == ("Why: for this reason", 2, 1)


def test_a_break_for_which_functions_are_not_compiled_is_told_once() -> None:
    made, net, first = build()
    made.compilation(net, "forward m.py:31", "0/0", graph_breaks=[BREAK_FROM_OUTSIDE])
    for module, function in ((first, "forward m.py:15"), (net, "loop m.py:40")):
        made.compilation(module, function, "1/0", error=f"Unsupported: {BREAK}", graph_breaks=[BREAK])
    (error,) = found(made).errors
    assert (error.line and error.line.place, error.compiled and error.compiled.place, error.others) == (
        ("m.py", 17),
        ("m.py", 15),
        1,
    )
    assert found(made).graph_breaks == ()


def test_one_cause_may_compile_several_functions_again() -> None:
    made, net, first = build()
    made.compilation(net, "forward m.py:31", "0/0")
    made.compilation(first, "forward m.py:15", "1/0")
    made.compilation(net, "forward m.py:31", "0/1", failed_guards=[f"0/0: {SIZE.format(3, 5)}"])
    made.compilation(first, "forward m.py:15", "1/1", failed_guards=[f"1/0: {SIZE.format(3, 5)}"])
    made.step(1, 1000, 2000)
    made.compilation(net, "forward m.py:31", "0/2", failed_guards=[f"0/1: {SIZE.format(5, 9)}"])
    (reason,) = found(made).recompilations
    assert (reason.module, reason.values, reason.times, reason.others) == ("Net", ("3", "5", "9"), 3, 1)
    assert reason.steps == (0, 1)


def test_code_of_another_instance_is_no_reason_for_compiling_again() -> None:
    made = RecordingBuilder()
    blocks = [made.module(f"blocks.{at}", "Block") for at in range(2)]
    another = "0/0: ___check_type_id(self._modules['part'], 94), type=<class 'A'>"
    mode = "GLOBAL_STATE changed: grad_mode "
    of_second = {0: ("0/1", [another]), 1: ("0/2", [f"0/1: {mode}", another])}
    of_second[2] = ("0/3", [another, f"0/2: {mode}", f"0/1: {SIZE.format(3, 5)}"])
    for step, (compile_id, guards) in of_second.items():
        made.step(step, 1000 * step, 1000 * step + 1000)
        calls = [made.call(block, 1000 * step, 1000 * step + 400, compiled=True) for block in blocks]
        if step == 0:
            made.compilation(blocks[0], "forward m.py:15", "0/0", call=calls[0])
        made.compilation(blocks[1], "forward m.py:15", compile_id, call=calls[1], failed_guards=guards)
    assert found(made).anew == ("blocks.1",)
    assert [(each.module, each.reason, each.values) for each in found(made).recompilations] == [
        ("blocks.1", "the grad mode changed, as between training and evaluation", ()),
        ("blocks.1", "the size of the tensor 'x' changed in dimension 0", ("3", "5")),
    ]


def test_what_did_not_fit_is_told_of_a_module_that_ran_code_of_another_instance() -> None:
    made = RecordingBuilder()
    blocks = [made.module(f"blocks.{at}", "Block") for at in range(2)]
    for step in range(2):
        made.step(step, 1000 * step, 1000 * step + 1000)
        calls = [made.call(block, 1000 * step, 1000 * step + 400, compiled=True) for block in blocks]
        if step == 0:
            made.compilation(blocks[0], "forward m.py:15", "0/0", call=calls[0])
    size = [f"0/0: {SIZE.format(3, 5)}"]
    made.compilation(blocks[1], "forward m.py:15", "0/1", call=calls[1], failed_guards=size)
    assert found(made).anew == ()
    assert [each.values for each in found(made).recompilations] == [("3", "5")]


def test_code_from_before_the_recording_is_no_reason_for_compiling_again() -> None:
    made, net, _ = build()
    made.compilation(net, "forward m.py:31", "0/1", failed_guards=["0/0: GLOBAL_STATE changed: grad_mode "])
    assert (found(made).anew, found(made).recompilations) == (("Net",), ())


def test_what_was_not_compiled_again_is_an_error_and_no_recompilation() -> None:
    made, net, _ = build()
    made.compilation(
        net,
        "forward m.py:31",
        "0/8",
        failed_guards=[f"0/7: {SIZE.format(3, 5)}"],
        error="Unsupported: Dynamo recompile limit exceeded",
    )
    assert found(made).recompilations == ()
    assert [each.reason for each in found(made).errors] == [
        "the limit of compilations, recompile_limit, is reached: calls that fit no graph so far run uncompiled"
    ]
    assert found(made).regions[0].compilations == 0


def test_modules_without_calls_lie_in_the_region_of_the_called_one_above_them() -> None:
    made, net, _ = build()
    made.compilation(net, "forward m.py:31", "0/0")
    assert {each.region: each.modules for each in found(made).inside} == {
        "blocks.0": ("blocks.0.lin",),
        "Net": ("blocks.1",),
    }


def test_modules_inside_that_were_measured_are_told_as_such() -> None:
    made, net, _ = build()
    made.compilation(net, "forward m.py:31", "0/0")
    made.site(made.module("blocks.1.lin", "Linear", parent=4), "output")
    assert [(each.region, each.modules, each.measured) for each in found(made).inside] == [
        ("blocks.0", ("blocks.0.lin",), False),
        ("Net", ("blocks.1",), True),
    ]


def test_a_region_that_nothing_was_compiled_for_was_compiled_before() -> None:
    made, _, _ = build()
    assert (found(made).count, found(made).before, found(made).shared) == (0, ("Net",), ())


def test_a_region_whose_class_was_compiled_for_another_module_shares_its_code() -> None:
    made, net, first = build()
    other = made.module("blocks.2", "Block", parent=net)
    made.call(other, 300, 400, compiled=True)
    made.compilation(first, "forward m.py:15", "0/0")
    assert (found(made).shared, found(made).before) == (("blocks.2",), ())


def test_a_row_without_module_and_function_is_told_too() -> None:
    made, _, _ = build()
    made.compilation(None, "", "0/0", error="Odd: no one knows", ops=None, guards=None)
    assert [(each.module, each.line, each.reason) for each in found(made).errors] == [
        ("", None, "Odd: no one knows")
    ]
