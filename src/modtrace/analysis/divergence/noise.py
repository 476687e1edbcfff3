"""Estimates how much of a difference is noise: given, shown by further runs, or assumed from dtypes and sums."""

from dataclasses import dataclass, replace

import numpy as np

from ...recording.role import OF_PARAMETERS, OP_OUTPUT, PARAMETER, PARAMETER_GRAD, UPDATE
from ...recording.statistics.moments import Numbers
from ..tables.columns import Rows, find_rows
from ..tables.measured import ComparedRows
from ..tables.op_flow import OpFlow
from ..tables.op_rules import ADDITIVE
from ..tables.ops import bare_name
from ..tables.run import RunTables
from .inherited import find_largest, name_parameters
from .paired_run import PairedRun, find_inputs
from .tensor_metrics import EPSILONS

GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"

#: Rounding is assumed to be at most so many times eps * sqrt(reduction length).
FACTOR = 2.0

#: Fewer tensors with unequal dtypes are not a run in another dtype.
_FEW = 0.1

#: Two tensors that are noise alone are apart by the root of 2 of their size, or 1.2 times that by sketches.
#: One that is the negative of the other is twice its size apart, which is no chance.
MOST_NOISE = 1.7

#: A further run differs by other random rounding: up to so many times what was measured is noise.
_RUNS_FACTOR = 4.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """What of the error of each pair is noise."""

    kind: str  # GIVEN, MEASURED or ASSUMED
    text: str  # the same as a sentence
    local: Numbers  # what its op or module makes by itself
    inherited: Numbers  # what it may have inherited at most, of the noise of all before it
    plain: Numbers  # the same, if no summands cancel
    gain: Numbers  # how many times larger what it has inherited may become, as its summands cancel
    most: Numbers | float = np.inf  # the largest that noise is assumed to be

    def add_rounding(self, epsilons: Numbers) -> "Noise":
        """Returns the same with what rounding to other dtypes explains, if noise is assumed.

        Args:
            epsilons: of each pair eps of the dtype to which what it was computed from was rounded; 0 for none.
        """
        if self.kind != ASSUMED:
            return self
        rounding = np.minimum(FACTOR * epsilons * self.gain, self.most)
        return replace(self, local=np.maximum(self.local, rounding))

    def multiply(self, gain: Numbers) -> "Noise":
        """Returns the same where what each pair was computed from has so many times its noise, if that is assumed."""
        if self.kind != ASSUMED:
            return self
        return replace(self, local=np.maximum(self.local, np.minimum(self.local * gain, self.most)))


def give_noise(tolerance: float, count: int) -> Noise:
    """Returns a tolerance as the noise of all pairs."""
    level = np.full(count, float(tolerance))
    text = f"noise: a relative error of {tolerance:g} is tolerated"
    return Noise(
        kind=GIVEN,
        text=text,
        local=level,
        inherited=np.zeros(count),
        plain=np.zeros(count),
        gain=np.ones(count),
    )


def measure_noise(levels: list[Numbers], cancellation: Numbers) -> Noise:
    """Returns the noise that further runs of the same configuration show.

    Args:
        cancellation: how many times larger the summands of each tensor are.
        levels: of each further run the error of each pair; NaN where the run has no such tensor.
    """
    highest = np.fmax.reduce(levels)
    known = highest[np.isfinite(highest)]
    # Infinite: the run shows that it differs, and not how far. Whatever is there is noise.
    level = _RUNS_FACTOR * np.where(np.isnan(highest), known.max(initial=0.0), highest)
    runs = f"{len(levels)} further run{'s' if len(levels) > 1 else ''}"
    most = known.max(initial=0.0)
    text = f"noise: measured by {runs}, up to {most:.1e}; {_RUNS_FACTOR:.0f} times that of a site is noise"
    return Noise(
        kind=MEASURED,
        text=text,
        local=level,
        inherited=np.where(np.isinf(level), np.inf, np.minimum(level * cancellation, 1.0)),
        plain=level,
        gain=cancellation,
    )


