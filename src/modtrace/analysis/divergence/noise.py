"""Estimates how much of each difference is noise: as given, as further runs show, or as dtypes and sums suggest."""

from dataclasses import dataclass, replace

import numpy as np

from ...recording.role import OF_PARAMETERS, PARAMETER, PARAMETER_GRAD, UPDATE
from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Rows, find_rows
from ..tables.measured import ComparedRows
from ..tables.op_flow import OpFlow
from ..tables.op_rules import ADDITIVE
from ..tables.run import RunTables
from .op_inputs import find_op_inputs
from .pair_inputs import find_largest, number_parameters
from .paired_run import PairedRun
from .tensor_metrics import EPSILONS

GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"

#: Rounding is assumed to make an error of at most this factor times eps * sqrt(reduction length).
FACTOR = 2.0

#: If fewer tensors than this share have unequal dtypes, the run as a whole is not one in another dtype.
_FEW = 0.1

#: The largest relative error of two tensors of independent noise: sqrt(2), times 1.2 for the estimate by sketches. A
#: tensor and its negative have an error of 2, which does not happen by chance.
MOST_NOISE = 1.7

#: Differences up to this multiple of those measured between runs are noise, as each run is rounded differently.
_RUNS_FACTOR = 4.0

#: The largest factor by which summands are assumed to exceed their sum.
_LARGEST = 1e12


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """The error of each pair that noise explains."""

    kind: str  # GIVEN, MEASURED or ASSUMED
    text: str  # the kind of noise as a sentence
    local: Numbers  # noise that the op or module of the pair itself makes
    accumulated: Numbers  # the most that results from the noise of all earlier pairs
    uncancelled: Numbers  # the same if no summands cancel
    gain: Numbers  # the factor by which noise of the inputs may grow, as summands cancel
    most: Numbers | float = np.inf  # an upper limit of assumed noise

    def add_rounding(self, epsilons: Numbers, gain: Numbers) -> "Noise":
        """Returns this noise with rounding between the pairs added, if the noise is assumed.

        Args:
            epsilons: for each pair, eps of the dtype to which its inputs were rounded on the way; 0 for none.
            gain: for each pair, the factor by which the noise of its inputs is larger.
        """
        if self.kind != ASSUMED:
            return self
        local = np.maximum(self.local, np.minimum(FACTOR * epsilons * self.gain, self.most))
        return replace(self, local=np.maximum(local, np.minimum(local * gain, self.most)))


def give_noise(tolerance: float, count: int) -> Noise:
    """Returns a noise that equals the tolerance for all pairs."""
    return Noise(
        kind=GIVEN,
        text=f"noise: a relative error of {tolerance:g} is tolerated",
        local=np.full(count, float(tolerance)),
        accumulated=np.zeros(count),
        uncancelled=np.zeros(count),
        gain=np.ones(count),
    )


def measure_noise(levels: list[Numbers], cancellation: Numbers) -> Noise:
    """Returns the noise that further runs with the same configuration show.

    Args:
        levels: for each further run, the error of each pair; NaN where the run has no such tensor.
        cancellation: the factors that `find_cancellation` returns.
    """
    highest = np.fmax.reduce(levels)
    known = highest[np.isfinite(highest)]
    most = known.max(initial=0.0)
    # An infinite error says that a further run differs by an unknown amount, so every difference is noise.
    level = _RUNS_FACTOR * np.where(np.isnan(highest), most, highest)
    runs = f"{len(levels)} further run{'s' if len(levels) > 1 else ''}"
    return Noise(
        kind=MEASURED,
        text=f"noise: measured by {runs}, up to {most:.1e}; {_RUNS_FACTOR:.0f} times that of a site is noise",
        local=level,
        accumulated=np.where(np.isinf(level), np.inf, np.minimum(level * cancellation, 1.0)),
        uncancelled=level,
        gain=cancellation,
    )


