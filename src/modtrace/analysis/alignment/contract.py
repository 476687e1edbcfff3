"""Defines the result of aligning two recordings, which are called `a` and `b` throughout."""

from dataclasses import dataclass

from ..tables.columns import Column, Rows
from ..tables.placement import ModuleName

#: The reasons why a row of one recording has no partner in the other, listed by their codes.
REASONS = (
    "step",  # the other recording has no such step
    "module",  # the other recording has no such module
    "call",  # the other recording calls the module less often in this step and phase
    "op",  # the corresponding call in the other recording has no such op
    "site",  # the other recording did not measure this tensor of the same call, op or module
    "wrapper",  # the other recording lacks this wrapper; the wrapped call has a partner
    "recompute",  # the other recording did not recompute the call, whose forward has a partner
    "optimizer",  # the two optimizers run different ops; the parameters that they update are compared
    "prepared",  # the op ran before the step's first call; what later ops read of it is compared
    "again",  # another row of the same parameter in the same step has a partner
    "before",  # the other recording measured this leaf in an earlier step, when an op first read it
    "view",  # the op computes nothing: it returns a view of its input
    "joined",  # the module is one of several parts, or the whole of several: see `Alignment.joined`
    "inside",  # the other recording measured the module inside of compiled code, which has no calls
    "unrecorded",  # the other recording was not asked to record ops, or the calls of backward
)

#: Reasons that do not mean that the models compute different things, so that the recordings may still be equal.
HARMLESS = frozenset(REASONS) - {"step", "module", "call", "op", "site"}


@dataclass(frozen=True, kw_only=True, eq=False)
class UnpairedRows:
    """The rows of one table of one recording that have no partner, in the order of execution."""

    rows: Rows
    reason: Column  # for each row, the code of its reason, an index of REASONS

    def __len__(self) -> int:
        return len(self.rows)

    def count(self) -> dict[str, int]:
        """Returns how many rows have each reason, without reasons that no row has."""
        counts = {name: int((self.reason == code).sum()) for code, name in enumerate(REASONS)}
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, kw_only=True, eq=False)
class Unpaired:
    """The rows of one of the two recordings that have no partner in the other."""

    modules: tuple[ModuleName, ...]
    calls: UnpairedRows
    ops: UnpairedRows
    values: UnpairedRows
    #: (n, 2): for recomputes that the other recording lacks, the row of `values` of the recompute and of its forward.
    recomputed: Rows

    @property
    def is_harmless(self) -> bool:
        """True if no reason says that the other model computes something else."""
        tables = (self.calls, self.ops, self.values)
        return all(HARMLESS.issuperset(table.count()) for table in tables)


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """Tensors of one recording that are parts of a tensor of the other, such as three projections of a fused one.

    Each part has an entry; the parts of one whole are adjacent, in the order in which they are concatenated.
    """

    part: Rows  # the part's row of `values`
    whole: Rows  # the whole's row of `values` in the other recording
    whole_in_a: Column  # whether the whole is in `a`, and its parts are in `b`
    dimension: Rows  # the dimension of the whole along which the parts are concatenated
    offset: Rows  # the index in that dimension at which the part begins
    permuted: Rows  # how to permute the dimensions of the part first, as `Alignment.permuted`

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """The rows of two recordings that correspond, and the rows that have no partner.

    Each row of the compared steps occurs exactly once: in a pair, as missing or as extra. Rows are numbered as in the
    tables that `RecordingData.table` returns. A pair has the row of `a` first, and pairs are in the order in which `a`
    executed or measured their rows.
    """

    steps: Rows  # (n, 2): numbers of steps
    modules: tuple[tuple[ModuleName, ModuleName], ...]
    calls: Rows  # (n, 2)
    ops: Rows  # (n, 2)
    values: Rows  # (n, 2)
    #: For each pair of values, how the dimensions of `b` have to be permuted, as an index of `axes`; -1 for not at all.
    permuted: Rows
    axes: tuple[tuple[int, ...], ...]  # as `torch.permute` takes them: (1, 0) transposes a matrix
    joined: Joined
    missing: Unpaired  # rows of `a` without partner in `b`
    extra: Unpaired  # rows of `b` without partner in `a`
    rules: tuple[str, ...]  # the rules that were applied, as `--map` takes them
    proposed: tuple[str, ...]  # rules that types, shapes and order suggest; they are not applied
