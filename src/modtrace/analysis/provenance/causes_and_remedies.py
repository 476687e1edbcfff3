"""Explains from the numbers that an op read why it returned NaN or infinite values, and suggests a remedy."""

import math
import re
from typing import NamedTuple

from ...recording.phase import BACKWARD, PHASES
from ...recording.statistics.number_formats import LARGEST
from ..tables.op_rules import (
    AVERAGES,
    DIVISIONS,
    EXPONENTIALS,
    LOGARITHMS,
    MEANS,
    ROOTS,
    SOFTMAX,
    VARIANCES,
    WRITES,
    holds_infinity,
    holds_nan,
    is_attention,
)  # fmt: skip
from ..tables.ops import bare_name
from ..values.nonfinite import EXP_OVERFLOW, OVERFLOW
from .step_counts import Counts
from .traced import Origin, Trace

#: Functions of one number, with the bounds between which they are finite.
_FINITE_BETWEEN = {
    "acos": (-1.0, 1.0), "asin": (-1.0, 1.0), "atanh": (-1.0, 1.0), "erfinv": (-1.0, 1.0), "acosh": (1.0, math.inf),
    "log1p": (-1.0, math.inf), "logit": (0.0, 1.0),
}  # fmt: skip

#: Functions that are infinite at 0 and at negative integers.
_GAMMAS = frozenset({"lgamma", "digamma", "polygamma"})

#: Functions whose derivatives divide by the differences of eigenvalues or singular values.
_DECOMPOSITIONS = frozenset({"linalg_eigh", "linalg_eig", "linalg_svd"})

#: Ops that compute a whole layer, including masked attention.
_FUSED_ATTENTION = frozenset({"transformer_encoder_layer_fwd", "native_multi_head_attention"})

_NORMALIZATIONS = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm"})


class Cause(NamedTuple):
    """The cause of NaN or infinite values, with an explanation and a remedy."""

    name: str  # such as "overflow" or "log of 0"
    text: str  # a sentence about the numbers that show the cause
    remedy: str


class ReadTensor(NamedTuple):
    """A tensor that an op read, with its measurement; None if it was not measured."""

    slot: str
    tensor: int
    counts: Counts | None


def find_cause(trace: Trace, event: Origin, inputs: list[ReadTensor], forward_op: str | None) -> Cause | None:
    """Returns the cause of the values that an event's op made; None if the numbers do not show one.

    Args:
        inputs: the tensors that the op read; views have the measurement of the tensor behind them.
        forward_op: for an op in backward, the name of the op whose derivative it computes.
    """
    name, args = trace.step.bare_names[event.op], trace.step.op_args[event.op]
    if forward_op is not None and trace.step.ops.phase[event.op] == PHASES.index(BACKWARD):
        found = _in_backward(bare_name(forward_op), _describe_zero(name, inputs, args))
        if found is not None:
            return found
    return (
        _fully_masked(trace, name, event, inputs)
        or _outside_of_domain(name, inputs)
        or _of_normalization(name, inputs, args)
        or _in_forward(name, event, inputs, args)
        or _written(name, event, args)
        or _written_infinity(name, event, inputs, args)
        or _by_infinity(event, args)
        or _overflow_of_exp(trace, event, inputs)
        or _overflow(name, event, inputs)
    )


def _fully_masked(trace: Trace, name: str, event: Origin, inputs: list[ReadTensor]) -> Cause | None:
    code, dtypes = trace.step.tensors.dtype
    reads_mask = any(dtypes[code[read.tensor]] == "bool" for read in inputs)
    is_softmax = (name in SOFTMAX or is_attention(name)) and event.meant_inputs
    if not event.counts.nan or not (is_softmax or (name in _FUSED_ATTENTION and reads_mask)):
        return None
    return Cause(
        "fully masked row",
        "a row of the scores is masked in full, and the softmax of a row of nothing but -inf is 0 / 0",
        "leave one position of each row unmasked, or set the rows of padding to 0 after the softmax",
    )


def _outside_of_domain(name: str, inputs: list[ReadTensor]) -> Cause | None:
    if name in _GAMMAS and _reaches(inputs, 0.0):
        return Cause(
            f"{name} of 0",
            f"{name} is infinite at 0 and at the whole numbers below it; its input reaches down to {_lowest(inputs)}",
            "clamp it to a small positive number",
        )
    if name not in _FINITE_BETWEEN:
        return None
    low, high = _FINITE_BETWEEN[name]
    for counts in (read.counts for read in inputs):
        if counts is None or counts.min is None or counts.max is None:
            continue
        reached = counts.max if counts.max >= high else counts.min
        if reached >= high or reached <= low:
            above = f"from {low:g} to {high:g}" if high < math.inf else f"above {low:g}"
            return Cause(
                f"{name} at {reached:.7g}",
                f"{name} is finite {above}, and its input reaches {reached:.7g}",
                "clamp it a little inside of that: rounding alone can lead out of it",
            )
    return None