def assume_noise(
    a: ComparedRows, b: ComparedRows, cancellation: Numbers, most: Numbers | float = MOST_NOISE
) -> Noise:
    """Returns the noise of rounding: of results to the coarser dtype, and of sums along the tensor's largest axis.

    Sums are assumed to be computed in float32 at least.

    Args:
        a: the measurements of one recording.
        b: the measurements of the other recording.
        cancellation: the factors that `find_cancellation` returns.
        most: an upper limit of the noise of each pair.
    """
    coarser = _find_coarser_epsilons(a, b)
    length = np.maximum(
        *(np.asarray(measured.sizes.max(axis=1, initial=1), np.float64) for measured in (a, b))
    )
    local = FACTOR * (coarser + np.minimum(coarser, 2.0**-23) * np.sqrt(length))
    accumulated = np.maximum.accumulate(local) * np.sqrt(1 + np.arange(len(local)))
    return Noise(
        kind=ASSUMED,
        text=f"noise: assumed, {FACTOR:g} eps of the dtype x sqrt(sum length): {_describe_range(local)}",
        local=np.minimum(local * cancellation, most),
        accumulated=np.minimum(accumulated * cancellation, most),
        uncancelled=accumulated,
        gain=cancellation,
        most=most,
    )


def _find_coarser_epsilons(a: ComparedRows, b: ComparedRows) -> Numbers:
    """Returns eps of the coarser dtype of each pair, or of the finer one if few pairs have unequal dtypes.

    A run in another dtype has unequal ones nearly everywhere; a single op that changes the dtype is not noise.
    """
    eps, eps_b = (
        np.array([*(EPSILONS.get(dtype, 0.0) for dtype in measured.dtypes), 0.0])[measured.dtype]
        for measured in (a, b)
    )
    if (eps != eps_b).sum() < _FEW * max(int((eps > 0).sum()), 1):
        return np.asarray(np.minimum(eps, eps_b))
    return np.asarray(np.maximum(eps, eps_b))


def _describe_range(local: Numbers) -> str:
    used = local[local > 0]
    if not len(used):
        return "none, for integers are exact"
    low, high = used.min(), used.max()
    return f"{low:.1e}" if high < 1.5 * low else f"{low:.0e} to {high:.0e}"


#: Ops that return means, either of all they read or at slot `[1]`.
_AVERAGING = frozenset({"mean", "native_layer_norm", "native_batch_norm", "native_group_norm"})

#: Ops that return, at slots `[1]` and `[2]`, sums over the incoming gradient times numbers of about one.
_OF_WEIGHTS = frozenset(
    {"native_layer_norm_backward", "native_batch_norm_backward", "native_group_norm_backward"}
)

#: Ops that return, at slot `[2]`, the sum of the incoming gradient.
_OF_BIASES = frozenset({"convolution_backward"})

#: Ops that return a gradient minus its mean, which is weighted by another tensor.
_CENTERING = frozenset({"softmax_backward_data"})


def find_cancellation(run: PairedRun) -> Numbers:
    """Returns the factor by which the summands of each tensor exceed their sum; 1 where nothing cancels.

    An example is the gradient of the bias of keys, which is zero but for rounding, as softmax does not depend on it.
    """
    factor = np.ones(len(run.rows))
    with np.errstate(all="ignore"):
        _compare_with_siblings(factor, run)
        _compare_with_summands(factor, run)
    return np.clip(np.nan_to_num(factor, nan=1.0), 1.0, _LARGEST)


def find_gain_before(run: PairedRun) -> Numbers:
    """Returns the factor by which unpaired softmaxes enlarge the rounding in what the op of each pair reads.

    The backward of a softmax subtracts from a gradient its mean weighted by the output, so summands cancel.
    """
    tables, gain = run.tables, np.ones(len(run.rows))
    is_centering = tables.ops.are_named(_CENTERING) & run.is_unpaired[:-1]
    if not is_centering.any():
        return gain
    stats, flow, is_plain = tables.values.read_stats(), tables.flow, tables.ops.is_plain
    outputs = np.flatnonzero(tables.tensor_of_value >= 0)
    tensor = tables.tensor_of_value[outputs]
    norm = _to_tensors(flow, tensor, stats.l2[outputs])
    largest = _to_tensors(flow, tensor, stats.max[outputs])
    is_gradient = _are_gradients(flow)
    size = find_op_inputs(flow, is_plain, norm, np.where(is_gradient, np.nan, 0.0), is_centering)
    weight = find_op_inputs(flow, is_plain, largest, np.where(is_gradient, 0.0, np.nan), is_centering)
    first = flow.first_returned[is_centering]
    with np.errstate(all="ignore"):
        of_op = size.error[is_centering] * weight.error[is_centering] / norm[first]
    of_tensor = _to_tensors(flow, tables.tensor_of_value[run.rows[run.op >= 0]], 1.0)
    of_tensor[first] = np.clip(np.nan_to_num(of_op, nan=1.0), 1.0, _LARGEST)
    read = find_op_inputs(flow, is_plain, of_tensor, np.full(len(flow.read), np.nan)).error
    gain[run.op >= 0] = np.fmax(1.0, read[run.op[run.op >= 0]])
    return gain


