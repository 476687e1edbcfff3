"""The example knows the module of each node of ResNet-18, and its model is torchvision's, name by name."""

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "resnet18_paths.py"

#: Each node of the graph and the module that it comes from, `""` the root.
MODULES = [
    ("x", ""),
    ("conv1", "conv1"),
    ("bn1", "bn1"),
    ("relu", "relu"),
    ("maxpool", "maxpool"),
    ("layer1_0_conv1", "layer1.0.conv1"),
    ("layer1_0_bn1", "layer1.0.bn1"),
    ("layer1_0_relu", "layer1.0.relu"),
    ("layer1_0_conv2", "layer1.0.conv2"),
    ("layer1_0_bn2", "layer1.0.bn2"),
    ("add", "layer1.0"),
    ("layer1_0_relu_1", "layer1.0.relu"),
    ("layer1_1_conv1", "layer1.1.conv1"),
    ("layer1_1_bn1", "layer1.1.bn1"),
    ("layer1_1_relu", "layer1.1.relu"),
    ("layer1_1_conv2", "layer1.1.conv2"),
    ("layer1_1_bn2", "layer1.1.bn2"),
    ("add_1", "layer1.1"),
    ("layer1_1_relu_1", "layer1.1.relu"),
    ("layer2_0_conv1", "layer2.0.conv1"),
    ("layer2_0_bn1", "layer2.0.bn1"),
    ("layer2_0_relu", "layer2.0.relu"),
    ("layer2_0_conv2", "layer2.0.conv2"),
    ("layer2_0_bn2", "layer2.0.bn2"),
    ("layer2_0_downsample_0", "layer2.0.downsample.0"),
    ("layer2_0_downsample_1", "layer2.0.downsample.1"),
    ("add_2", "layer2.0"),
    ("layer2_0_relu_1", "layer2.0.relu"),
    ("layer2_1_conv1", "layer2.1.conv1"),
    ("layer2_1_bn1", "layer2.1.bn1"),
    ("layer2_1_relu", "layer2.1.relu"),
    ("layer2_1_conv2", "layer2.1.conv2"),
    ("layer2_1_bn2", "layer2.1.bn2"),
    ("add_3", "layer2.1"),
    ("layer2_1_relu_1", "layer2.1.relu"),
    ("layer3_0_conv1", "layer3.0.conv1"),
    ("layer3_0_bn1", "layer3.0.bn1"),
    ("layer3_0_relu", "layer3.0.relu"),
    ("layer3_0_conv2", "layer3.0.conv2"),
    ("layer3_0_bn2", "layer3.0.bn2"),
    ("layer3_0_downsample_0", "layer3.0.downsample.0"),
    ("layer3_0_downsample_1", "layer3.0.downsample.1"),
    ("add_4", "layer3.0"),
    ("layer3_0_relu_1", "layer3.0.relu"),
    ("layer3_1_conv1", "layer3.1.conv1"),
    ("layer3_1_bn1", "layer3.1.bn1"),
    ("layer3_1_relu", "layer3.1.relu"),
    ("layer3_1_conv2", "layer3.1.conv2"),
    ("layer3_1_bn2", "layer3.1.bn2"),
    ("add_5", "layer3.1"),
    ("layer3_1_relu_1", "layer3.1.relu"),
    ("layer4_0_conv1", "layer4.0.conv1"),
    ("layer4_0_bn1", "layer4.0.bn1"),
    ("layer4_0_relu", "layer4.0.relu"),
    ("layer4_0_conv2", "layer4.0.conv2"),
    ("layer4_0_bn2", "layer4.0.bn2"),
    ("layer4_0_downsample_0", "layer4.0.downsample.0"),
    ("layer4_0_downsample_1", "layer4.0.downsample.1"),
    ("add_6", "layer4.0"),
    ("layer4_0_relu_1", "layer4.0.relu"),
    ("layer4_1_conv1", "layer4.1.conv1"),
    ("layer4_1_bn1", "layer4.1.bn1"),
    ("layer4_1_relu", "layer4.1.relu"),
    ("layer4_1_conv2", "layer4.1.conv2"),
    ("layer4_1_bn2", "layer4.1.bn2"),
    ("add_7", "layer4.1"),
    ("layer4_1_relu_1", "layer4.1.relu"),
    ("avgpool", "avgpool"),
    ("flatten", ""),
    ("fc", "fc"),
    ("output", None),
]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("resnet18_paths")


@pytest.fixture(scope="module")
def model(example: Any) -> nn.Module:
    with torch.random.fork_rng():
        return example.resnet18().eval()


def test_each_of_the_71_nodes_has_its_module(example: Any, model: nn.Module) -> None:
    found = [(node, path) for node, path, _ in example.rows_of(model)]
    assert len(MODULES) == 71
    for row, wanted in zip(found, MODULES, strict=True):
        assert row == wanted


def test_only_the_second_call_of_each_blocks_relu_has_another_name(example: Any, model: nn.Module) -> None:
    assert [(node, call) for node, path, call in example.rows_of(model) if call != path] == [
        ("layer1_0_relu_1", "layer1.0.relu@1"),
        ("layer1_1_relu_1", "layer1.1.relu@1"),
        ("layer2_0_relu_1", "layer2.0.relu@1"),
        ("layer2_1_relu_1", "layer2.1.relu@1"),
        ("layer3_0_relu_1", "layer3.0.relu@1"),
        ("layer3_1_relu_1", "layer3.1.relu@1"),
        ("layer4_0_relu_1", "layer4.0.relu@1"),
        ("layer4_1_relu_1", "layer4.1.relu@1"),
    ]


def test_the_model_has_the_sizes_of_torchvisions(model: nn.Module) -> None:
    assert sum(each.numel() for each in model.parameters()) == 11_689_512
    assert len(model.state_dict()) == 122


def test_the_graph_computes_what_the_model_does(example: Any, model: nn.Module) -> None:
    traced = torch.fx.GraphModule(model, example.modtrace.ModulePathTracer().trace(model))
    images = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(traced(images), model(images))


def test_script_prints_its_table(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 72
    assert lines[:3] == [
        "node                   module                 call",
        "x                      ResNet18               ResNet18",
        "conv1                  conv1                  conv1",
    ]
    assert lines[11:13] == [
        "add                    layer1.0               layer1.0",
        "layer1_0_relu_1        layer1.0.relu          layer1.0.relu@1",
    ]
    assert lines[-3:] == [
        "flatten                ResNet18               ResNet18",
        "fc                     fc                     fc",
        "output                 -                      -",
    ]


def test_recorded_forward_runs_through_the_modules_of_the_graph_in_its_order(
    example: Any, model: nn.Module
) -> None:
    traced = [path for name, path, _ in example.rows_of(model) if name not in ("x", "output")]
    model.train()
    with example.modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(torch.ones(2, 3, 32, 32))
    assert rec.paths(phase="forward").modules() == tuple(path for path, _ in itertools.groupby(traced))
