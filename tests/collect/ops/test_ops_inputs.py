"""What outermost calls are given, in `uses`: what ops have made or read before; of the rest the site says so."""

import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from collect.ops.test_ops_lifetimes import small_step
from collect.ops.test_ops_outputs import Answer, Returns, Rows, at_roots, recorded
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.collect.tensor_ids import tensor_ids

VALUES = pytest.mark.parametrize("values", [None, "stats"])


def inputs(rec: modtrace.Recording) -> list[str]:
    """A line for each tensor that was given: `0 Linear@1 input[0]: ones`, with the step before it."""
    return at_roots(rec, "input")


def sources(rec: modtrace.Recording) -> list[str]:
    """What each tensor is that an op has read, as `input [0] of Linear`, in the order of their first reads."""
    rows = Rows(rec)
    read = (use["tensor_id"] for use in rows.uses if use["consumer_op"] is not None)
    return [rows.source(each) for each in dict.fromkeys(read)]


def keeps(model: nn.Module, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
    """Reads the first thing alone."""
    return model.layer(x)


# What ops have made.


@VALUES
def test_what_an_op_has_made_before_the_call_has_a_row_with_its_slot(values):
    model = Returns(keeps)

    def run():
        x = torch.ones(2, 3)
        model(x * 2, {"a": [x, None, x.sum()]}, ids=x.view(6), rest=(3, Answer(x.relu())))

    assert inputs(recorded(run, values=values)) == [
        "0 Returns@0 input[0]: mul",
        "0 Returns@0 input[1]['a'][0]: ones",
        "0 Returns@0 input[1]['a'][2]: sum",
        "0 Returns@0 input['ids']: view",
        "0 Returns@0 input['rest'][1].logits: relu",
    ]


def test_each_step_of_a_training_loop_has_its_batch_which_ops_of_that_step_have_made():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rec = recorded(lambda: [small_step(model, optimizer) for _ in range(3)])
    assert [line.split(":")[0] for line in inputs(rec)] == [
        "0 Linear@0 input[0]",
        "1 Linear@0 input[0]",
        "2 Linear@0 input[0]",
    ]
    rows = Rows(rec)
    made = [rows.tensors[use["tensor_id"]]["producer_op"] for use in rows.of_calls("input")]
    assert [rows.ops[each]["step"] for each in made] == [0, 1, 2]
    read = {use["tensor_id"] for use in rows.uses if use["consumer_op"] is not None}
    assert {use["tensor_id"] for use in rows.of_calls("input")} <= read


def test_batch_of_several_steps_has_a_row_in_each():
    model = nn.Linear(3, 3)

    def run():
        x = torch.ones(2, 3)
        for _ in range(3):
            model(x)

    rec = recorded(run)
    assert inputs(rec) == [
        "0 Linear@0 input[0]: ones",
        "1 Linear@0 input[0]: ones",
        "2 Linear@0 input[0]: ones",
    ]
    assert len({use["tensor_id"] for use in Rows(rec).of_calls("input")}) == 1


def test_what_one_root_returns_another_is_given():
    model, loss = nn.Linear(3, 3), nn.MSELoss()
    rec = recorded(lambda: loss(model(torch.ones(2, 3)), torch.zeros(2, 3)))
    assert inputs(rec) == [
        "0 Linear@0 input[0]: ones",
        "0 MSELoss@0 input[0]: addmm",
        "0 MSELoss@0 input[1]: zeros",
    ]
    rows = Rows(rec)
    assert rows.of_calls("output")[0]["tensor_id"] == rows.of_calls("input")[1]["tensor_id"]


def test_one_tensor_at_two_slots_is_one_tensor_and_a_view_of_it_another():
    model = Returns(keeps)

    def run():
        x = torch.ones(2, 3)
        model(x, x, x[:1], again=x)

    rec = recorded(run)
    assert inputs(rec) == [
        "0 Returns@0 input[0]: ones",
        "0 Returns@0 input[1]: ones",
        "0 Returns@0 input[2]: slice",
        "0 Returns@0 input['again']: ones",
    ]
    rows = Rows(rec)
    first, second, view, fourth = (use["tensor_id"] for use in rows.of_calls("input"))
    assert first == second == fourth != view
    assert rows.tensors[view]["storage"] == rows.tensors[first]["storage"]


def test_view_that_was_made_unseen_is_met_as_what_its_storage_was_last_written_by():
    """As where another thread has cut a batch out of what an op has made."""
    model = Returns(keeps)

    def run():
        x = torch.ones(4, 3).mul_(2)
        views = []
        thread = threading.Thread(target=lambda: views.append(x[:2]))
        thread.start()
        thread.join()
        model(*views)

    rec = recorded(run)
    assert inputs(rec) == ["0 Returns@0 input[0]: mul_"]
    rows = Rows(rec)
    (use,) = rows.of_calls("input")
    assert rows.tensors[use["tensor_id"]]["shape"] == [2, 3]
    assert use["tensor_id"] in {each["tensor_id"] for each in rows.uses if each["consumer_op"] is not None}


def test_what_is_written_to_in_the_call_was_given_as_it_was():
    def run(model, x):
        x.add_(1)
        return model.layer(x)

    model = Returns(run)
    rec = recorded(lambda: model(torch.ones(2, 3)))
    assert inputs(rec) == ["0 Returns@0 input[0]: ones"]
    assert "add_" in sources(rec)


# What no op has made.


@VALUES
def test_fresh_leaf_has_no_row_and_a_site_that_says_it_is_an_input(values):
    model, x, more = Returns(lambda model, x, more: model.layer(x) + more), torch.ones(2, 3), torch.ones(3)
    rec = recorded(lambda: model(x, more=more), values=values)
    assert inputs(rec) == []
    assert [each for each in sources(rec) if "input" in each] == [
        "input [0] of Returns",
        "input ['more'] of Returns",
    ]


def test_leaf_that_an_op_has_read_before_has_a_row_whatever_its_site_says():
    first, second, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.ones(2, 3)
    y = torch.ones(2, 3)
    rec = recorded(lambda: (first(x), second(x), y.sum(), second(y)))
    assert inputs(rec) == [
        "0 Linear#1@0 input[0]: input [0] of Linear",
        "1 Linear#1@0 input[0]: leaf  of nobody's",
    ]


def test_leaf_is_measured_with_the_op_that_reads_it_first():
    model, x = Returns(lambda model, x: model.layer(x)), torch.ones(2, 3)
    rec = recorded(lambda: (model(x), model(x)), values="stats")
    rows = Rows(rec)
    measured = [
        rows.ops[row["op_id"]]["name"]
        for row in rec.table("values").to_pylist()
        if rows.sites[row["site_id"]]["role"] == "input"
    ]
    assert measured == ["aten.addmm.default"]


def test_parameters_have_none():
    def run(model, x, weight, table):
        return nn.functional.linear(x, weight) + table

    model = Returns(run)
    x = torch.ones(2, 3)
    rec = recorded(lambda: [model(x, model.layer.weight, model.table) for _ in range(2)])
    assert inputs(rec) == [
        "1 Returns@0 input[0]: input [0] of Returns",
        "1 Returns@0 input[2]: buffer table of Returns",
    ]


def test_tensors_without_storage_have_none():
    model = Returns(lambda model, x: torch.sparse.mm(x, model.layer.weight))
    assert inputs(recorded(lambda: model(torch.ones(2, 3).to_sparse()))) == []


def test_nothing_and_numbers_are_no_tensors():
    model = Returns(lambda model, *args, **kwargs: None)
    assert inputs(recorded(lambda: model(3, None, "text", [], more={}))) == []


def test_whatever_a_root_is_given_and_an_op_reads_is_an_input_with_its_slot():
    def run(model, x, more, *, name, rest):
        return model.layer(x) + more["a"][0] + name + rest[1].logits

    model = Returns(run)
    given = [torch.full((2, 3), float(each)) for each in range(4)]
    rec = recorded(lambda: model(given[0], {"a": [given[1]]}, name=given[2], rest=(None, Answer(given[3]))))
    assert {each for each in sources(rec) if "input" in each} == {
        "input [0] of Returns",
        "input [1]['a'][0] of Returns",
        "input ['name'] of Returns",
        "input ['rest'][1].logits of Returns",
    }


def test_targets_and_constants_are_leaves_of_where_they_are_read():
    """A target given to a loss module is its input; to a function it belongs to nobody."""
    model = Returns(lambda model, x: model.layer(x) + torch.from_numpy(np.ones(3, np.float32)))
    x, target, other = torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)

    def run():
        nn.MSELoss()(model(x), target)
        nn.functional.mse_loss(model(x), other)

    found = sources(recorded(run))
    assert [each for each in found if "leaf" in each] == [
        "leaf  of Returns",
        "leaf  of Returns",
        "leaf  of nobody's",
    ]
    assert "input [1] of MSELoss" in found