def assume_noise(
    a: ComparedRows, b: ComparedRows, cancellation: Numbers, most: Numbers | float = MOST_NOISE
) -> Noise:
    """Returns what rounding explains: eps of the coarser dtype, and of sums as long as the tensor's largest axis.

    Results are rounded to their dtype, and added up in float32 at least.

    Args:
        a: the tensors of one recording.
        b: those of the other.
        cancellation: how many times larger the summands of each tensor are.
        most: the largest noise of each.
    """
    coarser = _find_coarser_epsilons(a, b)
    length = np.maximum(_longest_axes(a), _longest_axes(b))
    local = FACTOR * (coarser + np.minimum(coarser, 2.0**-23) * np.sqrt(length))
    before = np.maximum.accumulate(local) if len(local) else local
    text = f"noise: assumed, {FACTOR:g} eps of the dtype x sqrt(sum length): {_range(local)}"
    inherited = before * np.sqrt(1 + np.arange(len(local)))
    return Noise(
        kind=ASSUMED,
        text=text,
        local=np.minimum(local * cancellation, most),
        inherited=np.minimum(inherited * cancellation, most),
        plain=inherited,
        gain=cancellation,
        most=most,
    )


def _find_coarser_epsilons(a: ComparedRows, b: ComparedRows) -> Numbers:
    """Returns eps of the coarser dtype of each pair; of the finer one where few tensors have unequal dtypes.

    A run in another dtype has that nearly everywhere. An op that changes the dtype in one of the runs is no noise.
    """
    one, other = _epsilons(a), _epsilons(b)
    are_unequal = one != other
    if are_unequal.sum() < _FEW * max(int((one > 0).sum()), 1):
        return np.where(are_unequal, np.minimum(one, other), one)
    return np.maximum(one, other)


def _epsilons(measured: ComparedRows) -> Numbers:
    of_code = np.array([*(EPSILONS.get(each, 0.0) for each in measured.dtypes), 0.0])
    return of_code[measured.dtype]


def _longest_axes(measured: ComparedRows) -> Numbers:
    return np.asarray(measured.sizes.max(axis=1, initial=1), np.float64)


def _range(local: Numbers) -> str:
    used = local[local > 0]
    if not len(used):
        return "none, for integers are exact"
    low, high = used.min(), used.max()
    return f"{low:.1e}" if high < 1.5 * low else f"{low:.0e} to {high:.0e}"


#: Ops that return means: of all they read, or at slot `[1]`.
_AVERAGING = frozenset({"mean", "native_layer_norm", "native_batch_norm", "native_group_norm"})

#: Ops that return at slots `[1]` and `[2]` sums over what they read as a gradient, times numbers of about one.
_OF_WEIGHTS = frozenset(
    {"native_layer_norm_backward", "native_batch_norm_backward", "native_group_norm_backward"}
)

#: Ops that return at slot `[2]` the sum of what they read as a gradient.
_OF_BIASES = frozenset({"convolution_backward"})

#: Ops that return what is left of a gradient when its mean, weighted by another tensor, is taken from it.
_CENTERING = frozenset({"softmax_backward_data"})

_LARGEST = 1e12


def find_cancellation(side: RunTables, rows: Rows, measured: ComparedRows) -> Numbers:
    """Returns how many times larger than a tensor what it was added up from is: 1 where nothing cancels.

    The gradient of the bias of keys is an example: it is zero but for rounding, as a softmax does not see it.

    Args:
        side: the recording.
        rows: rows of `values`.
        measured: what was measured of them.
    """
    factor = np.ones(len(rows))
    with np.errstate(all="ignore"):
        _compare_with_siblings(factor, side, rows, measured)
        _compare_with_summands(factor, side, rows, measured)
    return np.clip(np.nan_to_num(factor, nan=1.0), 1.0, _LARGEST)


def find_gain_before(run: PairedRun) -> Numbers:
    """Returns how many times larger the rounding of what each op read is by softmaxes that one recording alone has.

    Their backward takes the mean of a gradient, weighted by the output, from that.
    """
    side, gain = run.side, np.ones(len(run.rows))
    values, flow = side.values, side.flow
    ops = np.flatnonzero(side.ops.are_named(_CENTERING) & run.alone[:-1])
    if not len(ops):
        return gain
    tensor = side.tensor_of_value
    outputs = np.flatnonzero(tensor >= 0)
    tensor = tensor[outputs]
    stats = values.stats.take(outputs)
    is_gradient = np.array([*(each.startswith("grad") for each in flow.slots), False])[flow.slot]
    is_asked = np.isin(np.arange(len(side.ops.name)), ops)
    size, weight = (
        find_inputs(
            flow,
            side.ops.is_plain,
            _to_tensors(flow, tensor, each),
            np.where(left_out, 0.0, np.nan),
            is_asked,
        )
        for each, left_out in ((stats.l2, ~is_gradient), (stats.max, is_gradient))
    )
    of_tensor = _to_tensors(flow, side.tensor_of_value[run.rows[run.op >= 0]], 1.0)
    made = flow.first_returned[ops]
    with np.errstate(all="ignore"):
        of_op = size.error[ops] * weight.error[ops] / _to_tensors(flow, tensor, stats.l2)[made]
    of_tensor[made] = np.clip(np.nan_to_num(of_op, nan=1.0), 1.0, _LARGEST)
    read = find_inputs(flow, side.ops.is_plain, of_tensor, np.full(len(flow.read), np.nan)).error
    gain[run.op >= 0] = np.fmax(1.0, read[run.op[run.op >= 0]])
    return gain


