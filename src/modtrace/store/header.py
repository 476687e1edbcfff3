"""Reads and writes `recording.json`, which describes the recording in a folder."""

import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import DamagedRecordingError, NewerSchemaError
from ..recording.json_text import parse_json
from ..recording.meta import RunMeta
from ..recording.schema import SCHEMA_VERSION
from .layout import HEADER
from .regular_file import read_regular

_MOST_BYTES = 2**20
_TEMPORARY = re.compile(re.escape(HEADER) + r"\.\d+\.tmp")

#: The fields of `RunMeta` that the header holds, because they are the same for all ranks of a run; the last only if
#: there may be others.
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
    """Returns what the header of the recording in the folder `path` says of the run; None if there is no header.

    Raises:
        DamagedRecordingError: it cannot be understood.
        NewerSchemaError: a newer modtrace wrote it.
        RecordingError: it cannot be read.
    """
    file = path / HEADER
    try:
        text = bytes(read_regular(file, _MOST_BYTES))
    except FileNotFoundError:
        return None
    return _parse(path, file, text)


def _parse(path: Path, file: Path, text: bytes) -> RunMeta:
    try:
        values: dict[str, Any] = parse_json(text)
        found = {name: values.get(name, "") for name in _FIELDS}
        version = values["schema_version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(file, text, repr(error)) from error
    if type(version) is not int or version < 1 or not all(isinstance(each, str) for each in found.values()):
        raise _damaged(file, text, "a value is of the wrong type")
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path} was written by modtrace {found['modtrace_version'] or '(unknown version)'} with schema "
            f"{version}; this modtrace reads up to {SCHEMA_VERSION}. Upgrade: pip install -U modtrace"
        )
    return RunMeta(**found)


def _damaged(file: Path, text: bytes, why: str) -> DamagedRecordingError:
    return DamagedRecordingError(
        f"{file}: cannot be understood ({len(text)} bytes; {why}). "
        f'Put {{"schema_version": {SCHEMA_VERSION}}} into it to read the tables beside it.'
    )
