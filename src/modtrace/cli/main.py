"""The command `modtrace`: imports its subcommands when they are called, and turns errors into exit codes."""

import importlib
import json
import shlex
import sys
from typing import NoReturn

import click

from ..errors import ModtraceError, NothingRecordedError
from ..recording.suggestions import did_you_mean
from ..views.common.columns import printable

#: Each command is the function of its name in the module `modtrace.cli.<name>`, which is imported on use.
COMMANDS = {
    "record": "Runs a Python script and records its models.",
    "show": "Shows the module tree of a recording with the times and values of one step.",
    "ops": "Shows what the ops of one step cost, by module, by call or by name.",
    "memory": "Shows which modules keep memory for the backward of one step.",
    "paths": "Shows which op ran in which module, in order.",
    "graph": "Draws the execution graph of one step, or of a model.",
    "view": "Writes a report for the browser: tables, graph, timeline and values in one file.",
    "timeline": "Writes when what ran, as a trace for Perfetto or Chrome.",
    "plot": "Draws how values went over the steps, with matplotlib.",
    "export": "Writes a recording in a format that other programs read.",
    "check": "Tells what is wrong with a run, and what to do.",
    "nonfinite": "Finds where NaN and infinite values came up first.",
    "recompute": "Tells whether checkpointing computed the same again.",
    "compare": "Tells where two recordings part, and which op made the difference.",
    "ranks": "Tells which ranks of a run there are, and which of them differ.",
    "query": "Answers questions about many exported runs and ranks, in SQL.",
    "verify": "Proves a recording of a model: runs all of it again, bit by bit.",
    "doctor": "Tells what works on this installation.",
}

#: The end of the help of commands that take a recording.
_RUN = "RUN is a folder that modtrace record, or record(to=...) in Python, has written."

EXIT_MISUSE = 2
_EXIT_INTERRUPTED = 130


class _LazyGroup(click.Group):
    """A group that imports a command when it runs it, so that `modtrace --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"modtrace.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        names = {param.name for param in command.params}
        if names & {"run", "a"} and "rank" not in names:  # a command is the same object in each call
            from .open_run import RankOption

            command.params.append(RankOption())
        if "run" in names:
            command.epilog = "\n\n".join(filter(None, (_RUN, command.epilog)))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS)
            if args[0].endswith(".py"):
                hint = f" To record a script: modtrace record [OPTIONS] {shlex.join(args)}"
            raise click.UsageError(f"There is no command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="modtrace", message="modtrace %(version)s")
@click.pass_context
def modtrace(ctx: click.Context) -> None:
    """Shows what runs inside a PyTorch model."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Runs the command line.

    Exit codes: 0 fine, 1 something was found, 2 misuse, or there is nothing that can be shown.
    """
    try:
        code = modtrace.main(prog_name="modtrace", standalone_mode=False)
    except click.Abort:
        sys.exit(_EXIT_INTERRUPTED)
    except click.ClickException as error:
        _fail(_describe(error))
    except NothingRecordedError as error:
        if "--json" in sys.argv:
            click.echo(json.dumps({"error": str(error)}))
        _fail(printable(str(error)))
    except ModtraceError as error:
        _fail(str(error))
    if callable(code):  # the program of `record` must not run inside click, which catches interrupts
        code = code()
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> NoReturn:
    click.echo(f"modtrace: error: {text}", err=True)
    sys.exit(EXIT_MISUSE)


def _describe(error: click.ClickException) -> str:
    text = error.format_message()
    if isinstance(error, click.NoSuchOption):
        text = f"{error.message.rstrip('.')}.{did_you_mean(error.option_name, error.possibilities or [])}"
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return text
    stop = "" if text.endswith((".", "?", "?)")) else "."
    return f"{text}{stop} Try '{error.ctx.command_path} --help'."


if __name__ == "__main__":  # `python -m modtrace.cli.main`
    main()
