"""The module tree as text: golden files for the whole, single rules below."""

import itertools
import re
from dataclasses import replace

import pytest

from builders import raw_statistics
from golden import assert_golden
from modtrace.analysis.modules.module_tree import ModuleNode, ModuleTree
from modtrace.analysis.modules.value_summary import Kind, NonFiniteCount, SlotValues, ValueSummary
from modtrace.analysis.tables.chosen_step import ShownStep
from modtrace.analysis.tables.cycles import CycleSummary
from modtrace.analysis.tables.times import NO_CALLS, PhaseTimes
from modtrace.recording.statistics.moments import Stats
from modtrace.views.text.show_module_tree import SORT_KEYS, SortKey, render_module_tree

STEP = ShownStep(step=19, kind="train", start_ns=0, end_ns=200_000_000, first=0, last=19, count=20)


def times(calls: int, total_us: int, self_us: int | None = None, **more: int) -> PhaseTimes:
    own_us = total_us if self_us is None else self_us
    share = total_us / 200_000
    return PhaseTimes(calls=calls, total_ns=1000 * total_us, self_ns=1000 * own_us, share=share, **more)


_ids = itertools.count()


def node(label: str, type: str, forward: PhaseTimes, *children: ModuleNode, **more: object) -> ModuleNode:
    values = {
        "path": label,
        "root": "GPT",
        "label": label,
        "type": type,
        "module_id": next(_ids),
        "parameters": 0,
        "called": forward.calls > 0,
        "forward": forward,
        "children": children,
    }
    return ModuleNode(**(values | more))  # type: ignore[arg-type]


def tree(*roots: ModuleNode, **more: object) -> ModuleTree:
    values = {
        "command": ("train.py", "--steps", "20"),
        "marks": (),
        "step": STEP,
        "roots": roots,
        "forward": times(1, 1),
        "backward": NO_CALLS,
        "recompute": NO_CALLS,
        "optimizer": NO_CALLS,
        "outside_ns": None,
        "backward_recorded": True,
    }
    return ModuleTree(**(values | more))  # type: ignore[arg-type]


def block(index: int, *, recompute: bool) -> ModuleNode:
    """A block of the GPT, a little slower with every index."""
    attn = node(
        "attn",
        "CausalSelfAttention",
        times(1, 900 + 40 * index),
        backward=times(1, 1800),
        recompute=times(1, 910) if recompute else NO_CALLS,
        parameters=262_144,
        path=f"blocks.{index}.attn",
    )
    mlp = node(
        "mlp",
        "MLP",
        times(1, 1100),
        backward=times(1, 2200),
        recompute=times(1, 1110) if recompute else NO_CALLS,
        parameters=524_288,
        path=f"blocks.{index}.mlp",
    )
    return node(
        str(index),
        "Block",
        times(1, 2100 + 40 * index, 100),
        attn,
        mlp,
        backward=times(1, 4100, 100),
        recompute=times(1, 2150, 130) if recompute else NO_CALLS,
        parameters=786_432,
        path=f"blocks.{index}",
    )


def gpt(blocks: int, *, recompute: bool = False) -> ModuleTree:
    forward_us = sum(2100 + 40 * index for index in range(blocks))
    inside = node(
        "blocks",
        "ModuleList",
        times(0, forward_us, 0),
        *(block(index, recompute=recompute) for index in range(blocks)),
        backward=times(0, 4100 * blocks, 0),
        recompute=times(0, 2150 * blocks, 0) if recompute else NO_CALLS,
        parameters=786_432 * blocks,
    )
    root = node(
        "GPT",
        "GPT",
        times(1, forward_us + 1400, 1000),
        node("wte", "Embedding", times(1, 90), backward=times(1, 150), parameters=512_000),
        inside,
        node("head", "Linear", times(1, 310), backward=times(1, 620), same_as="wte", parameters=512_000),
        backward=times(1, 4100 * blocks + 900, 130),
        recompute=times(0, 2150 * blocks, 0) if recompute else NO_CALLS,
        parameters=512_000 + 786_432 * blocks,
        path="",
    )
    return tree(
        root,
        backward=times(1, 4100 * blocks + 900),
        recompute=times(blocks, 2150 * blocks) if recompute else NO_CALLS,
        optimizer=times(1, 6500),
        outside_ns=4_000_000,
        outside_share=0.02,
    )


