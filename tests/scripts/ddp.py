"""A model that several processes train together, started by torchrun."""

import sys

import torch
import torch.distributed as dist
from results import print_results
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            total = nn.functional.mse_loss(model.module(data.tensors[0]), data.tensors[1])
        dist.all_reduce(total)
        losses.append(total.item())
    with open(f"{sys.argv[1]}-{rank}.txt", "w") as file:
        print_results(losses, model, file=file)
    dist.barrier()  # a rank that leaves first has made gloo end the other: "terminate called"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
