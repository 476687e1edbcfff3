"""What `modtrace show` says of torch.compile: a golden file for the whole, single rules below."""

import pytest

from builders import RecordingBuilder
from golden import assert_golden
from modtrace.analysis.compile.compilations import Compilations, CompiledRegion, Reason
from modtrace.analysis.compile.texts import CodeLine
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.views.text.compilations import (
    describe_compilations,
    describe_reason,
    describe_rest,
    region_columns,
)
from modtrace.views.text.show_module_tree import render_module_tree

STACK = 'User stack trace:\n  File "/home/me/gpt/{}", line {}, in forward\n    {}'


def build_compiled() -> RecordingBuilder:
    """A model of two blocks with a break, a cause of recompilation, and a function over the limit."""
    made = RecordingBuilder(argv=("train.py",))
    gpt = made.module("", "GPT", parameters=120)
    made.module("head", "Linear", parent=gpt, parameters=40)
    blocks = [made.module(f"blocks.{at}", "Block", parent=gpt, parameters=40) for at in range(2)]
    for block in blocks:
        made.module(f"blocks.{blocks.index(block)}.lin", "Linear", parent=block, parameters=40)
    made.step(0, 0, 9_000_000)
    outer = made.call(gpt, 0, 8_000_000, compiled=True)
    for block in blocks:
        made.call(block, 1_000_000, 2_000_000, parent=outer)
    stack = STACK.format("model.py", 17, "if y.sum() > 0:")
    made.compilation(gpt, "forward /home/me/gpt/model.py:31", "0/0", ops=0, guards=12, took_ns=2_100_000_000)
    made.compilation(
        blocks[0],
        "forward /home/me/gpt/model.py:15",
        "1/0",
        ops=5,
        guards=31,
        graph_breaks=[f"generic_jump TensorVariable()\n{stack}"],
        took_ns=700_000_000,
    )
    name = "torch_dynamo_resume_in_forward_at_17"
    for at in range(3):
        guard = f"2/{at - 1}: self.scale == {at}  # return y * self.scale\n"
        made.compilation(
            blocks[0],
            f"{name} /home/me/gpt/model.py:17",
            f"2/{at}",
            ops=4 + at,
            failed_guards=[guard + STACK.format("model.py", 19, "return y * self.scale")] if at else (),
        )
    made.compilation(
        blocks[1],
        f"{name} /home/me/gpt/model.py:17",
        "2/3",
        ops=None,
        guards=None,
        error="Unsupported: Dynamo recompile limit exceeded\n  Explanation: exceeding the recompile_limit cache size "
        "limit (currently set to 3). And more.",
    )
    return made


def test_reasons_and_regions_at_eighty_columns() -> None:
    tree = build_module_tree(build_compiled().data())
    assert_golden("compiled.txt", render_module_tree(tree, width=80))


def test_no_line_is_wider_than_the_terminal() -> None:
    text = render_module_tree(build_module_tree(build_compiled().data()), width=60)
    assert max(len(line) for line in text.splitlines()) <= 60


def reason(**more: object) -> Reason:
    values = {
        "kind": "break",
        "module": "attn",
        "reason": "Why",
        "values": (),
        "line": CodeLine("/a/b/m.py", 9, "forward"),
        "compiled": CodeLine("/a/b/m.py", 2, "forward"),
        "advice": "",
        "times": 1,
        "others": 0,
        "steps": (0,),
        "text": "",
    }
    return Reason(**(values | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({}, ["graph broken: attn, b/m.py:9 in forward", "Why"]),
        ({"module": "", "line": None}, ["graph broken: (no module)", "Why"]),
        ({"advice": "do it"}, ["graph broken: attn, b/m.py:9 in forward", "Why", "to do: do it"]),
        (
            {"kind": "error", "others": 1},
            [
                "not compiled: attn, b/m.py:2 in forward, and 1 more function",
                "because of b/m.py:9 in forward",
                "Why",
            ],
        ),
        (
            {"kind": "guard", "values": ("1", "2"), "times": 2, "steps": (3, 7), "others": 1},
            [
                "compiled again 2x in 2 steps, 3 to 7: attn, b/m.py:9 in forward, and 1 more function",
                "Why: it was 1, then 2",
            ],
        ),
        (
            {"kind": "guard", "values": tuple("abcdef")},
            [
                "compiled again 1x in step 0: attn, b/m.py:9 in forward",
                "Why: it was a, then b, then c, then d and 2 more",
            ],
        ),
        (
            {"reason": "x\x1b[31m " * 90},
            ["graph broken: attn, b/m.py:9 in forward", " ".join(["x\\x1b[31m"] * 19) + " ..."],
        ),
    ],
    ids=["break", "no place", "advice", "error", "guard", "many values", "long, with control characters"],
)
def test_lines_of_a_reason(given: dict[str, object], lines: list[str]) -> None:
    assert describe_reason(reason(**given)) == lines


def test_further_reasons_are_counted() -> None:
    found = Compilations(count=9, graph_breaks=tuple(reason(module=f"m{at}") for at in range(6)))
    texts = [each.render(color=False) for each in describe_compilations(found)]
    assert texts[-1] == "! graph broken: 2 more, all of them with --json"
    assert sum(text.startswith("! graph broken: m") for text in texts) == 4


def test_of_many_regions_those_that_took_longest_are_shown() -> None:
    regions = tuple(
        CompiledRegion(
            module=f"m{at}",
            function="forward",
            line=None,
            compilations=1,
            ops=(1, 2, 3, 4, 5),
            guards=None,
            backwards=0,
            took_ns=at,
            steps=(0,),
            error=None,
        )
        for at in range(23)
    )
    names, _, _, ops, _ = region_columns(regions)
    assert [cell.render(color=False) for cell in names.cells] == [f"m{at}" for at in range(3, 23)]
    assert {cell.render(color=False) for cell in ops.cells} == {"1 to 5"}
    (rest,) = describe_rest(Compilations(count=23, regions=regions))
    assert rest.render(color=False) == "3 more regions, all of them with --json"


def test_nothing_is_said_where_nothing_was_compiled() -> None:
    assert list(describe_compilations(Compilations())) == []
