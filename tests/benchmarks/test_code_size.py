"""What counts as a line, and what as one of code."""

from pathlib import Path

from helpers.benchmark_runs import run_benchmark

PYTHON = '''"""A module
of two lines."""

import os  # code

# a comment


class Thing:
    """A class."""

    TEXT = """no

    docstring"""

    def run(self) -> str:
        """A function."""

        return os.sep
'''

C = """/* A comment
   of two lines. */
#include <Python.h>

static int one(void) { return 1; } // code
"""


def test_blank_lines_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "thing.py").write_text(PYTHON)
    (tmp_path / "things" / "_thing.c").write_text(C)
    (tmp_path / "alone.py").write_text("x = 1\n")
    done = run_benchmark("code_size.py", str(tmp_path))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "alone.py                     1 files       1 lines       1 of code",
        "things                       2 files      24 lines       9 of code",
        "sum                          3 files      25 lines      10 of code",
        "1 functions of Python, median 2 lines of code, longest 2 (thing.py:run)",
    ]
