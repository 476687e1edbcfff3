"""The words that were retired stay retired, and every word of ours stands in docs/vocabulary.md.

A retired word had several meanings, or was an image where the field has a word of its own.
"""

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "src" / "modtrace"

#: A retired word, as a part of an identifier or of the name of a file, and what is said instead.
RETIRED = {
    "place": "CallContext, OpRun or TreePlace",
    "places": "contexts, runs or rows",
    "wish": "CaptureMasks",
    "wishes": "CaptureMasks",
    "hear": "the listener's method, such as call_began",
    "heard": "BackwardCall",
    "hearer": "BackwardListener",
    "hearing": "CallEvents",
    "crossing": "CallTensors",
    "crossings": "CallTensors",
    "passing": "passthrough",
    "saving": "SavedForBackward, saved_memory",
    "savings": "SavedForBackward, saved_memory",
    "draft": "NodeTable",
    "drafts": "NodeTable",
    "spread": "tier2",
    "spreads": "tier2",
    "words": "dictionary codes",
    "door": "the wrapped engine entry",
    "doors": "the wrapped engine entries",
    "asleep": "suspended",
    "woken": "resumed",
    "wake": "resume",
    "manieth": "index",
    "rooms": "row slots",
    "told_of": "receives",
    "tell_of": "passes to",
    "comes_by": "is seen",
    "came_by": "was seen",
    "each": "what the variable holds: call, op, column",
}

#: Pairs of words that contain a retired one and mean something else.
IN_ENGLISH = {
    "in_place": "writes in place",
    "tree_place": "the word that replaces one meaning of `place`",
    "tree_places": "the same, of several",
    "of_each": "for every one of several",
    "in_each": "for every one of several",
    "once_each": "every one of several one time",
}

#: Retired words that mean something else in a folder or in files whose paths begin so.
MEANS_SOMETHING_ELSE = {
    ("analysis/graph_view/", "crossing"): "an edge that crosses the border of a layer",
    ("cli/children", "words"): "the words of a command line",
    ("measure/_fingerprint", "words"): "64 bits of memory",
    ("measure/fingerprints", "words"): "32 bits of memory",
    ("recording/statistics/fingerprints", "words"): "32 bits of memory",
    ("measure/device_fingerprints", "words"): "64 bits of memory",
    ("collect/recorder/flush_timer", "wake"): "a thread that waits is woken",
    ("views/plot/", "words"): "what a reader of a plot reads",
}

#: Retired words that some identifier still contains. A word that has gone is taken out here, and stays out.
STILL_USED: set[str] = {
    "place",
    "places",
}

#: Retired phrases of docstrings, comments and pages.
RETIRED_PHRASES = {
    "how-manieth": "index",
    "has somebody": "passes",
    "rooms for": "row slots",
    "whose it is": "owner",
    "is told of": "receives",
    "comes by": "is seen",
    "come by": "are seen",
    "came by": "was seen",
    "of that sort": "of this kind",
    "at the door": "around the engine's entry",
    "asleep": "suspended",
    "woken": "resumed",
    "the captures wish": "the captures ask",
    ": so many": "the largest number",
}

#: Retired phrases that still stand somewhere; treated as `STILL_USED`.
PHRASES_STILL_USED: set[str] = set()


#: Classes that two files define. A name that means one thing again is taken out here.
NAMED_TWICE = {
    "ModtraceCallback",  # one for each training framework, of which a script imports one
    "NonFinite",
}

#: Words of the code in docs/vocabulary.md that no identifier has yet. A word that has come is taken out here.
NOT_YET_USED: set[str] = set()


@cache
def identifiers() -> dict[str, list[str]]:
    """Each identifier and name of a file in the package, with the files that use it."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in {".py", ".pyi", ".c", ".h"}:
            for name in {path.stem, *path.relative_to(PACKAGE).parts[:-1], *_names_in(path)}:
                found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return found


def _names_in(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix in {".c", ".h"}:
        code = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', " ", text, flags=re.DOTALL)
        yield from re.findall(r"[A-Za-z_]\w*", code)
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from (each.string for each in tokens if each.type == tokenize.NAME)


def parts_of(identifier: str) -> str:
    """Returns "_op_run_" for `OpRun`, `op_run` and `_OP_RUN`."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", identifier)
    return f"_{'_'.join(parts).lower()}_"


