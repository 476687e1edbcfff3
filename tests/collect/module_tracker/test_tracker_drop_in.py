"""PyTorch's own tools give the same answers on our tracker, and right ones where torch's tracker misleads them."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import mem_tracker, mod_tracker, runtime_estimator, sac_estimator
from torch.utils import flop_counter
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint

import modtrace

MODULES = {  # where each tool has its tracker's class from
    "flop_counter": (flop_counter, "ModuleTracker"),
    "mem_tracker": (mem_tracker, "ModTracker"),
    "mod_tracker": (mod_tracker, "ModTracker"),
    "runtime_estimator": (runtime_estimator, "ModTracker"),
    "sac_estimator": (sac_estimator, "ModTracker"),
}

CHECKPOINTS = pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])


@pytest.fixture(autouse=True)
def what_torchs_leave_is_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ModTracker replaces `warnings.formatwarning`, and an estimator keeps its fake mode in its class."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    runtime_estimator.RuntimeEstimator.fake_mode = None


def on_both(tool: str, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What a tool gives on torch's tracker and on ours."""
    theirs = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*MODULES[tool], modtrace.ModuleTracker)
        ours = run()
    return theirs, ours


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(16)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Two blocks, and an embedding of the tokens that is also the head."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(11, 16)
        self.positions = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(8))
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def loss_of(model: nn.Module) -> Tensor:
    model.zero_grad()
    tokens = torch.arange(16).view(2, 8) % 11
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


# FlopCounterMode.

Counts = dict[str, dict[str, int]]


def flops(run: Callable[[], Any]) -> tuple[int, Counts]:
    """The sum, and the numbers by module and op."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        run()
    found = counter.get_flop_counts()
    return counter.get_total_flops(), {
        name: {str(op).removeprefix("aten."): number for op, number in ops.items()}
        for name, ops in found.items()
    }


def flops_on_both(run: Callable[[], Any]) -> tuple[Counts, Counts]:
    """The numbers on both trackers; the sums are the same."""
    (theirs_total, theirs), (ours_total, ours) = on_both("flop_counter", lambda: flops(run))
    assert ours_total == theirs_total
    return theirs, ours


def test_flops_of_a_gpt_are_the_same_for_every_module_and_in_a_second_context_of_a_counter() -> None:
    model = GPT()

    def run() -> list[Any]:
        counter = flop_counter.FlopCounterMode(display=False)
        found = []
        for _ in range(2):
            with counter:
                loss_of(model).backward()
            found.append(counter.get_flop_counts())
        return found

    theirs, ours = on_both("flop_counter", run)
    assert ours == theirs
    assert ours[0] == ours[1]
    assert len(ours[0]) == 17
    assert list(ours[0]["GPT.blocks.1.mlp.2"].values()) == [32_768, 65_536]


def test_flops_of_reentrant_checkpoints_count_the_backward_for_the_block_too() -> None:
    """On torch's tracker the block is not among the parents in the backward that runs inside of its own."""
    model = GPT("reentrant")
    theirs, ours = flops_on_both(lambda: loss_of(model).backward())
    for block in ("GPT.blocks.0", "GPT.blocks.1"):
        parts = [f"{block}.attn", f"{block}.mlp"]
        assert ours[block]["mm"] == sum(ours[part]["mm"] for part in parts) == 196_608
        assert "mm" not in theirs[block]
        theirs[block] = ours[block]
    assert ours == theirs


def test_flops_of_non_reentrant_checkpoints_count_a_recompute_for_what_is_recomputed_alone() -> None:
    """On torch's tracker also for the layer whose backward has asked for it."""
    model = GPT("non-reentrant")
    theirs, ours = flops_on_both(lambda: loss_of(model).backward())
    recomputed = 24_576 + 8_192 + 32_768  # attn.qkv, attn.proj and mlp.0; the recompute stops before mlp.2
    for block in ("GPT.blocks.0", "GPT.blocks.1"):
        assert ours[f"{block}.mlp.2"] == {"addmm": 32_768, "mm": 65_536}
        assert theirs[f"{block}.mlp.2"] == {"addmm": 32_768 + recomputed, "bmm": 2 * 4_096, "mm": 65_536}
        assert ours[f"{block}.mlp"] == {"addmm": 3 * 32_768, "mm": 131_072}
        assert theirs[f"{block}.mlp"] == {"addmm": 2 * 32_768 + recomputed, "bmm": 2 * 4_096, "mm": 131_072}
        for part in ("mlp", "mlp.2"):
            theirs[f"{block}.{part}"] = ours[f"{block}.{part}"]
    assert ours == theirs


