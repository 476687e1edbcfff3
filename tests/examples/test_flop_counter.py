"""The example counts what torch's FlopCounterMode counts, and is right where that one is not."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import flop_counter as torchs
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "flop_counter.py"

TABLE = """\
module                    forward    backward  recompute
Global                  7,340,032  14,942,208  4,718,592
GPT                     7,340,032  14,942,208  4,718,592
GPT.blocks.0            3,407,872   6,946,816  2,359,296
GPT.blocks.0.attn       1,310,720   2,752,512  1,310,720
GPT.blocks.0.attn.qkv     786,432   1,572,864    786,432
GPT.blocks.0.attn.proj    262,144     524,288    262,144
GPT.blocks.0.mlp        2,097,152   4,194,304  1,048,576
GPT.blocks.0.mlp.fc     1,048,576   2,097,152  1,048,576
GPT.blocks.0.mlp.proj   1,048,576   2,097,152          0
GPT.blocks.1            3,407,872   6,946,816  2,359,296
GPT.blocks.1.attn       1,310,720   2,752,512  1,310,720
GPT.blocks.1.attn.qkv     786,432   1,572,864    786,432
GPT.blocks.1.attn.proj    262,144     524,288    262,144
GPT.blocks.1.mlp        2,097,152   4,194,304  1,048,576
GPT.blocks.1.mlp.fc     1,048,576   2,097,152  1,048,576
GPT.blocks.1.mlp.proj   1,048,576   2,097,152          0
GPT.head                  524,288   1,048,576          0
"""


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The script as a module; it imports its neighbour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("flop_counter")


def ours(example: Any, run: Any) -> dict[str | None, dict[str, int]]:
    """What the example counts, by phase and module."""
    with example.FlopCounter() as counter:
        run()
    found: dict[str | None, dict[str, int]] = {}
    for (phase, name), flops in counter.flops.items():
        found.setdefault(phase, {})[name] = flops
    return found


def all_phases(found: dict[str | None, dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in found.values() for name in counts)
    return {name: sum(counts.get(name, 0) for counts in found.values()) for name in names}


def torch_says(run: Any) -> dict[str, int]:
    """What FlopCounterMode counts by module, whatever the phase."""
    with FlopCounterMode(display=False) as counter:
        run()
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


def train(model: nn.Module) -> Any:
    """A forward and a backward. Each Linear(4, 4) takes 64 flops forward, and 64 for each of its two gradients."""
    return lambda: model(torch.ones(2, 4)).sum().backward()


class Two(nn.Module):
    """Runs two branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4))
        self.b = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_parallel_branches_have_each_their_own(example: Any) -> None:
    counts = {"Global": 128, "Two": 128, "Two.a": 64, "Two.a.0": 64, "Two.b": 64, "Two.b.0": 64}
    found = ours(example, train(Two()))
    assert found == {"forward": counts, "backward": counts}
    torchs_counts = torch_says(train(Two()))
    assert (all_phases(found)["Two.b.0"], torchs_counts.pop("Two.b.0")) == (64 + 64, 64 + 128)
    assert (all_phases(found)["Two.b"], torchs_counts.pop("Two.b")) == (64 + 64, 64 + 128)
    assert torchs_counts == {"Global": 256, "Two": 256, "Two.a": 128, "Two.a.0": 128}


class Keyword(nn.Module):
    """Takes its input by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x: Tensor) -> Tensor:
        return self.layer(x)


class Mod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.j = Keyword()
        self.i = Keyword()

    def forward(self, x: Tensor) -> Tensor:
        return self.i(x=self.j(x=x))


def test_inputs_by_keyword_do_not_keep_a_module_running(example: Any) -> None:
    found = ours(example, train(Mod()))
    assert found == {
        "forward": {
            "Global": 128,
            "Mod": 128,
            "Mod.j": 64,
            "Mod.j.layer": 64,
            "Mod.i": 64,
            "Mod.i.layer": 64,
        },
        "backward": {
            "Global": 192,
            "Mod": 192,
            "Mod.i": 128,
            "Mod.i.layer": 128,
            "Mod.j": 64,
            "Mod.j.layer": 64,
        },
    }
    torchs_counts = torch_says(train(Mod()))
    assert torchs_counts.pop("Mod.i") == 64 + 192  # it is charged with the backward of Mod.j too
    assert {**torchs_counts, "Mod.i": 64 + 128} == all_phases(found)


def test_two_models_of_one_class_have_two_names(example: Any) -> None:
    first, second = Mod(), Mod()

    def run() -> None:
        first(torch.ones(2, 4)).sum().backward()
        second(torch.ones(4, 4)).sum().backward()  # twice as much

    found = ours(example, run)
    forward = {"": 128, ".j": 64, ".j.layer": 64, ".i": 64, ".i.layer": 64}
    backward = {"": 192, ".j": 64, ".j.layer": 64, ".i": 128, ".i.layer": 128}
    for phase, flops in (("forward", forward), ("backward", backward)):
        assert found[phase] == {
            "Global": 3 * flops[""],
            **{f"Mod{path}": each for path, each in flops.items()},
            **{f"Mod#1{path}": 2 * each for path, each in flops.items()},
        }
    assert torch_says(run)["Mod"] == 3 * (128 + 192)  # of both


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.rest, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recompute_is_a_phase_of_its_own(example: Any, reentrant: bool) -> None:
    found = ours(example, train(Checkpointed(reentrant)))
    top = "Checkpointed"
    assert found == {
        "forward": {"Global": 128, top: 128, f"{top}.first": 64, f"{top}.rest": 64, f"{top}.rest.0": 64},
        "recompute": {"Global": 64, top: 64, f"{top}.rest": 64, f"{top}.rest.0": 64},
        "backward": {"Global": 192, top: 192, f"{top}.rest": 128, f"{top}.rest.0": 128, f"{top}.first": 64},
    }
    assert torch_says(train(Checkpointed(reentrant)))["Global"] == 128 + 64 + 192


def test_what_runs_outside_of_modules_has_no_phase(example: Any) -> None:
    found = ours(example, lambda: torch.ones(2, 4) @ torch.ones(4, 4))
    assert found == {None: {"Global": 64}}


@pytest.fixture
def torch_knows_attention_on_the_cpu(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ):
        monkeypatch.setitem(torchs.flop_registry, op, example.FORMULAS[op])


@pytest.mark.usefixtures("torch_knows_attention_on_the_cpu")
def test_gpt_without_branches_gets_the_counts_of_torch_for_every_module(example: Any) -> None:
    model = example.GPT(11, layers=2, width=16, heads=2, context=8)
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def run() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    found = all_phases(ours(example, run))
    assert found == torch_says(run)
    assert (
        found["GPT.blocks.1.attn"] == 3 * (24_576 + 8_192) + 8_192 + 20_480
    )  # qkv, proj; then attention itself


def test_table_has_a_column_for_what_is_outside_and_zero_for_what_is_not_there(example: Any) -> None:
    table = example.render_table({("forward", "Global"): 1000, ("forward", "M"): 64, (None, "Global"): 5})
    assert table.splitlines() == [
        "module  forward  outside",
        "Global    1,000        5",
        "M            64        0",
    ]


def test_script_prints_its_table(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    assert capsys.readouterr().out == TABLE
