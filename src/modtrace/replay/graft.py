"""Defines `modtrace.graft`, under which modules return what those of a recorded run returned."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ..analysis.tables.values import PlacedValues
from ..analysis.values.selection import Selection, select_values
from ..collect.structures.find import find_slots
from ..collect.structures.rebuild import rmap_tensor
from ..errors import MisuseError
from ..recording.options.path_filter import (
    PathFilter,
    describe_unmatched,
    name_nearest,
    to_patterns,
    unmatched,
)
from ..recording.phase import FORWARD
from ..recording.protocols import RecordingData
from ..recording.role import OUTPUT
from ..recording.suggestions import count_of, first_few
from ..store.reader import read_given
from ..torch_internals.autograd import graph_task_id
from ..torch_internals.modes import unseen


class HasData(Protocol):
    """A `Recording`, or one that runs."""

    @property
    def data(self) -> RecordingData:
        """The tables of the recording."""
        ...


@contextmanager
def graft(
    model: nn.Module,
    recording: HasData | str | os.PathLike[str],
    paths: str
    | re.Pattern[str]
    | Sequence[str | re.Pattern[str]]
    | Set[str | re.Pattern[str]]
    | Mapping[str, str],
    *,
    step: int | None = None,
) -> Iterator[None]:
    """Lets modules of a model return, in the block, what they returned in a recorded run.

        with modtrace.graft(port, reference, ["blocks.3.attn"]):
            logits = port(tokens)

    If the difference to the other run is gone then, it came from these modules or from what they read; if it stays,
    something else differs, too. The n-th call in the block returns the tensors of the n-th call in the step. They are
    copies, on the device and in the dtype of what the module has
    returned itself: it runs too, so that random numbers and buffers are those of a run without the graft. A gradient
    passes to the module's own output unchanged. All modules return what they did before after the block, also if it
    raises.

    Args:
        model: the model that runs in the block.
        recording: a recording with whole tensors, or the path of one, as `record(model,
            values=modtrace.Capture(roles="output", include="blocks.3.attn", tensors=True))` makes.
        paths: which modules: a path, a glob such as `blocks.*.attn`, a regular expression, or a list or set of
            those; a dict of paths in `model` and paths in the recording, if it names them otherwise.
        step: the step of the recording; None if whole outputs of one step alone were kept.

    Raises:
        TypeError: `model` is not a module, `recording` is not a recording, or `paths` is something else.
        ModtraceError: the recording at a path cannot be read.
        ValueError: a path or glob matches no module of `model`, nothing of it was kept whole (`NothingRecordedError`),
            or tensors of several steps were; in the block: a tensor has another shape than the recorded one.
        MisuseError: in the block, if a module is called more often than it was in the step, again in a backward, or
            returns other tensors than were kept, or some inside of an object; at its end, if it was called less often.
    """
    grafted: list[_GraftedModule] = []
    with ExitStack() as replaced:
        data = _data_of(recording)
        for module, path, there in _choose_modules(model, paths):
            grafted.append(_GraftedModule(path, _Outputs(data, there, step)))
            replaced.enter_context(_forward_replaced(module, grafted[-1]))
        yield
    for one in grafted:
        one.check_is_done()


@contextmanager
def _forward_replaced(module: nn.Module, grafted: "_GraftedModule") -> Iterator[None]:
    """Passes what the module's forward returns to `grafted`, before any hook, and so any recording, receives it."""
    own, had_own = module.forward, "forward" in vars(module)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return grafted(own(*args, **kwargs))

    module.forward = forward
    try:
        yield
    finally:
        if had_own:
            module.forward = own
        else:
            del module.forward