# Which calls.


def test_only_outermost_calls_have_rows():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert inputs(recorded(lambda: model(torch.ones(2, 3)))) == ["0 Sequential@0 input[0]: ones"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_and_modules_in_hooks_of_a_backward_have_none(reentrant):
    model = Returns(lambda model, x: checkpoint(model.layer, x, use_reentrant=reentrant).relu())
    hooked = nn.Linear(3, 3)

    def run():
        x = torch.ones(2, 3, requires_grad=True)
        x.register_hook(lambda gradient: hooked(gradient))
        model(x).sum().backward()

    rec = recorded(run)
    assert "recompute" in rec.table("calls").column("phase").to_pylist()
    assert inputs(rec) == ["0 Returns@0 input[0]: ones"]


def test_call_that_raised_has_what_it_was_given():
    def run(model, x):
        model.layer(x)
        raise ValueError("boom")

    model = Returns(run)

    def catch():
        with pytest.raises(ValueError, match="boom"):
            model(torch.ones(2, 3))

    rec = recorded(catch)
    assert inputs(rec) == ["0 Returns@0 input[0]: ones"]
    rows = Rows(rec)
    assert [rows.calls[use["consumer_call"]]["raised"] for use in rows.of_calls("")] == [True]


def test_call_that_was_given_what_an_op_had_made_and_runs_none_has_it(tmp_path):
    model = Returns(lambda model, x: None)
    recorded(lambda: model(torch.ones(2)), to=tmp_path / "run")
    assert inputs(modtrace.open_recording(tmp_path / "run")) == ["0 Returns@0 input[0]: ones"]


def test_method_that_is_named_has_what_it_was_given():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def encode(self, x, *, scale, shift):
            return self.layer(x) * scale + shift

    model, shift = Encoder(), torch.ones(3)

    def run():
        x = torch.ones(2, 3)
        with modtrace.ModuleTracker() as tracker:
            tracker.methods(model, "encode")
            model.encode(x, scale=x.sum(), shift=shift)

    rec = recorded(run)
    assert inputs(rec) == ["0 Encoder@0 input[0]: ones", "0 Encoder@0 input['scale']: sum"]
    assert "input ['shift'] of Encoder" in sources(rec)


def test_steps_that_are_not_kept_have_none():
    model = nn.Linear(3, 3)

    def run():
        x = torch.ones(2, 3)
        for _ in range(4):
            model(x)

    rec = recorded(run, steps="1:3")
    assert inputs(rec) == ["2 Linear@0 input[0]: input [0] of Linear"]
    assert sources(rec).count("input [0] of Linear") == 1


def test_without_ops_nothing_is_noted():
    model = nn.Linear(3, 3)
    assert len(recorded(lambda: model(torch.ones(2, 3)), ops=False).table("uses")) == 0


def test_other_threads_whose_ops_are_not_seen_have_none():
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def run():
        x = torch.ones(2, 3)
        thread = threading.Thread(target=lambda: other(x))
        thread.start()
        thread.join()
        model(x)

    assert inputs(recorded(run)) == ["0 Linear#1@0 input[0]: ones"]


def test_root_in_a_transform_is_given_what_ops_have_made():
    model = nn.Linear(3, 3)
    parameters = dict(model.named_parameters())

    def loss(given, x):
        return torch.func.functional_call(model, given, (x,)).sum()

    def run():
        x = torch.ones(2, 3)
        torch.vmap(model)(x)
        torch.func.grad(loss)(parameters, x)

    assert [line.split(": ")[1] for line in inputs(recorded(run))] == ["ones", "ones"]


# What it leaves alone.


def test_input_lives_no_longer_than_it_would():
    model = Returns(keeps)

    def run():
        x, more = torch.ones(2, 3), torch.ones(2)
        refs = [weakref.ref(each) for each in (x, more)]
        with torch.no_grad():
            model(x, [more])
        del x, more
        assert [ref() for ref in refs] == [None, None]

    recorded(run)


@pytest.mark.parametrize("mode_type", [SeesOps, SeesFunctions])
def test_modes_of_the_users_see_nothing_of_it(mode_type):
    seen = []
    for ops in (False, True):
        model = Returns(keeps)
        with mode_type() as mode:
            recorded(lambda: model(torch.ones(2, 3), more=torch.ones(2)), ops=ops)  # noqa: B023
        seen.append(list(mode.seen))
    assert seen[0] == seen[1] != []


def test_failure_of_ours_ends_ops_and_not_the_run(monkeypatch):
    from modtrace.collect.ops import boundary as op_boundary

    def fail(output):
        raise RuntimeError("out of order")

    monkeypatch.setattr(op_boundary, "find_slots", fail)
    model = nn.Linear(3, 3)
    warns = pytest.warns(modtrace.ModtraceWarning, match=r"what Linear was given: .* records no more ops")
    with warns, modtrace.record(ops=True, values=None) as rec:
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert rec.meta.marks == (
        "ops are incomplete from step 0: modtrace failed at what Linear was given: RuntimeError: out of order",
    )
    assert len(rec.table("calls")) == 2


def test_without_a_compiler_it_is_the_same(monkeypatch):
    def lines():
        model, fresh = Returns(keeps), torch.ones(3)

        def run():
            x = torch.ones(2, 3)
            for _ in range(2):
                model(x, x.data[:1], fresh.sum(), fresh, x.to_sparse(), named=[x.view(6)])

        return inputs(recorded(run))

    expected = lines()
    monkeypatch.setattr(tensor_ids, "compiled", None)
    assert lines() == expected
    assert [line.split(" ", 2)[2] for line in expected] == 2 * [
        "input[0]: ones",
        "input[1]: slice",
        "input[2]: sum",
        "input[3]: leaf  of nobody's",
        "input['named'][0]: view",
    ]


# Parameters of a model that is made while ops are recorded.


def test_parameters_that_ops_have_made_are_named_and_stay_so_when_an_optimizer_writes_them():
    with modtrace.record(ops=True, strict=True) as rec:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    sites = {row["site_id"]: (row["role"], row["slot"]) for row in rec.table("sites").to_pylist()}
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    owners = {row["site_id"]: paths.get(row["module_id"]) for row in rec.table("sites").to_pylist()}
    tensors = {row["tensor_id"]: row["site_id"] for row in rec.table("tensors").to_pylist()}
    ops = {row["op_id"]: row for row in rec.table("ops").to_pylist()}
    for step in range(2):
        read = {
            (owners[tensors[use["tensor_id"]]], *sites[tensors[use["tensor_id"]]])
            for use in rec.table("uses").to_pylist()
            if use["consumer_op"] is not None
            and (ops[use["consumer_op"]]["step"], ops[use["consumer_op"]]["phase"]) == (step, "forward")
            and tensors[use["tensor_id"]] is not None
        }
        assert read >= {
            ("0", "parameter", "weight"),
            ("0", "parameter", "bias"),
            ("1", "parameter", "weight"),
            ("1", "parameter", "bias"),
        }
        assert ("1", "buffer", "running_mean") in read
