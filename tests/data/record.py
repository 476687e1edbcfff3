"""Makes `version-N.tar.xz`, with the modtrace of that version: `python record.py` in an empty folder."""

import tarfile

import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.recording.schema import SCHEMA_VERSION


class Net(torch.nn.Module):
    """A layer that is checkpointed, one with buffers, and a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.norm(checkpoint(self.inner, x, use_reentrant=False)).sigmoid() * x[:, :1])


def train(rec: modtrace.LiveRecording, net: Net, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        loss = mse_loss(net(batch), batch[:, :2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rec.log(loss=loss.item())


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    healthy = [torch.rand(4, 3) + 0.5 for _ in range(4)]
    everything = modtrace.Capture(roles="all", stats=2, hash=True, function=lambda tensor: tensor.dim())
    large = modtrace.Capture(roles="output", include="norm", sketch=True, sample=2, tensors=True)
    ops = modtrace.Ops(source=True, python_names=True)
    net = Net()
    with modtrace.record(net, to="all.modtrace", ops=ops, values=[everything, large]) as rec:
        train(rec, net, healthy[:2])
    bad = [*healthy, healthy[0] * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), healthy[1]]
    net = Net()
    with modtrace.record(net, to="kept.modtrace", ops=ops, keep_last=2) as rec:
        train(rec, net, bad)
    with tarfile.open(f"version-{SCHEMA_VERSION}.tar.xz", "w:xz") as archive:
        for recording in ("all.modtrace", "kept.modtrace"):
            archive.add(recording)


if __name__ == "__main__":
    main()
