"""Two spawned processes train the same model from different seeds; the process that started them tests their mean."""

import os
import sys

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from results import print_results
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(rank, folder):
    torch.set_num_threads(1)
    model = make_model()
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 4)
        F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
    torch.save(model.state_dict(), os.path.join(folder, f"trained-{rank}.pt"))


if __name__ == "__main__":
    folder = sys.argv[1]
    mp.spawn(train, args=(folder,), nprocs=2)
    states = [torch.load(os.path.join(folder, f"trained-{rank}.pt")) for rank in range(2)]
    model = make_model()
    model.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    model.eval()
    with torch.no_grad():
        losses = [
            F.mse_loss(model(torch.full((2, 4), x)), torch.full((2, 1), 4 * x)).item() for x in (0.0, 1.0)
        ]
    print_results(losses, model)