def _of_normalization(name: str, inputs: list[ReadTensor], args: str) -> Cause | None:
    if name not in _NORMALIZATIONS:
        return None
    if _reaches([read for read in inputs if read.slot == "running_var"], -math.ulp(0.0)):
        return Cause(
            "root of a negative number",
            "its running variance is negative: as after a merge of two checkpoints, or an error in loading one",
            "look at what wrote the running variance",
        )
    if re.search(r'"eps":0(\.0*)?[,}]', args):
        return Cause("division by 0", "eps is 0, and elements that it normalizes are all equal", "eps=1e-5")
    return None


def _in_forward(name: str, event: Origin, inputs: list[ReadTensor], args: str) -> Cause | None:
    if "ctc_loss" in name:
        return Cause(
            "no alignment",
            "a target is longer than its input, or needs a blank between equal labels for which there is no room",
            "leave such samples out, or zero_infinity=True",
        )
    if name in LOGARITHMS and _reaches(inputs, 0.0):
        what, remedy = "0", "add an epsilon to it, or clamp it"
        if event.counts.nan:
            what = "a negative number"
            remedy = "clamp it to a small positive number, or find why it is negative"
        return Cause(f"log of {what}", f"its input reaches down to {_lowest(inputs)}", remedy)
    if name in VARIANCES and event.counts.nan:
        return Cause(
            "variance of one element",
            "the unbiased variance divides by the number of elements less one, which is 0",
            "give it more than one element, as by drop_last=True of a DataLoader, or correction=0",
        )
    if name in AVERAGES and event.counts.nan and inputs and _sums_overflow(event, inputs):
        return Cause(
            OVERFLOW,
            f"its inputs reach {_largest(inputs):.4g}: sums of them overflow with both signs, and inf - inf is NaN",
            "look at what makes the inputs that large",
        )
    if name in MEANS and event.counts.nan:
        return Cause(
            "mean of nothing",
            "there was no element to average: every label is ignored, or the tensor is empty",
            "skip such batches, or reduction='sum' and a division by max(count, 1)",
        )
    if name in ROOTS and event.counts.nan and _reaches(inputs, -math.ulp(0.0)):
        return Cause(
            "root of a negative number", f"its input reaches down to {_lowest(inputs)}", "clamp it at 0"
        )
    if name == "addcdiv" and _reaches([read for read in inputs if read.slot == "tensor2"], 0.0):
        return Cause(
            "division by 0",
            "its divisor holds 0: the root of the second moment and eps",
            "a larger eps in the optimizer"
            + (": 1e-8 is 0 in float16" if event.counts.dtype == "float16" else ""),
        )
    if zero := _describe_zero(name, inputs, args):
        return Cause(
            "division by 0", zero, "add an epsilon to the divisor, or clamp it, as count.clamp(min=1)"
        )
    return None


def _sums_overflow(event: Origin, inputs: list[ReadTensor]) -> bool:
    """Returns whether the sum of all elements of an input may exceed the largest number of the output's dtype."""
    limit = LARGEST.get(event.counts.dtype, math.inf)
    return any(
        read.counts is not None and _abs_max(read.counts) * read.counts.numel > limit for read in inputs
    )


def _written(name: str, event: Origin, args: str) -> Cause | None:
    if name in WRITES and event.counts.nan and (event.meant_inputs or holds_nan(args)):
        return Cause("constant NaN", "the program writes a NaN of its own", "look at the line that writes it")
    return None


def _written_infinity(name: str, event: Origin, inputs: list[ReadTensor], args: str) -> Cause | None:
    is_infinite = holds_infinity(args) or any(read.counts and read.counts.inf for read in inputs)
    if name not in WRITES or event.counts.nan or not is_infinite:
        return None
    return Cause(
        "constant infinity",
        "the program writes an infinity of its own, and nothing behind it took it away",
        "look at the line that writes it: is there always an element that is not masked?",
    )


def _by_infinity(event: Origin, args: str) -> Cause | None:
    reads_infinity = event.counts.nan and event.meant_inputs
    if not reads_infinity and not holds_infinity(args):
        return None
    return Cause(
        "arithmetic with infinity",
        "it calculates with an infinite constant: inf - inf and 0 * inf are NaN",
        "put infinities into masks by masked_fill or where, not by a sum or a product",
    )


def _in_backward(forward: str, zero: str | None) -> Cause | None:
    if forward in _DECOMPOSITIONS:
        values = "singular values" if forward == "linalg_svd" else "eigenvalues"
        return Cause(
            f"equal {values}",
            f"the derivative of the vectors divides by the differences of {values}, and some are equal",
            f"compute the gradient of the {values} alone, or add small different numbers to the diagonal",
        )
    if forward in _FINITE_BETWEEN and forward != "logit":
        return Cause(
            f"derivative of {forward} at an end of its range",
            f"the derivative of {forward} is infinite at the ends of where it is defined",
            f"clamp the input of {forward} a little inside of that",
        )
    if zero is None:
        return None
    if forward in ROOTS:
        return Cause(
            "derivative of a root at 0",
            f"the derivative of {forward} at 0 is infinite",
            "add an epsilon inside of it",
        )
    if forward in LOGARITHMS | DIVISIONS:
        by, keep = ("divisor", "x != 0") if forward in DIVISIONS else ("input", "x > 0")
        return Cause(
            f"derivative of {forward} at 0",
            f"the derivative divides by the {by} of {forward}, and {zero}; a where() behind {forward} hides "
            "the values, and not their gradients",
            f"keep 0 out of the {by}: clamp it, or torch.where({keep}, x, 1) in front of {forward}",
        )
    return None


