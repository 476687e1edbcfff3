"""Training that saves its state after each epoch, and goes on from a state that was saved."""

import argparse
import os

import torch
from results import print_results
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--resume", metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
    first = 0
    if args.resume and os.path.isfile(args.resume):
        state = torch.load(args.resume, weights_only=True)
        first = state["epoch"]
        parts = {"model": model, "averaged": averaged, "optimizer": optimizer, "scheduler": scheduler}
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
    losses = []
    for epoch in range(first, args.epochs):
        for _ in range(3):
            inputs = torch.randn(4, 3)
            loss = (model(inputs) - inputs.prod(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            averaged.update_parameters(model)
            losses.append(loss.item())
        if args.resume:
            state = {"epoch": epoch + 1, "model": model.state_dict(), "averaged": averaged.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(state | {"random": torch.get_rng_state()}, args.resume)
        if epoch + 1 == args.stop_after:
            break
    print_results(losses, model, averaged)


if __name__ == "__main__":
    main()
