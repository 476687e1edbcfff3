"""Infinities that are meant, and memory that nobody has written to, are nobody's fault.

Whole programs in which NaN is meant are in `healthy_programs.py`; `test_reach.py` runs them.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.nonfinite_models import record_training

FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)


def written_by_index(scores: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(6, 6)
    mask[FUTURE] = -math.inf
    return scores + mask


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros and masked_fill": lambda scores: scores + torch.zeros(6, 6).masked_fill(FUTURE, -math.inf),
    "where": lambda scores: torch.where(FUTURE, torch.tensor(-math.inf), scores),
    "masked_fill of the scores": lambda scores: scores.masked_fill(FUTURE, -math.inf),
    "written by index": written_by_index,
}


class Attention(nn.Module):
    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(self.attend(q, k, v, self.mask))


def written_out(mask: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, _: mask(q @ k.transpose(-1, -2) / 3).softmax(-1) @ v


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def fused_with_padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(mask == 0) & (torch.arange(6) > 1))


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(6))


class CausalMask(nn.Module):
    """Returns its buffer, or a view of it: no op in it writes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        size = scores.shape[-1]
        return self.mask[:size, :size]


class MaskedByModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mask = nn.Linear(8, 8), CausalMask()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x) @ x.mT
        return (scores + self.mask(scores)).softmax(-1) @ x


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(8, 8), use_reentrant
        self.blocks = nn.ModuleList(Attention(written_out(MASKS["where"])) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.inner(x), 0.1)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"mask by {name}": lambda mask=mask: Attention(written_out(mask)) for name, mask in MASKS.items()},
    "mask of a module": MaskedByModule,
    "fused attention": lambda: Attention(fused),
    "fused attention with padding": lambda: Attention(fused_with_padding),
    "nn.Transformer": Translation,
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpointed, non-reentrant": lambda: Checkpointed(use_reentrant=False),
}


#: The masked scores, which attention over three dimensions has as an output before torch 2.14, a kernel since then.
MASKED_SCORES = 0 if torch.__version__ >= "2.14" else 1

#: Outputs of ops of one step that are not finite.
MEANT = {
    "mask by zeros and masked_fill": 2,
    "mask by where": 1,
    "mask by masked_fill of the scores": 1,
    "mask by written by index": 2,
    "mask of a module": 1,
    "fused attention": MASKED_SCORES,
    "fused attention with padding": 2 + MASKED_SCORES,
    "nn.Transformer": 7,
    "checkpointed, reentrant": 4,
    "checkpointed, non-reentrant": 4,
}


def count_meant(rec: modtrace.Recording, lowest: float) -> int:
    """Returns how many outputs of ops hold NaN, infinities or this smallest number in step 1."""
    sites = rec.table("sites").to_pylist()
    of_ops = {site["site_id"] for site in sites if site["role"] == "op_output"}
    rows = (row for row in rec.table("values").to_pylist() if row["step"] == 1 and row["site_id"] in of_ops)
    return sum(row["nan_count"] + row["inf_count"] > 0 or row["min"] == lowest for row in rows)


@pytest.mark.parametrize("name", MODELS)
def test_healthy_model_has_no_nonfinite_values_to_report(name: str) -> None:
    torch.manual_seed(0)
    rec = record_training(MODELS[name](), lambda step: torch.randn(2, 6, 8), loss=lambda y: y.square().mean())
    assert list(rec.nonfinite()) == []
    assert (rec.table("ops")["step"].to_numpy() == 1).any()
    assert count_meant(rec, torch.finfo(torch.float32).min) == MEANT[name]


class Reused(nn.Module):
    """Writes all it reads into memory that held something else before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = [
            torch.empty(2, 6, 8),
            x.new_empty(2, 6, 8),
            torch.empty_like(x),
            torch.empty_strided((2, 6, 8), (48, 1, 6)),
            x.new_empty_strided((2, 6, 8), (48, 8, 1)),
            torch.empty(0).resize_(2, 6, 8),
        ]
        assert all(each.isnan().all() for each in memory)
        for each in memory:
            each[:, ::2] = x[:, ::2]
            each[:, 1::2] = x[:, 1::2]
            x = each * 1.0
        torch.empty(3, 3).t()
        return self.inner(x) * torch.empty(6, 8).uniform_()


def test_nan_in_memory_that_nobody_has_written_to_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        rec = record_training(
            Reused(), lambda step: torch.ones(2, 6, 8), loss=lambda y: y.square().mean(), steps=1
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert list(rec.nonfinite()) == []
    names = rec.table("ops")["name"].to_pylist()
    assert {name.split(".")[1] for name in names if "empty" in name or "resize" in name} >= {
        "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_",
    }  # fmt: skip


def test_bucket_that_is_a_logarithm_cast_to_an_integer_is_no_fault() -> None:
    class Bucketed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Embedding(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            distance = torch.arange(6.0)
            far = distance.log().to(torch.long).clamp(0, 15)
            return x + self.bias(torch.where(distance < 2, distance.long(), far))

    torch.manual_seed(0)
    rec = record_training(Bucketed(), lambda step: torch.randn(2, 6, 8), loss=lambda y: y.square().mean())
    assert rec.first_nonfinite() is None


def test_mamba_has_no_nonfinite_values_to_report() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2
    )
    ids = torch.randint(0, 20, (2, 6))
    rec = record_training(
        transformers.MambaForCausalLM(config),
        lambda step: {"input_ids": ids, "labels": ids},
        loss=lambda found: found.loss,
        steps=1,
    )
    assert list(rec.nonfinite()) == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padded_llama_has_no_nonfinite_values_to_report(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation=attention,
    )  # fmt: skip
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    batch = {"input_ids": torch.randint(0, 20, (2, 6)), "attention_mask": mask}
    batch["labels"] = batch["input_ids"]
    rec = record_training(
        transformers.LlamaForCausalLM(config), lambda step: batch, loss=lambda found: found.loss
    )
    assert rec.first_nonfinite() is None
    assert count_meant(rec, torch.finfo(torch.float32).min) > 0


@pytest.mark.parametrize("view", [False, True], ids=["the mask itself", "a view of it"])
def test_mask_that_is_made_in_the_first_step_and_kept_is_no_fault(view: bool) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                mask = torch.full((6, 6), -math.inf).triu(1)
                self.kept = mask[None] if view else mask
            scores = self.inner(x)
            return (scores @ scores.mT + self.kept).softmax(-1) @ scores

    torch.manual_seed(0)
    rec = record_training(
        Keeping(), lambda step: torch.randn(2, 6, 8), loss=lambda y: y.square().mean(), steps=3
    )
    assert rec.first_nonfinite() is None
