"""Runs a script or a module as `python` would: its own `__main__`, arguments, exit code and traceback."""

import builtins
import importlib.abc
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import click

from ..store.layout import HEADER
from ..torch_internals.own_frames import is_ours
from .endings import Ending, Exited, print_ending
from .factory import locate_error
from .interrupts import EndingSignals


@dataclass(frozen=True)
class Program:
    """The program to run.

    Attributes:
        stem: a short name for it.
        file: its source file.
        argv: its `sys.argv`.
        search_path: the first entry of `sys.path` while it runs.
        spec: the spec of a module that is run by name, or of `__main__` in a folder or archive; None for a script.
    """

    stem: str
    file: str
    argv: tuple[str, ...]
    search_path: str
    spec: ModuleSpec | None = None


def find_script(path: str, arguments: Sequence[str]) -> Program:
    """Returns the program that `python path arguments...` would run.

    Raises:
        click.ClickException: there is no such file, or it is a folder or an archive without `__main__.py`.
    """
    stem, argv, place = Path(os.path.abspath(path)).stem, (path, *arguments), os.path.join(os.getcwd(), path)
    importer = pkgutil.get_importer(place)  # None for a script
    if importer is None and os.path.isfile(path):
        return Program(stem, place, argv, os.path.dirname(os.path.realpath(path)))
    spec = None if importer is None or not os.path.exists(path) else importer.find_spec("__main__")
    if spec is None or spec.origin is None:
        raise click.ClickException(f"{path}: {_what_is_wrong(path)}")
    return Program(stem, spec.origin, argv, place, spec)


def find_module(name: str, arguments: Sequence[str]) -> Program:
    """Returns the program that `python -m name arguments...` would run.

    Raises:
        click.ClickException: there is no such module, or it cannot be run.
    """
    _set_search_path(os.getcwd())
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise click.ClickException(f"-m {name}: no module of this name can be run from {os.getcwd()}")
    return Program(name.rpartition(".")[2], spec.origin, (spec.origin, *arguments), os.getcwd(), spec)


def run_program(
    program: Program, recording: AbstractContextManager[Any], close: Callable[[BaseException], None]
) -> Ending:
    """Runs a program inside a recording, which is entered first and left when the program ends.

    A program that cannot be compiled is not recorded. SIGTERM and SIGHUP end the program by an exception, as Ctrl-C
    does, unless the program handles them. Otherwise Python would end at once, with the recording open.

    Args:
        program: the program.
        recording: the recording.
        close: closes the recording on another thread, before the process ends, if a signal comes while a call blocks.

    Returns:
        how `python` would have ended; see `end_like`.

    Raises:
        ModtraceError: the recording cannot be made.
    """
    namespace = _become_main(program)
    uncaught = _run(program, namespace, recording, EndingSignals(close))
    return Exited(0) if uncaught is None else _show(uncaught, namespace)


def _run(
    program: Program,
    namespace: dict[str, Any],
    recording: AbstractContextManager[Any],
    signals: AbstractContextManager[None],
) -> BaseException | None:
    """Returns the exception that the program did not catch. Printing must happen outside of `except`, as in Python."""
    try:
        code = _compile(program)
    except Exception as error:
        return error
    recording.__enter__()
    try:
        with signals, ExitStack() as leaving:
            leaving.push(recording)
            exec(code, namespace)
    except BaseException as error:
        return error
    return None


def _what_is_wrong(path: str) -> str:
    if os.path.isfile(os.path.join(path, HEADER)):
        return "this is a recording: look at it with modtrace show; record takes the script to run"
    if os.path.isdir(path):
        return "this is a folder without a __main__.py; give the script to run"
    if os.path.exists(path):
        return "this is an archive without a __main__.py; give the script to run"
    return f"there is no such script (looked from {os.getcwd()})"


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except Exception as error:  # importing the packages around the module may raise
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            return None  # a package is missing, or is not a package
        raise click.ClickException(f"-m {name}: importing it raised {locate_error(error)}") from error


def _become_main(program: Program) -> dict[str, Any]:
    """Installs a fresh `__main__` module, so that pickling and spawned workers find the program's names."""
    main, spec = ModuleType("__main__"), program.spec
    main.__file__ = program.file
    main.__spec__ = spec
    main.__loader__ = SourceFileLoader("__main__", program.file) if spec is None else spec.loader
    main.__package__ = None if spec is None else spec.parent
    main.__dict__["__builtins__"] = builtins
    ours = vars(sys.modules["__main__"])
    if "__annotations__" in ours:  # Python 3.14 makes it when it is asked for
        main.__annotations__ = {}
    if "__cached__" in ours:
        main.__dict__["__cached__"] = None if spec is None else spec.cached
    sys.modules["__main__"] = main
    sys.argv[:] = program.argv
    _set_search_path(program.search_path, is_needed=spec is not None and spec.name == "__main__")
    return main.__dict__


def _set_search_path(first: str, *, is_needed: bool = False) -> None:
    """Puts the program's folder in place of the folder of the `modtrace` script.

    The option -P (`safe_path`), which exists since Python 3.11, leaves both out, except a folder or an archive that is
    run.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first
    elif is_needed:
        sys.path.insert(0, first)


def _compile(program: Program) -> CodeType:
    if program.spec is not None:
        loader: Any = program.spec.loader
        code: CodeType | None = loader.get_code(program.spec.name)
        if code is not None:
            return code
    source = Path(program.file).read_bytes()
    return compile(source, program.file, "exec", dont_inherit=True)


def _show(error: BaseException, namespace: dict[str, Any]) -> Ending:
    """Prints what would be shown without modtrace's frames, and returns how that ends the process."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not namespace:
        trace = trace.tb_next
    _leave_out_ours(trace)
    known, waiting = {id(error)}, _errors_behind(error)
    while waiting:
        behind = waiting.pop()
        if id(behind) not in known:
            known.add(id(behind))
            _leave_out_ours(behind.__traceback__)
            waiting += _errors_behind(behind)
    return print_ending(error, trace)


def _errors_behind(error: BaseException) -> list[BaseException]:
    """Returns the errors that are printed together with one: its cause, its context, and those of a group."""
    found = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return [one for one in found if isinstance(one, BaseException)]


def _leave_out_ours(trace: TracebackType | None) -> None:
    """Removes modtrace's frames from a traceback, because a backward runs below two."""
    while trace is not None:
        inner = trace.tb_next
        while inner is not None and is_ours(inner):
            inner = inner.tb_next
        trace.tb_next = inner
        trace = inner