def test_flops_of_a_layer_whose_output_is_written_to_count_for_it() -> None:
    """On torch's tracker its backward never begins: in place of the view that it has returned there is another."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    theirs, ours = flops_on_both(lambda: model(torch.ones(1, 2, 4)).sum().backward())
    assert ours == {
        "Global": {"addmm": 192, "mm": 320},
        "Sequential": {"addmm": 192, "mm": 320},
        "Sequential.0": {"addmm": 64, "mm": 64},
        "Sequential.1": {"addmm": 64, "mm": 128},
        "Sequential.3": {"addmm": 64, "mm": 128},
    }
    assert theirs.pop("Sequential.2") == {"mm": 192}  # of the two layers before it
    assert theirs["Sequential.1"] == {"addmm": 64}
    theirs["Sequential.1"] = ours["Sequential.1"]
    assert ours == theirs


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4))
        self.b = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


# MemTracker.

#: Bytes by kind, of the CPU.
Snapshot = dict[str, int]


class Memory:
    """What a MemTracker tells of one training step."""

    def __init__(self, checkpointing: str | None) -> None:
        torch.manual_seed(0)
        model = GPT(checkpointing)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = mem_tracker.MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.peak = _of_cpu(tracker.get_tracker_snapshot("peak"))
        self.now = _of_cpu(tracker.get_tracker_snapshot())
        stats = {each.mod_fqn: each for each in tracker.memory_tracking.values()}
        self.sizes = {
            name: (each.parameter_mem, each.buffer_mem, each.input_mem, each.output_mem)
            for name, each in stats.items()
        }
        self.states: dict[str, dict[str, list[Snapshot]]] = {
            name: {state.name: [_of_cpu(each) for each in found] for state, found in each.snapshots.items()}
            for name, each in stats.items()
        }

    def take(self, state: str, name: str) -> Snapshot:
        """Takes out the only snapshot of a module in a state."""
        (snapshot,) = self.states[name].pop(state)
        return snapshot


def _of_cpu(snapshot: Any) -> Snapshot:
    kinds = snapshot[torch.device("cpu")]
    return {str(getattr(kind, "value", kind)): size for kind, size in kinds.items() if size}


@functools.cache
def memory_on_both(checkpointing: str | None) -> "tuple[Memory, Memory]":
    return on_both("mem_tracker", lambda: Memory(checkpointing))


#: A gradient of what flows between the blocks.
GRADIENT_BYTES = 2 * 8 * 16 * 4

NAMES = [
    "GPT", "GPT.tokens", "GPT.positions",
    "GPT.blocks.0", "GPT.blocks.0.ln1", "GPT.blocks.0.attn", "GPT.blocks.0.attn.qkv", "GPT.blocks.0.attn.proj",
    "GPT.blocks.0.ln2", "GPT.blocks.0.mlp", "GPT.blocks.0.mlp.0", "GPT.blocks.0.mlp.1", "GPT.blocks.0.mlp.2",
    "GPT.blocks.1", "GPT.blocks.1.ln1", "GPT.blocks.1.attn", "GPT.blocks.1.attn.qkv", "GPT.blocks.1.attn.proj",
    "GPT.blocks.1.ln2", "GPT.blocks.1.mlp", "GPT.blocks.1.mlp.0", "GPT.blocks.1.mlp.1", "GPT.blocks.1.mlp.2",
    "GPT.head",
]  # fmt: skip


@CHECKPOINTS
def test_memory_is_the_same_for_every_module(checkpointing: str | None) -> None:
    """All but the end of its backward: of that the next tests tell."""
    theirs, ours = copy.deepcopy(memory_on_both(checkpointing))
    assert (ours.peak, ours.now) == (theirs.peak, theirs.now)
    assert ours.sizes == theirs.sizes
    assert list(ours.states) == list(theirs.states) == NAMES
    for each in (theirs, ours):
        for name in NAMES:
            each.take("POST_BW", name)
        each.take("PEAK_BW", "GPT.positions")  # it lasts until its end
    if checkpointing == "reentrant":  # on torch's tracker no backward begins in it
        for name in NAMES:
            if name.startswith("GPT.blocks."):
                assert not {"PRE_BW", "PEAK_BW"} & theirs.states[name].keys()
                before, peak = ours.take("PRE_BW", name), ours.take("PEAK_BW", name)
                assert before["Total"] < peak["Total"] <= ours.peak["Total"]
    assert ours.states == theirs.states


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_memory_at_the_end_of_a_backward_has_the_gradients_that_the_hook_is_given(
    checkpointing: str | None,
) -> None:
    """Ours tells what the module itself gives to its input. On torch's tracker that is part of a sum already,
    where what goes into the module goes elsewhere too, as in a residual."""
    theirs, ours = copy.deepcopy(memory_on_both(checkpointing))
    for name in NAMES:
        if name == "GPT.positions":
            continue
        theirs_end, ours_end = theirs.take("POST_BW", name), ours.take("POST_BW", name)
        more = ours_end.pop("Temp", 0) - theirs_end.pop("Temp", 0)
        assert ours_end.pop("Total") - theirs_end.pop("Total") == more
        assert ours_end == theirs_end
        meets = name.endswith((".ln1", ".ln2", "blocks.0", "blocks.1"))
        assert more in ((0, GRADIENT_BYTES) if meets else (0,)), name


@pytest.mark.parametrize("checkpointing", [None, "reentrant"])
def test_memory_of_a_module_without_gradients_for_its_input_is_that_at_its_own_end(
    checkpointing: str | None,
) -> None:
    """On torch's tracker it is that at the end of the whole backward, when all gradients are there."""
    theirs, ours = copy.deepcopy(memory_on_both(checkpointing))
    theirs_end, ours_end = (each.take("POST_BW", "GPT.positions") for each in (theirs, ours))
    everything = theirs.take("POST_BW", "GPT")
    assert theirs_end == everything
    tokens_gradient = 11 * 16 * 4  # of the other embedding, which comes later
    assert everything["Gradient"] - ours_end["Gradient"] >= tokens_gradient
    assert theirs.take("PEAK_BW", "GPT.positions")["Total"] >= ours.take("PEAK_BW", "GPT.positions")["Total"]
    if checkpointing == "reentrant":  # the same for all modules in there
        gradients = []
        for name in ("mlp.2", "mlp.1", "mlp.0", "attn.proj", "attn.qkv"):
            assert theirs.take("POST_BW", f"GPT.blocks.1.{name}") == everything
            gradients.append(ours.take("POST_BW", f"GPT.blocks.1.{name}")["Gradient"])
        assert (
            gradients[:2] == [(16 * 64 + 16) * 4] * 2
        )  # of mlp.2 alone: that of the tied head is not all there
        assert gradients == sorted(gradients)
        assert gradients[-1] < everything["Gradient"]


