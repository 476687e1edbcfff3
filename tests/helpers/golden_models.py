"""Three models for golden recordings, changes planted in one module of them, and what an assertion says of these."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from modtrace.integrations.model_assertions import ModelAssertions


class Given(NamedTuple):
    """A model with the arguments of a call, and the paths of modules in which changes are planted."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    paths: tuple[str, ...]


class Residual(nn.Module):
    """A block as those of ResNet-18."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride == 2
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + (x if self.shortcut is None else self.shortcut(x)))


def make_cnn() -> Given:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Residual(*pair) for pair in itertools.pairwise(widths)]
    first = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    model = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    paths = ("0", "4.bn1", "7.conv2", "9.shortcut.0", "14")
    return Given(model.eval(), (torch.randn(2, 3, 32, 32),), {}, paths)


def make_transformer() -> Given:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    paths = (
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.3.mlp.act_fn",
        "model.layers.6.input_layernorm",
        "lm_head",
    )
    return Given(model, (), {"input_ids": torch.randint(128, (2, 16))}, paths)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(128, 20)
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(words))[0])


def make_lstm() -> Given:
    return Given(Tagger().train(), (torch.randint(100, (4, 20)),), {}, ("embed", "lstm", "head"))


MAKERS: Mapping[str, Callable[[], Given]] = {
    "cnn": make_cnn,
    "transformer": make_transformer,
    "lstm": make_lstm,
}


def make(name: str) -> Given:
    """Returns the model of this name, the same in each process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MAKERS[name]()


@contextmanager
def planted(model: nn.Module, path: str, relative: float) -> Iterator[None]:
    """Multiplies what the module at `path` returns by `1 + relative`."""
    module = model.get_submodule(path)
    forward = module.forward

    def scale(output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(map(scale, output))
        return output * (1 + relative)

    module.forward = lambda *args, **kwargs: scale(forward(*args, **kwargs))
    try:
        yield
    finally:
        del module.forward


def find_unnamed(
    assertions: ModelAssertions, name: str, relative: float, *, ops: bool = False
) -> dict[str, str]:
    """Returns the paths at which a planted change is not named, with what was said instead, "" for nothing."""
    model, args, kwargs, paths = make(name)
    unnamed = {}
    for path in paths:
        said = ""
        with planted(model, path, relative):
            try:
                assertions.assert_same(model, args, kwargs, golden=name, ops=ops)
            except AssertionError as error:
                said = str(error).splitlines()[1]
        place = f" in {path}, step 0" if ops else f" of {path}, step 0"
        if place not in said:
            unnamed[path] = said
    return unnamed


def make_assertions(folder: Path, *, update: bool = False) -> ModelAssertions:
    """Returns assertions whose golden recordings, and recordings of failures, lie in `folder`."""

    def make_folder() -> Path:
        kept = folder / "kept" / str(len([*folder.glob("kept/*")]))
        kept.mkdir(parents=True)
        return kept

    return ModelAssertions(folder=folder / "golden", test="the-test", update=update, make_folder=make_folder)


def make_amplifying() -> Given:
    """Returns a model whose rounding is large, because its summands cancel."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = nn.Linear(64, 64, bias=False), 100 + torch.randn(32, 64)
        with torch.no_grad():
            model.weight -= model.weight.mean(dim=1, keepdim=True)
        return Given(nn.Sequential(model), (x,), {}, ())


def check_here(folder: Path, relative: float) -> None:
    """Prints of each model which planted changes are not named, after an equal run has passed."""
    for name in MAKERS:
        model, args, kwargs, _ = make(name)
        make_assertions(folder).assert_same(model, args, kwargs, golden=name)
        print(f"{name}: {find_unnamed(make_assertions(folder), name, relative)}")
    model, args, kwargs, _ = make_amplifying()
    make_assertions(folder).assert_same(model, args, kwargs, golden="amplifying")