def _overflow_of_exp(trace: Trace, event: Origin, inputs: list[ReadTensor]) -> Cause | None:
    names, limit = trace.step.bare_names, LARGEST.get(event.counts.dtype)
    top = _largest(inputs)
    if names[event.op] not in EXPONENTIALS or limit is None or top <= (most := math.log(limit)):
        return None
    is_softmax = _is_softmax_by_hand(trace, event)
    remedy = "subtract the maximum first, as softmax and logsumexp do" if is_softmax else "clamp its input"
    return Cause(EXP_OVERFLOW, f"exp of {top:.4g}: {event.counts.dtype} ends at exp({most:.1f})", remedy)


def _is_softmax_by_hand(trace: Trace, event: Origin) -> bool:
    """Returns whether the program computes a softmax itself: it divides exponentials by their sum, or takes its log."""
    step, names = trace.step, trace.step.bare_names

    def reads(op: int) -> set[str]:
        made_by = (int(step.tensors.producer[tensor]) for _, tensor in step.reads[op])
        return {names[op] for op in made_by if op >= 0}

    readers = step.flow.readers[event.tensor].tolist()
    of_sums = {
        reader
        for op in readers
        if names[op] == "sum"
        for _, tensor in step.returns[op]
        for reader in step.flow.readers[tensor].tolist()
    }
    return any(names[op] == "log" for op in of_sums) or any(
        names[op] == "div" and "sum" in reads(op) and not EXPONENTIALS.isdisjoint(reads(op))
        for op in {*readers, *of_sums}
    )


def _overflow(name: str, event: Origin, inputs: list[ReadTensor]) -> Cause | None:
    limit = LARGEST.get(event.counts.dtype)
    top = _largest(inputs)
    if limit is None or name in EXPONENTIALS or not event.counts.inf or top <= 1:
        return None
    text = f"beyond {limit:.6g}, the largest {event.counts.dtype}; {_describe_reach(name, inputs, limit)}"
    remedy = "look at what makes the inputs that large"
    if event.counts.dtype == "float16":
        remedy = "compute this in float32 or bfloat16, or scale its input or weights down"
    return Cause(OVERFLOW, text, remedy)


def _describe_reach(name: str, inputs: list[ReadTensor], limit: float) -> str:
    tops = [_abs_max(read.counts) for read in inputs if read.counts]
    if name == "mul" and len(tops) == 2:
        return (
            f"its inputs reach {tops[0]:.4g} and {tops[1]:.4g}, which multiplied are {tops[0] * tops[1]:.4g}"
        )
    share = max(tops) / limit
    return f"its inputs reach {max(tops):.6g}" + (f", {share:.0%} of it" if 0.005 <= share <= 0.99 else "")


def _abs_max(counts: Counts) -> float:
    ends = [abs(bound) for bound in (counts.min, counts.max) if bound is not None and math.isfinite(bound)]
    return max(ends, default=0.0)


def _largest(inputs: list[ReadTensor]) -> float:
    return max((_abs_max(read.counts) for read in inputs if read.counts), default=0.0)


def _reaches(inputs: list[ReadTensor], bound: float) -> bool:
    return any(read.counts and read.counts.min is not None and read.counts.min <= bound for read in inputs)


def _lowest(inputs: list[ReadTensor]) -> str:
    return f"{min(read.counts.min for read in inputs if read.counts and read.counts.min is not None):.4g}"


def _divisors(name: str, inputs: list[ReadTensor], args: str) -> list[tuple[float, float]]:
    """Returns the ranges of the divisors of an op; none if it does not divide."""
    exponent = re.search(r'"exponent":(-?[\d.]+)', args)
    is_inverse = name == "pow" and exponent is not None and float(exponent[1]) < 0
    if name not in DIVISIONS and not is_inverse:
        return []
    constant = None if is_inverse else re.search(r'"other":(-?[\d.]+)', args)
    if constant:
        return [(float(constant[1]), float(constant[1]))]
    divisors = inputs if len(inputs) == 1 else [read for read in inputs if read.slot == "other"]
    return [
        (read.counts.min, read.counts.max)
        for read in divisors
        if read.counts is not None and read.counts.min is not None and read.counts.max is not None
    ]


def _describe_zero(name: str, inputs: list[ReadTensor], args: str) -> str | None:
    """Returns how a divisor came to be 0; None if no divisor is 0."""
    for low, high in _divisors(name, inputs, args):
        if low == 0 or high == 0:
            return "its divisor holds 0"
        if low < 0 < high:
            return f"the range of its divisor, {low:.4g} .. {high:.4g}, includes 0"
    return None
