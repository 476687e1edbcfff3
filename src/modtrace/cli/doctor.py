"""`modtrace doctor`: reports what works on this installation."""

import importlib
import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click

from ..collect.compiled_parts import COLLECTIVES, KERNEL, TENSOR_IDS, MissingPart, find_missing_parts
from ..views.common.columns import Column, Text, printable, render_columns, render_lines
from .output import find_terminal, print_text

_LIBRARIES = ("modtrace", "torch", "numpy", "pyarrow", "pandas", "click", "transformers")
_WIDTH = 80  # the width for which lines are made
_PROGRAMS = {"dot": "graphs as pictures (Graphviz)"}


@dataclass(frozen=True)
class Support:
    """Something that modtrace uses, with its purpose or with what is lost without it."""

    name: str
    found: bool
    what_for: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A report on what works on this installation."""

    versions: dict[str, str | None]  # None for libraries that are not installed
    cuda: str
    kernel: str  # the code that measures values in main memory
    tensor_ids: str  # the code that tells tensors of ops apart
    collectives: str  # the code that notes collectives where they are called
    torch_names: tuple[Support, ...]  # private names of torch that modtrace uses
    torch_problem: str | None  # why the names could not be searched for; None if they could
    programs: tuple[Support, ...]


@click.command()
@click.option(
    "--all", "with_all", is_flag=True, help="Every name of torch that modtrace needs, also those found."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def doctor(with_all: bool, as_json: bool) -> None:
    """Reports what works on this installation: versions, names of torch that modtrace needs, programs."""
    diagnosis = diagnose()
    if as_json:
        print_text(json.dumps(asdict(diagnosis)) + "\n")
    else:
        print_text(render_diagnosis(diagnosis, with_all=with_all, color=find_terminal().color))


def diagnose() -> Diagnosis:
    """Examines the installation, and imports torch if it is installed."""
    names, problem = _check_torch_names()
    missing = find_missing_parts()
    return Diagnosis(
        versions={
            "python": platform.python_version(),
            **{library: _version(library) for library in _LIBRARIES},
        },
        cuda=_describe_cuda(),
        kernel=_describe_part(KERNEL, missing),
        tensor_ids=_describe_part(TENSOR_IDS, missing),
        collectives=_describe_part(COLLECTIVES, missing),
        torch_names=names,
        torch_problem=problem,
        programs=tuple(Support(name, shutil.which(name) is not None, use) for name, use in _PROGRAMS.items()),
    )


def _version(library: str) -> str | None:
    """Returns the version of an installed library; for torch in full, such as 2.14.1+cu130."""
    torch = sys.modules.get("torch") if library == "torch" else None
    try:
        return str(getattr(torch, "__version__", version(library)))
    except PackageNotFoundError:
        return None


def _check_torch_names() -> tuple[tuple[Support, ...], str | None]:
    try:
        from ..torch_internals.private_names import check_all

        return tuple(Support(*name) for name in check_all()), None
    except Exception as error:  # a broken torch may raise anything, which must be reported
        return (), f"{type(error).__name__}: {error}"


def _describe_cuda() -> str:
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            is_built = torch.version.cuda or torch.version.hip
            return f"not available: {'torch finds no device' if is_built else 'torch is built without CUDA'}"
        name, device = torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device())
        from ..measure.cuda.cuda_kernels import describe_path

        return f"available: {name}, CUDA {torch.version.cuda}; values are measured {describe_path(device)}"
    except Exception as error:  # a broken torch may raise anything
        return f"unknown ({type(error).__name__}: {error})"


def _describe_part(part: str, missing: Sequence[MissingPart]) -> str:
    """Returns whether a part of modtrace is compiled; if not, why, and what that costs."""
    lacks = [lack for lack in missing if lack.part == part]
    if not lacks:
        return "compiled"
    costs = "; ".join(lack.cost for lack in lacks)
    return f"{lacks[0].problem}: {costs}. Install a C compiler, then modtrace again."


def render_diagnosis(diagnosis: Diagnosis, *, with_all: bool = False, color: bool = False) -> str:
    """Returns the findings, and each missing name of torch, in 80 columns.

    Args:
        with_all: whether to list all names instead of the missing ones, in a table as wide as the longest.
    """
    names, texts = zip(*_lines(diagnosis), strict=True)
    columns = [Column("", [Text(name) for name in names], right=False), Column("", texts, right=False)]
    listed = _render_all(diagnosis.torch_names, color) if with_all else _render_missing(diagnosis, color)
    return render_columns(columns, color=color) + (f"\n{listed}" if listed else "")


def _lines(diagnosis: Diagnosis) -> Iterator[tuple[str, Text]]:
    """Yields pairs of a name and a line about it; further lines of a long text have no name."""
    told = {name: found or "not installed" for name, found in diagnosis.versions.items()}
    told |= {"CUDA": diagnosis.cuda, "CPU kernels": diagnosis.kernel, TENSOR_IDS: diagnosis.tensor_ids}
    told |= {COLLECTIVES: diagnosis.collectives}
    told |= {"torch names": _describe_torch_names(diagnosis)}
    told |= {
        program.name: f"{'found' if program.found else 'missing'}: {program.what_for}"
        for program in diagnosis.programs
    }
    beside = _WIDTH - max(map(len, told)) - 2
    for name, text in told.items():
        for at, line in enumerate(textwrap.wrap(printable(text), beside)):
            yield "" if at else name, Text(line)


def _describe_torch_names(diagnosis: Diagnosis) -> str:
    if diagnosis.torch_problem is not None:
        return f"not looked for, because {diagnosis.torch_problem}"
    count, found = len(diagnosis.torch_names), sum(finding.found for finding in diagnosis.torch_names)
    if found == count:
        return f"all {count} that modtrace needs are found (--all lists them)"
    return f"{count - found} of the {count} that modtrace needs are missing"


def _render_missing(diagnosis: Diagnosis, color: bool) -> str:
    lines = []
    for finding in diagnosis.torch_names:
        if not finding.found:
            lost = textwrap.wrap(f"without it is lost: {finding.what_for}", _WIDTH - 4)
            lines += [Text(f"missing: {finding.name}", "red"), *(Text(f"    {line}") for line in lost)]
    return render_lines(lines, color=color)


def _render_all(findings: Sequence[Support], color: bool) -> str:
    states = [Text("found", "green") if finding.found else Text("missing", "red") for finding in findings]
    columns = [
        Column("name of torch", [Text(finding.name) for finding in findings], right=False),
        Column("", states, right=False),
        Column("what is lost without it", [Text(finding.what_for) for finding in findings], right=False),
    ]
    return render_columns(columns, color=color) if findings else ""
