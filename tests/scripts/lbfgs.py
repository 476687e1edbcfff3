"""A recurrent model that LBFGS fits to waves with a closure, and that goes on predicting after each step."""

import torch
from results import print_results
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LSTMCell(1, 5)
        self.second = nn.LSTMCell(5, 5)
        self.linear = nn.Linear(5, 1)

    def forward(self, values, future=0):
        outputs = []
        one = two = None
        for value in values.split(1, dim=1):
            one = self.first(value, one)
            two = self.second(one[0], two)
            outputs.append(self.linear(two[0]))
        for _ in range(future):
            one = self.first(outputs[-1], one)
            two = self.second(one[0], two)
            outputs.append(self.linear(two[0]))
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    waves = torch.sin(torch.arange(12.0) / 2 + torch.randn(5, 1) * 4).double()
    inputs, targets = waves[2:, :-1], waves[2:, 1:]
    held_out, held_out_targets = waves[:2, :-1], waves[:2, 1:]
    model = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    losses = []
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            losses.append(loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            predicted = model(held_out, future=3)
            losses.append(criterion(predicted[:, :-3], held_out_targets).item())
    print_results(losses, model)
