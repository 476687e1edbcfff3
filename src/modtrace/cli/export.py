"""`modtrace export`: writes a recording in a format that other programs read."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from ..recording.phase import PHASES
from ..views.common.numbers import format_bytes
from ..views.common.whole_file import errors_told
from .export_formats import FORMATS, ExportOptions, FormatName, check_options, find_format
from .open_run import AskedStep, errors_of, open_with_rows, read_step, step_option
from .output import tell, tell_marks, wrap

_ABOUT = "\n".join(f"  {name}: {kind.about}" for name, kind in FORMATS.items())


@click.command(epilog=f"\b\nFormats:\n{_ABOUT}")
@click.argument("run")
@click.option("--format", "name", type=FormatName(), help="Default: what PATH ends in.")
@click.option(
    "-o", "--output", "path", type=click.Path(path_type=Path), required=True, help="Where to write."
)
@step_option("The step to export, where the format shows one.")
@click.option("--depth", type=click.IntRange(min=0), help="Levels of modules, where the format folds them.")
@click.option("--phase", type=click.Choice(PHASES), help="The phase to export, where the format shows one.")
@click.option("--json", "as_json", is_flag=True, help="Say as JSON what was written.")
def export(
    run: str,
    name: str | None,
    path: Path,
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
        sizes = {file: file.stat().st_size for file in files or [path]}
    marks = data.meta.marks
    tell(_render_json(name, path, sizes, marks) if as_json else wrap(_render(name, path, sizes)), path)
    if not as_json:
        tell_marks(marks)


def _render(name: str, path: Path, sizes: dict[Path, int]) -> str:
    files = f"{len(sizes)} files, " if len(sizes) > 1 else ""
    size = format_bytes(sum(sizes.values())) if any(file.is_file() for file in sizes) else "no regular file"
    folder = "the folder " if path.is_dir() else ""
    beside = [file.name for file in sizes if file != path and file.parent == path.parent]
    others = f"; the others lie beside it: {', '.join(beside)}" if beside else ""
    return f"wrote {folder}{path} ({name}, {files}{size}){others}\n"


def _render_json(name: str, path: Path, sizes: dict[Path, int], marks: Sequence[str]) -> str:
    files = [{"path": str(file), "size_bytes": size} for file, size in sizes.items()]
    return json.dumps({"format": name, "path": str(path), "files": files, "marks": list(marks)}) + "\n"