def retired_words_in(identifier: str) -> list[str]:
    """The retired words that an identifier contains in their retired meaning."""
    parts = parts_of(identifier)
    for english in IN_ENGLISH:
        parts = parts.replace(f"_{english}_", "_")
    return [word for word in RETIRED if f"_{word}_" in parts]


@cache
def uses_of_words() -> dict[str, list[str]]:
    """For each retired word that is used in its retired meaning, the identifiers that contain it, each with a file."""
    uses: dict[str, list[str]] = {}
    for name, files in identifiers().items():
        for word in retired_words_in(name):
            retired_there = [each for each in files if not _means_something_else(word, each)]
            if retired_there:
                uses.setdefault(word, []).append(f"{retired_there[0]}: {name}")
    return uses


def _means_something_else(word: str, file: str) -> bool:
    return any(word == other and file.startswith(start) for start, other in MEANS_SOMETHING_ELSE)


@cache
def uses_of_phrases() -> dict[str, list[str]]:
    """For each retired phrase that is used, the files in which it stands."""
    pages = [each for each in PROJECT.glob("docs/*.md") if each.name != "vocabulary.md"]
    sources = [each for each in PACKAGE.rglob("*") if each.suffix in {".py", ".pyi", ".c", ".h"}]
    uses: dict[str, list[str]] = {}
    for path in (*sources, *pages, PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"):
        text = re.sub(r"[\s#*]+", " ", path.read_text(encoding="utf-8")).lower()
        for phrase in RETIRED_PHRASES:
            if phrase in text:
                uses.setdefault(phrase, []).append(str(path.relative_to(PROJECT)))
    return uses


def test_identifiers_contain_no_retired_word() -> None:
    uses = uses_of_words()
    found = {word: uses[word] for word in sorted(uses.keys() - STILL_USED)}
    assert found == {}, "; ".join(f"{word}: say {RETIRED[word]}" for word in found)


def test_words_that_are_still_used_occur() -> None:
    assert sorted(STILL_USED - uses_of_words().keys()) == [], "take them out of STILL_USED"


def test_docstrings_comments_and_pages_contain_no_retired_phrase() -> None:
    uses = uses_of_phrases()
    found = {phrase: uses[phrase] for phrase in sorted(uses.keys() - PHRASES_STILL_USED)}
    assert found == {}, "; ".join(f"{phrase}: say {RETIRED_PHRASES[phrase]}" for phrase in found)


def test_phrases_that_are_still_used_occur() -> None:
    assert sorted(PHRASES_STILL_USED - uses_of_phrases().keys()) == [], "take them out of PHRASES_STILL_USED"


def test_public_class_is_defined_once() -> None:
    names = [
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(name for name, count in Counter(names).items() if count > 1) == sorted(NAMED_TWICE)


def test_words_of_the_code_are_identifiers() -> None:
    page = (PROJECT / "docs" / "vocabulary.md").read_text(encoding="utf-8")
    section = page.split("## Words of the code\n")[1].split("\n## ")[0]
    words = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert len(words) > 15
    assert sorted(words - identifiers().keys()) == sorted(NOT_YET_USED)


@pytest.mark.parametrize(
    ("identifier", "words"),
    [
        ("PlaceTree", ["place"]),
        ("enter_place", ["place"]),
        ("_PLACES", ["places"]),
        ("BackwardHearer", ["hearer"]),
        ("_told_of_tensors", ["told_of"]),
        ("TreePlace", []),
        ("writes_in_place", []),
        ("replace", []),
        ("placement", []),
        ("find_passthrough", []),
    ],
)
def test_retired_words_are_found_in_an_identifier(identifier: str, words: list[str]) -> None:
    assert retired_words_in(identifier) == words
