"""Passes whole tensors to the sink: at once, or as late as they are still certain to be unchanged."""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ...measure.dtypes import format_of
from ...measure.measurers.extras import is_plain
from ...measure.measurers.measurer import why_not
from ...measure.measurers.want import Extra
from ...measure.memory import logical_array, why_unread
from ...measure.special import find_plain, shortened
from ...torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ...torch_internals.tensors import has_own_dispatch, is_on_device, plain_kinds, version_of
from ...torch_internals.transforms import plain_ops

_BLOB = "blob"
_DROPPED = "not kept: the buffer of whole tensors was full, or they cannot be written any more"
_NOWHERE = "not kept: this recording takes no whole tensors"
_WRITTEN = "not kept: written to before it was copied"
_FREED = "not kept: its storage was freed before it was copied"
_CAPTURED = f"not kept: {BEING_CAPTURED}"
_NO_MEMORY = "not kept: there was no memory for a copy"


class KeptTensors:
    """The whole tensors of one recorder, until the sink has them.

    A tensor that is kept lazily is held, with its memory, until `settle`, and is put only if torch has counted no write
    to it or to a view of it. Torch does not count writes through `.data`, numpy or DLPack, by fused optimizers (2.13),
    by NCCL, or by FSDP2 to its parameters; after such a write the new contents are put. Calling `settle` before
    optimizers step leaves few such cases.
    """

    def __init__(self, put: Callable[..., str | None] | None) -> None:
        """Creates the store.

        Args:
            put: `Sink.put_tensor`, which takes name, array, dtype and shape, and has a copy when it returns. It is
                called on the thread that keeps or settles. What it raises is raised there, except for a
                `MemoryError`, which becomes a note. None if tensors cannot be put anywhere.
        """
        self._put = put
        self._plain = plain_kinds()
        self._held: dict[int, _Held] = {}  # keyed by the `id` of the extra, which is held as well
        self._lock = threading.Lock()  # held briefly, around changes of `_held`
        self._settling = threading.RLock()  # a thread that waits for it continues when all is copied
        self._is_stopped = False

    def keep(self, extra: Extra, tensor: torch.Tensor, name: str, *, lazy: bool) -> None:
        """Passes a tensor to the sink, or remembers it for later; a tensor is never passed twice.

        Call it inside `DisableTorchFunction()`.

        A tensor on another device is cloned there without synchronization, and passed on by `settle`. Holding a plain
        tensor lazily needs a `detach`, which a profiler sees, but no mode. It takes 17 us, half of them to hide it.

        Args:
            extra: receives the tensor's reference, or a note why there is none.
            name: such as `blocks.0.attn.output[0]`.
            lazy: holds the tensor until `settle` if torch counts the writes to it; otherwise it is copied at once.
        """
        if self._is_stopped or extra.blob is not None or (lazy and id(extra) in self._held):
            return
        try:
            ready = self._prepare(extra, tensor, name, lazy=lazy)
        except Exception as error:  # a user's subclass, or a device without memory, may raise
            extra.add_note(shortened(f"not kept: {type(error).__name__}"), _BLOB)
            return
        if ready is not None:
            self._write_array(extra, ready, name)

    def settle(self) -> None:
        """Passes all held tensors that are unchanged to the sink. Returns when no other thread does so either.

        It waits for the devices of the tensors. While a CUDA graph is captured, no tensor of a device is held, as all
        were passed on when the capture began. `device_work` takes the same lock, so the lock must not be held before.
        """
        with graph_captures.device_work() as is_allowed, self._settling:
            while (held := self._take()) is not None:
                self._settle(held, is_allowed)

    def drop(self, extras: Iterable[Extra]) -> None:
        """Forgets the held tensors of these extras, whose steps are not wanted."""
        with self._lock:
            for extra in extras:
                self._held.pop(id(extra), None)

    def stop(self) -> None:
        """Forgets all held tensors, and keeps none from now on. It takes no lock, because the process may be a fork."""
        self._is_stopped = True
        self._held = {}

    # Taking tensors.

    def _prepare(self, extra: Extra, tensor: torch.Tensor, name: str, *, lazy: bool) -> torch.Tensor | None:
        """Returns the tensor to pass to the sink now; None if it is held, or if there is nothing to pass."""
        if is_plain(tensor, self._plain):
            return self._now_or_later(extra, tensor, name, lazy=lazy)
        with plain_ops(), graph_captures.device_work(tensor) as is_allowed:
            if not is_allowed:
                extra.add_note(_CAPTURED, _BLOB)
                return None
            plain = find_plain(tensor)
            extra.add_note(shortened(plain.note))
            if plain.tensor is None:
                return None
            # One and the same object must be used, because its version counts the writes.
            counts_writes = plain.tensor is tensor and not has_own_dispatch(type(tensor))
            return self._now_or_later(extra, plain.tensor, name, lazy=lazy and counts_writes)

    def _now_or_later(
        self, extra: Extra, tensor: torch.Tensor, name: str, *, lazy: bool
    ) -> torch.Tensor | None:
        if format_of(tensor.dtype) is None or why_unread(tensor) is not None:
            extra.add_note(why_not(tensor).replace("not measured", "not kept"), _BLOB)
            return None
        version = version_of(tensor) if lazy else None
        if version is None and tensor.device.type == "cpu":
            with self._lock:
                self._held.pop(id(extra), None)  # it was held for later
            return tensor
        with plain_ops():
            own = tensor.clone() if version is None else tensor.detach()
        held = _Held(extra, own, name, version, own.untyped_storage().nbytes())
        with self._lock:
            self._held[id(extra)] = held
        return None

    # Passing tensors on.

    def _take(self) -> "_Held | None":
        with self._lock:
            return self._held.pop(next(iter(self._held))) if self._held else None

    def _settle(self, held: "_Held", is_allowed: bool) -> None:
        with plain_ops():
            reason = held.why_not()
            if reason is None and not is_allowed and is_on_device(held.tensor):
                reason = _CAPTURED
            if reason is None:
                try:
                    own = held.tensor.cpu()  # for a CPU tensor this is the tensor itself
                except Exception as error:
                    reason = f"not kept: {type(error).__name__}"
            if reason is None:
                self._write_array(held.extra, own, held.name)
                reason = held.why_not()  # another thread may write to it during the copy
        if reason is not None:
            held.extra.blob = None
            held.extra.add_note(shortened(reason), _BLOB)

    def _write_array(self, extra: Extra, tensor: torch.Tensor, name: str) -> None:
        try:
            array, shape = logical_array(tensor), tuple(tensor.shape)
        except Exception as error:  # a user's subclass may raise
            extra.add_note(f"not kept: {type(error).__name__}", _BLOB)
            return
        if array is None:
            extra.add_note(_FREED, _BLOB)
        elif self._put is None:
            extra.add_note(_NOWHERE, _BLOB)
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            try:
                extra.blob = self._put(name, array, dtype, shape)
            except MemoryError:
                extra.add_note(_NO_MEMORY, _BLOB)
                return
            if extra.blob is None:
                extra.add_note(_DROPPED, _BLOB)


class _Held(NamedTuple):
    extra: Extra
    tensor: torch.Tensor
    name: str
    version: int | None  # None for a copy, which no code can write to
    size_bytes: int  # the size of its storage

    def why_not(self) -> str | None:
        """Returns the reason why the tensor counts as changed; None if torch has seen no write."""
        if self.version is None:
            return None
        if version_of(self.tensor) != self.version:
            return _WRITTEN
        return None if self.tensor.untyped_storage().nbytes() == self.size_bytes else _FREED
