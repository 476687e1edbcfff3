"""Two versions of a training script, each fault of the second, and the places that an answer may name."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .paired_models import GPT, TIME, TOKENS
from .pairs import OTHER_OPS, Pair, Run, Truth, seeded

STEPS = 2


class Setting(NamedTuple):
    """What the second version does otherwise, if a fault says so."""

    smoothing: float = 0.0
    shift: int = 1  # how far labels are ahead
    is_summed: bool = False
    rate: float = 1e-2
    warmup: int = 2  # steps
    decay: float = 0.1
    beta: float = 0.9
    norm: float = 0.5  # gradients are clipped to it
    is_training: bool = True
    keeps_gradients: bool = False
    seed: int = 1  # of the batches
    has_state: bool = True  # it resumes with the state of the optimizer
    frozen: str = ""
    is_cast: bool = False  # by autocast
    clips_late: bool = False


class Planted(NamedTuple):
    setting: Setting
    truth: Truth


def draw(seed: int) -> torch.Tensor:
    """The batches of all steps, of one token more than the model gets."""
    return torch.randint(TOKENS, (STEPS, 4, TIME + 1), generator=torch.Generator().manual_seed(seed))


def make(
    rate: float, decay: float, beta: float, *, has_state: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, behind one step that nobody records."""
    model = seeded(GPT, dropout=0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), rate, (beta, 0.99), weight_decay=decay, foreach=False)
    first = {name: each.clone() for name, each in model.state_dict().items()}
    F.cross_entropy(model(draw(5)[0, :, :-1]).flatten(0, 1), draw(5)[0, :, 1:].flatten()).backward()
    if has_state:
        optimizer.step()
        model.load_state_dict(first)
    optimizer.zero_grad()
    return model, optimizer


def run_first() -> Run:
    """Everything by the functions of PyTorch."""
    told = Setting()
    model, optimizer = make(told.rate, told.decay, told.beta, has_state=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / told.warmup))

    def work() -> None:
        torch.manual_seed(2)
        model.train()
        for batch in draw(told.seed):
            scores = model(batch[:, :-1])
            F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), told.norm, foreach=False)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return Run(model, work)


def run_second(told: Setting) -> Run:
    """The loss, the schedule and the clipping by hand, with numbers that the script logs."""
    model, optimizer = make(told.rate, told.decay, told.beta, has_state=told.has_state)

    def clip() -> None:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        length = torch.stack([each.square().sum() for each in gradients]).sum().sqrt()
        for each in gradients:
            each.mul_((told.norm / (length + 1e-6)).clamp(max=1.0))

    def work() -> None:
        logged = []
        torch.manual_seed(2)
        model.train(told.is_training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not told.frozen or not name.startswith(told.frozen))
        for number, batch in enumerate(draw(told.seed)):
            optimizer.param_groups[0]["lr"] = told.rate * min(1.0, (number + 1) / told.warmup)
            if not told.keeps_gradients:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=told.is_cast):
                scores = model(batch[:, :-1])
            labels = batch.roll(1 - told.shift, 1)[:, 1:]
            chances = scores.float().log_softmax(-1)
            losses = -chances.gather(-1, labels[..., None])[..., 0]
            losses = (1 - told.smoothing) * losses - told.smoothing * chances.mean(-1)
            loss = losses.sum() if told.is_summed else losses.mean()
            loss.backward()
            logged.append((loss.item(), float((scores.argmax(-1) == labels).float().mean())))
            if not told.clips_late:
                clip()
            optimizer.step()
            if told.clips_late:
                clip()

    return Run(model, work)


_IN_LOSS = Truth(None, "backward", also=("",))
_IN_OPTIMIZER = Truth(None, "optimizer", also=("embed",))
#: The first parameter's gradient behind the clipping, or its update.
_BEHIND = Truth("embed", "optimizer", also=("embed",))

#: What is wrong with the second version, and where the first differs by that.
SCRIPTS: Mapping[str, Planted] = {
    "smoothed labels": Planted(Setting(smoothing=0.1), _IN_LOSS),
    "labels that are not ahead": Planted(Setting(shift=0), _IN_LOSS),
    "sum for a mean": Planted(Setting(is_summed=True), _IN_LOSS._replace(says="32 x the first run's")),
    "learning rate": Planted(Setting(rate=2e-2), _IN_OPTIMIZER._replace(says="other 0.9995 against 0.999")),
    "warmup": Planted(Setting(warmup=3), _IN_OPTIMIZER._replace(says="other 0.9995 against 0.99966")),
    "no weight decay": Planted(Setting(decay=0.0), _BEHIND._replace(says="only the first run has mul_ x29")),
    "beta": Planted(Setting(beta=0.8), _IN_OPTIMIZER._replace(says="lerp_ in the optimizer")),
    "other norm": Planted(
        Setting(norm=0.25), Truth(None, None, says="mul outside of modules, step 0: other 0.5")
    ),
    "evaluation mode": Planted(Setting(is_training=False), Truth("blocks.0.drop", also=("blocks.0.drop",))),
    "gradients that are kept": Planted(Setting(keeps_gradients=True), _BEHIND._replace(says="step 1")),
    "other batches": Planted(
        Setting(seed=3), Truth(None, None, ("aten.randint.low_generator", "aten.randint.generator"))
    ),
    "no state": Planted(Setting(has_state=False), _BEHIND._replace(says="step 2 against 1")),
    "frozen layer": Planted(
        Setting(frozen="blocks.0.fc"),
        _BEHIND._replace(says="only the first run has gradient of the parameter blocks.0.fc.weight"),
    ),
    "clipping behind the step": Planted(Setting(clips_late=True), _BEHIND),
}


def pair_of(name: str, fault: str) -> Pair:
    """The first version, and the second with or without a fault."""
    planted = SCRIPTS[fault]
    return Pair(
        run_first,
        lambda is_planted: run_second(planted.setting if is_planted else Setting()),
        planted.truth,
        OTHER_OPS,
    )
