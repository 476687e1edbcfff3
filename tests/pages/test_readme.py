"""What the README says works: its Python runs, its commands and options exist."""

import re
import shutil
from importlib.metadata import requires
from pathlib import Path

import pytest

from helpers.command_ends import end_of_modtrace
from helpers.command_line import run_command
from modtrace.cli.main import COMMANDS

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [block for each, block in found if each == language]


def console_lines() -> list[str]:
    """What is typed, without comments."""
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [line[2:].split("#")[0].strip() for line in lines]


def table_rows(title: str) -> list[tuple[str, str]]:
    section = README.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)


def run_modtrace(folder: Path, *arguments: str, status: int = 0) -> str:
    done = end_of_modtrace(folder, *arguments)
    assert done.status == status, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "Sequential  Sequential"), (1, "backward {'")],
    ids=["recording", "tracking"],
)
def test_python_runs_as_it_stands(number: int, shown: str, tmp_path: Path) -> None:
    done = end_of_modtrace(tmp_path, before=f"{blocks('python')[number]}\nraise SystemExit")
    assert (done.status, done.stderr) == (0, "")
    assert shown in done.stdout
    if number == 0:
        shown_again = run_modtrace(tmp_path, "show", "run.modtrace")
        assert "median of 3 steps, 0 to 2 (train)" in shown_again
        assert "3 steps recorded, 0 to 2" in shown_again


def test_python_is_there() -> None:
    assert len(blocks("python")) == 2


def test_first_commands_name_the_op_that_the_readme_names(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    record, nonfinite = [line.split()[1:] for line in console_lines() if line.startswith("modtrace ")][:2]
    run_modtrace(tmp_path, *record, "--width", "64", "--context", "16", "--batch", "2")
    answer = run_modtrace(tmp_path, *nonfinite, status=1)
    [printed] = blocks("")
    assert max(map(len, printed.splitlines())) <= 80
    # Sizes and numbers are those of a larger model; the op, its place and its cause are the same.
    for line in printed.splitlines()[:4]:
        words = re.sub(
            r"first non-finite values: \d+|, [\d.]+[KM]? elements|, the first at \S+|[\d.]+: float32",
            "|",
            line,
        ).split("|")
        assert [each for each in words if each not in answer] == []


def test_commands_of_the_module_tree_give_such_a_tree(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "module-tree.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text((PROJECT / "examples" / "train_gpt.py").read_text())
    record, show = [line.split()[2:] for line in page.splitlines() if line.startswith("$ modtrace ")]
    small = ["--steps", "2", "--layers", "4", "--width", "16", "--context", "8", "--batch", "2"]
    run_modtrace(tmp_path, *record, *small)
    shown = run_modtrace(tmp_path, *(word for word in show if word not in ("--step", "29")))
    page = page.split("\n## Medians over steps")[0]  # whose tree is another model's
    tree = [line[:26].rstrip() for line in page.splitlines() if re.match(r"[│├└ ]*[├└]─", line)]
    assert len(tree) > 15
    assert [line for line in tree if line not in shown] == []


@pytest.mark.parametrize(("command", "about"), table_rows("Commands"))
def test_commands_and_their_options_exist(
    command: str, about: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = command.split()[1]
    options = re.findall(r"`(--?[\w-]+)`", about)
    assert run_command(monkeypatch, name, "--help") == 0
    text = capsys.readouterr().out
    assert options
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)] == []


def test_commands_that_answer_questions_and_their_options_are_in_the_table() -> None:
    described = {command.split()[1]: f"`{command}` {about}" for command, about in table_rows("Commands")}
    section = README.split("## What else it answers\n")[1].split("\n## ")[0]
    asked = re.findall(r"^\| .+\? \| `modtrace (\w+) ([^`]+)` \|", section, re.MULTILINE)
    assert len(asked) == 13
    for command, rest in asked:
        options = re.findall(r"(?<!\S)--?[\w-]+", rest)
        assert [
            each for each in options if not re.search(rf"(?<![\w-]){each}(?![\w-])", described[command])
        ] == []


def test_every_command_is_in_the_table() -> None:
    assert [command.split()[1] for command, _ in table_rows("Commands")] == list(COMMANDS)


def test_make_targets_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"make (\w+)", " ".join(console_lines()))
    assert set(targets) == {"demo", "test"}
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_readme_is_read_in_one_go() -> None:
    assert len(README.splitlines()) <= 200


def test_costs_in_the_readme_are_those_of_their_page() -> None:
    page = (PROJECT / "docs" / "costs.md").read_text(encoding="utf-8")
    section = README.split("## What it costs, and what it promises\n")[1]
    named = re.findall(r"\b(1\.\d+) times", section)
    assert named
    assert [each for each in named if each not in page] == []


def test_extras_and_versions_are_those_of_the_project() -> None:
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.10"' in project and "Python 3.10 or newer" in README
    assert "torch>=2.11" in project and "2.11 or newer" in README


def test_readme_says_what_is_required_as_pyproject_does() -> None:
    required = [each.replace(">=", " ") for each in requires("modtrace") or () if "extra ==" not in each]
    assert required == ["numpy 2.0", "pyarrow 16", "click 8.1"]
    assert "with {}, {} and {} or newer".format(*required) in README
