"""Notes which storages live when an op cannot have memory. It allocates nothing on a device."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import describe_error
from ...recording.arrow.arrays import from_strings
from ...recording.out_of_memory import is_out_of_memory
from ...recording.role import BUFFER, OPTIMIZER_STATE, PARAMETER, PARAMETER_GRAD
from ...torch_internals.device_memory import read_bytes_of
from ...torch_internals.gradients import read_gradients
from ...torch_internals.modes import DisableTorchFunction
from ..identity_map import IdentityMap
from ..log.nesting import Ints
from ..scopes.tracker import ScopeTracker
from ..tensor_ids.tensor_ids import TensorIds

#: The most storages that are noted one by one; 10 MB of rows.
_MOST = 100_000

#: The most characters of torch's message that are kept; what comes behind is general advice.
_MOST_LETTERS = 300

_LIVING_WIDTH = 3  # numbers of a storage in `TensorIds.living`

_NONE = -1


class _Owned(NamedTuple):
    """What a storage is to a model or an optimizer."""

    role: str
    module_id: int
    slot: str


class Alive(NamedTuple):
    """The storages that lived when an op could not have memory."""

    op: int
    error: str
    storages: Ints  # _NONE: no op has met it, or all others of the device
    sizes: Ints
    devices: Sequence[str]
    owned: Sequence[_Owned | None]


class AliveStorages:
    """Notes the storages that live when an op raises for lack of memory: of several such ops those of the last one."""

    def __init__(self, tracker: ScopeTracker, ids: TensorIds) -> None:
        self._tracker = tracker
        self._ids = ids
        self._found: Alive | None = None
        self._optimizers: IdentityMap[Any, bool] = IdentityMap()

    def add_optimizer(self, optimizer: Any) -> None:
        """Receives an optimizer that has stepped."""
        self._optimizers[optimizer] = True

    def op_raised(self, op: int, error: RuntimeError) -> None:
        """Receives an error that an op has raised."""
        text = describe_error(error)
        if is_out_of_memory(text):
            with DisableTorchFunction():
                self._found = self._read(op, text[:_MOST_LETTERS])

    def take(self) -> Alive | None:
        """Returns what was noted since the last call."""
        found, self._found = self._found, None
        return found

    def _read(self, op: int, error: str) -> Alive:
        living = np.array(self._ids.living(), np.int64).reshape(-1, _LIVING_WIDTH)
        living = living[np.lexsort((living[:, 0], -living[:, 1]))]
        names = [str(device) for device in self._ids.devices]
        totals = np.bincount(living[:, 2], living[:, 1], len(names)).astype(np.int64)
        known, unmet = self._find_owned()
        kept = living[:_MOST]
        rows: list[tuple[int, int, str, _Owned | None]] = [
            (storage, size, names[device], known.get(storage)) for storage, size, device in kept.tolist()
        ]
        rows += [(_NONE, *row) for row in unmet]
        totals -= np.bincount(kept[:, 2], kept[:, 1], len(names)).astype(np.int64)
        for device, rest in _find_rests(self._ids.devices, rows, totals.tolist()):
            rows.append((_NONE, rest, device, None))
        storages, sizes, devices, owned = zip(*rows, strict=True) if rows else ((), (), (), ())
        return Alive(op, error, np.array(storages, np.int64), np.array(sizes, np.int64), devices, owned)

    def _find_owned(self) -> tuple[dict[int, _Owned], list[tuple[int, str, _Owned]]]:
        """Returns what storages are to models and optimizers by their numbers; and those that no op has met."""
        known: dict[int, _Owned] = {}
        unmet: dict[int, tuple[int, str, _Owned]] = {}  # by address
        for tensor, owned in self._walk():
            with suppress(Exception):  # it has no storage, or a subclass of the user's raises
                number = self._ids.storage_of(tensor)
                if number >= 0:
                    known.setdefault(number, owned)
                    continue
                stored = tensor.untyped_storage()
                if stored.nbytes() and stored.device.type != "meta":
                    unmet.setdefault(stored.data_ptr(), (stored.nbytes(), str(tensor.device), owned))
        return known, [*unmet.values()]

    def _walk(self) -> Iterator[tuple[torch.Tensor, _Owned]]:
        """Yields the parameters, gradients and buffers of all models, and the states of optimizers."""
        owners: dict[int, tuple[int, str]] = {}  # of parameters, by `id`
        for named in [*self._tracker.names.modules]:
            module = named.module
            if module is None:
                continue
            parameters = dict(module._parameters.items())
            gradients = read_gradients(parameters.values()) or len(parameters) * [None]
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                if parameter is not None and id(parameter) not in owners:
                    owners[id(parameter)] = named.module_id, name
                    yield parameter, _Owned(PARAMETER, named.module_id, name)
                    if gradient is not None:
                        yield gradient, _Owned(PARAMETER_GRAD, named.module_id, name)
            for name, buffer in [*module._buffers.items()]:
                if buffer is not None:
                    yield buffer, _Owned(BUFFER, named.module_id, name)
        for optimizer, _ in [*self._optimizers.items()]:
            for parameter, state in [*optimizer.state.items()]:
                module_id, slot = owners.get(id(parameter), (_NONE, ""))
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield value, _Owned(OPTIMIZER_STATE, module_id, f"{slot}.{key}" if slot else str(key))


def _find_rests(
    devices: Sequence[torch.device | None],
    rows: Sequence[tuple[int, int, str, _Owned | None]],
    left_out: Sequence[int],
) -> Iterator[tuple[str, int]]:
    """Yields for each device the bytes of what has no row: left out, or known to the device's counter alone."""
    with_rows: dict[str, int] = {}
    for _, size, name, _ in rows:
        with_rows[name] = with_rows.get(name, 0) + size
    for device, rest in zip(devices, left_out, strict=True):
        counted = None if device is None else read_bytes_of(device)
        rest = rest if counted is None else max(counted - with_rows.get(str(device), 0), 0)
        if rest:
            yield str(device), rest


def alive_columns(found: Sequence[tuple[int, Alive]]) -> dict[str, Any]:
    """Returns the columns of the table `alive`: of each step the last of what was noted."""
    last = dict(found)
    steps = [step for step, alive in last.items() for _ in alive.sizes]
    noted = [alive for alive in last.values() for _ in alive.sizes]
    owned = [one for alive in last.values() for one in alive.owned]
    storages = np.concatenate([alive.storages for alive in last.values()])
    modules = np.array([_NONE if one is None else one.module_id for one in owned], np.int32)
    return {
        "step": np.array(steps, np.int32),
        "op_id": np.array([alive.op for alive in noted], np.int64),
        "error": from_strings([alive.error for alive in noted]).dictionary_encode(),
        "storage": np.ma.masked_less(storages, 0),
        "bytes": np.concatenate([alive.sizes for alive in last.values()]),
        "device": from_strings(
            [name for alive in last.values() for name in alive.devices]
        ).dictionary_encode(),
        "role": [None if one is None else one.role for one in owned],
        "module_id": np.ma.masked_less(modules, 0),
        "slot": [None if one is None else one.slot for one in owned],
    }
