"""Shows which module each node of a torch.fx graph comes from, on ResNet-18.

    python examples/resnet18_paths.py

The model is written out here with torchvision's attribute names, so that nothing has to be installed or downloaded;
`torchvision.models.resnet18()` gives the same table.
"""

from collections.abc import Iterator

import torch.fx
from torch import Tensor, nn

import modtrace


class BasicBlock(nn.Module):
    """Two convolutions, and the block's input added to what they give."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """Takes images (batch, 3, height, width), gives logits (batch, classes)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64), BasicBlock(64, 64))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, stride=2), BasicBlock(128, 128))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, stride=2), BasicBlock(256, 256))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, stride=2), BasicBlock(512, 512))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18() -> ResNet18:
    """The model with random weights: 11,689,512 parameters."""
    return ResNet18()


def rows_of(model: nn.Module) -> Iterator[tuple[str, str | None, str | None]]:
    """For each node of the model's graph its name, the module that it comes from, and the call of that module."""
    tracer = modtrace.ModulePathTracer()
    for node in tracer.trace(model).nodes:
        yield node.name, tracer.node_to_originating_module[node], tracer.node_to_call[node]


def render_table(model: nn.Module) -> str:
    """A line for each node; the root is shown by the name of its class, what has no module as `-`."""
    root = type(model).__name__
    lines = [("node", "module", "call")]
    for name, path, call in rows_of(model):
        lines.append((name, "-", "-") if path is None else (name, path or root, call or root))
    first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    return "\n".join(f"{name:{first}}  {path:{second}}  {call}" for name, path, call in lines)


def main() -> None:
    print(render_table(resnet18()))


if __name__ == "__main__":
    main()
