"""The pairs, the ports and the training scripts in one table, each recorded once in a process."""

from functools import cache

import modtrace
from modtrace.analysis.divergence.answer import Comparison

from .pairs import PAIRS, Pair, record
from .ported_pairs import KINDS, pair_of
from .reordered_pairs import PORTED
from .reordered_pairs import pair_of as reordered_pair_of
from .training_scripts import SCRIPTS
from .training_scripts import pair_of as script_pair_of

#: Of each port: what makes a pair of it and of one of its faults, and these.
PORTS = {
    **{name: (pair_of, each.faults) for name, each in KINDS.items()},
    **{name: (reordered_pair_of, each.faults) for name, each in PORTED.items()},
    "training script": (script_pair_of, SCRIPTS),
}

#: The name of each pair, and of each port with each of its faults.
TABLE: dict[str, Pair] = {
    **PAIRS,
    **{f"{name}, {fault}": pair(name, fault) for name, (pair, faults) in PORTS.items() for fault in faults},
}

#: Of each pair, and of each port once: its name in TABLE.
HEALTHY = {
    **{name: name for name in PAIRS},
    **{name: f"{name}, {next(iter(faults))}" for name, (_, faults) in PORTS.items()},
}

#: Of each model that was written anew, the faults that are of another kind than those of the other models, and of the
#: training script some of each kind; the usual tests run these, and all others with `make soak`.
_UNUSUAL = {
    "GPT-2": ("gelu", "mask", "transposed"),
    "Gemma": ("embed scale", "positions"),
    "Llama in another order": ("order of grouped heads", "negated row"),
    "BERT in another order": ("activation", "mask", "queries for keys"),
    "ViT in another order": ("token that is read", "missing bias"),
    "ResNet in another order": ("momentum", "norm in evaluation mode", "pooling"),
    "T5 in another order": ("residual", "future"),
    "U-Net in another order": ("order of the skip", "interpolation"),
    "training script": (
        "labels that are not ahead",
        "learning rate",
        "other batches",
        "clipping behind the step",
    ),
}

#: The names in TABLE of what the usual tests run.
USUAL = [
    *(name for name in TABLE if name.partition(",")[0] not in _UNUSUAL),
    *(f"{port}, {fault}" for port, faults in _UNUSUAL.items() for fault in faults),
]


def compare(name: str, *, is_planted: bool) -> Comparison:
    """What `modtrace.compare` says of a pair."""
    first, second = first_of(name), second_of(name, is_planted=is_planted)
    return modtrace.compare(first, second, noise=noise_of(name), **TABLE[name].options)


def first_of(name: str) -> modtrace.Recording:
    """The recording of the first run, which all faults of a port share."""
    port = name.partition(",")[0]
    return _first(HEALTHY[port] if port in PORTS else name)


@cache
def _first(name: str) -> modtrace.Recording:
    return record(TABLE[name].first(), ops=TABLE[name].ops)


@cache
def second_of(name: str, *, is_planted: bool) -> modtrace.Recording:
    return record(TABLE[name].second(is_planted), ops=TABLE[name].ops)


@cache
def noise_of(name: str) -> list[modtrace.Recording]:
    """Another recording of the first run, if that is what the noise is measured by."""
    return [record(TABLE[name].first(), ops=TABLE[name].ops)] if TABLE[name].noise else []
