"""Reads and writes the JSON files of a recording: its header `recording.json`, and `meta.json` of each rank.

`meta.json` is written in place, so that a mark reaches the disk even if the disk is full.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DamagedRecordingError, NewerSchemaError
from ..recording.json_text import parse_json
from ..recording.meta import RunMeta
from ..recording.schema import SCHEMA_VERSION
from .damage import unclear_header
from .layout import HEADER, META
from .regular_file import read_regular

# The file consists of pieces of this size; half of one is left as spaces for later marks.
_PIECE_BYTES = 16 * 1024
_MAY_BE_NULL = ("git_commit", "flags", "ended", "shards")
_OF_TEXTS = ("argv", "marks", "ended")
_MOST_BYTES = 2**26  # the largest `meta.json`, enough for 400,000 marks
_MOST_INTEGER = 2**63 - 1


class StoredMeta(NamedTuple):
    """The content of a `meta.json`."""

    meta: RunMeta
    ended: tuple[str, ...] | None  # tables with an end-of-stream marker; None before closing
    damage: str | None  # what is wrong with the file, whose meta is empty then
    shards: int | None = None  # the number of files of whole tensors; None if unknown


def write_meta(
    folder: Path, meta: RunMeta, *, ended: Sequence[str] | None, shards: int | None = None
) -> None:
    """Writes the meta data of a rank, in place if they fit into the existing file.

    Args:
        folder: the folder of the rank.
        meta: the description of the run.
        ended: the tables that have their end-of-stream marker; None before the recording is closed.
        shards: the number of files of whole tensors; None before the recording is closed.

    Raises:
        OSError: the file cannot be written. The old content stays, unless the disk itself failed.
    """
    values = {**meta.to_json(), "ended": ended, "shards": shards}
    text = json.dumps(values, indent=2, default=str).encode() + b"\n"
    file = folder / META
    reserved = file.stat().st_size if file.exists() else 0
    if len(text) > reserved:
        _replace(file, text)
        return
    fd = os.open(file, os.O_WRONLY)
    try:
        os.pwrite(fd, text.ljust(reserved), 0)
    finally:
        os.close(fd)


def _replace(file: Path, text: bytes) -> None:
    pieces = -(-(len(text) + _PIECE_BYTES // 2) // _PIECE_BYTES)
    whole = file.with_name(file.name + ".tmp")
    try:
        whole.write_bytes(text.ljust(pieces * _PIECE_BYTES))
        os.replace(whole, file)
    except OSError:
        whole.unlink(missing_ok=True)  # a full disk needs the space
        raise


def read_meta(folder: Path) -> StoredMeta:
    """Returns the meta data of a rank. A file that cannot be understood becomes a mark, as tables do not depend on it.

    Raises:
        RecordingError: the file cannot be read.
    """
    wrong: object
    try:
        values = parse_json(bytes(read_regular(folder / META, _MOST_BYTES)))
        wrong = _find_wrong_type(values)
    except FileNotFoundError:
        return StoredMeta(RunMeta(), ended=None, damage="is missing")
    except DamagedRecordingError as error:
        wrong = error
    except ValueError as error:
        wrong = f"not JSON: {error}"
    if wrong is not None:
        return StoredMeta(RunMeta(), ended=None, damage=f"cannot be understood ({wrong})")
    ended = None if values.get("ended") is None else tuple(values["ended"])
    return StoredMeta(RunMeta.from_json(values), ended, damage=None, shards=values.get("shards"))


def _find_wrong_type(values: Any) -> str | None:
    """Returns a description of the first value whose type is not that of its field; None if there is none."""
    if not isinstance(values, Mapping):
        return f"a JSON object is expected, and a {type(values).__name__} is there"
    for name, example in {**RunMeta(git_commit="", flags={}).to_json(), "ended": [], "shards": 0}.items():
        value = values.get(name, example)
        if type(value) is not type(example) and not (name in _MAY_BE_NULL and value is None):
            return f"{name} is {value!r}, and a value of type {type(example).__name__} is expected"
        if isinstance(value, int) and not 0 <= value <= _MOST_INTEGER:
            return f"{name} is {value}, and a number from 0 to 2**63 is expected"
        if name in _OF_TEXTS and not all(isinstance(text, str) for text in value or ()):
            return f"{name} holds something else than texts"
    return None


_MOST_HEADER_BYTES = 2**20
_TEMPORARY = re.compile(re.escape(HEADER) + r"\.\d+\.tmp")

#: The fields of `RunMeta` that the header holds, because they are the same for all ranks of a run. The last one is
#: written only if there may be other ranks.
_FIELDS = ("run_id", "created", "modtrace_version", "launch")


def write_header(path: Path, meta: RunMeta) -> None:
    """Writes the header of a new recording atomically: a reader sees all of it or none.

    Raises:
        OSError: it cannot be written.
    """
    values = {"schema_version": SCHEMA_VERSION, **{name: getattr(meta, name) for name in _FIELDS}}
    if not meta.launch:
        del values["launch"]
    whole = path / f"{HEADER}.{os.getpid()}.tmp"
    whole.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(whole, path / HEADER)


def is_temporary_header(file: Path) -> bool:
    """Returns whether a file is a header under its temporary name, in progress or left by a killed process."""
    return _TEMPORARY.fullmatch(file.name) is not None


def read_header(path: Path) -> RunMeta | None:
    """Returns what the header of the recording in `path` says about the run; None if there is no header.

    Raises:
        DamagedRecordingError: the header cannot be understood.
        NewerSchemaError: a newer modtrace wrote it.
        RecordingError: it cannot be read.
    """
    file = path / HEADER
    try:
        text = bytes(read_regular(file, _MOST_HEADER_BYTES))
    except FileNotFoundError:
        return None
    try:
        values: dict[str, Any] = parse_json(text)
        fields = {name: values.get(name, "") for name in _FIELDS}
        version = values["schema_version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise unclear_header(file, size=len(text), why=repr(error)) from error
    if type(version) is not int or version < 1 or not all(isinstance(text, str) for text in fields.values()):
        why = "a value is of the wrong type"
        raise unclear_header(file, size=len(text), why=why)
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path} was written by modtrace {fields['modtrace_version'] or '(unknown version)'} with schema "
            f"{version}; this modtrace reads up to {SCHEMA_VERSION}. Upgrade: pip install -U modtrace"
        )
    return RunMeta(**fields)
