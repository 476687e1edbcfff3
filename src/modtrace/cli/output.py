"""Prints the output of commands."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..recording.suggestions import first_few
from ..store.layout import is_url
from ..views.common.columns import Text, printable, render_lines

#: The lines that stand above and below a table.
_AROUND = 12


#: The key in click's context for a function that returns the numbers of training steps; see `count_training`.
TRAINING_COUNTS = "modtrace.training-counts"

#: A step that an answer names, and how many of them are told their numbers among those of training.
_STEP = re.compile(r"\bstep\s+(\d{1,9})\b")
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_MOST_COUNTED = 3


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
    """Prints the result of a rendering function for the width and the colours of standard output.

    If it names training steps that come after an evaluation, which is a step too, a last line tells their numbers as a
    training log counts them.
    """
    terminal = find_terminal()
    text = render(*args, **options, width=terminal.width, color=terminal.color)
    print_text(text)
    told = _number_training({int(number) for number in _STEP.findall(_STYLE.sub("", text))})
    if told:
        line = f"steps count evaluations: {first_few(told, _MOST_COUNTED)}"
        print_text(render_lines([Text(line, "dim")], color=terminal.color, width=terminal.width))


def _number_training(steps: Set[int]) -> list[str]:
    """Returns which step of training each step is that has an evaluation before it: `step 9 is the 7th of training`."""
    context = click.get_current_context(silent=True)
    if not steps or context is None or TRAINING_COUNTS not in context.meta:
        return []
    counts = context.meta[TRAINING_COUNTS]()
    late = [step for step in sorted(steps & counts.keys()) if counts[step] <= step]
    return [f"step {step} is the {_ordinal(counts[step])} of training" for step in late]


def _ordinal(number: int) -> str:
    is_teen = 10 < number % 100 < 14
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def print_text(text: str) -> None:
    """Prints whole lines. Characters that standard output cannot encode become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)
