"""What an alignment of two recordings says. The recordings are `a` and `b` throughout."""

from dataclasses import dataclass

from ..tables.columns import Column, Rows
from ..tables.placement import ModuleName

#: Why rows of one recording have no partner in the other, by their codes.
REASONS = (
    "step",  # the other one has no such step
    "module",  # it has no such module
    "call",  # it calls the module less often in this step and phase
    "op",  # its call has no such op
    "site",  # it measured no such tensor of the same call, op or module
    "wrapper",  # it lacks a wrapper; the call that the wrapper passes on to has a partner
    "recompute",  # it did not recompute the call, whose forward has a partner
    "optimizer",  # the op is one of an optimizer that runs others; what it made of the parameters is compared
    "prepared",  # the op ran before the step's first call; what later ops read of such ops is compared
    "again",  # another row of the same parameter in the same step has a partner
    "before",  # it measured this leaf in an earlier step: leaves are measured when an op first reads them
    "view",  # the op computes nothing: it returns a view of what it was given
    "joined",  # one of several parts, or the whole of several: see `Alignment.joined`
    "inside",  # it measured the module inside of compiled code, which has no calls
    "unrecorded",  # it was not asked to record ops, or the calls of backward
)

#: Reasons that say nothing of what the two models compute: none of them makes two recordings unequal.
HARMLESS = frozenset(REASONS) - {"step", "module", "call", "op", "site"}


@dataclass(frozen=True, kw_only=True, eq=False)
class UnpairedRows:
    """Rows of one table of one recording without a partner, in the order of execution."""

    rows: Rows
    reason: Column  # of each row: the code of one of REASONS

    def __len__(self) -> int:
        return len(self.rows)

    def count(self) -> dict[str, int]:
        """Returns how many rows have each reason; reasons that none has are left out."""
        counts = {name: int((self.reason == code).sum()) for code, name in enumerate(REASONS)}
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, kw_only=True, eq=False)
class Unpaired:
    """What only one of the two recordings has."""

    modules: tuple[ModuleName, ...]
    calls: UnpairedRows
    ops: UnpairedRows
    values: UnpairedRows
    #: (n, 2): of what the other one did not recompute, a row of `values` of the recompute and that of its forward.
    recomputed: Rows

    @property
    def is_harmless(self) -> bool:
        """True if nothing says that the other model computes something else."""
        tables = (self.calls, self.ops, self.values)
        return all(HARMLESS.issuperset(table.count()) for table in tables)


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """Tensors of one recording that are parts of a tensor of the other: three projections and the fused one.

    There is an entry for each part; the parts of one whole are adjacent, in the order in which they are concatenated.
    """

    part: Rows  # row of `values`
    whole: Rows  # row of `values` of the other recording
    whole_in_a: Column  # whether the whole is of `a`; its parts are of `b` then
    dimension: Rows  # of the whole, along which the parts follow each other
    offset: Rows  # where the part begins in that dimension
    permuted: Rows  # as `Alignment.permuted`: how the dimensions of the part have to be permuted first

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """Which rows of two recordings mean the same.

    Every row of the compared steps is in a pair, or is missing or extra: once. Numbers of rows are positions in the
    tables as `RecordingData.table` returns them. Pairs have the row of `a` first, and are in the order in which `a`
    executed or measured them.
    """

    steps: Rows  # (n, 2): numbers of steps
    modules: tuple[tuple[ModuleName, ModuleName], ...]
    calls: Rows  # (n, 2)
    ops: Rows  # (n, 2)
    values: Rows  # (n, 2)
    #: Of each pair of values: the code in `axes` of how the dimensions of `b` have to be permuted; -1: not at all.
    permuted: Rows
    axes: tuple[tuple[int, ...], ...]  # for `transpose`: (1, 0) of a matrix
    joined: Joined
    missing: Unpaired  # what `a` has and `b` has not
    extra: Unpaired  # what `b` has and `a` has not
    rules: tuple[str, ...]  # that were applied, as `--map` takes them
    proposed: tuple[str, ...]  # further rules that types, shapes and order speak for; they are not applied
