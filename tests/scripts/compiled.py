"""A model under `torch.compile`, trained and evaluated; its checkpoint names the model that was compiled."""

import torch
from results import print_results
from torch import nn

torch.manual_seed(4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


plain = nn.Sequential(Layer(), Layer(), nn.Linear(6, 1))
model = torch.compile(plain, backend="eager")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for iteration in range(4):
    model.train()
    inputs = torch.randn(4, 6)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if iteration % 2 == 1:
        model.eval()
        with torch.inference_mode():
            losses.append(model(torch.ones(2, 6)).sum().item())
print_results(losses, plain)
