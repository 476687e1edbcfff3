"""The command line as a whole: commands are found late, errors become exit codes."""

import os
import subprocess
import sys
from types import ModuleType

import click
import pytest

from helpers.command_line import Command
from modtrace.cli.main import COMMANDS, main
from modtrace.errors import MisuseError


def replace_command(monkeypatch: pytest.MonkeyPatch, name: str, command: click.Command) -> None:
    module = ModuleType(f"modtrace.cli.{name}")
    setattr(module, name, command)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(command: Command, arguments: tuple[str, ...]) -> None:
    text = command(*arguments).out
    assert all(name in text for name in COMMANDS)


def test_help_imports_no_command_and_no_library() -> None:
    code = (
        "import sys; sys.argv = ['modtrace', '--help']\n"
        "from modtrace.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules)"
    )
    loaded = set(run_python(code).stdout.split())
    assert loaded.isdisjoint(
        {"modtrace.cli.show", "modtrace.api.recording", "torch", "numpy", "pyarrow", "rich"}
    )


def test_unknown_command_is_misuse(command: Command) -> None:
    assert command("shew", code=2).err == (
        "modtrace: error: There is no command 'shew'. Did you mean 'show'? Try 'modtrace --help'.\n"
    )


def test_script_in_place_of_a_command_is_told_how_it_is_recorded(command: Command) -> None:
    assert command("train.py", "--steps", "3 4", code=2).err == (
        "modtrace: error: There is no command 'train.py'. To record a script: "
        "modtrace record [OPTIONS] train.py --steps '3 4'. "
        "Try 'modtrace --help'.\n"
    )


def test_error_of_ours_is_one_line_and_exit_code_2(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def show() -> None:
        raise MisuseError("out of order")

    replace_command(monkeypatch, "show", show)
    assert command("show", code=2).err == "modtrace: error: out of order\n"


def test_error_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def show() -> None:
        raise ZeroDivisionError

    replace_command(monkeypatch, "show", show)
    monkeypatch.setattr(sys, "argv", ["modtrace", "show"])
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize("code", [0, 1, 3])
def test_exit_code_of_a_command_is_passed_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    @click.command()
    @click.pass_context
    def show(ctx: click.Context) -> None:
        ctx.exit(code)

    replace_command(monkeypatch, "show", show)
    command("show", code=code)


def test_interrupt_is_exit_code_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def show() -> None:
        raise KeyboardInterrupt

    replace_command(monkeypatch, "show", show)
    command("show", code=130)


def test_broken_pipe_is_silent() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "from modtrace.cli.output import print_text as p\nimport sys, click\n"
    code += "@click.command()\ndef c(): [p('line\\n' * 9999) for _ in range(9)]\nc(standalone_mode=False)"
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert process.stderr == b""


def test_output_survives_a_terminal_without_the_characters() -> None:
    code = "from modtrace.cli.output import print_text\nprint_text('├─ a\\n')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert process.stdout.splitlines() == [b"?? a"]


@pytest.mark.parametrize("module", ["modtrace", "modtrace.cli.main"])
def test_modules_of_the_command_line_run_it(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "show", "nothing.modtrace"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("modtrace: error: nothing.modtrace")
