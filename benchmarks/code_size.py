"""How many lines each package has, all and those of code alone, and how long functions are: `make size`."""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent / "src" / "modtrace"

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def code_lines(path: Path) -> set[int]:
    """The numbers of the lines of a file that hold code, of Python or of C."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".c", ".h"):
        text = _C_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        return {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - _docstring_lines(ast.parse(text))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def function_lengths(path: Path) -> Iterator[tuple[int, str]]:
    """For each function of a Python file how many lines of code it has, with its first one, and where it stands."""
    lines = code_lines(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield len(lines.intersection(own)), f"{path.name}:{node.name}"


def package_of(path: Path, root: Path) -> str:
    """Returns "analysis/graph" for analysis/graph/build.py, and the file's name for one beside the packages."""
    folder = path.relative_to(root).parent.as_posix()
    return path.name if folder == "." else folder


def size_table(root: Path) -> str:
    """The lines of each package, all of them and those of code, and their sums."""
    every, code, files = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".pyi", ".c", ".h")):
        package = package_of(path, root)
        every[package] += len(path.read_text(encoding="utf-8").splitlines())
        code[package] += len(code_lines(path))
        files[package] += 1
    rows = [
        *((package, files[package], every[package], code[package]) for package in sorted(files)),
        ("sum", files.total(), every.total(), code.total()),
    ]
    return "\n".join(
        f"{package:<24} {count:>5} files {total:>7,} lines {size:>7,} of code"
        for package, count, total, size in rows
    )


def describe_functions(root: Path) -> str:
    """How many functions there are, and how long: `3000 functions, median 6 lines, longest 60 (file.py:name)`."""
    lengths = sorted(each for path in root.rglob("*.py") for each in function_lengths(path))
    longest, where = lengths[-1]
    middle = median(length for length, _ in lengths)
    return f"{len(lengths)} functions of Python, median {middle:g} lines of code, longest {longest} ({where})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the folder of the package")
    root = parser.parse_args().root
    print(size_table(root))
    print(describe_functions(root))


if __name__ == "__main__":
    main()