def test_memory_of_a_second_iteration_is_refused_on_both_until_it_is_reset() -> None:
    model = GPT()

    def run() -> list[int]:
        tracker = mem_tracker.MemTracker()
        tracker.track_external(model)
        with tracker:
            loss_of(model).backward()
            with pytest.raises(NotImplementedError, match="multiple iterative calls"):
                loss_of(model)
            first = len(tracker.memory_tracking)
            tracker.reset_mod_stats()
            loss_of(model).backward()
            return [first, len(tracker.memory_tracking)]

    assert on_both("mem_tracker", run) == ([24, 24], [24, 24])


# DebugMode.


def text(run: Callable[[], Any]) -> str:
    with DebugMode(record_nn_module=True) as mode:
        run()
    return str(mode.debug_string())


@CHECKPOINTS
def test_debug_text_of_a_gpt_is_the_same(checkpointing: str | None) -> None:
    model = GPT(checkpointing)
    theirs, ours = on_both("mod_tracker", lambda: text(lambda: loss_of(model).backward()))
    assert ours == theirs
    lines = [line for line in ours.splitlines() if "[nn.Mod]" in line]
    assert lines[:4] == [
        "    [nn.Mod] GPT",
        "      [nn.Mod] GPT.tokens",
        "      [nn.Mod] GPT.positions",
        "      [nn.Mod] GPT.blocks.0",
    ]
    assert ours.count("GPT.blocks.1.attn.qkv") == (1 if checkpointing is None else 2)


