"""Runs whose models return other shapes never agree: the first line says which shapes, and nothing stands for them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from helpers.command_line import run_command
from modtrace.analysis.divergence.answer import Reshaped

WIDTH = 8
TOKENS = torch.randint(0, 30, (8, 6), generator=torch.Generator().manual_seed(0))
CAPTURES = {
    "statistics": modtrace.Capture(roles=["output", "op_output", "leaf"]),
    "hashes": modtrace.Capture(roles="all", hash=True, sketch=True),
}


class Decoder(nn.Module):
    """Attends to the tokens before each, and to those of calls before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(30, WIDTH), nn.Embedding(64, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 30)
        self.factor = 1.0

    def forward(self, tokens: torch.Tensor, before: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        begin = 0 if before is None else before.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(begin, begin + tokens.shape[-1])) * self.factor
        keys = x if before is None else torch.cat([before, x], 1)
        scores = x @ keys.transpose(-1, -2)
        visible = torch.ones_like(scores[0] if scores.dim() > 2 else scores).tril(begin).bool()
        y = self.mix(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ keys)
        return {"keys": keys, "logits": self.head(y)}


Run = Callable[[Decoder], object]


def whole(model: Decoder) -> None:
    model(TOKENS)


def one(model: Decoder) -> None:
    model(TOKENS[:1])


def in_parts(model: Decoder) -> None:
    for part in TOKENS.split(2):
        model(part)


def with_cache(model: Decoder) -> None:
    before = None
    for at in range(6):
        before = model(TOKENS[:1, at : at + 1], before)["keys"]


def prefilled(model: Decoder) -> None:
    before = model(TOKENS[:1, :4])["keys"]
    model(TOKENS[:1, 4:], before)


def padded(model: Decoder) -> None:
    model(nn.functional.pad(TOKENS[:1], (0, 2)))


def two_padded(model: Decoder) -> None:
    model(nn.functional.pad(TOKENS[:2], (0, 2)))


def packed(model: Decoder) -> None:
    model(TOKENS[:2].reshape(1, 12))


def without_batch(model: Decoder) -> None:
    model(TOKENS[0, :5])


def train(model: Decoder, parts: Sequence[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for part in parts:
            model(part)["logits"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model: Decoder) -> None:
    train(model, [TOKENS])


def trained_as_one_of_two_ranks(model: Decoder) -> None:
    train(model, [TOKENS[:4]])


PAIRS = {
    "batch in parts": (whole, in_parts, "[8, 6, 30] against 4 x [2, 6, 30]", "a batch in parts"),
    "parts against a batch": (in_parts, whole, "4 x [2, 6, 30] against [8, 6, 30]", "a batch in parts"),
    "cache": (one, with_cache, "[1, 6, 30] against 6 x [1, 1, 30]", "a sequence in parts, as with a cache"),
    "prefilled cache": (
        one,
        prefilled,
        "[1, 6, 30] against 2 x [1, 4, 30]",
        "axis 1 is 6 in 1 call, and 4 in 2",
    ),
    "padding": (one, padded, "[1, 6, 30] against [1, 8, 30]", "another length, as with padding"),
    "packing": (packed, two_padded, "[1, 12, 30] against [2, 8, 30]", "axes 0, 1 differ"),
    "no batch": (one, without_batch, "[1, 6, 30] against [5, 30]", "they have 3 and 2 axes"),
    "rank": (trained, trained_as_one_of_two_ranks, "[8, 6, 30] against [4, 6, 30]", "another batch"),
}


def record(run: Run, capture: str, to: Path | None = None, factor: float = 1.0) -> modtrace.Recording:
    model = Decoder()
    model.factor = factor
    with modtrace.record(model, ops=True, values=CAPTURES[capture], to=to, strict=True) as rec:
        run(model)
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", PAIRS)
def test_first_line_says_the_shapes_and_nothing_agrees(name: str, capture: str) -> None:
    first, second, shapes, reason = PAIRS[name]
    runs = record(first, capture), record(second, capture)
    for allow_missing in (False, True):
        found = modtrace.compare(*runs, allow_missing=allow_missing)
        assert found.is_void and not found.ok
        lines = str(found).splitlines()
        [at] = [at for at, line in enumerate(lines) if line.startswith("the shapes differ: ")]
        assert lines[at].startswith(f"the shapes differ: output['logits'] of Decoder is {shapes}, and "), (
            lines[at]
        )
        assert reason in lines[at + 1]
        assert lines[at + 2] == "  nothing that a model returned was compared: give both runs the same inputs"


def test_another_size_of_the_last_axis_is_no_length() -> None:
    def run(width: int) -> modtrace.Recording:
        model = nn.Sequential(nn.ReLU(), nn.Tanh())
        with modtrace.record(model, strict=True) as rec, torch.no_grad():
            model(torch.ones(2, width))
        return rec

    assert "  axis 1 is 3 in 1 call, and 4 in 1" in str(modtrace.compare(run(3), run(4))).splitlines()


def test_command_that_compared_no_output_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a.modtrace", tmp_path / "b.modtrace"]
    for run, folder in zip((whole, one), folders, strict=True):
        record(run, "hashes", folder)
    assert run_command(monkeypatch, "compare", "--allow-missing", *map(str, folders)) == 2
    assert "the shapes differ" in capsys.readouterr().out


@pytest.mark.parametrize("capture", CAPTURES)
def test_difference_of_what_has_the_same_shape_is_the_place_all_the_same(capture: str) -> None:
    found = modtrace.compare(record(whole, capture), record(one, capture, factor=1.5))
    assert found.first is not None and found.first.op == "aten.mul.Tensor"
    assert str(found).index("the shapes differ") < str(found).index("the runs part at")


def test_shapes_inside_of_models_that_return_the_same_are_listed_and_no_verdict() -> None:
    class Inside(nn.Module):
        def __init__(self, wide: bool) -> None:
            super().__init__()
            self.same, self.wide = nn.Identity(), wide

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(x.expand(3, -1) if self.wide else x).mean(0) * 2

    with torch.no_grad():
        found = modtrace.compare(Inside(False), Inside(True), (torch.ones(1, 4),), allow_missing=True)
    assert found.ok and not found.is_void
    told = Reshaped(
        name="output of same", step=0, shape=(1, 4), shape_b=(3, 4), calls=1, calls_b=1, outermost=False
    )
    assert found.reshaped == (told,)
    assert "the shapes differ" not in str(found)


def test_model_with_another_head_agrees_where_that_is_allowed() -> None:
    class Net(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.head = nn.Linear(4, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    with torch.no_grad():
        found = modtrace.compare(Net(2), Net(3), (torch.ones(5, 4),), allow_missing=True)
    assert found.ok and not found.is_void
    lines = str(found).splitlines()
    assert "the shapes differ: output of Net is [5, 2] against [5, 3], and 1 other output of modules" in lines
    assert "  these were not compared: give both runs the same inputs" not in lines
