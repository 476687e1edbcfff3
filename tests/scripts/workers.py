"""A classifier of pictures with arguments: DataLoader workers, a scheduler, a test after each epoch, a saved model."""

import argparse

import torch
import torch.nn.functional as F
from results import print_results
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """Pictures that a module normalizes when they are read, as torchvision's transforms do."""

    def __init__(self, size):
        self.size = size
        self.normalize = nn.Sequential(nn.Hardtanh(-2.0, 2.0), nn.Identity())

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        picture = torch.sin(torch.arange(64.0) * (index + 1)).view(1, 8, 8)
        return self.normalize(picture), index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(36, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(args, model, device, loader, optimizer, epoch, losses):
    model.train()
    for batch, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            losses.append(loss.item())
            if args.dry_run:
                break


def test(model, device, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output[:, :1])).sum().item()
    return loss / len(loader.dataset), correct


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--save-model", metavar="FILE")
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cpu")
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    train_loader = DataLoader(Pictures(24), batch_size=8, shuffle=True, **options)
    test_loader = DataLoader(Pictures(12), batch_size=6, **options)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch, losses)
        losses += test(model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)
    print_results(losses, model)


if __name__ == "__main__":
    main()
