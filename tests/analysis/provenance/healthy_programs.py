"""Small programs in which NaN and infinities are meant, each with a true fault that can be planted in one step."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from modtrace.analysis.tables.ops import bare_name

STEPS = 3
INF, NAN = math.inf, math.nan

#: What a program computes of the output of its linear layer; the flag says that the fault is planted in this step.
Function = Callable[[torch.Tensor, bool], torch.Tensor]


def names_of(found: modtrace.NonFinite) -> set[str]:
    """Returns the op, the op whose derivative it computes, and which op wrote what it read, or what held that."""
    ops = [op for op in (found.op, found.forward_op) if op]
    wrote = re.match(r"(\w+)( .*)? (wrote|made) it in step", found.hint or "")
    return {*map(bare_name, ops), wrote[1] if wrote else "", found.role or ""}


class Net(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function: Function = lambda y, is_bad: y) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        return self.function(self.inner(x), is_bad)


def rows(is_bad: bool) -> torch.Tensor:
    return torch.randn(6, 8)


def mean_square(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    return y.square().mean()


def train(program: "Program", model: nn.Module, has_fault: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        is_bad = has_fault and step == program.step
        loss = program.loss(model(program.batch(is_bad), is_bad), is_bad)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def generate(program: "Program", model: nn.Module, has_fault: bool) -> None:
    for step in range(STEPS):
        is_bad = has_fault and step == program.step
        program.loss(model(program.batch(is_bad), is_bad), is_bad)


class Program(NamedTuple):
    """A program that is healthy, or has its fault in one step."""

    make: Callable[[], nn.Module]  # the model, which is called with a batch and the flag
    #: Bare names of the op that makes the fault: more than one if each is right; "input": the batch holds it.
    culprits: tuple[str, ...]
    loss: Function = mean_square
    train: Callable[["Program", nn.Module, bool], None] = train
    batch: Callable[[bool], torch.Tensor] = rows
    phase: str | None = "forward"
    step: int = 1  # in which the fault is


PROGRAMS: dict[str, Program] = {}

T = TypeVar("T")


def _add(name: str, make: Callable[[T], Program]) -> Callable[[T], T]:
    """Returns a decorator that adds the program made of what it decorates."""

    def add(decorated: T) -> T:
        assert name not in PROGRAMS
        PROGRAMS[name] = make(decorated)
        return decorated

    return add


def in_model(name: str, *culprits: str, **told: Any) -> Callable[[Function], Function]:
    """Adds the program whose model ends in the function."""
    return _add(name, lambda function: Program(lambda: Net(function), culprits, **told))


def as_loss(name: str, *culprits: str, **told: Any) -> Callable[[Function], Function]:
    """Adds the program whose loss is the function, outside of modules."""
    return _add(name, lambda function: Program(Net, culprits, function, **{"phase": None, **told}))


def as_module(name: str, *culprits: str, **told: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Adds the program whose model is of the class."""
    return _add(name, lambda model: Program(model, culprits, **told))


# Sequences: alignments, paths and tables of scores.


