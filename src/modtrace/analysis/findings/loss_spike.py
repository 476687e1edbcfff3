"""Finds a loss that leaves its band, and what left its own band before it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...recording.role import GRAD_OUTPUT, LOSS, OUTPUT, PARAMETER, PARAMETER_GRAD
from ...recording.statistics.band import Band, StepBand, judge_series
from ...recording.statistics.moments import Numbers
from ...recording.suggestions import count_of
from ..tables.columns import Column, split_rows
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import StepSeries, arrange_series
from .check import check
from .finding import Finding
from .needs import lacks_values, require_steps
from .places import describe_site, place_of_site

#: The number of last losses that make a band, and of those without which there is none. With the 50 of the trigger
#: `OutOfBand`, the band of a loss that falls is as wide as the fall.
_WINDOW, _AT_LEAST = 20, 10

#: The numbers of steps before a spike among which those like it are searched: a GAN trains its generator in every sixth
#: step.
_SEARCHED = 8 * _WINDOW

#: The number of steps before a spike in which its cause is searched.
_BEFORE = 5

#: The number of candidates that are compared with steps like theirs.
_TRIED = 10

#: A loss below this part of the first ones hurts nobody.
_NEGLIGIBLE = 0.02

#: What rises by less is not what made a loss rise: a parameter that drifts has a narrow band.
_ROSE = 1.05

#: The largest number of losses that are judged, which takes 50 ms.
_MOST = 20_000

#: A GradScaler doubles its scale now and then. A loss above the limit may be scaled, so it must rise to more.
_MAY_BE_SCALED, _DOUBLED = 1024, 2.5


class _Spike(NamedTuple):
    row: int  # of the series of losses
    at: int  # the position of the step
    value: float
    middle: float
    width: float
    alike: Column  # the steps from which the band is computed


@check("loss-spike", about="a loss that leaves its band, and what left its band before it", needs="values")
def LOSS_SPIKE(run: SampledSteps, factor: float = 6, rise: float = 0.25) -> Iterator[Finding]:
    """Finds the worst step in which a loss rose far above what it was before.

    `factor` is half the width of the band in standard deviations, two thirds of it if losses above 0 are judged by
    their logarithms, which must leave their band too: of a loss near 0 the noise is a factor. Among 100 losses; among
    ten times as many, of which more are far off by chance, it is 1 more. A loss must also rise by the part `rise` of
    its median, as one that hardly changes has a narrow band. Of 52 healthy trainings none is accused so.
    """
    losses = arrange_series(run.losses)
    if not len(losses.site_id):
        raise lacks_values(run, "losses", LOSS)
    require_steps(len(losses.steps), _AT_LEAST + 1, "", " with a loss")
    spikes = [_find_worst(run, losses, row, factor, rise) for row in range(len(losses.site_id))]
    found = [spike for spike in spikes if spike is not None]
    if found:
        worst = max(found, key=lambda spike: (spike.value - spike.middle) / spike.width)
        yield _describe(run, losses, worst, factor)


def _find_worst(run: SampledSteps, losses: StepSeries, row: int, factor: float, rise: float) -> _Spike | None:
    """Returns the spike that is furthest outside of its band."""
    known = np.flatnonzero(losses.is_measured[row] & np.isfinite(losses.stats.mean[row]))
    first = np.median(np.abs(losses.stats.mean[row][known[:_AT_LEAST]])) if len(known) else 0
    known = known[-_MOST:]
    values = losses.stats.mean[row][known]
    factor += max(np.log10(len(values) / 100), 0)
    is_spike, band = _judge(values, factor, rise)
    candidates = np.flatnonzero(is_spike & (values > _NEGLIGIBLE * first))
    with np.errstate(all="ignore"):
        order = np.argsort(-(values - band.middle)[candidates] / band.width[candidates], kind="stable")
    for at in candidates[order][:_TRIED].tolist():
        earlier = known[max(at - _SEARCHED, 0) : at]
        alike = earlier[_are_alike(run, losses.steps[earlier], int(losses.steps[known[at]]))][-_WINDOW:]
        before = np.append(losses.stats.mean[row][alike], values[at])
        is_one, last = _judge(before, factor, rise)
        if is_one[-1]:
            middle, width = float(last.middle[-1]), float(last.width[-1])
            return _Spike(row, int(known[at]), float(values[at]), middle, width, losses.steps[alike])
    return None


def _judge(values: Numbers, factor: float, rise: float) -> tuple[Column, Band]:
    """Returns which losses are spikes, and the band of each."""
    band = judge_series(values, factor, _WINDOW, _AT_LEAST)
    is_spike = band.is_outside & _has_risen(values, band.middle, rise)
    if (values > 0).all():
        logarithms = np.log(values)
        ratios = judge_series(logarithms, factor * 2 / 3, _WINDOW, _AT_LEAST)
        is_spike &= ratios.is_outside & (logarithms > ratios.middle)
    return is_spike, band


def _has_risen(values: Numbers, middle: Numbers, rise: float) -> Column:
    """Returns which losses are far above the median of earlier ones."""
    with np.errstate(invalid="ignore"):  # without earlier ones the median is infinite
        needed = np.where(np.abs(middle) > _MAY_BE_SCALED, _DOUBLED - 1, rise) * np.abs(middle)
        return np.asarray(values - middle > needed)


def _are_alike(run: SampledSteps, steps: Column, step: int) -> Column:
    """Returns which steps called the same modules as a step, and trained the same parameters.

    The losses of a GAN's generator and of its discriminator are thus told apart.
    """
    wanted = np.append(steps, step)
    trained = run.values(PARAMETER_GRAD, steps=wanted)
    rows = split_rows(np.arange(len(trained.step)), trained.step)
    sites = {number: np.unique(trained.site_id[of_step]).tobytes() for number, of_step in rows}
    kinds = list(zip(run.find_kinds(wanted).tolist(), map(sites.get, wanted.tolist()), strict=True))
    return np.array([kind == kinds[-1] for kind in kinds[:-1]], bool)


def _describe(run: SampledSteps, losses: StepSeries, spike: _Spike, factor: float) -> Finding:
    step = int(losses.steps[spike.at])
    slot = run.sites[int(losses.site_id[spike.row])].slot
    before = _band_text(spike.middle, spike.width)
    evidence = [_describe_later(losses, spike)]
    if abs(spike.middle) > _MAY_BE_SCALED:
        evidence.append("this is the loss that backward was given; a GradScaler may have scaled it")
    first = _find_first(run, losses, spike, factor)
    if first is not None:
        evidence.insert(0, f"first out of its band: {first.text}")
    return Finding(
        severity="warning",
        text=f"the loss{slot} left its band in step {step}: {spike.value:.3g}, before {before}",
        remedy=_advise(run, first, step),
        evidence=tuple(evidence),
        rests_on=f"the losses of {count_of(len(spike.alike), 'step')} before it",
        step=step,
        **(place_of_site(run, first.site_id).fields() if first is not None else {}),
    )


def _band_text(middle: float, width: float) -> str:
    return f"{middle:.3g} ± {width:.2g}"


def _describe_later(losses: StepSeries, spike: _Spike) -> str:
    """Returns how the loss went on after a spike."""
    later = np.flatnonzero(losses.is_measured[spike.row])
    later = later[later > spike.at]
    values = losses.stats.mean[spike.row][later]
    back = later[values <= spike.middle + spike.width]
    if not len(later):
        return "no later loss was recorded"
    if len(back):
        return f"it was back in its band in step {losses.steps[back[0]]}"
    return f"it did not come back: {values[-1]:.3g} in step {losses.steps[later[-1]]}"


class _First(NamedTuple):
    """The first tensor that left its band."""

    site_id: int
    step: int
    text: str


def _find_first(run: SampledSteps, losses: StepSeries, spike: _Spike, factor: float) -> _First | None:
    """Returns the first tensor outside of its band, in the spike's step or in the ones just before that have some.

    In the spike's step only what was computed before the loss counts. A parameter counts as the first of its step: it
    is measured at its end, but the forward used it.
    """
    steps = np.append(spike.alike, losses.steps[spike.at])
    series = arrange_series(run.values(OUTPUT, GRAD_OUTPUT, PARAMETER_GRAD, PARAMETER, steps=steps))
    is_parameter = np.isin(series.site_id, run.sites_of(PARAMETER))
    moment = np.where(is_parameter[:, None] & (series.moment >= 0), 0, series.moment + 1)
    rms, band, found = series.stats.rms, StepBand(factor, _WINDOW, _AT_LEAST), None
    key = band.rows_of(range(len(series.site_id)))
    for at, step in enumerate(series.steps.tolist()):
        rows = np.flatnonzero(series.is_measured[:, at])
        if at >= len(series.steps) - 1 - _BEFORE:
            judged = band.judge(key[rows], rms[rows, at])
            is_high = judged.is_outside & (rms[rows, at] > _ROSE * judged.middle)
            if step == steps[-1]:
                is_high &= moment[rows, at] <= losses.moment[spike.row, spike.at]
            high = np.flatnonzero(is_high)
            if len(high):
                first = high[np.argmin(moment[rows[high], at])]
                site = int(series.site_id[rows[first]])
                before = _band_text(float(judged.middle[first]), float(judged.width[first]))
                text = f"{describe_site(run, site)} in step {step}, RMS {rms[rows[first], at]:.3g}, before {before}"
                found = found or _First(site, step, text)
            elif step != steps[-1]:
                found = None
        band.add(key[rows], rms[rows, at])
    return found


def _advise(run: SampledSteps, first: _First | None, step: int) -> str:
    if first is None:
        return f"look at the batch of step {step} and at its targets: no measured tensor left its band before"
    role, name = run.sites[first.site_id].role, place_of_site(run, first.site_id).name
    if role == OUTPUT:
        return f"look at what {name} was given in step {first.step}: its batch, and the parameters there"
    if role == PARAMETER:
        return "the update before it was too large: lower the learning rate, or warm it up for longer"
    return f"clip gradients (torch.nn.utils.clip_grad_norm_), and look at the batch of step {first.step}"
