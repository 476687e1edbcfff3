"""Defines the answer of comparing two recordings, as frozen dataclasses with names that scripts can rely on."""

from dataclasses import dataclass, field
from typing import Any

from ..tables.columns import ArrowTable
from .run_pair import RunPair

# The ways in which a difference came up.
SOURCE = "source"  # a parameter, a buffer or an input differs: nothing was computed
MADE = "made"  # equal inputs gave unequal outputs
AMPLIFIED = "amplified"  # the error of the output is several times that of the inputs
SEEN = "seen"  # the difference is first seen here, and the inputs were not compared
GROWN = "grown"  # no op stands out: small differences added up

# The verdicts on compared tensors are those ways and the following.
EQUAL = "equal"
NOISE = "noise"
ABSORBED = "absorbed"  # everything that is computed from the tensor is equal
INHERITED = "inherited"  # the error is about as large as that of the inputs
VERDICTS = (EQUAL, NOISE, ABSORBED, INHERITED, SOURCE, MADE, AMPLIFIED, SEEN, GROWN)

# Why aligned tensors were not compared, where the recordings have no note.
UNLIKE_OPS = "the two runs computed it from other tensors"
NOT_MEASURED = "not measured in both runs"

# The names of the two recordings.
FIRST = "first"
SECOND = "second"


@dataclass(frozen=True, kw_only=True)
class UnpairedModule:
    """A module that only one recording has."""

    name: str  # with its type: `blocks.4 (Block)`
    only_in: str  # FIRST or SECOND


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A tensor at which two recordings part, and what made the difference. It is named as in the first recording."""

    root: str | None  # the name of the root; None outside of modules
    path: str | None
    call: int | None  # the number of the call among those of its module in the step, from 0
    op: str | None  # None where only modules were measured
    op_nth: int | None  # the number of the op among those of its name in the call, from 0
    phase: str | None
    step: int
    role: str
    slot: str
    kind: str  # "source", "made", "amplified", "seen", "grown" or "absorbed"; in `firsts` also "inherited"
    #: scale, sign, offset, masked, shifted, transposed, permuted, reordered or stale; None if no relation is found.
    kind_of_difference: str | None
    relation: str | None  # how the second tensor follows from the first: `1/8 x the first run's`
    error: float  # relative; infinite if the tensors differ by an unknown amount
    low: float  # a lower bound of the error; for statistics, the upper bound is infinite
    high: float
    #: What the error was computed from: tensors, sketches, samples, statistics, hashes, shapes, nonfinite.
    metric: str
    noise: float  # an error up to this is noise for this tensor
    input_error: float
    amplification: float  # `error / input_error`; infinite where the inputs are equal
    #: FIRST or SECOND if a recompute in that recording, `b`, differs from its forward, `a`; None: the recordings
    #: differ.
    recompute_of: str | None
    #: FIRST or SECOND if only that recording has the op, which then has its name there.
    only_in: str | None
    #: An op that only one recording has and through which the difference comes. If `only_in` is set, the op that the
    #: other recording has instead.
    through: str | None
    #: The name of the compared tensor, if `op` is an earlier op that made the difference.
    seen_at: str | None
    other: str | None  # the name of the place in the second recording, if it differs
    #: The output in which a difference below noise has grown, as summands cancelled: `output of Net, 9.5e-02 apart`.
    leads_to: str | None
    source_line: str | None
    arguments: tuple[str, ...]  # unequal arguments of the op, other than tensors: `eps 1e-05 against 0.001`
    operands: tuple[str, ...]  # unequal tensors that the op reads, such as weights of other names
    a: str  # the measured tensor in the first recording: `float32[4, 8], -1 .. 1`
    b: str
    largest: float | None = None  # the largest absolute difference of whole tensors
    where: tuple[int, ...] | None = None  # the index of the largest difference
    pair: tuple[float, float] | None = None  # the two elements at that index
    cosine: float | None = None
    close_share: float | None = None  # the share of elements that differ by at most a thousandth
    ulps: float | None = None
    #: For a parameter, the last step in which it differed by noise at most, so that what wrote it made the difference.
    updated_since: int | None = None
    #: How many parameters or updates of that step differ now, and how many there are.
    updated: tuple[int, int] = (0, 0)
    #: How often the axes of an argument were reordered: `mat1 behind transpose x2 against transpose x1`.
    turned: str | None = None
    #: For an update, how the optimizers' states differed before it, as `step 3 against 1`.
    states: tuple[str, ...] = ()
    #: The modules that only one recording has behind whose outputs, or in which, the difference came up: at most one of
    #: each recording.
    behind: tuple[UnpairedModule, ...] = ()
    ranks: tuple[int, ...] = ()  # on which it came up; empty where ranks were not compared one by one


@dataclass(frozen=True, kw_only=True)
class Named:
    """A place with calls, ops or tensors that only one recording has; the last one in a list may sum up all others."""

    name: str
    count: int  # the number of its calls, ops or tensors in all steps
    why: str  # what the other lacks: "step", "module", "call", "op", "site" or "shape"; "" for a sum


@dataclass(frozen=True, kw_only=True)
class OneSided:
    """The rows that only one of the two recordings has. It is false if none of them matters."""

    steps: tuple[int, ...] = ()  # steps that the other recording lacks
    modules: tuple[str, ...] = ()
    calls: tuple[Named, ...] = ()
    ops: tuple[Named, ...] = ()
    tensors: tuple[Named, ...] = ()  # measured tensors
    #: The number of harmless rows: of wrappers, recomputes, views, copies, casts and parts of joined tensors.
    harmless: int = 0

    def __bool__(self) -> bool:
        return bool(self.modules or self.calls or self.ops or self.tensors)


@dataclass(frozen=True, kw_only=True)
class Reshaped:
    """An output of a module that was not compared, because the other run's has another number of elements."""

    name: str  # `output['logits'] of LlamaForCausalLM`
    step: int
    shape: tuple[int, ...]  # the shape in the module's first call in the first recording
    shape_b: tuple[int, ...]
    calls: int  # how many calls correspond to `calls_b` of the other run: 1 and 4 for micro-batches
    calls_b: int
    outermost: bool  # whether the model itself returns it, so that no measured call is around the module


