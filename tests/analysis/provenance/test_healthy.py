"""Infinities that are meant, and memory that nobody has written to, are nobody's fault."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.nonfinite_models import BY_OP, record_training

FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)


def written_by_index(scores: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(6, 6)
    mask[FUTURE] = -math.inf
    return scores + mask


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full and triu": lambda scores: scores + torch.full((6, 6), -math.inf).triu(1),
    "zeros and masked_fill": lambda scores: scores + torch.zeros(6, 6).masked_fill(FUTURE, -math.inf),
    "where": lambda scores: torch.where(FUTURE, torch.tensor(-math.inf), scores),
    "masked_fill of the scores": lambda scores: scores.masked_fill(FUTURE, -math.inf),
    "written by index": written_by_index,
    "finite minimum": lambda scores: scores + torch.full((6, 6), torch.finfo(scores.dtype).min).triu(1),
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


class Uninitialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied = torch.empty_like(x)
        copied[:] = x
        torch.empty(1000).as_strided((10,), (1,))
        return self.inner(copied) * torch.empty(6, 8).uniform_()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.up = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(8, 1, 1),
        )
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.down(x[:, None]))
        inner = F.interpolate(F.gelu(self.norm(self.inner(F.max_pool2d(skip, 2)))), skip.shape[-2:])
        return self.up(torch.cat([skip, inner], 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 3]), batch_first=True)
        found, _ = self.inner(packed)
        return nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0]


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


class Experts(nn.Module):
    """Sends each token to the two best of four experts; the scores of the others are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        best, chosen = scores.topk(2, dim=-1)
        shares = torch.full_like(scores, -math.inf).scatter(-1, chosen, best).softmax(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            is_sent = (chosen == number).any(-1)
            found[is_sent] += shares[is_sent][:, number, None] * expert(x[is_sent])
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"mask by {name}": lambda mask=mask: Attention(written_out(mask)) for name, mask in MASKS.items()},
    "mask in a buffer": lambda: Attention(lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v),
    "fused attention": lambda: Attention(fused),
    "fused attention with padding": lambda: Attention(fused_with_padding),
    "nn.Transformer": Translation,
    "uninitialized memory": Uninitialized,
    "convolutions": Convolutions,
    "recurrent": Recurrent,
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpointed, non-reentrant": lambda: Checkpointed(use_reentrant=False),
    "experts": Experts,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_healthy_model_has_no_nonfinite_values_to_report(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    rec = record_training(make(), lambda step: torch.randn(2, 6, 8), loss=lambda y: y.square().mean())
    assert rec.first_nonfinite() is None
    assert (rec.table("ops")["step"].to_numpy() == 1).any()


def test_gradients_that_overflow_before_a_scaler_skips_the_step_are_expected() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with modtrace.record(model, ops=True, values=BY_OP) as rec:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert (rec.table("values")["inf_count"].to_numpy() > 0).any()
    assert rec.first_nonfinite() is None


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
