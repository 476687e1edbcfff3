"""`modtrace export`: writes a recording in a format that other programs read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ..recording.phase import PHASES
from ..store.layout import is_url
from ..store.object_store import size_of
from ..views.common.numbers import format_bytes
from ..views.common.whole_file import errors_told
from .export_formats import FORMATS, Destination, ExportOptions, FormatName, check_options, find_format
from .open_run import AskedStep, errors_of, open_with_rows, read_step, step_option
from .output import tell, tell_marks, wrap

_ABOUT = "\n".join(f"  {name}: {kind.about}" for name, kind in FORMATS.items())


@click.command(epilog=f"\b\nFormats:\n{_ABOUT}")
@click.argument("run")
@click.option("--format", "name", type=FormatName(), help="Default: what PATH ends in.")
@click.option(
    "-o",
    "--output",
    "path",
    type=Destination(),
    required=True,
    help="Where to write: a path, or a URL for parquet.",
)
@step_option("The step to export, where the format shows one.")
@click.option("--depth", type=click.IntRange(min=0), help="Levels of modules, where the format folds them.")
@click.option("--phase", type=click.Choice(PHASES), help="The phase to export, where the format shows one.")
@click.option("--json", "as_json", is_flag=True, help="Say as JSON what was written.")
def export(
    run: str,
    name: str | None,
    path: Path | str,
    step: AskedStep,
    depth: int | None,
    phase: str | None,
    as_json: bool,
) -> None:
    """Writes the recording RUN in a format that other programs read.

    An existing file is replaced. Folders are replaced only in part: for `parquet` the part of this run, for `csv` the
    tables; a folder with other contents is not changed.
    """
    name = find_format(name, path)
    given = {"step": step, "depth": depth, "phase": phase}
    check_options(name, given)
    data = open_with_rows(run, *FORMATS[name].tables, reads_all=name == "parquet")
    write = FORMATS[name].load_writer()
    options = ExportOptions(step=read_step(run, data, step), depth=depth, phase=phase)
    with errors_told(path):
        with errors_of(run, data, option="--step"):
            files = write(data, path, options)
        sizes = {file: size_of(file) for file in files or [path]}
    marks = data.meta.marks
    tell(_render_json(name, path, sizes, marks) if as_json else wrap(_render(name, path, sizes)), path)
    if not as_json:
        tell_marks(marks)


def _render(name: str, path: Path | str, sizes: Mapping[Path | str, int]) -> str:
    files = f"{len(sizes)} files, " if len(sizes) > 1 else ""
    is_there = any(is_url(file) or Path(file).is_file() for file in sizes)
    size = format_bytes(sum(sizes.values())) if is_there else "no regular file"
    folder = "the folder " if is_url(path) or Path(path).is_dir() else ""
    beside = [Path(file).name for file in sizes if file != path and Path(file).parent == Path(path).parent]
    others = f"; the others lie beside it: {', '.join(beside)}" if beside else ""
    return f"wrote {folder}{path} ({name}, {files}{size}){others}\n"


def _render_json(name: str, path: Path | str, sizes: Mapping[Path | str, int], marks: Sequence[str]) -> str:
    files = [{"path": str(file), "size_bytes": size} for file, size in sizes.items()]
    return json.dumps({"format": name, "path": str(path), "files": files, "marks": list(marks)}) + "\n"