def test_debug_text_names_modules_that_ran_before_their_root_and_after_an_exception() -> None:
    failing, model = nn.Sequential(nn.Linear(4, 4), Fails()), Two()

    def run() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            failing(torch.ones(2, 4))
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()

    theirs, ours = on_both("mod_tracker", lambda: text(run))
    assert ours == theirs
    assert [line.strip() for line in ours.splitlines() if "[nn.Mod]" in line] == [
        "[nn.Mod] Sequential",
        "[nn.Mod] Sequential.0",
        "[nn.Mod] Sequential.1",
        "[nn.Mod] Two",
        "[nn.Mod] Two.a",
        "[nn.Mod] Two.a.0",
        "[nn.Mod] Two.b",
        "[nn.Mod] Two.b.0",
    ]


# The estimators. What an op costs they ask of a GPU; here each op takes a millisecond.


@pytest.fixture
def ops_take_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return function(*args, **(kwargs or {})), 1.0

    monkeypatch.setattr(runtime_estimator.RuntimeEstimator, "_roofline_estimate", staticmethod(estimate))


@pytest.mark.usefixtures("ops_take_a_millisecond")
def test_runtimes_and_orders_of_a_chain_are_the_same() -> None:
    """But for one: the root and its last layer give the same tensor, and torch's tracker tells of the layer first."""

    def run() -> list[Any]:
        with FakeTensorMode():
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            x = torch.ones(2, 4, requires_grad=True) * 1
            estimator = runtime_estimator.RuntimeEstimator()
            with estimator("operator-level-cost-model"):
                model(x).sum().backward()
        return [
            estimator.total_runtime,
            {name: dict(times) for name, times in estimator.mod_runtimes.items()},
            estimator.mod_fw_pre_order,
            estimator.mod_fw_post_order,
            estimator.mod_bw_pre_order,
            estimator.mod_bw_post_order,
        ]

    run()  # an op on fake tensors is made of more ops when it runs first
    theirs, ours = on_both("runtime_estimator", run)
    assert ours.pop(4) == ["Sequential", "Sequential.2", "Sequential.1", "Sequential.0"]
    assert theirs.pop(4) == ["Sequential.2", "Sequential", "Sequential.1", "Sequential.0"]
    assert ours == theirs


@pytest.mark.usefixtures("ops_take_a_millisecond")
def test_what_checkpointing_would_keep_is_the_same_for_every_module() -> None:
    def run() -> list[Any]:
        with FakeTensorMode():
            model = GPT()
            estimator = sac_estimator.SACEstimator()
            with estimator("operator-level-cost-model"):
                loss_of(model)
        return [estimator.sac_mod_stats, list(estimator.sac_mod_greedy_order_meta)]

    theirs, ours = on_both("sac_estimator", run)
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    for name, stats in ours[0].items():
        assert stats.func_names == theirs[0][name].func_names
        assert stats.memory == theirs[0][name].memory
        assert stats.runtimes == theirs[0][name].runtimes
    assert ours[1][:2] == ["GPT.blocks.0.attn", "GPT.blocks.0.mlp"]
