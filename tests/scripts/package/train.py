"""Trains a model that sorts digits, and has it generate after every third batch."""

import torch
import torch.nn.functional as F
from results import print_results
from torch import nn
from torch.utils.data import Dataset

from .trainer import Trainer


class Sorted(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        digits = torch.tensor([index % 3, index % 5, index % 2, index % 4])
        row = torch.cat([digits, digits.sort().values])
        targets = row[1:].clone()
        targets[:3] = -1
        return row[:-1], targets


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 5)

    def configure_optimizer(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def forward(self, digits, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(digits.shape[1])
        logits = self.head(self.layer(self.embedding(digits), src_mask=mask, is_causal=True))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, digits, length):
        for _ in range(length):
            logits, _ = self(digits)
            chosen = torch.multinomial(logits[:, -1].softmax(-1), 1)
            digits = torch.cat([digits, chosen], dim=1)
        return digits


if __name__ == "__main__":
    torch.manual_seed(3407)
    model, losses = Sorter(), []
    trainer = Trainer(model, Sorted(), iterations=6, batch_size=4)

    def batch_ended(trainer):
        losses.append(trainer.loss.item())
        if trainer.iteration % 3 == 2:
            model.eval()
            losses.extend(model.generate(torch.tensor([[2, 1, 0, 1]]), 4)[0].tolist())
            model.train()

    trainer.add_callback("batch ended", batch_ended)
    trainer.run()
    print_results(losses, model)
