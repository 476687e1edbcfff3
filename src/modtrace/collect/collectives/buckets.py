"""Tells which layers' gradients DDP reduces in a collective."""

from collections.abc import Iterator, Sequence

from ...torch_internals.collectives import Bucket, StartedCollective, read_buckets
from ..names.module_names import ModuleNames


class BucketLayers:
    """Names the layers in the buckets of the `DistributedDataParallel` models that were seen."""

    def __init__(self) -> None:
        #: For each model its buckets in their order, with bytes and layers.
        self._models: list[list[tuple[int, str]]] = []

    def learn(self, names: ModuleNames) -> None:
        """Reads which buckets there are. In a backward it would wait for DDP, which may wait for another rank."""
        modules = [module for named in names.modules if (module := named.module) is not None]
        self._models = [
            [(bucket.size_bytes, _describe(bucket, names)) for bucket in buckets]
            for module in modules
            if (buckets := read_buckets(module))
        ]

    def find(self, entries: Sequence[StartedCollective]) -> dict[tuple[str, int], str]:
        """Returns for the records of torch's log that are buckets the paths of their first and last layer.

        All-reduces with exactly their sizes in their order are one backward; the last one may be cut off. If several
        models have such all-reduces, the result is empty.

        Args:
            entries: all-reduces that C++ code has started, in their order.
        """
        found = [dict(_match(entries, buckets)) for buckets in self._models]
        matching = [one for one in found if one]
        return matching[0] if len(matching) == 1 else {}


def _match(
    entries: Sequence[StartedCollective], buckets: Sequence[tuple[int, str]]
) -> Iterator[tuple[tuple[str, int], str]]:
    row: list[StartedCollective] = []  # of one backward
    for entry in entries:
        if entry.bytes_read != buckets[len(row)][0]:
            row = []
        if entry.bytes_read == buckets[len(row)][0]:
            row.append(entry)
        if len(row) == len(buckets):
            yield from _name(row, buckets)
            row = []
    yield from _name(row, buckets)


def _name(
    row: Sequence[StartedCollective], buckets: Sequence[tuple[int, str]]
) -> Iterator[tuple[tuple[str, int], str]]:
    for entry, (_, layers) in zip(row, buckets, strict=False):
        yield (entry.log, entry.record), layers


def _describe(bucket: Bucket, names: ModuleNames) -> str:
    paths = [
        path.rpartition(".")[0] or path
        for parameter in bucket.parameters
        if (path := names.parameter_name(parameter)) is not None
    ]
    return " to ".join(dict.fromkeys([paths[0], paths[-1]])) if paths else ""
