"""The rows of `parameters`, `values.requires_grad` and `calls.training` say what was so while the model ran."""

import torch
from torch import nn

import modtrace


def _rows(rec: modtrace.Recording) -> dict[str, list[tuple[object, ...]]]:
    """Returns by name of each parameter its rows: step, requires_grad, optimizer, group, has_gradient."""
    sites = {row["site_id"]: row for row in rec.table("sites").to_pylist()}
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    found: dict[str, list[tuple[object, ...]]] = {}
    for row in rec.table("parameters").to_pylist():
        site = sites[row["site_id"]]
        name = f"{paths[site['module_id']]}.{site['slot']}"
        facts = ("step", "requires_grad", "optimizer", "param_group", "has_gradient")
        found.setdefault(name, []).append(tuple(row[fact] for fact in facts))
    return found


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_a_row_stands_again_only_where_something_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    first = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias]}], lr=0.1)
    second = torch.optim.SGD([model[2].bias], lr=0.1)
    with modtrace.record(model, strict=True) as rec:
        for number in range(5):
            if number == 3:
                model[0].bias.requires_grad_(False)
            _step(model, first)
            rec.step()
        _step(model, first, second)
    assert _rows(rec) == {
        "0.weight": [(0, True, "SGD", 0, None)],
        "0.bias": [(0, True, "SGD", 1, None), (3, False, "SGD", 1, None)],
        "2.weight": [(0, True, None, None, True)],
        "2.bias": [(0, True, None, None, True), (5, True, "SGD#1", 0, None)],
    }


def test_tied_parameter_has_one_row_and_evaluation_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with modtrace.record(model, strict=True) as rec, torch.no_grad():
        model(torch.randn(3, 4))
    assert not _rows(rec)
    with modtrace.record(model, strict=True) as rec:
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(_rows(rec)) == ["0.weight", "0.bias", "1.bias"]


def test_outputs_say_whether_they_require_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    with modtrace.record(model, strict=True) as rec:
        _step(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
        with torch.no_grad():
            model(torch.randn(3, 4))
    values, sites = rec.frame("values"), rec.frame("sites").set_index("site_id")
    values = values.assign(of=values["site_id"].map(sites["module_id"]))
    flags = values.groupby(["step", "role", "of"])["requires_grad"].first()
    assert flags[0, "output"].to_dict() == {0: True, 1: False, 2: False, 3: True}
    assert not flags[1, "output"].any()
    assert values[~values["role"].isin(["input", "output"])]["requires_grad"].isna().all()


def test_calls_say_whether_their_module_was_in_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    with modtrace.record(model, strict=True) as rec:
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        model[2].train()
        with torch.no_grad():
            model(torch.randn(3, 4))
    calls = rec.frame("calls")
    calls = calls[calls["phase"] == "forward"]
    flags = {
        step: group.set_index("module_id")["training"].to_dict() for step, group in calls.groupby("step")
    }
    assert flags == {0: {0: True, 1: None, 2: True, 3: True}, 1: {0: False, 1: None, 2: False, 3: True}}