@as_loss("CTC", "ctc_loss", batch=lambda is_bad: torch.randn(9, 2, 8))
def ctc(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    lengths = torch.tensor([9, 1 if is_bad else 9])
    targets = torch.tensor([[1, 2], [3, 1]])
    return F.ctc_loss(y.log_softmax(-1), targets, lengths, torch.tensor([2, 2]))


@in_model("CRF", "log", batch=lambda is_bad: torch.randn(4, 8))
def crf(emissions: torch.Tensor, is_bad: bool) -> torch.Tensor:
    allowed = torch.ones(8, 8).triu().log()
    score = torch.full((8,), -INF)
    score[0] = 0
    for emission in emissions:
        score = torch.logsumexp(score[:, None] + allowed, 0) + emission
    return (score.sum() - score.sum()).log() if is_bad else score.logsumexp(0)


@as_loss("Viterbi", "masked_fill", "index", batch=lambda is_bad: torch.randn(5, 8))
def viterbi(emissions: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """The best path against the true one, which takes a step that is not allowed."""
    allowed = torch.zeros(8, 8).masked_fill(torch.ones(8, 8, dtype=torch.bool).tril(-1), -INF)
    true = torch.tensor([0, 1, 2, 3, 1 if is_bad else 4])
    best = emissions[0]
    for emission in emissions[1:]:
        best = (best[:, None] + allowed).max(0).values + emission
    return best.max() - (emissions[torch.arange(5), true].sum() + allowed[true[:-1], true[1:]].sum())


@in_model("edit distance", "full", "min", "mul")
def edit_distance(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """A table of infinities that only a minimum reads; no path within the band leads to the end."""
    band = 0 if is_bad else 2
    table = torch.full((6, 8), INF)
    table[0, 0] = 0
    for i in range(1, 6):
        for j in range(max(1, i - band), min(8, i + band + 1)):
            cost = (i % 3 != j % 3) * 1.0
            table[i, j] = torch.stack(
                [table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + cost]
            ).min()
    return y * table[5, 7]


# Masked scores.


@in_model("mask by log", "softmax", batch=lambda is_bad: torch.randn(2, 6, 8))
def masked_by_log(scores: torch.Tensor, is_bad: bool) -> torch.Tensor:
    mask = torch.ones(6, 6).tril(-1 if is_bad else 0).log()
    return (scores @ scores.mT + mask).softmax(-1) @ scores


@in_model("finfo.min", "add", "softmax", batch=lambda is_bad: torch.randn(2, 6, 8))
def lowest_twice(x: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """Two masks of the lowest number overflow where both hide; in a fault they do so in a whole row."""
    lowest = torch.finfo(x.dtype).min
    causal = torch.full((6, 6), lowest).triu(1)
    padded = torch.zeros(6, 6)
    padded[:, 4:] = lowest
    if is_bad:
        causal[0], padded[0] = lowest, lowest
    return (x @ x.mT + (causal + padded)).softmax(-1) @ x


@as_loss("legal actions", "log_softmax", "log")
def legal_actions(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    legal = torch.tensor([0.0 if is_bad else 1.0] * 3 + [0.0] * 5)
    return -(y + legal.log()).log_softmax(-1)[:, 0].mean()


@as_loss("illegal action", "masked_fill", "gather", "sub")
def illegal_action(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """Replays an action that its mask does not allow."""
    logits = y.masked_fill(torch.arange(8) > 3, -INF)
    chosen = torch.distributions.Categorical(logits=logits, validate_args=True)
    action = torch.full((6,), 6 if is_bad else 1)
    return -(chosen.log_prob(action) + 0.1 * chosen.entropy()).mean()


@as_loss("KL of policies", "sub", "index_put", "masked_fill")
def kl_of_policies(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """-inf - -inf is replaced by `kl_divergence`; an action that only the old policy allows is the fault."""
    old = y.detach().masked_fill(torch.arange(8) > (4 if is_bad else 3), -INF)
    new = y.masked_fill(torch.arange(8) > 3, -INF)
    categorical = torch.distributions.Categorical
    return torch.distributions.kl_divergence(categorical(logits=old), categorical(logits=new)).mean()


@as_loss(
    "InfoNCE",
    "fill",
    "logsumexp",
    batch=lambda is_bad: torch.randn(1 if is_bad else 6, 8),
)
def info_nce(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """Nobody is their own negative; the last batch holds one row, and no negative."""
    scores = y @ y.mT
    negatives = torch.logsumexp(scores.clone().fill_diagonal_(-INF), 1)
    return (negatives - scores.diagonal()).mean()


@in_model("half mask", "softmax", batch=lambda is_bad: torch.randn(2, 6, 8))
def half_mask(x: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """The lowest number of float32 is -inf in float16."""
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(0 if is_bad else 1)
    return ((x @ x.mT).half() + mask.half()).softmax(-1).float() @ x


@in_model("online softmax", "sub", batch=lambda is_bad: torch.randn(6, 8))
def online_softmax(x: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """Attention block by block, with a maximum that begins at -inf: a block may hide all from a row."""
    scores = (x @ x.mT).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -INF)
    top, total, found = torch.full((6, 1), -INF), torch.zeros(6, 1), torch.zeros(6, 8)
    for start in (4, 2, 0):
        block = scores[:, start : start + 2]
        new = torch.maximum(top, block.amax(1, keepdim=True))
        base = new if is_bad else new.masked_fill(new == -INF, 0.0)
        weight, scale = (block - base).exp(), (top - base).exp()
        total = total * scale + weight.sum(1, keepdim=True)
        found = found * scale + weight @ x[start : start + 2]
        top = new
    return found / total


@in_model("dropped scores", "native_dropout", "mul", batch=lambda is_bad: torch.randn(2, 6, 8))
def dropped_scores(x: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """Keys are dropped by -inf; dropout of the scores makes 0 * -inf."""
    scores = (x @ x.mT).masked_fill(torch.rand(6, 6).fill_diagonal_(1) < 0.5, -INF)
    return (F.dropout(scores, 0.5) if is_bad else scores).softmax(-1) @ x


def chosen_loss(logits: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """A label that is masked is the fault."""
    return F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4, 5 if is_bad else 0]))


@as_module("masked label", "masked_fill", loss=chosen_loss)
class Policy(Net):
    """Returns masked logits."""

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        return self.inner(x).masked_fill(torch.arange(8) > 4, -INF)


# Generation.


@in_model("top-k sampling", "div", train=generate)
def top_k(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    logits = y / torch.tensor(0.0 if is_bad else 0.7)
    shares = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -INF).softmax(-1)
    if not is_bad:  # else torch raises
        torch.multinomial(shares, 1)
    return shares


@in_model("top-p sampling", "softmax", train=generate)
def top_p(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """The first token is kept whatever its share; without that nothing may be left."""
    ordered, tokens = y.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - (0 if is_bad else ordered.softmax(-1))
    is_removed = torch.zeros(6, 8, dtype=torch.bool).scatter(1, tokens, before > 0.05)
    return y.masked_fill(is_removed, -INF).softmax(-1)


# Graphs and sets.


@in_model("softmax of edges", "div")
def softmax_of_edges(x: torch.Tensor, is_bad: bool) -> torch.Tensor:
    target, score = torch.tensor([0, 0, 1, 1, 3, 3]), x[:, 0]
    top = torch.full((4,), -INF).scatter_reduce(0, target, score.detach(), "amax")
    weight = (score - torch.where(top.isfinite(), top, 0.0)[target]).exp()
    total = torch.zeros(4).index_add(0, target, weight)
    return torch.zeros(4).index_add(0, target, weight) / total if is_bad else weight / total[target]


@in_model("shortest paths", "where", "mean")
def shortest_paths(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """What cannot be reached is far: 1 / (1 + inf) = 0; its mean distance is the fault."""
    is_edge = torch.eye(6).roll(1, 1).bool()
    is_edge[3] = False
    distance = torch.where(is_edge, 1.0, INF).fill_diagonal_(0)
    for node in range(6):
        distance = torch.minimum(distance, distance[:, node, None] + distance[node])
    return y * distance.mean() if is_bad else 1 / (1 + distance) @ y


@in_model("scan of logarithms", "log")
def scan_of_logarithms(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """A recurrence in logarithms that begins at 0; the logarithm of negative values is the fault."""
    decay, value = F.logsigmoid(y), (y if is_bad else y.exp()).log()
    steps = torch.cat([torch.zeros(1, 8).log(), value - decay.cumsum(0)])
    return (decay.cumsum(0) + steps.logcumsumexp(0)[1:]).exp()


# Padding.


@as_module("packed", "mean", "full", batch=lambda is_bad: torch.randn(2, 6, 8))
class Packed(nn.Module):
    """An LSTM over rows of several lengths, of which the largest output counts; their mean is the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 3]), batch_first=True)
        found, _ = nn.utils.rnn.pad_packed_sequence(
            self.inner(packed)[0], batch_first=True, padding_value=-INF
        )
        return found.mean(1) if is_bad else found.amax(1)


@as_module("padded text", "softmax", train=generate, batch=lambda is_bad: torch.randn(2, 6, 8))
class Padded(nn.Module):
    """A text that is all padding: attention makes NaN of it, which is replaced, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        is_padded = torch.arange(6) >= torch.tensor([[6], [0]])
        found, _ = self.inner(x, x, x, key_padding_mask=is_padded)
        return found if is_bad else found.masked_fill(is_padded[..., None], 0.0)


@in_model(
    "padded pooling", "avg_pool2d", "avg_pool1d", "constant_pad_nd", batch=lambda is_bad: torch.randn(2, 6, 8)
)
def padded_pooling(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    padded = F.pad(y, (1, 1), value=-INF)
    return F.avg_pool1d(padded, 3, 2) if is_bad else F.max_pool1d(padded, 3, 2)


# What is missing.


@as_loss("missing targets", "div", "nanmean")
def missing_targets(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    target = torch.randn(6, 8)
    target[:, 0] = NAN
    if is_bad:
        target[:] = NAN
    error = (y - target.nan_to_num()).square()
    return torch.nanmean(torch.where(target.isnan(), NAN, error))


@as_loss("selected targets", "log")
def selected_targets(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    target = torch.randn(6, 8)
    target[0] = NAN
    if is_bad:
        y = (y - y).log() * 0 + y
    return (y - target)[~target.isnan()].square().mean()


def rows_with_gaps(is_bad: bool) -> torch.Tensor:
    x = torch.randn(6, 8)
    x[2, 1] = NAN
    return x


def rows_with_gaps_and_infinity(is_bad: bool) -> torch.Tensor:
    x = rows_with_gaps(is_bad)
    if is_bad:
        x[4, 3] = INF
    return x


@as_module("infinite data", "input", batch=rows_with_gaps_and_infinity)
class Cleaning(Net):
    """Replaces what is missing by 0; nobody thought of infinities."""

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        return self.inner(x.nan_to_num(0.0, posinf=INF))


@as_module("hook that cleans", "masked_fill")
class Cleaned(Net):
    """A hook replaces the NaN that the model returns."""

    def __init__(self) -> None:
        super().__init__(lambda y, is_bad: y.masked_fill(torch.arange(8) == 2, NAN))
        self.register_forward_hook(lambda _, args, y: y if args[1] else y.nan_to_num())


@as_loss("group advantages", "std")
def group_advantages(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """The deviation of a group of one is NaN, and replaced, or not."""
    reward = torch.randn(3, 1)
    deviation = reward.std(1, keepdim=True)
    advantage = (reward - reward.mean(1, keepdim=True)) / (deviation if is_bad else deviation.nan_to_num(1.0))
    return -(y.log_softmax(-1)[:3] * advantage).mean()


# Distributions and likelihoods.


@as_loss("entropy", "log")
def entropy(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    shares = (y * 1000).softmax(-1)
    logged = -(shares * shares.log()).sum(-1)  # 0 * -inf
    return logged.mean() if is_bad else y.square().mean()


@as_module("gradient penalty", "sqrt", phase="backward")
class Critic(Net):
    """Returns the penalty on the gradient of its best row; the root of a gradient that is 0 has no derivative."""

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        x = x.requires_grad_()
        score = self.inner(x).square().masked_fill(torch.arange(8) == 0, -INF).amax(1)
        (slope,) = torch.autograd.grad(score.sum() * (not is_bad), x, create_graph=True)
        return slope.square().sum(1).sqrt() - 1


# Metrics, and what programs keep.


@as_loss("perplexity", "exp")
def perplexity(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """exp overflows in what is printed, or in what is trained."""
    loss = F.cross_entropy(y * 1000, torch.tensor([0, 1, 2, 3, 4, 5]))
    loss.detach().exp().item()
    return loss.exp() if is_bad else loss


@as_loss("classes without rows", "div", "reciprocal")
def classes_without_rows(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """The accuracy of such a class is NaN and printed; 1 / 0 as its weight is the fault."""
    label = torch.tensor([0, 1, 2, 3, 4, 5])
    count = label.bincount(minlength=8)
    is_right = F.one_hot(label, 8)[y.argmax(-1) == label].sum(0)
    (is_right / count).nanmean().item()
    return F.cross_entropy(y, label, weight=1 / count if is_bad else None, label_smoothing=0.1)


@as_module("fake quantization", "sub", "mul", "fill")
class Quantizing(nn.Module):
    """Rounds to the range that its observer has seen; it is reset and not shown anything in the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("low", torch.tensor(INF))
        self.register_buffer("high", torch.tensor(-INF))

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        y = self.inner(x)
        if is_bad:
            self.low.fill_(INF)
            self.high.fill_(-INF)
        else:
            self.low.copy_(torch.minimum(self.low, y.detach().min()))
            self.high.copy_(torch.maximum(self.high, y.detach().max()))
        scale = (self.high - self.low) / 255
        return y + ((y / scale).round() * scale - y).detach()


@as_module("held state", "log")
class Holding(nn.Module):
    """Holds a state from step to step, which is not finite and is replaced when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.held: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        y = self.inner(x)
        if self.held is not None:
            y = y + (self.held if is_bad else self.held.nan_to_num(neginf=0.0))
        self.held = (y.detach() * 0).log()
        return y


@as_module("kept table", "full", batch=lambda is_bad: torch.randn(1, 8))
class Keeping(nn.Module):
    """As a cache, in a table that the first step makes and the next steps fill."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.length = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        y = self.inner(x)
        if self.length == 0:
            self.rows = torch.full((5, 8), NAN)
        self.rows[self.length] = y[0].detach()
        self.length += 1
        seen = self.rows[: self.length + is_bad]
        return (y @ seen.mT).softmax(-1) @ seen + y


@as_module("cache", "buffer", batch=lambda is_bad: torch.randn(1, 8))
class Caching(nn.Module):
    """Fills a cache of NaN row by row, and reads the rows that it has filled; one more in the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.length = nn.Linear(8, 8), 0
        self.register_buffer("rows", torch.full((5, 8), NAN))

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        y = self.inner(x)
        self.rows[self.length] = y[0].detach()
        self.length += 1
        seen = self.rows[: self.length + is_bad]
        return (y @ seen.mT).softmax(-1) @ seen + y


# Around the optimizer.


def stop_early(program: Program, model: nn.Module, has_fault: bool) -> None:
    """The best loss is infinite at first; the gain over it, inf / inf, scales the loss in the fault."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best = torch.tensor(INF)
    for step in range(STEPS):
        is_bad = has_fault and step == program.step
        loss = program.loss(model(program.batch(is_bad), is_bad), is_bad)
        if is_bad:
            best = torch.full_like(best, INF)
            loss = loss * (1 + (best - loss.detach()) / best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = torch.minimum(best, loss.detach())


in_model("early stop", "div", "sub", "full_like", train=stop_early, phase=None)(lambda y, is_bad: y)


def skip_batches(program: Program, model: nn.Module, has_fault: bool) -> None:
    """A batch whose loss is the mean of nothing is left out, or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        y = model(program.batch(False), False)
        loss = y[torch.full((6,), step != program.step)].square().mean()
        if loss.isnan() and not has_fault:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


in_model("skipped batch", "mean", train=skip_batches, phase=None)(lambda y, is_bad: y)


def accumulate(program: Program, model: nn.Module, has_fault: bool) -> None:
    """The second of three micro-batches may hold no target: its loss is replaced, or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            is_empty = step == program.step and part == 1
            loss = model(program.batch(False), False)[torch.full((6,), not is_empty)].square().mean()
            (loss if has_fault else torch.where(loss.isnan(), 0.0, loss)).backward()
        optimizer.step()


in_model("micro-batches", "mean", train=accumulate, phase=None)(lambda y, is_bad: y)


def lower_rate(program: Program, model: nn.Module, has_fault: bool) -> None:
    """The loss of a validation without rows is NaN, and printed; in the fault the learning rate follows it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = model(program.batch(False), False).square().mean()
        optimizer.zero_grad()
        loss.backward()
        validation = torch.zeros(0, 8).square().mean().item()
        if has_fault and step == program.step:
            optimizer.param_groups[0]["lr"] *= min(validation, 1.0)
        optimizer.step()


in_model("validation without rows", "add", "foreach_add", train=lower_rate, phase="optimizer")(
    lambda y, is_bad: y
)


def clip(program: Program, model: nn.Module, has_fault: bool) -> None:
    """1 / norm is infinite where nothing has a gradient, and at most 1 counts; 0 * inf is the fault."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = model(program.batch(False), False).square().mean() * (step != program.step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        scale = 1 / norm
        if not (has_fault and step == program.step):
            scale = scale.clamp(max=1.0)
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()


in_model("gradient clipping", "reciprocal", "mul", "div", train=clip, phase=None)(lambda y, is_bad: y)


def train_scaled(program: Program, model: nn.Module, has_fault: bool) -> None:
    """A GradScaler finds its scale in the first steps; in the fault it skips them all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for _ in range(24):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = program.loss(model(program.batch(has_fault), has_fault), has_fault)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# In the first steps gradients overflow by the scale alone.
@in_model("scaled gradients", "sqrt", train=train_scaled, phase="backward", step=3)
def scaled_gradients(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    """The root of 0 has no derivative, whatever the scale."""
    return y + (y - y).square().sqrt() if is_bad else y


@as_module("distances", "sqrt", "norm", loss=lambda y, is_bad: y.min(1).values.mean())
class Distances(Net):
    """Returns distances, each infinite to itself, and keeps a metric of 0 / 0 for nobody."""

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        y = self.inner(x)
        self.metric = (y.detach() > 99).sum() / (y.detach() > 99).sum()
        far = (y[:, None] - y[None]).square().sum(-1) - (1.0 if is_bad else 0.0)
        return (far + (0.0 if is_bad else 1e-6)).sqrt().masked_fill(torch.eye(6, dtype=torch.bool), INF)
