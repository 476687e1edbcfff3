"""Patterns select the paths that they should, and say what is wrong with them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace.recording.options.path_filter import PathFilter, describe_unmatched, to_path_filter, unmatched

PARTS = st.text(st.sampled_from("abc_019"), min_size=1, max_size=4)
PATHS = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
GLOBS = st.lists(
    st.one_of(PARTS, st.sampled_from(["*", "**", "a*", "*b", "?", "[ab]", "[!a]*"])), min_size=1, max_size=5
).map(".".join)

GPT = ["", "embed", "blocks"] + [
    f"blocks.{number}{part}" for number in range(8) for part in ("", ".attn", ".attn.qkv", ".ln1", ".fc")
]


@pytest.mark.parametrize(
    ("glob", "matching", "other"),
    [
        ("", [""], ["a"]),
        (
            "blocks.0.fc",
            ["blocks.0.fc"],
            ["", "blocks.0", "blocks.0.fc.weight", "blocks.00fc", "blocks.10.fc"],
        ),
        ("*", ["a", "blocks"], ["", "a.b"]),
        ("*.*", ["a.b"], ["", "a", "a.b.c", "a.", ".b"]),
        (
            "blocks.*.attn",
            ["blocks.0.attn", "blocks.x.attn"],
            ["blocks.attn", "blocks..attn", "blocks.0.1.attn"],
        ),
        ("ln*", ["ln", "ln1", "ln_f"], ["ln1.weight", "aln"]),
        ("*_proj", ["q_proj", "_proj"], ["attn.q_proj", "proj"]),
        ("b.?", ["b.1", "b.x"], ["b.", "b.12", "b.."]),
        ("a?b", ["axb"], ["ab", "a.b"]),
        ("b.[0-3]", ["b.0", "b.3"], ["b.4", "b.-", "b.", "b.01"]),
        ("[abc]", ["a", "c"], ["d", "", "ab"]),
        ("b[!0].x", ["b1.x", "b-.x"], ["b0.x", "b..x", "b.x"]),
        ("a[.]b", [], ["a.b"]),
        ("a[+-/]b", ["a+b", "a/b"], ["a.b"]),
        ("[]]", ["]"], ["["]),
        ("[!]]", ["["], ["]", "."]),
        ("[a-]", ["a", "-"], ["b"]),
        ("[[&&~~||^\\]", ["[", "&", "~", "|", "^", "\\"], ["a"]),
        ("**", ["", "a", "a.b.c"], []),
        ("***", ["", "a", "a.b.c"], []),
        ("**.attn", ["attn", "blocks.0.attn"], ["", "xattn", "blocks.0.attn.qkv"]),
        ("**.*", ["a", "a.b"], [""]),
        ("blocks.**", ["blocks.0", "blocks.0.attn.qkv"], ["blocks", "", "xblocks.0", "blocks."]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "ab", "a.xb", "a.x.bb"]),
        ("**.attn.**", ["attn.q", "b.0.attn.q.w"], ["attn", "b.0.attn"]),
        ("**proj", ["proj", "q_proj", "a.b.q_proj"], ["proj.weight"]),
        ("a**z", ["az", "a.b.z", "abz"], ["z", "a"]),
        ("blocks.(Linear#0)", ["blocks.(Linear#0)"], ["blocks.Linear#0"]),
        ("a+b|c", ["a+b|c"], ["aab", "c"]),
    ],
)
def test_glob_matches_whole_paths(glob: str, matching: list[str], other: list[str]) -> None:
    selects = to_path_filter(glob).selects
    assert [path for path in matching if not selects(path)] == []
    assert [path for path in other if selects(path)] == []


@pytest.mark.parametrize(
    ("given_pattern", "matching", "other"),
    [
        ("re:attn", ["attn", "b.0.attn.qkv", "xattnx"], ["", "b.0.fc"]),
        (r"re:^blocks\.\d+$", ["blocks.0", "blocks.12"], ["blocks", "blocks.0.attn"]),
        ("re:(?i)ATTN", ["b.attn"], ["b.fc"]),
        (re.compile("ATTN", re.IGNORECASE), ["b.attn"], ["b.fc"]),
        (re.compile("^$"), [""], ["a"]),
    ],
)
def test_expression_is_searched_in_the_path(given_pattern, matching: list[str], other: list[str]) -> None:
    selects = to_path_filter(given_pattern).selects
    assert [path for path in matching if not selects(path)] == []
    assert [path for path in other if selects(path)] == []


def test_exclude_wins() -> None:
    found = to_path_filter(["**.attn", "**.fc"], ("blocks.0.**", re.compile("ln")))
    assert found.selects("blocks.1.attn")
    assert found.selects("blocks.1.fc")
    assert not found.selects("blocks.0.attn")
    assert not found.selects("blocks.1.ln1")


def test_parameter_is_selected_by_its_own_path_or_by_its_modules() -> None:
    names = ("blocks.0.fc.weight", "blocks.0.fc")
    assert to_path_filter("blocks.*.fc").selects(*names)
    assert to_path_filter("**.weight").selects(*names)
    assert not to_path_filter("**.bias").selects(*names)
    assert not to_path_filter("**.weight", "**.fc").selects(*names)
    assert not to_path_filter("**.fc", "**.weight").selects(*names)
    assert not to_path_filter(None, "**.weight").selects(*names)


def test_none_selects_everything() -> None:
    assert to_path_filter(None, None) == to_path_filter() == PathFilter()
    assert to_path_filter().is_all
    assert to_path_filter().selects("")
    assert not to_path_filter("**").is_all
    assert not to_path_filter(None, "a").is_all


def test_texts_make_the_same_filter_again() -> None:
    found = to_path_filter(["a.*", re.compile("b", re.IGNORECASE | re.VERBOSE)], re.compile("c"))
    assert found.to_json() == {"include": ["a.*", "re:(?ix)b"], "exclude": ["re:c"]}
    again = to_path_filter(**found.to_json())
    assert again.to_json() == found.to_json()
    assert again.selects("xB")
    assert to_path_filter().to_json() == {"include": None, "exclude": None}
    assert to_path_filter(**to_path_filter().to_json()).is_all


@pytest.mark.parametrize(
    ("argument", "wrong", "text"),
    [
        (
            "include",
            "re:blocks.(0",
            "include='re:blocks.(0' is not a regular expression: missing ), unterminated subpattern at position 7 of "
            "'blocks.(0', before '(0'. Correct it, or leave out 're:' for a glob.",
        ),
        (
            "exclude",
            ["a", "re:a(?"],
            "exclude[1]='re:a(?' is not a regular expression: unexpected end of pattern at position 3 of 'a(?', its "
            "end. Correct it, or leave out 're:' for a glob.",
        ),
        (
            "include",
            "re:a{99999999999999999}",
            "include='re:a{99999999999999999}' is not a regular expression: the repetition number is too large. "
            "Correct it, or leave out 're:' for a glob.",
        ),
        (
            "include",
            "blocks.[0",
            "include='blocks.[0' is not a glob: the [ at position 7 is not closed. "
            "Correct it ([[] is a [ itself), or begin with 're:' for an expression.",
        ),
        (
            "include",
            "a[]",
            "include='a[]' is not a glob: the [ at position 1 is not closed. "
            "Correct it ([[] is a [ itself), or begin with 're:' for an expression.",
        ),
        (
            "include",
            "b.[3-0]",
            "include='b.[3-0]' is not a glob: the range 3-0 at position 3 is the wrong way round. "
            "Correct it ([[] is a [ itself), or begin with 're:' for an expression.",
        ),
        ("include", [], "include=[] holds no pattern. Give at least one, or None to do without."),
        ("exclude", (), "exclude=() holds no pattern. Give at least one, or None to do without."),
    ],
)
def test_wrong_pattern_says_where_and_what_to_do(argument: str, wrong: object, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        to_path_filter(**{argument: wrong})
    assert str(caught.value) == text


def test_what_is_no_pattern_is_a_type_error() -> None:
    advice = ": give a glob such as 'blocks.*.attn', a regular expression, or a list of those"
    for wrong, shown in [
        (3, "include=3"),
        (["a", None], "include[1]=None"),
        ([["a"]], "include[0]=['a']"),
        ({"a"}, "include={'a'}"),
        (re.compile(b"a"), "include=re.compile(b'a')"),
        (range(10**30), "include=range(0, 1000000000000000000000000000000)"),
        ({"a" * 200: 1}, "include={'" + "a" * 77 + "…"),
    ]:
        with pytest.raises(TypeError) as caught:
            to_path_filter(wrong)
        assert str(caught.value) == shown + advice


def test_unmatched_patterns_are_found_in_include_and_exclude() -> None:
    found = unmatched(to_path_filter(["**.attn", "nope"], ["re:qkv", "re:^x"]), GPT)
    assert [(each.argument, each.pattern.text) for each in found] == [
        ("include", "nope"),
        ("exclude", "re:^x"),
    ]
    assert unmatched(to_path_filter(), GPT) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (
            "blcks.*.attn",
            "the nearest are: blocks.0.attn, blocks.1.attn, blocks.2.attn, blocks.3.attn, blocks.4.attn",
        ),
        ("emded", "the nearest are: embed"),
        ("blocks.9.fc", "the nearest are: blocks.7.fc, blocks.6.fc, blocks.5.fc, blocks.4.fc, blocks.3.fc"),
        (
            "blocks.5.atn",
            "the nearest are: blocks.5.attn, blocks.5.ln1, blocks.5.attn.qkv, blocks.5, blocks.5.fc",
        ),
        (
            "blocks.5.attn.vkq",
            "the nearest are: blocks.5.attn.qkv, blocks.5.attn, blocks.5.ln1, blocks.5.fc, blocks.5",
        ),
        (
            "**.atn",
            "the nearest are: blocks.0.attn, blocks.1.attn, blocks.2.attn, blocks.3.attn, blocks.4.attn",
        ),
        ("qkv", "the nearest are: " + ", ".join(f"blocks.{number}.attn.qkv" for number in range(5))),
        (
            "blocks.**.vqk",
            "the nearest are: " + ", ".join(f"blocks.{number}.attn.qkv" for number in range(5)),
        ),
        (
            r"re:^blcks\.\d+\.ln1$",
            "the nearest are: blocks.0.ln1, blocks.1.ln1, blocks.2.ln1, blocks.3.ln1, blocks.4.ln1",
        ),
        (
            re.compile("ATTTN"),
            "the nearest are: " + ", ".join(f"blocks.{number}.attn" for number in range(5)),
        ),
        ("zzz", 'there are: "", embed, blocks, blocks.0, blocks.0.attn, …'),
    ],
)
def test_unmatched_pattern_names_what_is_near(pattern, text: str) -> None:
    found = unmatched(to_path_filter(pattern), GPT)
    shown = pattern if isinstance(pattern, str) else f"re:{pattern.pattern}"
    assert describe_unmatched(found, GPT) == f"include={shown!r} matches no module; {text}"


def test_several_unmatched_patterns_are_described_one_after_the_other() -> None:
    found = unmatched(to_path_filter("heaad", "xyz"), ["", "head", "tail"])
    assert describe_unmatched(found, ["", "head", "tail"], what="module or parameter", root="GPT") == (
        "include='heaad' matches no module or parameter; the nearest are: head. "
        "exclude='xyz' matches no module or parameter; there are: \"\" (GPT), head, tail"
    )
    regex = unmatched(to_path_filter(r"heads?\.\d+"), ["head"])
    assert describe_unmatched(regex, ["head"]).endswith(
        r"; it is a glob: a regular expression begins with re: as in 're:heads?\.\d+'"
    )
    assert describe_unmatched(found[:1], []) == "include='heaad' matches no module: there is none"


@pytest.mark.parametrize(
    "path", ["parts.a[0]", "a*", "b?.x", "[!a]", "d e.größe", "x.(Linear#0)", "**x", "a]b"]
)
def test_path_with_characters_of_globs_means_itself_too(path: str) -> None:
    assert to_path_filter(path).selects(path)
    assert not to_path_filter(path).selects(f"{path}.weight")


@given(PATHS, PATHS)
def test_literal_path_matches_itself_and_no_other(path: str, other: str) -> None:
    assert to_path_filter(path).selects(path)
    assert to_path_filter(path).selects(other) == (path == other)


@given(st.lists(st.sampled_from(["*", "a", "?", "[!x]", "b*"]), min_size=1, max_size=4), PATHS)
def test_one_star_never_matches_a_dot(parts: list[str], path: str) -> None:
    if to_path_filter(".".join(parts)).selects(path):
        assert path.count(".") == len(parts) - 1


@given(GLOBS, PATHS)
def test_two_stars_in_front_match_wherever_the_rest_does(glob: str, path: str) -> None:
    tails = [path.split(".", count)[-1] for count in range(path.count(".") + 1)]
    anywhere = any(to_path_filter(glob).selects(tail) for tail in tails)
    assert to_path_filter(f"**.{glob}").selects(path) == anywhere


@given(GLOBS, PATHS)
def test_exclude_is_the_opposite_of_include(glob: str, path: str) -> None:
    assert to_path_filter(glob).selects(path) != to_path_filter(None, glob).selects(path)


@given(st.text(max_size=12), st.lists(PATHS, max_size=4))
def test_any_text_is_a_pattern_or_a_value_error(text: str, paths: list[str]) -> None:
    try:
        found = to_path_filter(text)
    except ValueError:
        return
    assert isinstance(describe_unmatched(unmatched(found, paths), paths), str)