def stats(*numbers: float) -> Stats:
    return Stats(**raw_statistics(numbers))


def gpt_with_values() -> ModuleTree:
    """Two blocks, of which the second gives NaN; the model returns two slots."""
    nan, inf = float("nan"), float("inf")

    def block_of(index: int, output: Stats, **values: object) -> ModuleNode:
        attn = node(
            "attn",
            "Attention",
            times(1, 900),
            parameters=262_144,
            values=ValueSummary(output=output, gradient=stats(3e-7, -3.4e-7), **values),  # type: ignore[arg-type]
        )
        inside = 3 if values else 0
        summary = ValueSummary(gradient=stats(2e-5), nonfinite_inside=inside, parameters=stats(0.02))
        return node(str(index), "Block", times(1, 1000), attn, parameters=262_144, values=summary)

    bad = (
        NonFiniteCount(kind="output", nan_count=1, inf_count=0),
        NonFiniteCount(kind="parameter", nan_count=0, inf_count=2),
    )
    blocks = node(
        "blocks",
        "ModuleList",
        times(0, 2000, 0),
        block_of(0, stats(0.0123, -0.0123)),
        block_of(1, stats(nan, 1.0), nonfinite=bad),
        parameters=524_288,
        values=ValueSummary(parameters=stats(0.02), parameter_gradients=stats(0.0001), nonfinite_inside=3),
    )
    slots = (
        SlotValues(slot="['logits']", output=stats(11.0, -14.0), gradient=stats(0.001)),
        SlotValues(slot="['loss']", output=stats(7.25), gradient=None),
    )
    values = ValueSummary(
        output=stats(11.0, -14.0, 7.25),
        gradient=stats(0.001),
        parameters=stats(0.02, 5.0),
        parameter_gradients=stats(inf),
        slots=slots,
        nonfinite=(NonFiniteCount(kind="recomputed output", nan_count=1, inf_count=2),),
        nonfinite_inside=3,
    )
    wte = node(
        "wte",
        "Embedding",
        times(1, 90, raised=1),
        parameters=512_000,
        values=ValueSummary(
            output=stats(1.0, 12_345.0),
            nonfinite=(NonFiniteCount(kind="gradient", nan_count=2, inf_count=0),),
        ),
    )
    root = node("GPT", "GPT", times(1, 3000, 1000), wte, blocks, parameters=1_036_288, path="", values=values)
    step = replace(STEP, overhead_ns=1_200_000)
    optimizer = replace(times(1, 6500), share=6.5 / 198.8)
    return tree(root, step=step, optimizer=optimizer, outside_ns=4_000_000, outside_share=4 / 198.8)


def first_column(text: str) -> list[str]:
    """The tree's first column, without its title."""
    table = text.split("\n\n")[1].splitlines()
    return [re.split(r"\s{2,}(?=\S)", line.lstrip("│├└─ "))[0] for line in table[1:]]


def test_gpt() -> None:
    assert_golden("gpt.txt", render_module_tree(gpt(6)))


def test_gpt_unfolded() -> None:
    assert_golden("gpt_unfolded.txt", render_module_tree(gpt(3), fold=False, types=False))


def test_gpt_with_many_checkpointed_blocks() -> None:
    marked = replace(gpt(16, recompute=True), marks=("incomplete from step 20: the process was killed",))
    assert_golden("gpt_checkpointed.txt", render_module_tree(marked))


def test_gpt_with_values() -> None:
    assert_golden("values.txt", render_module_tree(gpt_with_values(), types=False))


def test_gpt_with_values_and_slots() -> None:
    assert_golden("values_slots.txt", render_module_tree(gpt_with_values(), slots=True, depth=1, types=False))


def test_gpt_with_values_in_colour() -> None:
    text = render_module_tree(gpt_with_values(), depth=0, types=False, color=True)
    assert_golden("values_colour.txt", text)


def test_slot_of_a_plain_tensor_has_no_line() -> None:
    plain = (SlotValues(slot="", output=stats(1.0), gradient=None),)
    root = node("Net", "Net", times(1, 5), values=ValueSummary(output=stats(1.0), slots=plain), path="")
    shown = tree(root)
    assert render_module_tree(shown, slots=True) == render_module_tree(shown)


