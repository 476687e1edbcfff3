"""Modules that have no hash, or whose hash and `==` raise, are recorded like any other: ours is asked for by `id`."""

from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace import Capture
from modtrace.collect.compile.hooks import compile_safe_hooks


class Unhashable(nn.Module):
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


class Raising(Unhashable):
    def __hash__(self) -> int:  # type: ignore[override]
        raise ValueError("no hash")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __len__(self) -> int:
        return 0


class Equal(Unhashable):
    """All of them are one and the same to whoever asks."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 1

    def __eq__(self, other: object) -> bool:
        return True


KINDS = pytest.mark.parametrize("kind", [Unhashable, Raising, Equal])


class Two(nn.Module):
    def __init__(self, kind: type[Unhashable]) -> None:
        super().__init__()
        self.one, self.other = kind(), kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))  # type: ignore[no-any-return]


def optimizer_of(model: Two) -> torch.optim.Optimizer:
    """`model.parameters()` asks modules for their hash."""
    return torch.optim.SGD([*model.one.layer.parameters(), *model.other.layer.parameters()], lr=0.1)


PATHS = ["", "one", "one.layer", "other", "other.layer"]


@KINDS
def test_unhashable_modules_have_calls_ops_and_values(kind):
    model = Two(kind)
    optimizer = optimizer_of(model)
    values = Capture(roles="all", micro_batches=True)
    with modtrace.record(model, ops=True, values=values, strict=True) as rec:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert rec.meta.marks == ()
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    assert sorted(paths.values()) == PATHS
    calls = [paths[row["module_id"]] for row in rec.table("calls").to_pylist() if row["phase"] == "forward"]
    assert sorted(calls) == sorted(PATHS * 2)
    leaves = {(paths.get(row["module_id"]), row["slot"]) for row in sites_of(rec, "parameter")}
    assert leaves == {(f"{name}.layer", part) for name in ("one", "other") for part in ("weight", "bias")}
    assert {paths[row["module_id"]] for row in sites_of(rec, "buffer")} == {"one", "other"}


def sites_of(rec: modtrace.Recording, role: str) -> list[dict[str, Any]]:
    return [row for row in rec.table("sites").to_pylist() if row["role"] == role]


@KINDS
def test_unhashable_modules_are_known_to_a_module_tracker(kind):
    model, found = Two(kind), []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(
            lambda module, args: found.append(f"pre {tracker.get_known_fqn(module)}"),
            lambda module, args, output: found.append(f"post {tracker.get_known_fqn(module)}"),
        )
        model(torch.ones(1, 2)).sum().backward()
    assert found == [
        "pre Two", "pre Two.one", "pre Two.one.layer", "post Two.one.layer", "post Two.one",
        "pre Two.other", "pre Two.other.layer", "post Two.other.layer", "post Two.other", "post Two",
    ]  # fmt: skip


@KINDS
def test_unhashable_modules_are_stashed(kind):
    model = Two(kind)
    with modtrace.track(model, strict=True) as tracked:
        model(torch.ones(1, 2)).sum().backward()
    names = [each.name for each in tracked]
    assert names[:5] == ["one.layer", "one", "other.layer", "other", ""]
    assert sorted(names[5:]) == PATHS  # their gradients


@KINDS
def test_unhashable_modules_get_compile_safe_hooks(kind):
    model, found = Two(kind), []
    with compile_safe_hooks(model, lambda path, given: found.append(path)):
        model(torch.ones(1, 2))
    assert found == PATHS[1:]
    assert all("forward" not in vars(each) for each in (model.one, model.other, model.one.layer))


@KINDS
def test_patterns_name_unhashable_modules(kind):
    with modtrace.record(Two(kind), values=Capture(include="one.layer"), strict=True) as rec:
        pass
    assert rec.meta.marks == ()