@dataclass(frozen=True, kw_only=True)
class GrowthPoint:
    """The output of one module along the depth of the model, in forward."""

    name: str
    step: int
    error: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison. It is true if everything in both was compared and no difference exceeds noise.

    With `allow_missing`, rows that only one recording has do not make it false, but inputs of other shapes do.
    """

    ok: bool
    first: Divergence | None
    divergences: tuple[Divergence, ...]  # the first difference, then others that were made later
    firsts: tuple[Divergence, ...]  # the first of each step and phase
    absorbed_most: Divergence | None  # the largest absorbed difference
    missing: OneSided  # rows that only the first recording has
    extra: OneSided  # rows that only the second recording has
    reshaped: tuple[Reshaped, ...]  # outputs of modules whose element counts differ, the outermost first
    environment: tuple[str, ...]  # differences of versions, device, command, commit, options
    compared: int  # the number of compared tensors
    equal: int  # how many of them are equal in every bit that was measured
    within: int  # how many differ, by no more than noise
    absorbed: int  # how many differ by more than noise, but were absorbed
    beyond: int  # how many differ by more than noise and were not absorbed
    inherited: int  # how many of those only differ as their inputs do
    made: int  # how many of those made a difference themselves, at the places of `divergences`
    is_void: bool  # whether the inputs have other shapes, so that most outputs could not be compared
    unmeasured: int  # aligned tensors that were not compared, as they are unlike or measurements are missing
    #: The reasons of those, each with its number, the most frequent first.
    unmeasured_why: tuple[tuple[str, int], ...]
    metrics: tuple[tuple[str, int], ...]  # how many tensors were compared by each metric
    by_ops: bool  # whether both recordings have outputs of ops
    without_ops: tuple[str, ...]  # FIRST, SECOND, both or none: the recordings that were made without ops
    noise: str  # the source of the noise: given, measured or assumed
    noise_text: str
    growth: tuple[GrowthPoint, ...]  # points of the step of `first`
    steps: tuple[tuple[int, int], ...]  # the compared steps
    rules: tuple[str, ...]
    proposed: tuple[str, ...]  # rules for modules without partner, as `map=` takes them
    marks: tuple[str, ...]
    #: The ranks that were compared one by one, as both runs have one mesh: then counts are of all ranks, and what is of
    #: one rank is of that where the runs part first.
    ranks: tuple[int, ...] = ()
    table: ArrowTable = field(repr=False, compare=False)  # all compared tensors, in order of execution
    #: What corresponds in the two recordings, which a report draws.
    pair: RunPair | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.ok

    def to_frame(self) -> Any:
        """Returns all compared tensors as a `pandas.DataFrame`, in the order in which the first recording ran.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        from ...optional import require

        return require("pandas", "Comparison.to_frame()") and self.table.to_pandas()