def _to_tensors(flow: OpFlow, tensor: Rows, numbers: Numbers | float) -> Numbers:
    """Returns for each tensor of a recording a number from `numbers`; NaN for tensors without."""
    of_tensor = np.full(len(flow.tensors) + 1, np.nan)
    of_tensor[tensor] = numbers
    return of_tensor[:-1]


def _are_gradients(flow: OpFlow) -> Bools:
    """Returns which reads of ops are reads of gradients."""
    return np.array([*(slot.startswith("grad") for slot in flow.slots), False])[flow.slot]


def _compare_with_siblings(factor: Numbers, run: PairedRun) -> None:
    """Compares the gradient of each parameter with the others of its module, and an update with its gradient."""
    tables, rows, rms = run.tables, run.rows, run.measured.stats.rms
    values = tables.values
    gradients, others, updates, parameters = (
        np.flatnonzero(values.is_of(*roles, rows=rows))
        for roles in ((PARAMETER_GRAD,), OF_PARAMETERS - {PARAMETER_GRAD}, (UPDATE,), (PARAMETER,))
    )
    keys = values.place[rows].astype(np.int64) << 32 | values.step[rows].astype(np.int64)
    keys = keys[gradients]
    factor[gradients] = find_largest(keys, rms[gradients], keys, none=0.0) / rms[gradients]
    of = _find_same_parameter(tables, rows[gradients], rows[others])
    factor[others[of >= 0]] = factor[gradients[of[of >= 0]]]  # an update is computed from the gradient
    of = _find_same_parameter(tables, rows[parameters], rows[updates])
    updates, ratio = updates[of >= 0], rms[parameters[of[of >= 0]]] / rms[updates[of >= 0]]
    factor[updates] = np.fmax(factor[updates], ratio)


def _find_same_parameter(tables: RunTables, rows: Rows, wanted: Rows) -> Rows:
    """Returns for each wanted row the position in `rows` of the same parameter and step; -1 if there is none."""
    keys, wanted_keys = (
        number_parameters(tables, some) << 32 | tables.values.step[some].astype(np.int64)
        for some in (rows, wanted)
    )
    return find_rows(keys, wanted_keys)


def _compare_with_summands(factor: Numbers, run: PairedRun) -> None:
    tables, rows, stats = run.tables, run.rows, run.measured.stats
    values, flow, ops = tables.values, tables.flow, tables.ops
    if not len(ops.name):
        return
    outputs = np.flatnonzero(run.op >= 0)
    op, tensor = run.op[outputs], tables.tensor_of_value[rows[outputs]]
    slot = np.array([*values.slots, ""], object)[values.slot[rows[outputs]]]
    is_other = ops.are_named(_OF_WEIGHTS | _OF_BIASES)[flow.reader] & ~_are_gradients(flow)
    of_all, only_gradients = np.full(len(flow.read), np.nan), np.where(is_other, 0.0, np.nan)
    for kinds, slots, size, of_read in (
        (ADDITIVE, None, stats.l2, of_all),
        (_AVERAGING, ("", "[1]"), stats.rms, of_all),
        (_OF_WEIGHTS, ("[1]", "[2]"), stats.l2, only_gradients),
        (_OF_BIASES, ("[2]",), stats.l2, only_gradients),
    ):
        is_of_kind = ops.are_named(kinds)
        of_tensor = _to_tensors(flow, tensor[tensor >= 0], size[outputs[tensor >= 0]])
        read = find_op_inputs(flow, ops.is_plain, of_tensor, of_read, is_of_kind).error
        is_sum = is_of_kind[op] if slots is None else is_of_kind[op] & np.isin(slot, slots)
        summed = outputs[is_sum]
        # Each thread rounds its own sum to the dtype, and the sum of these is rounded again.
        factor[summed] = (2.0 if kinds is _OF_WEIGHTS else 1.0) * read[run.op[summed]] / size[summed]
