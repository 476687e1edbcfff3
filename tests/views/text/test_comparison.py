"""The answer of a comparison as text."""

import math
from dataclasses import replace

import pyarrow as pa
import pytest

from golden import assert_golden
from modtrace.analysis.divergence.answer import Comparison, Divergence, GrowthPoint, Named, OneSided
from modtrace.views.text.comparison import render_comparison

FIRST = Divergence(
    root="GPT2LMHeadModel",
    path="transformer.h.0.mlp.act",
    call=0,
    op="aten.mul.Tensor",
    op_nth=0,
    phase="forward",
    step=0,
    role="op_output",
    slot="",
    kind="made",
    error=1.138e-4,
    low=1.138e-4,
    high=1.138e-4,
    metric="tensors",
    noise=2.1e-6,
    input_error=0.0,
    amplification=math.inf,
    recompute_of=None,
    only_in="first",
    through=None,
    seen_at="addmm in transformer.h.0.mlp.c_proj",
    other="blocks.0.mlp.proj",
    source_line="model.py:61 in forward",
    leads_to=None,
    kind_of_difference=None,
    relation=None,
    arguments=(),
    operands=(),
    a="float32[64, 64], -1.025 .. 0.9818, rms 0.277074",
    b="float32[64, 64], -1.025 .. 0.9817, rms 0.277096",
    largest=1.2e-4,
    where=(3, 17),
    pair=(0.9818, 0.98168),
    cosine=0.9999991,
    close_share=0.985,
    ulps=2012.0,
)
LATER = replace(
    FIRST,
    path="lm_head",
    op=None,
    op_nth=None,
    role="output",
    kind="amplified",
    metric="sketches",
    error=3e-3,
    input_error=1e-4,
    amplification=30.0,
    only_in=None,
    seen_at=None,
)
RECOMPUTED = replace(
    FIRST,
    path="blocks.1.drop",
    op="aten.bernoulli_.float",
    phase="recompute",
    error=0.98,
    recompute_of="second",
    only_in=None,
    seen_at=None,
    other=None,
    source_line=None,
    leads_to=None,
    kind_of_difference=None,
    relation=None,
    arguments=(),
    operands=(),
    pair=(0.0, 1.0),
    largest=1.0,
    ulps=None,
)
FOUND = Comparison(
    ok=False,
    first=FIRST,
    divergences=(FIRST, LATER),
    firsts=(FIRST, replace(LATER, phase="backward", step=1)),
    absorbed_most=None,
    reshaped=(),
    is_void=False,
    missing=OneSided(
        modules=("transformer (GPT2Model)", "transformer.drop (Dropout)"),
        ops=(Named(name="pow in transformer.h.0.mlp.act", count=4, why="op"),),
        harmless=12,
    ),
    extra=OneSided(ops=(Named(name="gelu in blocks.0.mlp", count=1, why="op"),)),
    environment=("torch: 2.12.0 / 2.13.0", "command: hf.py / port.py"),
    compared=248,
    equal=26,
    within=219,
    absorbed=0,
    beyond=3,
    inherited=1,
    made=2,
    unmeasured=1,
    unmeasured_why=(("no elements", 1),),
    metrics=(("tensors", 200), ("sketches", 48), ("nothing", 1)),
    by_ops=True,
    without_ops=(),
    noise="assumed",
    noise_text="noise: assumed, 2 eps of the dtype x sqrt(sum length): 5e-07 to 6e-06",
    growth=(
        GrowthPoint(name="transformer.wte", step=0, error=0.0, noise=1e-6),
        GrowthPoint(name="transformer.h.0", step=0, error=6.2e-5, noise=1e-6),
        GrowthPoint(name="transformer.h.1", step=0, error=6.8e-5, noise=1e-6),
        GrowthPoint(name="lm_head", step=0, error=3e-3, noise=1e-6),
    ),
    steps=((0, 0), (1, 1)),
    rules=(),
    proposed=(r"transformer\.h\.(\d+)\.ln_1=blocks.\1.ln1",),
    marks=("second: 3 steps were dropped",),
    table=pa.table({}),
)


