"""Describes a run by what is not in its tables."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: The rank of what is read of all ranks together.
ALL_RANKS = -1

#: The beginning of the mark on an exception that ended the run.
RUN_ENDED = "the run ended by"

#: The kind of the note that steps were held and never written.
HELD = "held"


@dataclass(frozen=True, kw_only=True)
class Note:
    """An event of a recording that is not damage: a trigger that fired, or steps that were not written."""

    step: int | None  # None if no step had ended
    kind: str  # the class name of a trigger, `exception`, `dump`, or HELD
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunMeta:
    """Describes the run of a recording; `meta.json` holds the same fields."""

    run_id: str = ""
    created: str = ""  # ISO 8601, UTC
    modtrace_version: str = ""
    argv: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # python, torch, numpy, ...
    device: str = ""
    #: torch's settings that change numbers, as they were at the end; None if unknown.
    flags: dict[str, Any] | None = None
    git_commit: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the arguments of record()
    rank: int = 0
    world_size: int = 1
    # Distinguishes the ranks of a run from those of other runs; not shown.
    launch: str = field(default="", repr=False)  # the name that its ranks share; "" for a single process
    attempt: int = field(default=0, repr=False)  # how often torchrun had restarted the ranks
    process: str = field(default="", repr=False)  # the process that wrote it, see `recording.process`
    clock_time_ns: int = 0  # time.time_ns() and time.perf_counter_ns() of one moment,
    clock_perf_counter_ns: int = 0  # which convert the tables' times to wall time
    marks: tuple[str, ...] = ()  # sentences on what is missing
    notes: tuple[Note, ...] = ()  # events that are not damage
    complete: bool = False  # whether the recording was closed and has no marks

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {**lists, "notes": [asdict(note) for note in self.notes]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunMeta":
        """Returns the meta data of a parsed `meta.json`. Unknown names are ignored, missing ones get their defaults."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        notes = []
        for note in known.get("notes", ()):
            parts: Mapping[str, Any] = note if isinstance(note, Mapping) else {"reason": str(note)}
            step = parts.get("step") if isinstance(parts.get("step"), int) else None
            notes.append(
                Note(step=step, kind=str(parts.get("kind", "")), reason=str(parts.get("reason", "")))
            )
        return cls(**{**known, "notes": tuple(notes)})


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The extent of a recording so far."""

    steps: int
    rows: int
    size_bytes: int
    held: int = 0  # the steps among these that wait for a trigger
