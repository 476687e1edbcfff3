"""A recurrent model whose parameters are updated by hand, with hidden states that are carried over and cut."""

import torch
from results import print_results
from torch import nn

torch.manual_seed(11)
tokens, width, length = 12, 6, 5


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(tokens, width)
        self.rnn = nn.GRU(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, tokens)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return torch.log_softmax(self.decoder(output), -1).flatten(0, 1), hidden


corpus = torch.randint(tokens, (21, 3))
model, criterion, rate = Recurrent(), nn.NLLLoss(), 2.0


def evaluate():
    model.eval()
    total, hidden = 0.0, torch.zeros(2, 3, width)
    with torch.no_grad():
        for start in range(0, 10, length):
            output, hidden = model(corpus[start : start + length], hidden)
            hidden = hidden.detach()
            total += criterion(output, corpus[start + 1 : start + 1 + length].flatten()).item()
    return total


losses = []
for _ in range(2):
    model.train()
    hidden = torch.zeros(2, 3, width)
    for start in range(0, 20, length):
        model.zero_grad()
        hidden = hidden.detach()
        output, hidden = model(corpus[start : start + length], hidden)
        loss = criterion(output, corpus[start + 1 : start + 1 + length].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-rate)
        losses.append(loss.item())
    losses.append(evaluate())
    rate /= 4
print_results(losses, model)
