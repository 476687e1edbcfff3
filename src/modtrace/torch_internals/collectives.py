"""Watches the collectives that Python code starts, and reads from a log of torch those that C++ code starts.

The log is what torch calls its "Flight Recorder"; it is on by default.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from .patches import replace


class EntryPoint(NamedTuple):
    """A method of `ProcessGroup` that starts collectives, or sends messages."""

    name: str  # of the collective
    outputs: int = 0  # the position of the tensors that it fills; -1 for none
    inputs: int = 0  # the position of the tensors that it reads; -1 for none
    peer: int = -1  # the position of the other rank, of messages

    @property
    def is_message(self) -> bool:
        """True if it is between two ranks."""
        return self.name in ("send", "recv")


#: By the name of the method, of torch 2.11 to 2.13; a torch lacks some. What `torch.distributed` does in Python, FSDP2
#: and pipelines included, goes through them, but for `monitored_barrier`. DDP's buckets, DTensors and compiled code
#: call C++.
ENTRY_POINTS = {
    "allreduce": EntryPoint("all_reduce"),
    "allreduce_coalesced": EntryPoint("all_reduce"),
    "broadcast": EntryPoint("broadcast"),
    "reduce": EntryPoint("reduce"),
    "allgather": EntryPoint("all_gather", inputs=1),
    "allgather_coalesced": EntryPoint("all_gather", inputs=1),
    "_allgather_base": EntryPoint("all_gather", inputs=1),
    "all_gather_single": EntryPoint("all_gather", inputs=1),
    "allgather_into_tensor_coalesced": EntryPoint("all_gather", inputs=1),
    "all_gather_single_coalesced": EntryPoint("all_gather", inputs=1),
    "gather": EntryPoint("gather", inputs=1),
    "scatter": EntryPoint("scatter", inputs=1),
    "reduce_scatter": EntryPoint("reduce_scatter", inputs=1),
    "_reduce_scatter_base": EntryPoint("reduce_scatter", inputs=1),
    "reduce_scatter_single": EntryPoint("reduce_scatter", inputs=1),
    "reduce_scatter_tensor_coalesced": EntryPoint("reduce_scatter", inputs=1),
    "reduce_scatter_single_coalesced": EntryPoint("reduce_scatter", inputs=1),
    "alltoall": EntryPoint("all_to_all", inputs=1),
    "alltoall_base": EntryPoint("all_to_all", inputs=1),
    "all_to_all_single": EntryPoint("all_to_all", inputs=1),
    "barrier": EntryPoint("barrier", -1, -1),
    "send": EntryPoint("send", outputs=-1, peer=1),
    "recv": EntryPoint("recv", inputs=-1, peer=1),
    "recv_anysource": EntryPoint("recv", inputs=-1),
}


class Notifier(Protocol):
    """A method of torch that notifies listeners of its calls."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Calls a method that starts collectives."""

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Calls a method that waits for one."""


_listeners: list[Any] = []
_patches = ExitStack()  # closed when there is no listener


def watch_collectives(listener: Any, notifier: Callable[..., Notifier]) -> None:
    """Notifies a listener of all collectives that Python code starts, on any thread, until `unwatch_collectives`.

    Only methods of classes are replaced, which Dynamo never traces: compiled code has the ops in place of
    `torch.distributed`'s functions.

    Args:
        listener: an object of the kind that the notifiers know.
        notifier: makes one of a method, the list of listeners, `order_arguments`, and the fields of an `EntryPoint`.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    is_first = not _listeners
    _listeners.append(listener)
    if module is None or not is_first:
        return
    bind = type(vars(module.ProcessGroup)["size"])  # pybind's, as a function of C does not bind by itself
    for name, entry in ENTRY_POINTS.items():
        original = getattr(module.ProcessGroup, name, None)
        if original is not None:
            noted = notifier(original, _listeners, order_arguments, *entry, entry.is_message)
            replace(module.ProcessGroup, name, bind(noted.start), _patches)
    waiting = notifier(module.Work.wait, _listeners, order_arguments, *EntryPoint("wait"), False)
    replace(module.Work, "wait", bind(waiting.wait), _patches)


def unwatch_collectives(listener: Any) -> None:
    """Removes a listener, and what was replaced with the last one."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _patches.close()


def order_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns all arguments of a method as by position: tensors first, and options last."""
    return (*args, *sorted(kwargs.values(), key=_are_options))


def size_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor; of a sparse one in coordinates those of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else 0


def _are_options(value: Any) -> bool:
    return type(value).__name__.endswith("Options")


def tells(kind: type) -> bool:
    """Returns whether objects of a type are options of a collective that have a root or a reduction."""
    return kind.__name__.endswith("Options") and (hasattr(kind, "rootRank") or hasattr(kind, "reduceOp"))


def root_of(options: Any) -> int | None:
    """Returns the group rank of the root in the options of a collective; None without one."""
    root = options.rootRank if hasattr(type(options), "rootRank") else None
    return root if isinstance(root, int) else None


#: The names of reductions, by their numbers.
_reductions: dict[int, str] = {}


def reduction_of(options: Any) -> str | None:
    """Returns how a collective reduces, from its options: `sum`, `avg`, ...; None if it does not. It takes 1.2 us."""
    if not hasattr(type(options), "reduceOp"):
        return None
    found = options.reduceOp
    kind = getattr(found, "op", found)
    number = int(kind)
    name = _reductions.get(number)
    if name is None:
        name = _reductions[number] = str(kind).rpartition(".")[2].strip(">").lower()
    return name


