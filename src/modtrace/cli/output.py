"""Prints the output of commands."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..store.layout import is_url
from ..views.common.columns import Text, printable, render_lines

#: The lines that stand above and below a table.
_AROUND = 12


class Terminal(NamedTuple):
    """The capabilities of standard output; `width` is None in a pipe or a file, unless COLUMNS is set."""

    width: int | None
    color: bool


def find_terminal() -> Terminal:
    """Returns the capabilities of standard output; `NO_COLOR` (https://no-color.org) is respected."""
    if not sys.stdout.isatty():
        columns = os.environ.get("COLUMNS", "")
        return Terminal(width=int(columns) if columns.isdecimal() and int(columns) else None, color=False)
    return Terminal(width=shutil.get_terminal_size().columns, color=not os.environ.get("NO_COLOR"))


def find_screenful() -> int | None:
    """Returns how many rows of a table a terminal has room for, beside what stands around it; None: it is none."""
    return max(shutil.get_terminal_size().lines - _AROUND, _AROUND) if sys.stdout.isatty() else None


def wrap(text: str) -> str:
    """Returns lines of prose, broken at blanks if the terminal is narrower."""
    return render_lines(map(Text, text.splitlines()), color=False, width=find_terminal().width)


def tell(text: str, path: Path | str) -> None:
    """Prints a text about the file that was written to a path.

    It goes to standard error if the path is not a regular file, because the path may be standard output.
    """
    if is_url(path) or os.path.isfile(path) or os.path.isdir(path):
        print_text(text)
    else:
        click.echo(text, nl=False, err=True)


def tell_marks(marks: Sequence[str]) -> None:
    """Prints the marks of a recording to standard error, for output formats that cannot contain them."""
    for mark in marks:
        click.echo(wrap(f"! {printable(mark)}"), nl=False, err=True)


def print_view(render: Callable[..., str], *args: Any, **options: Any) -> None:
    """Prints the result of a rendering function for the width and the colours of standard output."""
    terminal = find_terminal()
    print_text(render(*args, **options, width=terminal.width, color=terminal.color))


def print_text(text: str) -> None:
    """Prints whole lines. Characters that standard output cannot encode become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)
