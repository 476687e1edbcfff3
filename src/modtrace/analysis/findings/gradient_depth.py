"""Finds gradients that vanish or explode on their way back through a chain of layers."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ...recording.role import GRAD_OUTPUT, PARAMETER_GRAD
from ...recording.statistics.moments import Numbers
from ...recording.suggestions import count_of
from ..tables.calls import iterate_levels
from ..tables.columns import Column
from ..tables.placement import Module, read_modules
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import StepSeries, arrange_series
from .check import check
from .finding import Finding
from .needs import lacks_values, require_steps
from .places import place_of_module

#: The smallest number of modules in a chain.
_LEAST = 4

#: Members of a chain are numbered: `blocks.0`, `conv1_1`. What one attention has side by side is not: `q_proj`.
_DIGITS = re.compile(r"[\d_]+")

#: The smallest RMS: gradients of 0 would make it 0.
_SMALLEST = 1e-45


class _Chain(NamedTuple):
    """Modules of one type under one parent, in the order in which gradients reach them."""

    what: str  # `gradients at` or `gradients of the parameters of`
    modules: Column
    rms: Numbers  # of the gradients of each, the median over the steps

    @property
    def growth(self) -> float:
        """The logarithm of how much larger the gradients are at the end of their way than at its beginning."""
        return float(np.log(self.rms[-1] / self.rms[0]))

    @property
    def usual_growth(self) -> float:
        """The same if they grew everywhere as in the median place."""
        return float(np.median(np.diff(np.log(self.rms))) * (len(self.rms) - 1))


@check("gradients-over-depth", about="gradients that vanish or explode from layer to layer", needs="values")
def GRADIENTS_OVER_DEPTH(run: SampledSteps, factor: float = 1e3, steps: int = 3) -> Iterator[Finding]:
    """Finds the chain of modules in which gradients shrink or grow most from one to the next, at least by `factor`.

    Modules of one type under one parent whose names differ by their numbers are a chain, if there are at least four.
    Gradients must shrink or grow in most places of it. `steps` is the smallest number of steps that count.
    """
    at_outputs, of_parameters = (arrange_series(run.values(role)) for role in (GRAD_OUTPUT, PARAMETER_GRAD))
    measured = max(int(one.is_measured.sum(axis=1).max(initial=0)) for one in (at_outputs, of_parameters))
    if not measured:
        raise lacks_values(run, "gradients", GRAD_OUTPUT, PARAMETER_GRAD)
    require_steps(measured, steps)
    chains = [*_find_chains(run, at_outputs, of_parameters)]
    limit = np.log(factor)
    far = [
        chain
        for chain in chains
        if abs(chain.growth) >= limit and chain.usual_growth * np.sign(chain.growth) >= limit / 2
    ]
    if far:
        yield _describe(run, max(far, key=lambda chain: abs(chain.growth)), len(at_outputs.steps))


def _find_chains(run: SampledSteps, at_outputs: StepSeries, of_parameters: StepSeries) -> Iterator[_Chain]:
    """Yields each chain, with the gradients at its outputs and with those of its parameters."""
    modules = {module.module_id: module for module in read_modules(run.data).values()}
    siblings: dict[tuple[object, ...], list[int]] = {}
    for module in modules.values():
        stem = _DIGITS.sub("", module.path.rpartition(".")[2])
        siblings.setdefault((module.parent_id, module.type, stem), []).append(module.module_id)
    rms_at_outputs = _find_rms(run, at_outputs, modules, with_inner=False)
    rms_of_parameters = _find_rms(run, of_parameters, modules, with_inner=True)
    reached = {module_id: row for row, module_id in enumerate(_find_modules(run, at_outputs))}
    for group in siblings.values():
        is_known = all(module in reached for module in group)
        group.sort(key=lambda module: reached[module] if is_known else -module)
        for what, rms in (
            ("gradients at", rms_at_outputs),
            ("parameters' gradients in", rms_of_parameters),
        ):
            chain = [module for module in group if module in rms]
            if len(chain) >= _LEAST:
                yield _Chain(what, np.array(chain), np.array([rms[module] for module in chain]))


def _find_modules(run: SampledSteps, series: StepSeries) -> list[int | None]:
    """Returns the id of the module of each row."""
    return [run.sites[site].module_id for site in series.site_id.tolist()]


def _find_rms(
    run: SampledSteps, series: StepSeries, modules: Mapping[int, Module], *, with_inner: bool
) -> dict[int, float]:
    """Returns the RMS of the gradients of each module, or of it and all inside it, the median over the steps."""
    number: dict[int | None, int] = {module_id: at for at, module_id in enumerate(modules)}
    merged: dict[int | None, int] = {
        module_id: number[module.module_id] for module_id, module in read_modules(run.data).items()
    }
    owner = np.array([merged.get(module_id, -1) for module_id in _find_modules(run, series)], np.int64)
    owned = np.flatnonzero(owner >= 0)
    sumsq, count = np.zeros((2, len(modules), len(series.steps)))
    np.add.at(sumsq, owner[owned], np.nan_to_num(series.stats.sumsq[owned], nan=0))
    np.add.at(count, owner[owned], series.stats.count[owned])
    if with_inner:
        parent = np.array([merged.get(module.parent_id, -1) for module in modules.values()], np.int64)
        for level in reversed(list(iterate_levels(parent))[1:]):
            np.add.at(sumsq, parent[level], sumsq[level])
            np.add.at(count, parent[level], count[level])
    known = (count > 0) & np.isfinite(sumsq)
    rows = np.flatnonzero(known.any(axis=1))
    squares = np.full((len(rows), len(series.steps)), np.nan)
    np.divide(sumsq[rows], count[rows], out=squares, where=known[rows])
    rms = np.maximum(np.nanmedian(np.sqrt(squares), axis=1), _SMALLEST)
    ids = np.array([*modules], np.int64)
    return dict(zip(ids[rows].tolist(), rms.tolist(), strict=True))


def _describe(run: SampledSteps, chain: _Chain, steps: int) -> Finding:
    first, last = (place_of_module(run, int(chain.modules[at])) for at in (0, -1))
    verb = "explode" if chain.growth > 0 else "vanish"
    ratio = float(np.exp(abs(chain.growth)))
    step = float(np.exp(chain.usual_growth / (len(chain.rms) - 1)))
    return Finding(
        severity="warning",
        text=(
            f"{chain.what} {first.name} to {last.name} {verb}: RMS {chain.rms[0]:.2g} to {chain.rms[-1]:.2g}, "
            f"{'x' if chain.growth > 0 else '1/'}{ratio:.1e}"
        ),
        remedy="normalize between the layers, add residual connections, or initialize weights for their activation",
        evidence=(
            f"on the way back through {len(chain.rms)} layers, x {step:.2g} from one to the next (median)",
        ),
        rests_on=f"the median of {count_of(steps, 'training step')}",
        root=last.root,
        path=last.path,
    )