def _choose_modules(model: Any, paths: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields each chosen module with its path in the model and its path in the recording."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"graft(model=...): give a torch.nn.Module, not a {type(model).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    name = type(model).__name__
    if isinstance(paths, Mapping):
        if not paths or not all(isinstance(path, str) for path in (*paths, *paths.values())):
            raise TypeError(f"paths={paths!r}: give a dict of paths of the model and of the recording")
        for path, there in paths.items():
            if path not in modules:
                near = name_nearest(path, modules)
                raise ValueError(
                    f"graft(paths={path!r}): {name} has no such module{near}. A dict has the paths of the model first."
                )
            yield modules[path], path, there
        return
    chosen = PathFilter(to_patterns("paths", sorted(paths, key=str) if isinstance(paths, Set) else paths))
    if missing := unmatched(chosen, modules):
        near = describe_unmatched(
            [one._replace(argument="paths") for one in missing], modules, what=f"module of {name}"
        )
        raise ValueError(f"graft: {near}. A dict maps paths of the model to others in the recording.")
    found: dict[int, str] = {}  # a module that has two paths is grafted once
    for path, module in modules.items():
        if chosen.selects(path) and found.setdefault(id(module), path) == path:
            yield module, path, path


def _data_of(recording: Any) -> RecordingData:
    if (data := read_given(recording)) is None:
        raise TypeError(
            f"graft(recording=...): give a recording or the path of one, not a {type(recording).__name__}"
        )
    return data


class _Outputs:
    """The whole tensors that the calls of one module returned in one step."""

    def __init__(self, data: RecordingData, path: str, step: int | None) -> None:
        self._data, self.path = data, path
        selected = select_values(data, Selection(path, OUTPUT, None, FORWARD, steps=step, kept=True))
        values = PlacedValues(data=data, table=selected.select())
        steps = np.unique(values.step).tolist()
        if len(steps) > 1:
            raise ValueError(
                f"graft(paths={path!r}): whole outputs of {len(steps)} steps were kept: {first_few(steps)}. Give step=."
            )
        slots = [values.slots[code] for code in values.slot.tolist()]
        places = zip(values.nth.tolist(), slots, strict=True)
        #: By call and slot.
        self._blobs = dict(zip(places, values.table["blob"].to_pylist(), strict=True))
        self.calls: list[int] = sorted({call for call, _ in self._blobs})
        self.step: int = steps[0]

    def slots(self, call: int) -> set[str]:
        """Returns where a call returned tensors that were kept."""
        return {slot for number, slot in self._blobs if number == call}

    def read(self, call: int, slot: str) -> torch.Tensor:
        """Returns a tensor that was kept."""
        found: torch.Tensor = self._data.tensor(self._blobs[call, slot]).to_torch()
        return found


class _GraftedModule:
    """Puts recorded tensors in the place of a module's own."""

    def __init__(self, path: str, outputs: _Outputs) -> None:
        self._path, self._outputs = path, outputs
        self._calls = 0

    def __call__(self, output: Any) -> Any:
        call = self._next_call()
        with unseen():
            own = [(slot, tensor) for slot, tensor, _ in find_slots(output) if tensor is not None]
            self._check_slots(call, {slot for slot, _ in own})
            recorded = {id(tensor): self._read(call, slot, tensor) for slot, tensor in own}
        placed: dict[int, Any] = {}  # a tensor in two slots stays one

        def place(tensor: torch.Tensor) -> Any:
            if id(tensor) not in placed and id(tensor) in recorded:
                placed[id(tensor)] = _put_in_place(tensor, recorded[id(tensor)])
            return placed.get(id(tensor), tensor)

        result = rmap_tensor(output, place)
        left = [slot for slot, tensor in own if id(tensor) not in placed]
        if left:
            raise MisuseError(
                f"graft: {self._path} returns tensors inside of an object, which cannot be replaced: "
                f"{first_few(left)}. Give the paths of the modules inside that return them."
            )
        return result

    def _read(self, call: int, slot: str, own: torch.Tensor) -> torch.Tensor:
        """Returns the recorded tensor, on the device and in the dtype of the module's own."""
        found = self._outputs.read(call, slot)
        if found.shape != own.shape:
            raise ValueError(
                f"graft: {self._path}{slot} has the shape {tuple(own.shape)} in call {call}, and "
                f"{self._outputs.path!r} {tuple(found.shape)} in the recording. Give the model the inputs of the "
                "recorded run, and the path of the module that corresponds."
            )
        return found.to(own.device, own.dtype)

    def check_is_done(self) -> None:
        """Raises `MisuseError` if the module was called less often than in the recorded step."""
        calls = len(self._outputs.calls)
        if self._calls < calls:
            raise MisuseError(
                f"graft: {self._path} was called {self._calls} of {count_of(calls, 'time')} that step "
                f"{self._outputs.step} of the recording has. Run the whole step in the block, and the module that is "
                "called."
            )

    def _check_slots(self, call: int, own: set[str]) -> None:
        kept = self._outputs.slots(call)
        if own == kept:
            return
        here, there = (first_few([slot or "the output" for slot in sorted(slots)]) for slots in (own, kept))
        raise MisuseError(
            f"graft: {self._path} returns tensors at: {here or 'none'} in call {call}, and {self._outputs.path!r} has "
            f"whole ones in step {self._outputs.step} at: {there or 'none'}. Record them with "
            f"modtrace.Capture(include={self._outputs.path!r}, tensors=True), or graft another module."
        )

    def _next_call(self) -> int:
        calls = self._outputs.calls
        if graph_task_id() >= 0:  # a checkpoint runs it again
            if len(calls) > 1:
                raise MisuseError(
                    f"graft: {self._path} runs again in a backward, and it was called {len(calls)} times in step "
                    f"{self._outputs.step}: which call this repeats is not known. Turn checkpointing off."
                )
            return calls[0]
        if self._calls >= len(calls):
            raise MisuseError(
                f"graft: {self._path} is called more often than in the recording, where step {self._outputs.step} has "
                f"whole outputs of {count_of(len(calls), 'call')}. Leave the block before the next step."
            )
        self._calls += 1
        return calls[self._calls - 1]


class _PassGradient(torch.autograd.Function):
    """Returns another tensor, and passes its gradient on to the one in whose place it is."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        return recorded

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


def _put_in_place(own: torch.Tensor, recorded: torch.Tensor) -> Any:
    return recorded if not own.requires_grad else _PassGradient.apply(own, recorded)  # type: ignore[no-untyped-call]