def test_slots_of_a_folded_node_follow_its_extremes() -> None:
    slots = (SlotValues(slot="[0]\x1b", output=stats(2.0), gradient=None),)
    values = ValueSummary(output=stats(2.0), slots=slots)
    layers = (node(str(each), "Layer", times(1, 5), path=str(each), values=values) for each in range(13))
    text = render_module_tree(tree(node("Net", "Net", times(1, 90), *layers, path="")), slots=True)
    assert first_column(text) == ["Net", "0..12 x13", "shortest", "longest", "[0]\\x1b"]


def test_empty_tensors_leave_their_cells_empty() -> None:
    values = ValueSummary(
        output=stats(), gradient=stats(), parameters=stats(0.0), parameter_gradients=stats(0.0)
    )
    text = render_module_tree(tree(node("Net", "Net", times(1, 5), values=values, path="")))
    assert "out rms" not in text and "grad/param  " not in text


def test_gpt_without_backward_times() -> None:
    root = node("GPT", "GPT", times(1, 14_000, 1000), node("head", "Linear", times(1, 310)), path="")
    assert_golden("gpt_forward_only.txt", render_module_tree(tree(root, backward_recorded=False)))


def test_gpt_in_colour() -> None:
    assert_golden("gpt_colour.txt", render_module_tree(gpt(6), color=True))


def test_calls_that_raised_or_did_not_end_are_noted() -> None:
    root = node(
        "Net",
        "Net",
        times(2, 14_000, raised=1),
        node("cell", "Cell", times(3, 10, unfinished=2, raised=1)),
        path="",
    )
    assert_golden("notes.txt", render_module_tree(tree(root)))


@pytest.mark.parametrize(
    ("steps", "run", "line"),
    [
        ((), None, "GPT"),
        (
            (19,),
            None,
            "! NaN or infinite values in step 19; do they matter? rec.first_nonfinite()",
        ),
        (
            (4, 19),
            "my run",
            "! NaN or infinite values in 2 steps, first in step 4; do they matter? modtrace nonfinite 'my run'",
        ),
        (
            (4,),
            "run",
            "! NaN or infinite values in step 4, not in this one; do they matter? modtrace nonfinite run",
        ),
    ],
)
def test_nan_in_any_step_is_said_in_front_with_what_tells_more(
    steps: tuple[int, ...], run: str | None, line: str
) -> None:
    root = node("GPT", "GPT", times(1, 5), path="")
    text = render_module_tree(replace(tree(root), nonfinite_steps=steps), run=run)
    assert [each for each in text.splitlines()[2:] if each][1 if not steps else 0].startswith(line)


@pytest.mark.parametrize(
    ("parts_ms", "line"),
    [
        ({"data": 41, "forward": 8, "backward": 15}, "a step every 64.0ms: data 64%, backward 23%, forward 12%"),
        ({"forward": 999, "rest": 1}, "a step every 1.00s: forward 100%"),
        (
            {
                "data": 10, "copy": 5, "forward": 20, "backward": 25, "recompute": 15, "optimizer": 6,
                "collectives": 9, "between steps": 4, "rest": 6,
            },
            "a step every 100ms: backward 25%, forward 20%, recompute 15%, others 40%",
        ),
    ],
)  # fmt: skip
def test_where_a_cycle_goes_is_said_in_front_as_far_as_it_fits(parts_ms: dict[str, int], line: str) -> None:
    parts_ns = {part: 1_000_000 * time_ms for part, time_ms in parts_ms.items()}
    cycles = CycleSummary(
        cycles=48,
        cycle_ns=sum(parts_ns.values()),
        measuring_ns=0,
        parts_ns=parts_ns,
        slowest=None,
        slowest_ns=0,
    )
    assert render_module_tree(tree(cycles=cycles)).splitlines()[2] == line
    assert len(line) <= 80


