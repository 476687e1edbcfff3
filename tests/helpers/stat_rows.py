"""Reads the stat rows of a recording, joined by hand, and says what a tensor's row must hold."""

from typing import Any, NamedTuple

import pytest
import torch

import modtrace


class Row(NamedTuple):
    """One row of `values`, with the names of its site."""

    step: int
    phase: str
    path: str | None  # of the module; None for a parameter that no module owns
    nth: int | None
    role: str
    slot: str
    order: int
    call_id: int | None
    shape: tuple[int, ...]
    dtype: str
    count: int | None
    min: float | None
    max: float | None
    sum: float | None
    sumsq: float | None
    nan_count: int
    inf_count: int
    note: str | None
    root: str | None


def rows(rec: modtrace.Recording, **where: Any) -> list[Row]:
    """The stat rows by step and order; `where` are fields and what they must be: `role="output", nth=0`."""
    modules = {row["module_id"]: row for row in rec.table("modules").to_pylist()}
    sites = {row["site_id"]: row for row in rec.table("sites").to_pylist()}
    found = []
    for value in rec.table("values").to_pylist():
        site = sites[value["site_id"]]
        module = modules.get(site["module_id"])
        names = {name: site[name] for name in ("nth", "role", "slot")}
        names["path"] = None if module is None else module["path"]
        names["root"] = None if module is None else modules[module["root_id"]]["name"]
        names["shape"] = tuple(value["shape"])
        taken = {name: value[name] for name in Row._fields if name in value and name not in names}
        found.append(Row(**names, **taken))
    found.sort(key=lambda row: (row.step, row.order))
    return [row for row in found if all(getattr(row, name) == wanted for name, wanted in where.items())]


def one(rec: modtrace.Recording, **where: Any) -> Row:
    """The one row that there must be."""
    [row] = rows(rec, **where)
    return row


def names(found: list[Row], *fields: str) -> list[Any]:
    """Some fields of each row; tuples if there are several."""
    picked = [tuple(getattr(row, name) for name in fields) for row in found]
    return [each[0] for each in picked] if len(fields) == 1 else picked


def holds(row: Row, tensor: torch.Tensor) -> bool:
    """Whether a row is that of a finite tensor with these numbers: as `==` in an assert, it shows both."""
    wide = tensor.detach().double()
    expected = {
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "count": tensor.numel(),
        "min": wide.min().item() if tensor.numel() else None,
        "max": wide.max().item() if tensor.numel() else None,
        "sum": pytest.approx(wide.sum().item(), abs=1e-6 * wide.abs().sum().item()),
        "sumsq": pytest.approx(wide.square().sum().item(), rel=2e-6),
        "nan_count": 0,
        "inf_count": 0,
    }
    found = {name: getattr(row, name) for name in expected}
    assert found == expected
    return True
