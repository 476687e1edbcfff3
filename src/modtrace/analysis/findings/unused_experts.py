"""Finds experts that the router never chooses, and routers that choose a few of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.raw_tensor import RawTensor
from ...recording.role import OUTPUT
from ...recording.statistics.number_formats import to_float64
from ...recording.suggestions import count_of, first_few
from ..tables.columns import Column, find_rows, split_rows
from ..tables.placement import read_modules
from ..tables.sampled_steps import SampledSteps
from ..tables.tensors import read_sizes
from ..tables.values import PlacedValues
from .check import check
from .finding import Finding
from .names import name_alike, name_steps_of
from .needs import lacks_values
from .places import place_of_module

#: The smallest number of modules in a list that may be experts.
_LEAST = 3

#: An expert that gets less than this part of what each would get of equal shares is hardly used.
_HARDLY = 0.1

#: The part of the experts from which on it is a warning: a fresh router of 32 that takes one for each token leaves out
#: up to six of them.
_MANY = 0.25

#: The slots of a module's output, or of the first one of several.
_FIRST = ("", "[0]")


class _Experts(NamedTuple):
    """Experts of which a router chooses some for each token: members of one list, or parts of one module."""

    members: list[int]  # the experts; of parts of one module, the router for each
    tokens: Column  # the tokens that each got in all steps
    are_modules: bool = True

    @property
    def shares(self) -> Column:
        """The tokens of each as a part of what it would get of equal shares."""
        return np.asarray(self.tokens / self.tokens.mean())


@check("unused-experts", about="experts that get no tokens, and routers that use few", needs="values")
def UNUSED_EXPERTS(run: SampledSteps, tokens: float = 100) -> Iterator[Finding]:
    """Finds the layer with the most experts that got no tokens, or hardly any, in all steps.

    Experts are the members of a list of modules of one type beside a router, which returns as many numbers as there
    are experts, or whose tensors differ in size from each other and from step to step. Experts that a model
    computes all together, in one module, are seen where the router returns their numbers beside its logits, as
    those of transformers do, and these outputs were recorded as whole tensors. `tokens` is the number that each
    expert must have got on average: the fewer there are, the more likely is it that one gets none by chance.
    """
    values = run.values(OUTPUT)
    if not len(values.step):
        raise lacks_values(run, "outputs of modules", OUTPUT)
    known = [*_find_layers(run, values), *_find_chosen(run, values)]
    layers = [layer for layer in known if layer.tokens.mean() >= tokens]
    hardly = [(int(np.sum(layer.shares < _HARDLY)), layer) for layer in layers]
    dead = [(int(np.sum(layer.tokens == 0)), layer) for layer in layers if (layer.tokens == 0).any()]
    if dead:
        yield _describe(run, *max(dead, key=lambda one: one[0]), len(dead), 0, "no tokens")
    elif collapsed := [one for one in hardly if 2 * one[0] >= len(one[1].members)]:
        worst = max(collapsed, key=lambda one: one[0])
        yield _describe(run, *worst, len(collapsed), _HARDLY, "hardly any tokens")


def _find_layers(run: SampledSteps, values: PlacedValues) -> Iterator[_Experts]:
    """Yields the lists of experts, with the tokens that each expert got."""
    modules = {module.module_id: module for module in read_modules(run.data).values()}
    lists: dict[tuple[int, str], list[int]] = {}
    for module in modules.values():
        if module.parent_id is not None and module.path.rpartition(".")[2].isdecimal():
            lists.setdefault((module.parent_id, module.type), []).append(module.module_id)
    tokens = _count_tokens(run, values)
    widths = _find_widths(run, values)
    beside = Counter((module.parent_id, widths.get(number)) for number, module in modules.items())
    for (holder, _), members in lists.items():
        if len(members) < _LEAST:
            continue
        counts = np.array([tokens.get(member, np.zeros(len(run.numbers))) for member in members])
        block = modules[holder].parent_id if holder in modules else None
        routers = beside[block, len(members)] - (widths.get(holder) == len(members))
        if (block is not None and routers) or _differ(counts):
            yield _Experts(members, counts.sum(axis=1))


def _find_chosen(run: SampledSteps, values: PlacedValues) -> Iterator[_Experts]:
    """Yields the experts whose numbers routers return for each token, beside a row of as many logits."""
    kept = np.flatnonzero(to_numpy(values.table["blob"].is_valid()))
    blobs = values.table["blob"].take(from_numpy(kept)).to_pylist()
    tokens: dict[tuple[int, int], Column] = {}  # by the router and the number of its experts
    for _, rows in split_rows(np.arange(len(kept)), values.call_id[kept]):
        router = int(values.module[kept[rows[0]]])
        returned = [run.data.tensor(blobs[row]) for row in rows.tolist()]
        for chosen in returned:
            counts = _count_chosen(chosen, returned)
            if counts is not None:
                tokens[router, len(counts)] = tokens.get((router, len(counts)), 0) + counts
    for (router, count), of_experts in tokens.items():
        if count >= _LEAST:
            yield _Experts([router] * count, of_experts, are_modules=False)


def _count_chosen(chosen: RawTensor, beside: Sequence[RawTensor]) -> Column | None:
    """Returns how many tokens chose each expert; None if the tensor does not hold numbers of experts.

    They are such if there are logits from which they can have been chosen: for at least half of the tokens the largest
    is among them.
    """
    if not chosen.shape or "int" not in chosen.dtype:
        return None
    for other in beside:
        is_wider = other.shape[:-1] == chosen.shape[:-1] and other.shape[-1] > chosen.shape[-1]
        logits = to_float64(other) if is_wider and "float" in other.dtype else None
        if logits is not None and logits.size:
            numbers = chosen.to_numpy()
            if (numbers == logits.argmax(-1)[..., None]).any(-1).mean() >= 0.5:
                return np.bincount(
                    numbers[(numbers >= 0) & (numbers < other.shape[-1])], minlength=other.shape[-1]
                )
    return None


def _count_tokens(run: SampledSteps, values: PlacedValues) -> dict[int, Column]:
    """Returns for each module in how many rows its outputs were in each step: the product of all but the last size."""
    sizes = read_sizes(values.table["shape"])
    last = np.maximum((sizes >= 0).sum(axis=1) - 1, 0)
    width = np.maximum(sizes[np.arange(len(sizes)), last], 1) if sizes.shape[1] else np.ones(len(sizes))
    first = np.array([*(slot in _FIRST for slot in values.slots), False])[values.slot]
    step = find_rows(run.numbers, values.step)
    counts: dict[int, Column] = {}
    for module, rows in split_rows(np.flatnonzero(first), values.module[first]):
        counts[module] = np.bincount(step[rows], values.numel[rows] / width[rows], len(run.numbers))
    return counts


def _find_widths(run: SampledSteps, values: PlacedValues) -> dict[int, int]:
    """Returns the last size of the output of each module."""
    sizes = read_sizes(values.table["shape"])
    _, first = np.unique(values.module, return_index=True)
    return {
        int(values.module[row]): int(sizes[row][sizes[row] >= 0][-1])
        for row in first.tolist()
        if (sizes[row] >= 0).any()
    }


def _differ(counts: Column) -> bool:
    """Returns whether the members of a list got different numbers of tokens, and others in each step."""
    if (counts == counts[0]).all():  # as of most lists
        return False
    called = counts[counts.any(axis=1)]
    if len(called) < 2:
        return False
    is_uneven = (called != called[0]).any(axis=0)
    varies = (called != called[:, :1]).any(axis=1)
    return bool(is_uneven.mean() > 0.5 and varies.sum() >= 2)


def _describe(
    run: SampledSteps, count: int, layer: _Experts, layers: int, share: float, what: str
) -> Finding:
    unused = np.flatnonzero(layer.shares <= share)
    modules, most = read_modules(run.data), int(np.argmax(layer.shares))
    place = place_of_module(run, layer.members[unused[0]])
    if layer.are_modules:
        names = name_alike(run.data, [modules[layer.members[number]] for number in unused.tolist()])
        favored = place_of_module(run, layer.members[most]).name
    else:
        names = f"{first_few(unused.tolist(), 4)} of {place.name}"
        favored = f"expert {most}"
    others = f" (and so in {count_of(layers - 1, 'more layer')})" if layers > 1 else ""
    get = "gets" if count == 1 else "get"
    return Finding(
        severity="warning" if count >= _MANY * len(layer.members) else "note",
        text=f"{count} of {len(layer.members)} experts {get} {what}: {names}{others}",
        remedy="add or raise a loss that balances the load, or noise in the router; look at the router's logits",
        evidence=(
            f"{favored} gets {layer.tokens[most] / layer.tokens.sum():.0%} "
            f"of {layer.tokens.sum():,.0f} {'tokens' if layer.are_modules else 'choices'}",
        ),
        rests_on=name_steps_of(run),
        root=place.root,
        path=place.path,
    )
