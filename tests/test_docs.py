"""The pages name what is there: every message has its heading, every path and test named exists, schema.md is fresh."""

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import modtrace

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "src" / "modtrace"
PAGES = [*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md")]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

#: Classes whose texts no user is meant to see: bugs of ours, and what is caught within the package.
NOT_SHOWN = {"AssertionError", "AttributeError", "LookupError"}

#: Characters that a heading has at least.
LEAST = 10

VARIABLE = "…"  # what stands for the changing parts of a text


#: A file of Python, C or text, with the folders before it.
NAME_OF_FILE = r"(?:[\w-]+/)*[\w-]+\.(?:py|pyi|c|h|md)(?!\w)"

#: What may not stand before it: a name would be the end of a longer one, or of an address.
NOT_BEHIND = r"(?<![\w:/.-])"

#: Files of users that the pages talk about.
FILES_OF_USERS = {"train.py", "script.py", "__main__.py"}


class Message(NamedTuple):
    """A text of the source, with `…` for what changes in it."""

    where: str
    kind: str  # the class, or the name of what gives it out
    text: str


@cache
def messages() -> list[Message]:
    """All warnings, errors and marks whose text stands in the source."""
    return [
        message
        for path in sorted(PACKAGE.rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for message in _messages_of(function, str(path.relative_to(PACKAGE)))
    ]


def _messages_of(function: ast.FunctionDef, file: str) -> Iterator[Message]:
    texts = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and call.args:
            kind = _kind(call)
            text = _text(call.args[0], texts)
            if kind is not None and len(text.replace(VARIABLE, "").strip(" :.()")) > 3:
                yield Message(f"{file}:{call.lineno}", kind, text)


def _kind(call: ast.Call) -> str | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "warn":
        of_ours = any("ModtraceWarning" in ast.unparse(each) for each in [*call.args, *call.keywords])
        return "ModtraceWarning" if of_ours else None
    if name in NOT_SHOWN:
        return None
    is_error = name.endswith(("Error", "Exception")) or name in {"UsageError", "BadParameter", "kind", "mark"}
    return name if is_error else None


def _text(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """The fixed parts of a text; variables of the same function are looked up, once."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, texts) if isinstance(node.value, (ast.Name, ast.Call)) else VARIABLE
    if isinstance(node, ast.Name) and node.id in texts:
        return _text(texts[node.id], {})
    return VARIABLE


def headings() -> list[str]:
    page = (PROJECT / "docs" / "messages.md").read_text(encoding="utf-8")
    return re.findall(r"^### (.+)$", page, re.MULTILINE)


def names(heading: str, text: str) -> bool:
    """Whether the fixed parts of the heading stand in the text, in order."""
    at = 0
    for part in filter(None, (each.strip() for each in heading.split(VARIABLE))):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def source_texts() -> list[str]:
    """Every text in the source, also those that a function returns for others to give out."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(_text(node, {}))
    return found


class Row(NamedTuple):
    """A row of the tables of changes in CONTRIBUTING.md."""

    package: str  # "src/modtrace/collect/steps/"
    first_files: list[str]
    tests: list[str]


def rows_of_changes() -> list[Row]:
    page = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("### I want to change ...")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .+? \| `(src/[^`]+)` \| (.+) \| (.+) \|$", section, re.MULTILINE)
    return [Row(package, *(re.findall(r"`([^`]+)`", each) for each in others)) for package, *others in rows]


@cache
def files_of_ours() -> list[str]:
    """Every file of the project, with a slash before its path."""
    folders = [PROJECT / each for each in ("src", "tests", "docs", "benchmarks", "examples")]
    paths = [*PROJECT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]
    return [f"/{path.relative_to(PROJECT)}" for path in paths]


def is_file_of_ours(name: str) -> bool:
    """Whether a path of the project ends with this name."""
    return any(path.endswith(f"/{name}") for path in files_of_ours())


def test_messages_are_found_in_the_source() -> None:
    kinds = [message.kind for message in messages()]
    assert kinds.count("ModtraceWarning") >= 3
    assert {"RecordingExistsError", "MisuseError", "ValueError", "mark"} <= set(kinds)


def test_every_warning_has_its_heading() -> None:
    of_warnings = [each for each in messages() if each.kind == "ModtraceWarning"]
    missing = [each for each in of_warnings if not any(names(heading, each.text) for heading in headings())]
    assert missing == []


def test_every_error_and_mark_has_its_heading() -> None:
    others = [each for each in messages() if each.kind != "ModtraceWarning"]
    missing = [each for each in others if not any(names(heading, each.text) for heading in headings())]
    assert missing == []


def test_every_heading_is_of_a_text_in_the_source() -> None:
    texts = {*source_texts(), *(message.text for message in messages())}
    texts = {text for text in texts if len(text) >= LEAST}  # a heading is found in no shorter one
    gone = [heading for heading in headings() if not any(names(heading, text) for text in texts)]
    assert gone == []


def test_no_heading_is_there_twice_or_names_anything_at_all() -> None:
    found = headings()
    assert len(set(found)) == len(found)
    assert [heading for heading in found if len(heading.replace(VARIABLE, "").strip()) < LEAST] == []


def test_the_page_of_tables_is_fresh() -> None:
    script = runpy.run_path(str(PROJECT / "docs" / "make_schema.py"))
    assert (PROJECT / "docs" / "schema.md").read_text(encoding="utf-8") == script["render_schema"](), (
        "run `make docs`"
    )


def test_the_page_of_tables_has_every_column() -> None:
    from modtrace.recording.schema import schemas

    page = (PROJECT / "docs" / "schema.md").read_text(encoding="utf-8")
    parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert list(parts) == list(schemas())
    for table, columns in schemas().items():
        assert re.findall(r"^\| `(\w+)` \|", parts[table], re.MULTILINE) == columns.names


def test_the_drawing_has_every_package_and_every_arrow() -> None:
    script = runpy.run_path(str(PROJECT / "docs" / "make_drawing.py"))
    drawing = (PROJECT / "docs" / "packages.svg").read_text(encoding="utf-8")
    folders = {str(each.parent.relative_to(PACKAGE)) for each in PACKAGE.rglob("__init__.py")} - {"."}
    drawn = set(re.findall(r'<g id="(\S+)" class="(?:node|cluster)">', drawing))
    assert sorted((folders | script["boxes"]()) - drawn) == [], "run `make docs`"
    arrows = re.findall(r'<g id="(\S+) to (\S+)" class="edge">', drawing)
    assert sorted(arrows) == sorted(script["arrows"]()), "run `make docs`"


def test_arrows_of_the_drawing_are_those_that_others_do_not_imply() -> None:
    nearest = runpy.run_path(str(PROJECT / "docs" / "make_drawing.py"))["_nearest"]
    may_import = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert nearest("top", may_import) == {"middle"}
    assert nearest("middle", may_import) == {"bottom"}


def test_every_package_has_a_row_in_the_tables_of_changes() -> None:
    files = [each for each in PACKAGE.rglob("*.py") if each.name != "__init__.py"]
    packages = {f"{each.parent.relative_to(PROJECT)}/" for each in files}
    assert len(packages) > 30
    assert sorted(row.package for row in rows_of_changes()) == sorted(packages)


def test_every_file_in_the_tables_of_changes_exists() -> None:
    for row in rows_of_changes():
        assert row.first_files, f"{row.package} names no file to read first"
        assert [each for each in row.first_files if not (PROJECT / row.package / each).is_file()] == []


def test_every_test_in_the_tables_of_changes_exists() -> None:
    for row in rows_of_changes():
        assert row.tests, f"{row.package} names no tests"
        assert [each for each in row.tests if not (PROJECT / each).exists()] == []


def test_every_package_with_a_folder_of_tests_names_it() -> None:
    for row in rows_of_changes():
        folder = row.package.replace("src/modtrace/", "tests/")
        has_tests = folder != "tests/" and any((PROJECT / folder).glob("test_*.py"))
        assert not has_tests or folder in row.tests


@pytest.mark.parametrize(
    "page", [each for each in PAGES if each.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_every_file_named_on_a_page_exists(page: Path) -> None:
    """The changelog also tells of files that are gone."""
    found = re.findall(NOT_BEHIND + NAME_OF_FILE, page.read_text(encoding="utf-8"))
    assert sorted({each for each in found if each not in FILES_OF_USERS and not is_file_of_ours(each)}) == []


@EACH_PAGE
def test_functions_of_modtrace_on_the_pages_exist(page: Path) -> None:
    called = re.findall(r"\bmodtrace\.([A-Za-z_]\w*)\(", page.read_text(encoding="utf-8"))
    of_the_fixture = {"assert_same", "assert_finite"}  # which pytest gives tests under the same name
    assert set(called) <= {*modtrace.__all__, *of_the_fixture}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "docs"])
def test_every_file_named_in_code_exists(folder: str) -> None:
    """Names that begin with a folder of ours are meant; others are of files that tests make."""
    folders = ["docs", "tests", "src", "benchmarks", "examples", *(each.name for each in PACKAGE.iterdir())]
    of_ours = re.compile(rf"{NOT_BEHIND}(?:{'|'.join(map(re.escape, folders))})/{NAME_OF_FILE}")
    missing = {
        f"{path.relative_to(PROJECT)}: {found.group()}"
        for path in (PROJECT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".c", ".h"}
        for found in of_ours.finditer(path.read_text(encoding="utf-8"))
        if not is_file_of_ours(found.group())
    }
    assert sorted(missing) == []


@EACH_PAGE
def test_every_link_points_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", _without_code(page))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_page_of_docs_is_below_a_question() -> None:
    docs = PROJECT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    linked = {(docs / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", index)}
    assert [page for page in docs.rglob("*.md") if page.name != "index.md" and page not in linked] == []


@EACH_PAGE
def test_every_test_named_on_a_page_exists(page: Path) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
    assert [
        f"{file}::{test}"
        for file, test in named
        if not (PROJECT / file).exists() or f"def {test}(" not in (PROJECT / file).read_text(encoding="utf-8")
    ] == []


def test_every_promise_has_a_test_that_shows_it() -> None:
    page = (PROJECT / "docs" / "promises.md").read_text(encoding="utf-8")
    promises = re.findall(r"^\| ([A-Z].+) \| (.+) \|$", page, re.MULTILINE)
    assert len(promises) > 15
    assert [promise for promise, shown_by in promises if "](../tests/" not in shown_by] == []


@EACH_PAGE
def test_no_line_is_longer_than_120_characters_outside_of_tables(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 120 and not line.startswith("|") and "::test_" not in line]
    assert long == []


@pytest.mark.parametrize("page", ["vocabulary.md", "how-it-works.md"])
def test_python_on_the_page_is_python(page: str) -> None:
    text = (PROJECT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)


def _without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
