"""Which modules a tracker takes: searched expressions, exact names, globs."""

import re
import warnings
from typing import Any

import pytest
from torch import nn

import modtrace
from modtrace.errors import ModtraceWarning
from modtrace.tensor_tracker import Tracker, track


class Deep(nn.Module):
    """Twelve blocks, each with an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_in = nn.Identity()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": nn.Identity()}) for _ in range(12))


def chosen(**options: Any) -> list[str]:
    """The names that are registered."""
    with track(Deep(), strict=True, **options) as tracker:
        return [each.name for each in tracker._collector.registered]


def test_text_is_searched_so_that_one_is_in_ten() -> None:
    assert [name for name in chosen(include=r"blocks.1") if name.count(".") == 1] == [
        "blocks.1",
        "blocks.10",
        "blocks.11",
    ]


def test_exact_name_is_that_module_alone() -> None:
    assert chosen(include="blocks.1", match="exact") == ["blocks.1"]
    assert chosen(include=["blocks.1", "blocks.10.attn"], match="exact") == ["blocks.1", "blocks.10.attn"]
    assert chosen(include="", match="exact") == [""]
    assert chosen(include="blocks.1", exclude="blocks.1", match="exact") == []


def test_dot_of_an_exact_name_is_a_dot() -> None:
    with pytest.warns(ModtraceWarning, match="nearest are: embed_in"):
        assert chosen(include="embed.in", match="exact") == []


def test_glob_is_that_of_a_recording() -> None:
    assert chosen(include="blocks.?.attn", exclude="blocks.[2-9].*", match="glob") == [
        "blocks.0.attn",
        "blocks.1.attn",
    ]
    assert chosen(include="re:_in$", match="glob") == ["embed_in"]


def test_compiled_expression_is_searched_whatever_the_match() -> None:
    for match in ("search", "exact", "glob"):
        assert chosen(include=re.compile("EMBED", re.I), match=match) == ["embed_in"]


def test_several_expressions_are_alternatives() -> None:
    assert chosen(include=["_in$", re.compile(r"\.3\.")], exclude=["nothing"]) == [
        "embed_in",
        "blocks.3.attn",
    ]


def test_empty_expression_is_everything() -> None:
    assert len(chosen(include="")) == len(chosen()) == 27


def test_include_that_matches_nothing_warns_once_and_stashes_nothing() -> None:
    with pytest.warns(ModtraceWarning) as caught:
        tracker = track(Deep(), include=r"blocks\.12\.atn")
    assert [str(each.message) for each in caught] == [
        r"include='blocks\\.12\\.atn' matches no module; the nearest are: blocks.11.attn, blocks.10.attn, "
        "blocks.9.attn, blocks.8.attn, blocks.7.attn. Nothing of it is stashed; see `match` of modtrace.track() for "
        "how a text is read."
    ]
    assert caught[0].filename == __file__
    assert str(tracker) == "Tracker(stashes=0, tracking=0)"


def test_each_pattern_of_several_that_matches_nothing_is_told() -> None:
    with pytest.warns(ModtraceWarning) as caught:
        assert chosen(include=["embed_in", "blcks.1"], match="exact") == ["embed_in"]
    assert [str(each.message).split(";")[0] for each in caught] == ["include='blcks.1' matches no module"]


def test_exclude_that_matches_nothing_is_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(chosen(exclude="nothing")) == 27


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"include": 3},
            TypeError,
            r"^include=3: give a text, a compiled regular expression, or a list of those$",
        ),
        ({"exclude": ["a", None]}, TypeError, r"^exclude\[1\]=None: give a text"),
        ({"include": re.compile(b"a")}, TypeError, r"^include=re.compile\(b'a'\): give a text"),
        ({"include": []}, ValueError, r"^include=\[\] holds no pattern\. Give at least one"),
        ({"match": "fullmatch"}, ValueError, r"^match='fullmatch': give 'search', 'exact' or 'glob'$"),
        ({"include": "("}, re.error, "missing"),
        ({"include": "a[", "match": "glob"}, ValueError, r"^include='a\[' is not a glob"),
    ],
)
def test_pattern_that_cannot_be_read_is_an_error_and_leaves_nothing(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        track(Deep(), **options)


def test_register_all_chooses_too() -> None:
    with Tracker(strict=True) as tracker:
        tracker.register_all(Deep(), grad=False, include="blocks.3", match="exact")
        assert str(tracker) == "Tracker(stashes=0, tracking=1)"


def test_track_is_public() -> None:
    assert modtrace.track is track


@pytest.mark.parametrize("given", ["model", None])
def test_what_is_no_module_is_refused_at_once(given: Any) -> None:
    with pytest.raises(TypeError, match=r"register_all\(module=.*\): give a torch.nn.Module"):
        track(given)