def test_columns_that_are_left_out_are_named_and_not_explained() -> None:
    text = render_module_tree(gpt_with_values(), types=False, width=80)
    assert text.split("\n\n")[1].endswith(
        "left out at a width of 80: type, params, out rms, out max, grad rms, grad max,\n"
        "  grad/param (a width of 144 shows all, and so does | less -S)"
    )
    assert text.split("\n\n")[2] == (
        "optimizer           6.50ms    3.3%\n"
        "outside of modules  4.00ms    2.0%\n"
        "self: without the modules inside; %: of the time of the step\n"
    )
    whole = render_module_tree(gpt_with_values(), types=False, width=153)
    assert whole == render_module_tree(gpt_with_values(), types=False)
    assert max(map(len, whole.splitlines())) == 153


def test_eval_step_of_a_recording_with_backward_gives_no_hint() -> None:
    assert "--backward-times" not in render_module_tree(tree(node("Net", "Net", times(1, 5))))


def test_empty_recording_says_so() -> None:
    assert render_module_tree(tree(step=None, command=())) == "nothing was recorded\n"


def test_step_without_calls_says_so() -> None:
    assert render_module_tree(tree(outside_ns=200_000_000, outside_share=1.0)) == (
        "train.py --steps 20\n"
        "step 19 (train), 200ms, no module was called; 20 steps recorded, 0 to 19\n"
        "\n"
        "outside of modules   200ms  100.0%\n"
    )


def test_step_that_is_not_complete_says_so() -> None:
    step = ShownStep(step=4, kind=None, start_ns=None, end_ns=None, first=4, last=4, count=0, partial=1)
    net = node("Net", "Net", PhaseTimes(calls=1, total_ns=5))
    text = render_module_tree(tree(net, step=step))
    assert text.splitlines()[1] == "step 4, whose end was not recorded; parts of 1 step recorded"
    text = render_module_tree(tree(net, step=replace(step, first=0, last=3, count=4, partial=2)))
    assert text.splitlines()[1] == (
        "step 4, whose end was not recorded; 4 steps recorded, 0 to 3, and parts of 2 more"
    )


def test_control_characters_are_written_out() -> None:
    root = node("Net", "Net", times(1, 5), node("a\x1b[31m\nb", "L", times(1, 1)), path="")
    assert "└─ a\\x1b[31m\\nb" in render_module_tree(tree(root))


def test_wide_characters_keep_columns_aligned() -> None:
    root = node(
        "Netz", "Netz", times(1, 5), node("注意", "L", times(1, 1)), node("größe", "L", times(1, 1)), path=""
    )
    assert_golden("unicode.txt", render_module_tree(tree(root)))


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, ["GPT"]),
        (1, ["GPT", "wte", "blocks", "head"]),
        (2, ["GPT", "wte", "blocks", "0", "1", "head"]),
        (3, ["GPT", "wte", "blocks", "0", "1", "inside 0..1, summed", "attn x2", "mlp x2", "head"]),
        (9, ["GPT", "wte", "blocks", "0", "1", "inside 0..1, summed", "attn x2", "mlp x2", "head"]),
    ],
)
def test_depth_counts_levels_below_the_root(depth: int, expected: list[str]) -> None:
    assert first_column(render_module_tree(gpt(2), depth=depth)) == expected


#: The order of siblings by each key.
SORTED: dict[SortKey, list[str]] = {
    "order": ["b", "a", "10", "9"],
    "forward": ["10", "b", "9", "a"],
    "backward": ["a", "b", "10", "9"],
    "recompute": ["9", "b", "a", "10"],
    "self": ["a", "9", "10", "b"],
    "total": ["10", "a", "9", "b"],
    "parameters": ["9", "a", "b", "10"],
    "calls": ["a", "b", "10", "9"],
    "name": ["9", "10", "a", "b"],
}


@pytest.mark.parametrize("sort", SORT_KEYS)
def test_siblings_are_sorted(sort: SortKey) -> None:
    root = node(
        "Net",
        "Net",
        times(1, 1000),
        node("b", "L", times(2, 30, 1), parameters=2),
        node("a", "L", times(3, 10), backward=times(1, 30), parameters=3),
        node("10", "L", times(1, 50, 2), parameters=None),
        node("9", "L", times(1, 20), recompute=times(1, 15), parameters=4),
    )
    text = render_module_tree(tree(root, backward=times(1, 1), recompute=times(1, 1)), sort=sort)
    assert first_column(text)[1:] == SORTED[sort]


