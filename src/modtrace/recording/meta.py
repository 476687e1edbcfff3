"""What is known about a run beside its tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunMeta:
    """The run that a recording is of; `meta.json` holds the same fields."""

    run_id: str = ""
    created: str = ""  # ISO 8601, UTC
    modtrace_version: str = ""
    argv: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # python, torch, numpy, ...
    device: str = ""
    git_commit: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # what record() was given
    rank: int = 0
    world_size: int = 1
    clock_time_ns: int = 0  # time.time_ns() and time.perf_counter_ns() of one moment:
    clock_perf_counter_ns: int = 0  # they turn the tables' times into wall time
    marks: tuple[str, ...] = ()  # what is missing, in sentences
    complete: bool = False  # the recording was closed, and nothing is known to be missing

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunMeta":
        """The meta of a parsed `meta.json`; names it does not know are left out, missing ones take defaults."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        return cls(**known)
