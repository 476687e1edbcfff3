"""Turns results beyond the usual statistics into columns of the `values` table."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...measure.want import Extra, ExtraNote, Want
from ...recording.statistics.fingerprints import hash_to_bytes
from ...torch_internals.modes import unseen
from ...torch_internals.transforms import outside_transforms

_Rows = list[tuple[int, Extra]]


def extra_columns(extras: Sequence[Extra | None], wants: Sequence[Want | None]) -> dict[str, Any]:
    """Returns the columns that hold anything. An entry is None if the row's captures do not want it or it failed.

    Results on other devices are read, which waits for the devices. A row without extra results takes 0.05 us; one with
    tier 2, hash and sketch takes 2.5 us, and 4.5 us more for the conversion to Arrow.

    Args:
        extras: the extra results of each row's tensor; rows may share them.
        wants: what the captures want of each row in its step. Other results are not written.
    """
    groups = _rows_by_want(extras, wants)
    _read_results(extra for _, rows in groups for _, extra in rows)
    columns: dict[str, Any] = {}
    for name, (is_wanted, value_of) in _COLUMNS.items():
        values: list[Any] = []
        for want, rows in groups:
            if is_wanted(want):
                if not values:
                    values = [None] * len(extras)
                for at, extra in rows:
                    values[at] = value_of(extra, want)
        if values and any(each is not None for each in values):
            columns[name] = values
    return columns


def extra_notes(
    notes: Sequence[str | None], extras: Sequence[Extra | None], wants: Sequence[Want | None]
) -> list[str | None]:
    """Returns the notes of the rows joined by "; " with those of the extra results, each note once.

    Results on other devices are read, which may fail.
    """
    joined = list(notes)
    _read_results(each for each in extras if each is not None)
    for at, (extra, want) in enumerate(zip(extras, wants, strict=True)):
        if extra is not None and extra.notes and want is not None:
            texts = (joined[at] or "").split("; ") if joined[at] else []
            said = set(texts)
            for note in extra.notes:
                if _concerns(note, want) and not said.issuperset(note.text.split("; ")):
                    texts.append(note.text)
            joined[at] = "; ".join(texts) or None
    return joined


def _rows_by_want(extras: Sequence[Extra | None], wants: Sequence[Want | None]) -> list[tuple[Want, _Rows]]:
    groups: dict[int, tuple[Want, _Rows]] = {}
    for at, (extra, want) in enumerate(zip(extras, wants, strict=True)):
        if extra is not None and want is not None:
            groups.setdefault(id(want), (want, []))[1].append((at, extra))
    return list(groups.values())


def _concerns(note: ExtraNote, want: Want) -> bool:
    wanted = _COLUMNS[note.of][0](want) if note.of else True
    if note.of == "channel_max":
        return wanted and note.about == want.channel_dim
    if note.of == "sample":
        return wanted and note.about == want.sample
    return wanted and (note.of != "user" or any(each is note.about for each in want.functions))


# What is written in each column: whether a row has it, and what it is.


def _is_second_tier(want: Want) -> bool:
    return want.stats > 1


def _hash(extra: Extra, want: Want) -> bytes | None:
    return None if extra.hash is None else hash_to_bytes(int(extra.hash) % 2**64)  # of a device it is signed


def _user(extra: Extra, want: Want) -> str | None:
    """Returns the result of the user's function.

    For several functions it is a list, with null for one that has raised.
    """
    found = {id(function): value for function, value in extra.user}
    if len(want.functions) > 1:
        return json.dumps([found.get(id(each)) for each in want.functions]) if found else None
    only = id(want.functions[0])
    return json.dumps(found[only]) if only in found else None


_COLUMNS: dict[str, tuple[Callable[[Want], Any], Callable[[Extra, Want], Any]]] = {
    "sumabs": (_is_second_tier, lambda extra, want: extra.sumabs),
    "zero_count": (_is_second_tier, lambda extra, want: extra.zero_count),
    "sum4": (_is_second_tier, lambda extra, want: extra.sum4),
    "argmax": (_is_second_tier, lambda extra, want: extra.argmax),
    "channel_max": (_is_second_tier, lambda extra, want: extra.channel_max.get(want.channel_dim)),
    "sample": (lambda want: want.sample, lambda extra, want: extra.sample.get(want.sample)),
    "hash": (lambda want: want.hash, _hash),
    "sketch": (lambda want: want.sketch, lambda extra, want: extra.sketch),
    "histogram": (_is_second_tier, lambda extra, want: extra.histogram),
    "user": (lambda want: want.functions, _user),
    "blob": (lambda want: want.tensors or want.lazy, lambda extra, want: extra.blob),
}


# Results on other devices are read in one transfer for all of a kind.

_NUMBERS = ("sumabs", "zero_count", "sum4", "argmax", "hash")
_ARRAYS = ("histogram", "sketch")
_OF_ARRAYS = {torch.float64, torch.float32, torch.int64}  # of what is measured; a function may return any


def _read_results(extras: Iterable[Extra]) -> None:
    """Replaces tensors that hold results by numbers, arrays and lists. An extra without any takes 1.5 us.

    A result that cannot be read becomes None, and a note says why. This waits for the devices.
    """
    unique = list({id(each): each for each in extras}.values())
    waiting: dict[int, torch.Tensor] = {}

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        waiting[id(tensor)] = tensor
        return tensor

    for extra in unique:
        _change(extra, wait)
    if waiting:
        with unseen(), outside_transforms(), torch.no_grad():
            _replace(unique, _fetch(waiting))


def _replace(extras: Iterable[Extra], fetched: Mapping[int, torch.Tensor | Exception]) -> None:
    for extra in extras:

        def read(tensor: torch.Tensor, extra: Extra = extra) -> Any:
            found = fetched[id(tensor)]
            if isinstance(found, torch.Tensor):
                return found.numpy() if found.dim() and found.dtype in _OF_ARRAYS else found.tolist()
            extra.add_note(f"not read from {tensor.device}: {type(found).__name__}")
            return None

        _change(extra, read)


def _change(extra: Extra, change: Callable[[torch.Tensor], Any]) -> None:
    """Replaces each tensor by what `change` returns for it."""
    for name in (*_NUMBERS, *_ARRAYS):
        value = getattr(extra, name)
        if isinstance(value, torch.Tensor):
            setattr(extra, name, change(value))
    for by_key in (extra.channel_max, extra.sample):
        for key, value in by_key.items():
            if isinstance(value, torch.Tensor):
                by_key[key] = change(value)
    if extra.user:
        extra.user = [(function, _changed(value, change)) for function, value in extra.user]


def _changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        changed = change(value)
        return changed.tolist() if isinstance(changed, np.ndarray) else changed
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def _fetch(waiting: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | Exception]:
    """Returns the tensors on the CPU, under the same numbers; an error for each that cannot be read."""
    alike: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in waiting.items():
        key = (tensor.device, tensor.dtype, tuple(tensor.shape))
        alike.setdefault(key, []).append((number, tensor))
    found: dict[int, torch.Tensor | Exception] = {}
    for group in alike.values():
        try:
            read = torch.stack([tensor for _, tensor in group]).cpu().unbind()
            found.update(zip((number for number, _ in group), read, strict=True))
        except Exception as error:  # a device that has failed
            found.update(dict.fromkeys((number for number, _ in group), error))
    return found