def _to_tensors(flow: OpFlow, tensor: Rows, numbers: Numbers | float) -> Numbers:
    """Returns a number for each tensor of a recording; NaN for those without."""
    found = np.full(len(flow.tensors) + 1, np.nan)
    found[tensor] = numbers
    return found[:-1]


def _compare_with_siblings(factor: Numbers, side: RunTables, rows: Rows, measured: ComparedRows) -> None:
    """Compares the gradient of each parameter with the others of its module; an update with its parameter."""
    values = side.values
    rms = measured.stats.rms
    grads = np.flatnonzero(side.values.is_of(PARAMETER_GRAD, rows=rows))
    keys = values.place[rows].astype(np.int64) << 32 | values.step[rows].astype(np.int64)
    factor[grads] = find_largest(keys[grads], rms[grads], keys[grads], none=0.0) / rms[grads]
    others = np.flatnonzero(side.values.is_of(*(OF_PARAMETERS - {PARAMETER_GRAD}), rows=rows))
    of = find_rows(_name_keys(side, rows[grads]), _name_keys(side, rows[others]))
    factor[others[of >= 0]] = factor[grads[of[of >= 0]]]  # what an optimizer makes of a gradient
    updates = np.flatnonzero(side.values.is_of(UPDATE, rows=rows))
    parameters = np.flatnonzero(side.values.is_of(PARAMETER, rows=rows))
    of = find_rows(_name_keys(side, rows[parameters]), _name_keys(side, rows[updates]))
    known = of >= 0
    ratio = rms[parameters[of[known]]] / rms[updates[known]]
    factor[updates[known]] = np.fmax(factor[updates[known]], ratio)


def _name_keys(side: RunTables, rows: Rows) -> Rows:
    """Returns a number for the parameter and the step of each row."""
    return name_parameters(side, rows) << 32 | side.values.step[rows].astype(np.int64)


def _compare_with_summands(factor: Numbers, side: RunTables, rows: Rows, measured: ComparedRows) -> None:
    if not len(side.ops.name):
        return
    mine = np.flatnonzero(side.values.is_of(OP_OUTPUT, rows=rows) & (side.values.op[rows] >= 0))
    values, flow = side.values, side.flow
    tensor = side.tensor_of_value[rows[mine]]
    names = [bare_name(name) for name in side.ops.names]
    name = side.ops.name[values.op[rows[mine]]]
    slot = np.array([*values.slots, ""], object)[values.slot[rows[mine]]]
    is_plain = side.ops.is_plain
    is_gradient = np.array([*(each.startswith("grad") for each in flow.slots), False])[flow.slot]
    is_other = side.ops.are_named(_OF_WEIGHTS | _OF_BIASES)[flow.reader] & ~is_gradient
    only_gradients = np.where(is_other, 0.0, np.nan)
    for kinds, slots, size, of_read in (
        (ADDITIVE, None, measured.stats.l2, np.full(len(flow.read), np.nan)),
        (_AVERAGING, ("", "[1]"), measured.stats.rms, np.full(len(flow.read), np.nan)),
        (_OF_WEIGHTS, ("[1]", "[2]"), measured.stats.l2, only_gradients),
        (_OF_BIASES, ("[2]",), measured.stats.l2, only_gradients),
    ):
        of_tensor = np.full(len(flow.tensors), np.nan)
        of_tensor[tensor[tensor >= 0]] = size[mine[tensor >= 0]]
        read = find_inputs(flow, is_plain, of_tensor, of_read, side.ops.are_named(kinds)).error
        is_wanted = np.isin(name, [code for code, each in enumerate(names) if each in kinds])
        summed = mine[is_wanted if slots is None else is_wanted & np.isin(slot, slots)]
        # Each thread rounds a sum of its own to the dtype, and so is the sum of these.
        factor[summed] = (2.0 if kinds is _OF_WEIGHTS else 1.0) * read[values.op[rows[summed]]] / size[summed]
