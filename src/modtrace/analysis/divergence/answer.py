"""What a comparison of two recordings answers, as frozen dataclasses with names that scripts can rely on."""

from dataclasses import dataclass, field
from typing import Any

from ..tables.columns import ArrowTable

# What is known of how a difference came up.
SOURCE = "source"  # a parameter, a buffer or an input differs: nothing was computed
MADE = "made"  # equal inputs gave unequal outputs
AMPLIFIED = "amplified"  # the error of the output is several times that of the inputs
SEEN = "seen"  # it was seen here first, and the inputs were not compared
GROWN = "grown"  # nothing stands out: small differences added up

# The verdicts on compared tensors, besides these.
EQUAL = "equal"
NOISE = "noise"
ABSORBED = "absorbed"  # the difference is gone in all that is computed from it
INHERITED = "inherited"  # the error is about that of the inputs
VERDICTS = (EQUAL, NOISE, ABSORBED, INHERITED, SOURCE, MADE, AMPLIFIED, SEEN, GROWN)

# The two recordings.
FIRST = "first"
SECOND = "second"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A tensor at which two recordings part, and who made it. Names and numbers are those of the first recording."""

    root: str | None  # the name of the root; None outside of modules
    path: str | None
    call: int | None  # n-th of its module in the step, from 0
    op: str | None  # None where only modules were measured
    op_nth: int | None  # of its name within the call, from 0
    phase: str | None
    step: int
    role: str
    slot: str
    kind: str  # "source", "made", "amplified", "seen" or "grown"; of `firsts` also "inherited"; or "absorbed"
    #: scale, sign, offset, masked, shifted, transposed, permuted, reordered or stale; None if it is none of these.
    kind_of_difference: str | None
    relation: str | None  # the same in words, of the second: `1/8 x the first run's`
    error: float  # relative; infinite where it is known that they differ, and not how far
    low: float  # bounds on it; of statistics the upper one is infinite
    high: float
    #: What the error comes from: tensors, sketches, samples, statistics, hashes, shapes, nonfinite.
    metric: str
    noise: float  # a difference up to this is noise here
    input_error: float
    amplification: float  # error / input_error; infinite where the inputs are equal
    #: FIRST or SECOND: what it recomputed, `b`, differs from its own forward, `a`; None: the recordings differ.
    recompute_of: str | None
    #: FIRST or SECOND: the op is one that only this recording has; it is named as that calls it.
    only_in: str | None
    #: An op that only one recording has, from which this comes; of one that is `only_in` a recording, what the other
    #: has in its place.
    through: str | None
    #: The tensor that was compared, where it is named by the op in front of it that made it.
    seen_at: str | None
    other: str | None  # the place in the second recording, if it has another name
    #: What a difference that is less than noise becomes, as summands cancel behind it: `output of Net, 9.5e-02 apart`.
    leads_to: str | None
    source_line: str | None
    arguments: tuple[str, ...]  # of the op, that are no tensors and differ: `eps 1e-05 against 0.001`
    operands: tuple[str, ...]  # tensors that it reads that are others and differ, as a weight of another name
    a: str  # what was measured: `float32[4, 8], -1 .. 1`
    b: str
    largest: float | None = None  # of whole tensors: the largest absolute difference,
    where: tuple[int, ...] | None = None  # its index,
    pair: tuple[float, float] | None = None  # and the elements there
    cosine: float | None = None
    close_share: float | None = None  # of the elements within a thousandth
    ulps: float | None = None
    #: Of a parameter: the last step in which it differed by noise at most. Its optimizer has made the difference.
    updated_since: int | None = None
    #: How many of the parameters, or of updates, of that step differ now, and how many there are.
    updated: tuple[int, int] = (0, 0)
    #: How often the axes of an argument were put in another order: `mat1 behind transpose x2 against transpose x1`.
    turned: str | None = None
    #: Of an update: in what the optimizers' states differed before, `step 3 against 1`.
    states: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Named:
    """A place whose calls, ops or tensors only one of the recordings has; the last of a list may sum up the rest."""

    name: str
    count: int  # of its calls, ops or tensors, summed over all steps
    why: str  # what the other recording lacks: "step", "module", "call", "op", "site" or "shape"; "" of the rest


@dataclass(frozen=True, kw_only=True)
class OneSided:
    """What only one of the two recordings has. It is false if there is nothing that matters."""

    modules: tuple[str, ...] = ()
    calls: tuple[Named, ...] = ()
    ops: tuple[Named, ...] = ()
    tensors: tuple[Named, ...] = ()  # what was measured
    #: Further rows: of wrappers, recomputes, views, copies, casts and parts of joined tensors.
    harmless: int = 0

    def __bool__(self) -> bool:
        return bool(self.modules or self.calls or self.ops or self.tensors)


@dataclass(frozen=True, kw_only=True)
class Reshaped:
    """An output of a module that was not compared, as the other run's has another number of elements."""

    name: str  # `output['logits'] of LlamaForCausalLM`
    step: int
    shape: tuple[int, ...]  # in the first recording, of its first call
    shape_b: tuple[int, ...]
    calls: int  # of the module, for `calls_b` of the other run's: 1 and 4 where a batch is in four parts
    calls_b: int
    outermost: bool  # it is what the model returns: no measured call is around that of the module


@dataclass(frozen=True, kw_only=True)
class GrowthPoint:
    """The output of one module along the depth of the model, in forward."""

    name: str
    step: int
    error: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Where two recordings part. It is true if all of both was compared, and no difference is more than noise.

    With `allow_missing` it is true without what only one recording has, but not where the inputs have other shapes.
    """

    ok: bool
    first: Divergence | None
    divergences: tuple[Divergence, ...]  # the first, then others that made a difference, as they ran
    firsts: tuple[Divergence, ...]  # of each step and phase
    absorbed_most: Divergence | None  # the largest of the differences that came to nothing
    missing: OneSided  # what the first recording has and the second has not
    extra: OneSided  # what the second recording has and the first has not
    reshaped: tuple[Reshaped, ...]  # outputs of modules whose shapes differ, the outermost first
    environment: tuple[str, ...]  # differences of versions, device, command, commit, options; empty if equal
    compared: int  # tensors
    equal: int  # of them: equal bit by bit, as far as it was measured
    within: int  # that differ, by no more than noise
    absorbed: int  # that differ by more, while what both compute from them is equal, up to noise
    beyond: int  # that differ by more, and what is computed from them as well:
    inherited: int  # as their inputs do,
    made: int  # or on their own account, at the places of `divergences`
    is_void: bool  # the inputs have other shapes: so has what the models return, and most of what is inside of them
    unmeasured: int  # aligned, and not compared: nothing was measured of both, or they are of other tensors
    metrics: tuple[tuple[str, int], ...]  # how many tensors were compared by what
    by_ops: bool  # both recordings have what ops returned
    noise: str  # where it comes from: given, measured, assumed
    noise_text: str
    growth: tuple[GrowthPoint, ...]  # of the step of `first`
    steps: tuple[tuple[int, int], ...]  # that were compared
    rules: tuple[str, ...]
    proposed: tuple[str, ...]  # rules for modules without a partner, as map= takes them
    marks: tuple[str, ...]
    table: ArrowTable = field(repr=False, compare=False)  # all compared tensors, as they ran

    def __bool__(self) -> bool:
        return self.ok

    def to_frame(self) -> Any:
        """Returns all compared tensors as a `pandas.DataFrame`, in the order in which the first recording ran.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        from ...optional import require

        return require("pandas", "Comparison.to_frame()") and self.table.to_pandas()