def describe_group(group: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the name of a process group, the same on all of its ranks, and its global ranks, by group rank."""
    try:
        ranks = torch.distributed.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # it has been destroyed
        ranks = []
    return _join_names(group.group_name, getattr(group, "group_desc", "")), tuple(ranks)


def _join_names(name: str, described: str) -> str:
    return f"{name}:{described}" if described not in ("", "undefined") else name


def local_name(group: Any) -> str | None:
    """Returns the name of a process group in this process; None if it was given none, as `ProcessGroup` itself."""
    try:
        return str(group.group_name)
    except RuntimeError:
        return None


def is_distributed() -> bool:
    """Returns whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class StartedCollective(NamedTuple):
    """A collective in one of torch's logs."""

    log: str  # the name of the log
    record: int  # counts up in the log, in the order in which they were started
    group: str  # as `describe_group` names it
    number: int  # of the collective within its group
    name: str
    dtype: str | None
    bytes_read: int
    bytes_written: int
    time_ns: int  # as `time.time_ns()`
    is_done: bool


#: The functions that return torch's log as JSON; NCCL has one of its own.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

#: The names of dtypes in the log, with those of torch's attributes.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


def read_torch_log() -> list[StartedCollective]:
    """Returns the newest collectives (2,000 by default), in the order in which they were started.

    It takes some 20 us for each, in which no other thread runs Python. Messages are left out; gloo's are not in it.
    The result is empty where this torch has no such log, or it is switched off.
    """
    found = [
        _read_entry(log, entry)
        for log, content in _dump(with_entries=True)
        for entry in content.get("entries", ())
        if not entry.get("is_p2p") and ":coalesced" not in entry["profiling_name"]
    ]
    return sorted(found, key=attrgetter("time_ns"))


def read_progress() -> tuple[tuple[str, str, str], ...]:
    """Returns for each process group its log and number, and the numbers of its last issued and last completed ones.

    It takes 50 us.
    """
    return tuple(
        (f"{log} {group}", str(of.get("last_enqueued_collective")), str(of.get("last_completed_collective")))
        for log, content in _dump(with_entries=False)
        for group, of in content.get("pg_status", {}).items()
    )


def _dump(*, with_entries: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump: Callable[..., bytes] | None = getattr(c10d, name, None)
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # another torch
            if dump is not None:
                yield name, json.loads(dump(includeCollectives=with_entries))


def _read_entry(log: str, entry: dict[str, Any]) -> StartedCollective:
    name, described = entry["process_group"]
    kind = entry["profiling_name"].partition(":")[2].lstrip("_")
    dtypes = [*entry.get("input_dtypes", ()), *entry.get("output_dtypes", ())]
    return StartedCollective(
        log=log,
        record=entry["record_id"],
        group=_join_names(name, described),
        number=entry["collective_seq_id"],
        name=_NAMES.get(kind, kind),
        dtype=_DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else None,
        bytes_read=_size(entry.get("input_sizes", ()), entry.get("input_dtypes", ())),
        bytes_written=_size(entry.get("output_sizes", ()), entry.get("output_dtypes", ())),
        time_ns=entry["time_created_ns"],
        is_done=bool(entry.get("retired")),
    )


#: The names of collectives in the log that differ from ours.
_NAMES = {
    "allgather_base": "all_gather", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "all_to_all_single": "all_to_all", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all", "all_reduce_barrier": "barrier",
}  # fmt: skip


def _size(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=False):
        elements = functools.reduce(lambda product, size: product * size, shape, 1)
        total += elements * getattr(torch, _DTYPES.get(dtype, "uint8")).itemsize
    return int(total)


def list_groups() -> list[Any]:
    """Returns all process groups of this process."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return [*(getattr(getattr(module, "_world", None), "pg_map", None) or ())]


def number_of_last(group: Any) -> int | None:
    """Returns the number of the last collective that a process group has started (0.3 us); of gloo, messages count too.

    It is None if its backend does not count, as that of several devices, or the group was destroyed.
    """
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def number_reader() -> Callable[[Any], int | None]:
    """Returns the function by which `number_of_last` asks a process group; it may raise RuntimeError."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    reader: Callable[[Any], int | None] = getattr(
        getattr(module, "ProcessGroup", None), "_get_sequence_number_for_group", number_of_last
    )
    return reader


def backend_of(group: Any) -> str:
    """Returns the name of the backend of a process group: `gloo`, `nccl`; of gloo, messages count as collectives."""
    return str(getattr(group, "_get_backend_name", lambda: "")())


class Bucket(NamedTuple):
    """Gradients that DDP reduces together."""

    size_bytes: int
    parameters: tuple[torch.Tensor, ...]  # in the order in which DDP expects their gradients


def read_buckets(model: torch.nn.Module) -> list[Bucket]:
    """Returns the buckets of a `DistributedDataParallel` in the order of their reduction.

    The list is empty for another module, before the second backward, in which DDP makes them anew, and where this torch
    does not tell.
    """
    read = getattr(model, "_get_ddp_logging_data", None)
    parameters = getattr(model, "_module_parameters", None)
    if read is None or parameters is None:
        return []
    told = read()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sizes = _numbers(told.get("rebuilt_bucket_sizes", ""))
    members = [_numbers(part, " ") for part in told.get("rebuilt_per_bucket_param_indices", "").split(",")]
    if not sizes or len(sizes) != len(members) or len(trained) != told.get("num_parameter_tensors"):
        return []
    return [
        Bucket(size, tuple(trained[at] for at in of_bucket))
        for size, of_bucket in zip(sizes, members, strict=True)
    ]


def _numbers(text: str, between: str = ",") -> list[int]:
    return [int(part) for part in text.split(between) if part.strip()]
