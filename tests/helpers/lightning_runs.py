"""Trains a small network by Lightning, under either name of its package. Processes that it spawns import this file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.framework_cases import Case, Outcome, failing_at
from modtrace.integrations.lightning import ModtraceCallback  # noqa: F401

SCALARS = {"loss", "epoch"}  # what it logs with a training step
EVALUATION_LOSS = "val_loss"
RAISED = {KeyboardInterrupt: SystemExit}  # what it raises in place of an exception


class Training:
    """The methods of a module of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 1)
        self.losses: list[float] = []

    def forward(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.out(self.hidden(batch[0]).relu()).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        loss = self(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sequence[torch.Tensor], index: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Net(Training, lightning.pytorch.LightningModule):
    pass


def make_trainer(folder: Path, package: Any = lightning.pytorch, **arguments: Any) -> Any:
    chosen = {
        "default_root_dir": folder,
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        **arguments,
    }
    return package.Trainer(**chosen)


def make_net(package: Any, case: Case) -> Any:
    torch.manual_seed(0)
    is_newer = package is lightning.pytorch
    net = Net() if is_newer else type("Net", (Training, package.LightningModule), {})()
    if case.fail is not None:
        net.out.register_forward_pre_hook(failing_at(3, case.fail))
    return net


def data(batches: int) -> DataLoader[Any]:
    rows = torch.randn(4 * batches, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_size=4)


def train(
    folder: Path, case: Case, callback: Any = None, package: Any = lightning.pytorch, **arguments: Any
) -> Outcome:
    """Fits two epochs of two steps each. With a callback, it is the logger too."""
    ranks = arguments.get("devices", 1)
    loaders = (data(2 * case.accumulate * ranks), data(2 * ranks) if case.evaluate else None)
    chosen = {"accumulate_grad_batches": case.accumulate, "enable_checkpointing": False, **arguments}
    net, checkpoint = make_net(package, case), None
    if case.resume:
        first = make_trainer(folder, package, **{**chosen, "max_epochs": 1})
        first.fit(make_net(package, case), *loaders)
        first.save_checkpoint(checkpoint := folder / "first.ckpt")
    if callback is not None:
        chosen |= {"callbacks": [callback], "logger": callback}
    make_trainer(folder, package, **chosen).fit(net, *loaders, ckpt_path=checkpoint)
    return Outcome(net.losses, [parameter.detach().clone() for parameter in net.parameters()])