def test_what_is_inside_stays_behind_its_siblings_when_sorted() -> None:
    text = render_module_tree(gpt(3), sort="forward")
    assert first_column(text)[:7] == ["GPT", "blocks", "2", "1", "0", "inside 0..2, summed", "mlp x3"]


def test_columns_are_left_out_where_the_width_does_not_suffice() -> None:
    def titles(width: int | None) -> list[str]:
        return render_module_tree(gpt(6), width=width).split("\n\n")[1].splitlines()[0].split()

    everything = ["module", "type", "calls", "forward", "self", "%", "backward", "self", "%", "params"]
    assert titles(None) == everything
    assert titles(130) == everything
    assert titles(100) == [title for title in everything if title != "type"]
    assert titles(80) == [title for title in everything if title not in ("type", "params")]
    assert titles(70) == ["module", "calls", "forward", "%", "backward", "%"]
    assert titles(10) == ["module", "forward"]


def test_values_are_left_out_before_everything_else() -> None:
    def titles(width: int) -> str:
        text = render_module_tree(gpt_with_values(), width=width, depth=0, types=False)
        return text.split("\n\n")[1].splitlines()[0].split("params")[1]

    assert titles(160) == "  out rms  out max  grad rms  grad max  grad/param  NaN, inf"
    assert titles(121) == "  out rms  grad rms  grad max  grad/param  NaN, inf"
    assert titles(100) == "  out rms  grad rms  NaN, inf"
    assert titles(80) == "  NaN, inf"


def test_chain_of_2000_modules_is_rendered_without_overflow() -> None:
    chain = node("deepest", "Layer", times(1, 1))
    for depth in range(2000, 0, -1):
        chain = node(f"m{depth}", "Layer", times(1, 1), chain)
    text = render_module_tree(tree(chain, backward_recorded=True), types=False)
    lines = text.split("\n\n")[1].splitlines()
    assert len(lines) == 2002
    assert lines[31].startswith(" " * 87 + "└─ m31")
    assert lines[-1].startswith("(2000) " + " " * 90 + "└─ deepest")


def test_table_of_types_keeps_its_types_on_a_narrow_terminal() -> None:
    table = render_module_tree(gpt(6), width=30).split("\n\n")[2]
    titles = table.splitlines()[0].split()
    assert titles == ["type", "modules", "forward"]


def test_notes_stand_below_their_modules_where_columns_would_be_left_out_for_them() -> None:
    of_net = tree(node("Net", "Net", times(2, 14_000, raised=1), path="", same_as="teacher.net"))
    beside = render_module_tree(of_net, types=False).split("\n\n")[1]
    assert beside == (
        "module  type  calls  forward    self     %\n"
        "Net     Net       2   14.0ms  14.0ms  7.0%  shared with teacher.net\n"
        "                                            raised 1x"
    )
    below = render_module_tree(of_net, types=False, width=63).split("\n\n")[1]
    assert below == (
        "module                      type  calls  forward    self     %\n"
        "Net                         Net       2   14.0ms  14.0ms  7.0%\n"
        "   shared with teacher.net\n"
        "   raised 1x"
    )


def test_tensors_that_are_not_finite_are_marked_in_the_row_of_their_module() -> None:
    def values(*kinds: Kind, inside: int = 0) -> ValueSummary:
        counts = tuple(NonFiniteCount(kind=kind, nan_count=1, inf_count=2) for kind in kinds)
        return ValueSummary(nonfinite=counts, nonfinite_inside=inside)

    child = node("0", "Linear", times(1, 1_000), values=values("output", "gradient", "parameter gradient"))
    net = node("Net", "Net", times(1, 14_000), child, path="", values=values(inside=3))
    other = node("Other", "Net", times(1, 14_000), path="", values=values("recomputed output", inside=3))
    shown = render_module_tree(tree(net, other, values_step=4), types=False)
    rows = [line.split("%  ")[1] for line in shown.split("\n\n")[1].splitlines()]
    assert rows == ["NaN, inf", "inside", "out, grad, param grad", "recomputed out 1 NaN, 2 inf"]
    assert "NaN, inf, out, grad, grad/param: of step 4, the first bad one\n" in shown