def test_first_screen_says_who_made_the_difference_and_how_it_grows() -> None:
    assert_golden("comparison.txt", render_comparison(FOUND, width=80))


def test_recompute_that_differs_from_its_forward_is_told_as_that() -> None:
    alone = replace(
        FOUND,
        first=RECOMPUTED,
        divergences=(RECOMPUTED,),
        firsts=(RECOMPUTED,),
        missing=OneSided(),
        extra=OneSided(harmless=40),
        environment=(),
        proposed=(),
        marks=(),
        growth=(GrowthPoint(name="head", step=0, error=0.0, noise=1e-6),),
    )
    assert_golden("comparison_recompute.txt", render_comparison(alone, width=80))


def test_growth_shows_blocks_then_other_modules_and_counts_the_rest() -> None:
    growth = tuple(
        GrowthPoint(name=f"{block}{inner}", step=0, error=1e-3, noise=1e-6)
        for block in range(3)
        for inner in (".ln", ".up", ".act", ".down", "")
    )
    found = replace(FOUND, growth=growth)
    chart = render_comparison(found).partition("growth ")[2].splitlines()
    names = [line.split()[0] for line in chart[1:13]]
    assert {"0.ln", "0", "1", "2"} <= set(names) and names == [
        point.name for point in growth if point.name in names
    ]
    assert chart[13] == "3 of 15 are left out: --top 15 shows all, as does .growth"
    assert "left out" not in render_comparison(found, top=15)


def test_rules_that_are_not_printed_are_counted() -> None:
    rules = tuple(f"h.{at}=blocks.{at}" for at in range(12))
    lines = render_comparison(replace(FOUND, proposed=rules), width=80, top=10).splitlines()
    at = lines.index("  h.9=blocks.9")
    assert lines[at + 1] == "  … and 2 more"
    lines = render_comparison(replace(FOUND, rules=rules), width=80, top=10).splitlines()
    at = lines.index("names:")
    assert lines[at + 1] == "  h.0=blocks.0" and lines[at + 11] == "  … and 2 more"
    assert "names: h.0=blocks.0, h.1=blocks.1" in render_comparison(replace(FOUND, rules=rules[:2]))


def test_runs_that_differ_by_noise_agree() -> None:
    found = replace(
        FOUND,
        ok=True,
        first=None,
        divergences=(),
        firsts=(),
        beyond=0,
        inherited=0,
        made=0,
        missing=OneSided(),
        extra=OneSided(),
    )
    lines = render_comparison(found).splitlines()
    assert lines[0] == "equal, up to noise: no difference is more than that"


def test_runs_of_which_one_has_more_are_not_said_to_agree() -> None:
    found = replace(FOUND, first=None, divergences=(), firsts=(), beyond=0, inherited=0, made=0)
    assert (
        "what is in both runs is equal, and only one of them has the rest; allow_missing=True (--allow-missing) lets "
        "them agree" in render_comparison(found)
    )


@pytest.mark.parametrize(
    ("missing", "extra", "told"),
    [
        ((8, 9), (), "the second run stops after step 7, the first after step 9"),
        ((), (8,), "the first run stops after step 7, the second after step 8"),
        ((3, 4), (), "only the first run has step 3..4"),
        ((9,), (10, 11), "only the first run has step 9; only the second run has step 10..11"),
    ],
)
def test_runs_of_which_one_has_more_steps_say_where_the_other_stops(
    missing: tuple[int, ...], extra: tuple[int, ...], told: str
) -> None:
    def side(steps: tuple[int, ...]) -> OneSided:
        calls = (Named(name="Net", count=len(steps), why="step"),) if steps else ()
        return OneSided(steps=steps, calls=calls)

    found = replace(
        FOUND,
        first=None,
        divergences=(),
        firsts=(),
        steps=((2, 2), (7, 7)),
        missing=side(missing),
        extra=side(extra),
    )
    assert render_comparison(found).startswith(f"what is in both runs is equal, and {told}\n")


def test_two_steps_of_unequal_numbers_are_told() -> None:
    found = render_comparison(replace(FOUND, steps=((3, 4),)))
    assert "compared 248 tensors of step 3 and step 4: 26 equal," in found
