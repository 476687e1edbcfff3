"""Every reading command over every kind of recording, on terminals of several widths and in a pipe."""

import re
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import run_command
from modtrace.store.copy import write_recording
from modtrace.views.common.columns import Text

COMMANDS = {
    "show": "show run",
    "show slots": "show run --slots --no-fold",
    "ops": "ops run",
    "ops by name": "ops run --by op",
    "ops by call": "ops run --by call",
    "memory": "memory run --ops",
    "paths": "paths run",
    "modules": "paths run --modules",
    "graph": "graph run",
    "picture": "graph run -o a.dot",
    "timeline": "timeline run -o a.json",
    "export": "export run -o a.dot",
    "nonfinite": "nonfinite run",
}
TABLES = ("show", "show slots", "ops", "ops by name", "ops by call", "memory", "paths")
WIDTHS = (60, 80, 200)


def recording(*, ops: bool = True, value: float = 1.0) -> TypedRecording:
    """A training step and one of evaluation, of a model with blocks, their ops and values."""
    options = {"values": "stats", "ops": {"saved": True} if ops else None, "backward_times": ops}
    build = RecordingBuilder(complete=True, argv=("train.py", "--epochs", "3"), options=options)
    net = build.module("", "LanguageModel", parameters=1_200_000)
    blocks = [build.module(f"blocks.{at}", "TransformerBlock", parent=net, parameters=900) for at in range(3)]
    parts = [
        build.module(f"blocks.{at}.attention", "Attention", parent=each) for at, each in enumerate(blocks)
    ]
    for step, kind in enumerate(("train", "eval")):
        start_ns = step * 1_000_000
        build.step(step, start_ns, start_ns + 900_000, kind=kind, overhead_ns=1_000)
        outer = build.call(net, start_ns, start_ns + 500_000)
        for at, (block, part) in enumerate(zip(blocks, parts, strict=True)):
            time_ns = start_ns + at * 10_000
            call = build.call(block, time_ns, time_ns + 9_000, parent=outer)
            inner = build.call(part, time_ns, time_ns + 8_000, parent=call)
            build.output(inner, [value if at == 1 else 1.0])
            build.gradient(inner, [0.5])
            build.output(call, [2.0], "['hidden_states']")
            build.parameter(part, "weight", [1.0])
            if not ops:
                continue
            op = build.op(inner, "aten.addmm.default", time_ns, time_ns + 7_000, flops=9_000, bytes_read=800)
            build.tensor([2], producer=op)
            if kind == "train":
                backward = build.backward(inner, time_ns + 500_000, time_ns + 505_000)
                build.tensor([2], producer=build.op(backward, "aten.mm.default", time_ns, time_ns + 3_000))
        if kind == "train":
            build.optimizer(start_ns + 800_000, start_ns + 850_000)
    return build.data()


def write_cut(path: Path) -> None:
    write_recording(recording(), path)
    file = path / "rank-00000/calls.arrow"
    file.write_bytes(file.read_bytes()[:-60])


def write_killed(path: Path) -> None:
    write_recording(recording(), path)
    file = path / "rank-00000/meta.json"
    file.write_text(
        file.read_text().replace('"complete": true', '"complete": false').replace('"ended": [', '"was": [')
    )


#: Kinds of recordings, and those commands that cannot answer of one: they exit with 2.
RECORDINGS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "ops": (lambda path: write_recording(recording(), path), ()),
    "no ops": (
        lambda path: write_recording(recording(ops=False), path),
        ("ops", "ops by name", "ops by call", "memory", "paths", "modules"),
    ),
    "nan": (lambda path: write_recording(recording(value=nan), path), ()),
    "killed": (write_killed, ()),
    "cut": (write_cut, ("show", "show slots", "graph", "picture", "timeline", "export")),
    "nothing": (lambda path: write_recording(RecordingBuilder(complete=True).data(), path), (*COMMANDS,)),
    "no meta": (
        lambda path: (write_recording(recording(), path), (path / "rank-00000/meta.json").unlink()),
        (),
    ),
    "empty": (Path.mkdir, (*COMMANDS,)),
}


#: The kinds of recordings that a step is chosen of.
WITH_STEPS = ("ops", "nan")


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        *((kind, step) for kind in WITH_STEPS for step in ("first-train", "last-eval")),
        *((kind, None) for kind in RECORDINGS if kind not in WITH_STEPS),
    ],
)
def test_every_command_keeps_to_the_width_and_names_what_it_leaves_out(
    kind: str,
    step: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, failing = RECORDINGS[kind]
    # What is damaged changes no column, and another step and another value not the columns of one kind of step.
    has_own_columns = (kind, step) in (("ops", "first-train"), ("nan", "last-eval"), ("no ops", None))
    widths = WIDTHS if has_own_columns else WIDTHS[1:2]
    write(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name, words in COMMANDS.items():
        of_step = ("--step", step) if step is not None and name != "nonfinite" else ()
        said = {}
        for width in (None, *widths):
            monkeypatch.setenv("COLUMNS", str(width) if width else "")
            code = run_command(monkeypatch, *words.split(), *of_step)
            assert code == (2 if name in failing else 1 if (name, kind) == ("nonfinite", "nan") else 0)
            out, err = capsys.readouterr()
            assert "Traceback" not in err and "\x1b" not in out
            assert out == "" or code != 2
            if code == 2:
                assert err.startswith("modtrace: error: run: ") and err.count("\n") == 1
                continue
            if width:
                assert [each for each in (out + err).splitlines() if Text(each).width > width] == []
            said[width] = out
        if name in TABLES and said:
            for width in widths:
                narrow = tables_of(said[width])
                assert [sorted(shown | left_out) for shown, left_out in narrow] == [
                    sorted(shown) for shown, _ in tables_of(said[None])
                ]
                assert [shown & left_out for shown, left_out in narrow] == [set()] * len(narrow)


def tables_of(text: str) -> list[tuple[set[str], set[str]]]:
    """The titles of the columns of each table, and those that it says are left out."""
    parts = [part for part in text.split("\n\n")[1:] if re.match(r"(module|type|op|call)  ", part)]
    notes = [" ".join(part.split()).partition("left out at a width of ")[2] for part in parts]
    return [
        (
            {*re.split(r"\s{2,}", part.splitlines()[0])},
            {*note.partition(": ")[2].partition(" (")[0].split(", ")} - {""},
        )
        for part, note in zip(parts, notes, strict=True)
    ]


@pytest.mark.parametrize("name", [*TABLES, "nonfinite"])
def test_a_terminal_has_colours_unless_no_color_is_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(recording(value=nan), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    run_command(monkeypatch, *COMMANDS[name].split())
    assert "\x1b[" in (colored := capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    run_command(monkeypatch, *COMMANDS[name].split())
    assert capsys.readouterr().out == re.sub(r"\x1b\[[0-9;]*m", "", colored).replace(" \n", "\n")
