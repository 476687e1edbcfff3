"""Parts of paths that come from wrappers: one table, which all that makes paths reads."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

import modtrace
from modtrace.collect.compile.hooks import compile_safe_hooks
from modtrace.collect.names.module_names import ModuleNames
from modtrace.collect.names.walk import walk
from modtrace.collect.names.wrappers import COMPILED_PART, WRAPPERS, unwrapped

DOCS = Path(__file__).parents[3] / "docs"


def stand_in(class_name: str, part: str) -> Callable[[nn.Module], nn.Module]:
    """For wrappers that need a process group, or that only live while torch.export traces."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapper = type(class_name, (nn.Module,), {"forward": lambda self, x: model(x)})()
        wrapper.add_module(part, model)
        return wrapper

    return wrap


#: What makes a wrapper: by its part, and by its class where the table names one.
WRAP: dict[tuple[str, str | None], Callable[[nn.Module], nn.Module]] = {
    ("_orig_mod", None): lambda model: torch.compile(model, backend="eager"),
    ("_checkpoint_wrapped_module", None): checkpoint_wrapper,
    (FSDP_WRAPPED_MODULE, None): stand_in("FullyShardedDataParallel", FSDP_WRAPPED_MODULE),
    ("_export_root", None): stand_in("ModuleWrapper", "_export_root"),
    ("module", "DataParallel"): nn.DataParallel,
    ("module", "AveragedModel"): torch.optim.swa_utils.AveragedModel,
    ("module", "DistributedDataParallel"): stand_in("DistributedDataParallel", "module"),
}

TABLE = [(part, kind) for part, kinds in WRAPPERS.items() for kind in sorted(kinds or {None}, key=str)]


@pytest.mark.parametrize(("part", "kind"), TABLE)
def test_every_wrapper_of_the_table_is_left_out_of_paths(part: str, kind: str | None) -> None:
    wrapper = WRAP[part, kind](nn.Sequential(nn.Linear(2, 2)))
    raw = {path: raw_path for _, _, path, raw_path in walk(wrapper, "", "")}
    assert raw == {"": part, "0": f"{part}.0"}

    names = ModuleNames()
    names.add_root(wrapper)
    _, rows = names.rows_since(0)
    assert [(each["path"], each["raw_path"]) for each in rows] == [("", ""), ("", part), ("0", f"{part}.0")]


@pytest.mark.parametrize(("part", "kind"), TABLE)
def test_what_is_inside_of_every_wrapper_is_found(part: str, kind: str | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    inside = unwrapped(WRAP[part, kind](model))
    assert type(inside) is nn.Sequential


@pytest.mark.parametrize(("part", "kind"), [each for each in TABLE if each[0] != "_orig_mod"])
def test_nodes_of_torch_fx_have_paths_without_every_wrapper(part: str, kind: str | None) -> None:
    tracer = modtrace.ModulePathTracer()
    wrapper = stand_in(kind or "Wrapper", part)(nn.Sequential(nn.Linear(2, 2)))
    graph = tracer.trace(wrapper)
    assert [tracer.node_to_originating_module[each] for each in graph.nodes] == ["", "0", None]


@pytest.mark.parametrize(("part", "kind"), TABLE)
def test_every_wrapper_is_in_the_vocabulary(part: str, kind: str | None) -> None:
    [row] = [line for line in (DOCS / "vocabulary.md").read_text().splitlines() if "| module path |" in line]
    assert f"`{part}`" in row and (kind or "") in row


def test_a_part_of_that_name_in_another_class_is_part_of_the_path() -> None:
    model = stand_in("Mine", "module")(nn.Linear(2, 2))
    assert [path for _, _, path, _ in walk(model, "", "")] == ["module"]


def test_compile_safe_hooks_leave_out_the_part_of_torch_compile() -> None:
    assert COMPILED_PART in WRAPPERS
    seen: list[str] = []
    wrapper = WRAP[COMPILED_PART, None](nn.Sequential(nn.Linear(2, 2)))
    with compile_safe_hooks(wrapper, pre_fw_hook=lambda path, tensors: seen.append(path)):
        wrapper(torch.ones(1, 2))
    assert seen == ["0"]
