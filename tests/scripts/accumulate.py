"""A language model that accumulates gradients, is evaluated in between and saves its best state, in one flat script."""

import math
import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from results import print_results
from torch import nn

max_iterations, eval_interval, eval_batches = 6, 3, 2
accumulation_steps = 3
warmup, learning_rate, lowest_rate = 2, 1e-2, 1e-3
out_dir = "out"

torch.manual_seed(1337)
os.makedirs(out_dir, exist_ok=True)
context = nullcontext()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(F.gelu(self.mix(self.norm(x))))


class Language(nn.Module):
    def __init__(self, tokens: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = {"train": torch.randint(16, (200,)), "val": torch.randint(16, (60,))}


def get_batch(split):
    starts = torch.randint(len(data[split]) - 9, (4,))
    rows = torch.stack([data[split][start : start + 9] for start in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss():
    found = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_batches)
        for number in range(eval_batches):
            x, y = get_batch(split)
            with context:
                _, loss = model(x, y)
            losses[number] = loss.item()
        found[split] = losses.mean()
    model.train()
    return found


def rate_at(iteration):
    if iteration < warmup:
        return learning_rate * (iteration + 1) / (warmup + 1)
    done = (iteration - warmup) / (max_iterations - warmup)
    return lowest_rate + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - lowest_rate)


model = Language()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate)
scaler = torch.amp.GradScaler("cpu", enabled=False)

x, y = get_batch("train")
iteration, best, losses = 0, float("inf"), []
while True:
    for group in optimizer.param_groups:
        group["lr"] = rate_at(iteration)
    if iteration % eval_interval == 0:
        estimated = estimate_loss()
        losses += estimated.values()
        if estimated["val"] < best:
            best = estimated["val"]
            if iteration > 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": iteration}
                torch.save(state, os.path.join(out_dir, "best.pt"))
    for _ in range(accumulation_steps):
        with context:
            _, loss = model(x, y)
            loss = loss / accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * accumulation_steps)
    iteration += 1
    if iteration > max_iterations:
        break

print_results(losses, model)
