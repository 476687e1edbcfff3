"""What `record()` was asked for, and the checks of it that take several arguments."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .recording.options.capture import BOUNDARY, COMPILED, INSIDE, Capture
from .recording.options.capture import to_json as captures_to_json
from .recording.options.op_options import Ops
from .recording.options.step_range import ALL_STEPS, StepRange
from .recording.options.tensor_options import TensorOptions
from .recording.triggers.trigger_kinds import Trigger, has_action, paths_of
from .surface import choose_phrase, name_argument


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """The checked arguments of `record()`."""

    steps: StepRange
    backward_times: bool
    device_times: bool
    values: tuple[Capture, ...]  # empty: no values
    ops: Ops | None  # None: no ops
    overwrite: bool
    strict: bool
    max_bytes: int
    keep_last: int | None
    tensors: TensorOptions
    triggers: tuple[Trigger, ...]
    compiled: str = BOUNDARY

    def __post_init__(self) -> None:
        if self.max_bytes <= 0:
            raise ValueError(f"max_bytes={self.max_bytes!r}: give a positive number of bytes")

    @property
    def steps_behind(self) -> int:
        """The number of steps to write behind one in which a trigger fires.

        Captures may wait for them. Ops that run between two steps belong to the first, and what was measured of what
        they made is in the second.
        """
        of_ops = int(self.ops is not None and any(has_action(each) for each in self.triggers))
        return max([of_ops, *(each.on_trigger for each in self.values)])

    @property
    def measures_all(self) -> bool:
        """Whether all that ops return is measured in every step."""
        return (
            self.ops is not None
            and self.steps == ALL_STEPS
            and any(each.measures_all for each in self.values)
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the options that determine the contents of the recording."""
        return {
            "steps": str(self.steps),
            "backward_times": self.backward_times,
            **({"device_times": True} if self.device_times else {}),
            "ops": None if self.ops is None else asdict(self.ops),
            **captures_to_json(self.values),
            **({} if self.compiled == BOUNDARY else {"compiled": self.compiled}),
            **({} if self.keep_last is None else {"keep_last": self.keep_last}),
            **({"triggers": [repr(each) for each in self.triggers]} if self.triggers else {}),
        }


def check_choices(captures: Sequence[Capture], watched: Sequence[Trigger], model: object) -> None:
    """Raises ValueError if a pattern matches nothing in the model, or a capture waits for no trigger."""
    from .collect.names.given_models import check_patterns, check_types

    for paths in (*(each.paths for each in captures), *paths_of(watched)):
        check_patterns(paths, model)
    for capture in captures:
        check_types(capture.types, model)
        if capture.on_trigger and not watched:
            waits, how = f"on_trigger={capture.on_trigger}", "give record(triggers=...) or keep_last="
            waits = choose_phrase(python=f"Capture({waits})", command_line=f"--capture {waits}")
            how = choose_phrase(python=how, command_line="give --keep-last")
            raise ValueError(f"{waits} waits for a trigger: {how}")


def checked_tensors(tensors: TensorOptions | None) -> TensorOptions:
    """Returns the options of whole tensors, or the default ones; raises TypeError for something else."""
    if tensors is not None and not isinstance(tensors, TensorOptions):
        raise TypeError(f"tensors={tensors!r}: give modtrace.TensorOptions(...)")
    return tensors or TensorOptions()


def checked_compiled(compiled: str, captures: Sequence[Capture]) -> str:
    """Returns what is to be measured of compiled code; raises ValueError for something else, or without values."""
    given = name_argument("compiled", compiled)
    if compiled not in COMPILED:
        raise ValueError(f"{given}: give {' or '.join(COMPILED)}")
    if compiled == INSIDE and not captures:
        raise ValueError(f"{given} measures values, and no values are wanted")
    return compiled
