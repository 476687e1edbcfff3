"""`modtrace doctor`: what works on this installation."""

import importlib
import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click

from ..views.common.columns import Column, Text, printable, render_columns
from .output import find_terminal, print_text

_LIBRARIES = ("modtrace", "torch", "numpy", "pyarrow", "pandas", "click", "transformers")
_PROGRAMS = {"dot": "graphs as pictures (Graphviz)"}


@dataclass(frozen=True)
class Finding:
    """Something that modtrace uses, and what it is for or what is lost without it."""

    name: str
    found: bool
    what_for: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What works on this installation."""

    versions: dict[str, str | None]  # None: not installed
    cuda: str
    kernel: str  # what measures values in main memory
    tensor_ids: str  # what tells the tensors of ops apart
    torch_names: tuple[Finding, ...]  # private names of torch
    torch_problem: str | None  # why they could not be looked for
    programs: tuple[Finding, ...]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def doctor(as_json: bool) -> None:
    """Tells what works on this installation: versions, names of torch that modtrace needs, programs."""
    diagnosis = diagnose()
    if as_json:
        print_text(json.dumps(asdict(diagnosis)) + "\n")
    else:
        print_text(render_diagnosis(diagnosis, color=find_terminal().color))


def diagnose() -> Diagnosis:
    """Looks at the installation; imports torch if it is there."""
    names, problem = _check_torch_names()
    return Diagnosis(
        versions={"python": platform.python_version(), **{each: _version(each) for each in _LIBRARIES}},
        cuda=_describe_cuda(),
        kernel=_describe_compiled(
            _find_kernel,
            "numpy: no C compiler was there at installation, so measuring values takes three times as long",
        ),
        tensor_ids=_describe_compiled(
            _find_tensor_ids,
            "Python: no C compiler was there at installation, so recording ops takes twice as long",
        ),
        torch_names=names,
        torch_problem=problem,
        programs=tuple(Finding(name, shutil.which(name) is not None, use) for name, use in _PROGRAMS.items()),
    )


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _check_torch_names() -> tuple[tuple[Finding, ...], str | None]:
    try:
        from ..torch_internals.doctor_checks import check_all

        return tuple(Finding(*each) for each in check_all()), None
    except Exception as error:  # a broken torch fails to import in any way, and telling that is our task
        return (), f"{type(error).__name__}: {error}"


def _describe_cuda() -> str:
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return "not available"
        return f"available: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    except Exception as error:  # as above
        return f"unknown ({type(error).__name__}: {error})"


def _find_kernel() -> object | None:
    from ..measure.native_moments import measure_into

    return measure_into


def _find_tensor_ids() -> object | None:
    from ..collect.tensor_ids.tensor_ids import compiled

    return compiled


def _describe_compiled(find: Callable[[], object | None], without: str) -> str:
    """Returns whether a part of modtrace is compiled: `find` returns None otherwise."""
    try:
        found = find()
    except Exception as error:  # it imports torch
        return f"unknown ({type(error).__name__}: {error})"
    return without if found is None else "compiled"


def render_diagnosis(diagnosis: Diagnosis, *, color: bool = False) -> str:
    """Returns the diagnosis as three small tables."""
    versions = Column(
        "", [Text(each) for each in [*diagnosis.versions, "CUDA", "kernel", "tensor ids"]], right=False
    )
    values = [*(each or "not installed" for each in diagnosis.versions.values())]
    values += [diagnosis.cuda, diagnosis.kernel, diagnosis.tensor_ids]
    found = Column("", [Text(printable(each)) for each in values], right=False)
    return "\n".join(
        [
            render_columns([versions, found], color=color),
            _render_torch_names(diagnosis, color),
            _render_findings("program", "what it is for", diagnosis.programs, color),
        ]
    )


def _render_torch_names(diagnosis: Diagnosis, color: bool) -> str:
    if diagnosis.torch_problem is not None:
        return f"names of torch: not looked for, because {printable(diagnosis.torch_problem)}\n"
    return _render_findings("name of torch", "what is lost without it", diagnosis.torch_names, color)


def _render_findings(title: str, what_for: str, findings: Sequence[Finding], color: bool) -> str:
    states = [Text("found", "green") if each.found else Text("missing", "red") for each in findings]
    columns = [
        Column(title, [Text(each.name) for each in findings], right=False),
        Column("", states, right=False),
        Column(what_for, [Text(each.what_for) for each in findings], right=False),
    ]
    return render_columns(columns, color=color)
