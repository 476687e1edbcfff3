"""What outermost calls are given and return, in `uses`: which tensor, at which slot, of which call, made by what.

What a call is given has a row if an op has made it or read it before; of the rest its site says that it is an input.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from collect.ops.test_ops_steps import small_step
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.torch_internals.modes import unseen


def recorded(run: Callable[[], object], **options: Any) -> modtrace.Recording:
    """The ops of a run."""
    torch.manual_seed(0)
    with modtrace.record(strict=True, **{"ops": True, "values": None, **options}) as rec:
        run()
    assert rec.meta.marks == ()
    return rec


class Rows:
    """The rows of a recording, by their numbers."""

    def __init__(self, rec: modtrace.Recording) -> None:
        self.modules = self._by(rec, "modules", "module_id")
        self.calls = self._by(rec, "calls", "call_id")
        self.ops = self._by(rec, "ops", "op_id")
        self.sites = self._by(rec, "sites", "site_id")
        self.tensors = self._by(rec, "tensors", "tensor_id")
        self.uses = rec.table("uses").to_pylist()

    @staticmethod
    def _by(rec: modtrace.Recording, table: str, key: str) -> dict[int, dict[str, Any]]:
        return {row[key]: row for row in rec.table(table).to_pylist()}

    def path(self, module_id: int | None) -> str:
        if module_id is None:
            return "nobody's"
        return self.modules[module_id]["name"] or self.modules[module_id]["path"]

    def of_calls(self, word: str) -> list[dict[str, Any]]:
        """The uses by calls at slots that begin with `input` or `output`."""
        uses = [use for use in self.uses if use["consumer_call"] is not None]
        assert all(use["consumer_op"] is None for use in uses)
        return [use for use in uses if use["slot"].startswith(word)]

    def source(self, tensor_id: int) -> str:
        """`addmm`, the op that made a tensor; or `input [0] of Linear`, what it is if none has."""
        row = self.tensors[tensor_id]
        if row["producer_op"] is not None:
            return f"{self.ops[row['producer_op']]['name'].split('.')[1]}{row['slot']}"
        if row["site_id"] is None:
            return "unknown"
        site = self.sites[row["site_id"]]
        return f"{site['role']} {site['slot']} of {self.path(site['module_id'])}"

    def lines(self, word: str) -> list[str]:
        """A line for each tensor of outermost calls: `0 Linear@1 output: addmm`, with the step before it."""
        lines = []
        for use in self.of_calls(word):
            call = self.calls[use["consumer_call"]]
            where = f"{call['step']} {self.path(call['module_id'])}@{call['nth']}"
            lines.append(f"{where} {use['slot']}: {self.source(use['tensor_id'])}")
        return lines


def inputs(rec: modtrace.Recording) -> list[str]:
    """The lines of the tensors that were given."""
    return Rows(rec).lines("input")


def outputs(rec: modtrace.Recording) -> list[str]:
    """The lines of the tensors that were returned."""
    return Rows(rec).lines("output")


def sources(rec: modtrace.Recording) -> list[str]:
    """What each tensor is that an op has read, as `input [0] of Linear`, in the order of their first reads."""
    rows = Rows(rec)
    read = (use["tensor_id"] for use in rows.uses if use["consumer_op"] is not None)
    return [rows.source(tensor_id) for tensor_id in dict.fromkeys(read)]


class Returns(nn.Module):
    """Returns what a function makes of it and its arguments."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3))
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def reads_first(model: nn.Module, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
    """Reads the first argument alone."""
    return model.layer(x)


@dataclass
class Answer:
    """As models of transformers return it."""

    logits: Any
    hidden: Any = None


# Which tensors.


@pytest.mark.parametrize("values", [None, "stats"])
def test_tensors_in_any_structure_have_their_slots(values):
    def run(model, x, more, **named):
        y = model.layer(x)
        return {"a": y, "more": [Answer(y.relu(), (y * 2, None)), 3], "none": None}

    model = Returns(run)

    def call():
        x = torch.ones(2, 3)
        model(x * 2, {"a": [x, None, x.sum()]}, ids=x.view(6), rest=(3, Answer(x.relu())))

    rec = recorded(call, values=values)
    assert inputs(rec) == [
        "0 Returns@0 input[0]: mul",
        "0 Returns@0 input[1]['a'][0]: ones",
        "0 Returns@0 input[1]['a'][2]: sum",
        "0 Returns@0 input['ids']: view",
        "0 Returns@0 input['rest'][1].logits: relu",
    ]
    assert outputs(rec) == [
        "0 Returns@0 output['a']: addmm",
        "0 Returns@0 output['more'][0].logits: relu",
        "0 Returns@0 output['more'][0].hidden[0]: mul",
    ]


def test_model_of_transformers_returns_loss_logits_and_its_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    tokens = torch.ones(1, 4, dtype=torch.int64)
    rec = recorded(lambda: model(tokens, labels=tokens))
    assert [line.removeprefix("0 GPT2LMHeadModel@0 ") for line in outputs(rec)] == [
        "output.loss: nll_loss_forward[0]",
        "output.logits: _unsafe_view",
        "output.past_key_values.layers[0].keys: cat",
        "output.past_key_values.layers[0].values: cat",
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
    assert [rows.ops[op_id]["step"] for op_id in made] == [0, 1, 2]
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


def test_only_outermost_calls_have_rows_and_what_one_returns_another_is_given():
    model, loss = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.MSELoss()

    def run():
        x = torch.ones(2, 3)
        loss(model(x), torch.zeros(2, 3))
        model(x)

    rec = recorded(run)
    assert inputs(rec) == [
        "0 Sequential@0 input[0]: ones",
        "0 MSELoss@0 input[0]: relu",
        "0 MSELoss@0 input[1]: zeros",
        "1 Sequential@0 input[0]: ones",
    ]
    assert outputs(rec) == [
        "0 Sequential@0 output: relu",
        "0 MSELoss@0 output: mse_loss",
        "1 Sequential@0 output: relu",
    ]
    rows = Rows(rec)
    assert rows.of_calls("output")[0]["tensor_id"] == rows.of_calls("input")[1]["tensor_id"]


def test_one_tensor_at_two_slots_is_one_tensor_and_a_view_of_it_another():
    def run(model, x, *more, **named):
        y = model.layer(x)
        return y, y, y.detach(), y.view(6)

    model = Returns(run)

    def call():
        x = torch.ones(2, 3)
        model(x, x, x[:1], again=x)

    rows = Rows(recorded(call))
    assert rows.lines("input") == [
        "0 Returns@0 input[0]: ones",
        "0 Returns@0 input[1]: ones",
        "0 Returns@0 input[2]: slice",
        "0 Returns@0 input['again']: ones",
    ]
    first, second, view, fourth = (use["tensor_id"] for use in rows.of_calls("input"))
    assert first == second == fourth != view
    assert rows.tensors[view]["storage"] == rows.tensors[first]["storage"]
    numbers = [use["tensor_id"] for use in rows.of_calls("output")]
    assert numbers[0] == numbers[1]
    assert len({*numbers}) == 3
    assert len({rows.tensors[number]["storage"] for number in numbers}) == 1
    assert [rows.tensors[number]["requires_grad"] for number in numbers] == [True, True, False, True]


def test_view_that_was_made_unseen_is_met_as_what_its_storage_was_last_written_by():
    """As where another thread has cut a batch out of what an op has made."""
    model = Returns(reads_first)

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
    (given,) = rows.of_calls("input")
    assert rows.tensors[given["tensor_id"]]["shape"] == [2, 3]
    assert given["tensor_id"] in {use["tensor_id"] for use in rows.uses if use["consumer_op"] is not None}


def test_what_is_written_to_in_the_call_was_given_as_it_was():
    def run(model, x):
        x.add_(1)
        return model.layer(x)

    model = Returns(run)
    rec = recorded(lambda: model(torch.ones(2, 3)))
    assert inputs(rec) == ["0 Returns@0 input[0]: ones"]
    assert "add_" in sources(rec)


# What no op has made.


@pytest.mark.parametrize("values", [None, "stats"])
def test_what_no_op_has_made_says_what_it_is(values):
    def run(model, x, y, *, more):
        return model.layer(x) + more, x, y, model.layer.weight, model.table, torch.from_numpy(np.ones(2))

    model, x, y, more = Returns(run), torch.ones(2, 3), torch.ones(2, 3) * 2, torch.ones(3)
    rec = recorded(lambda: model(x, y, more=more), values=values)
    assert inputs(rec) == []  # what they are is known when an op reads them
    assert [source for source in sources(rec) if "input" in source] == [
        "input [0] of Returns",
        "input ['more'] of Returns",
    ]
    assert outputs(rec)[1:] == [
        "0 Returns@0 output[1]: input [0] of Returns",
        "0 Returns@0 output[2]: input [1] of Returns",
        "0 Returns@0 output[3]: parameter weight of layer",
        "0 Returns@0 output[4]: buffer table of Returns",
        "0 Returns@0 output[5]: leaf  of Returns",
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
    model, x = Returns(reads_first), torch.ones(2, 3)
    rec = recorded(lambda: (model(x), model(x)), values="stats")
    rows = Rows(rec)
    measured = [
        rows.ops[row["op_id"]]["name"]
        for row in rec.table("values").to_pylist()
        if rows.sites[row["site_id"]]["role"] == "input"
    ]
    assert measured == ["aten.addmm.default"]


def test_parameters_that_are_given_have_none():
    def run(model, x, weight, table):
        return nn.functional.linear(x, weight) + table

    model = Returns(run)
    x = torch.ones(2, 3)
    rec = recorded(lambda: [model(x, model.layer.weight, model.table) for _ in range(2)])
    assert inputs(rec) == [
        "1 Returns@0 input[0]: input [0] of Returns",
        "1 Returns@0 input[2]: buffer table of Returns",
    ]


def test_root_that_runs_no_op_is_measured_and_found_again_by_later_ops():
    model, x = nn.Identity(), torch.tensor([1.0, 3.0])
    rec = recorded(lambda: model(x) * 2, values="stats")
    assert outputs(rec) == ["0 Identity@0 output: input [0] of Identity"]
    rows = Rows(rec)
    assert len({use["tensor_id"] for use in rows.uses}) == 1
    values = [
        (rows.sites[row["site_id"]]["role"], row["sum"], row["op_id"])
        for row in rec.table("values").to_pylist()
    ]
    assert values == [("output", 4.0, None), ("input", 4.0, None), ("op_output", 8.0, 0)]


def test_recording_of_nothing_but_a_root_without_ops_has_its_output(tmp_path):
    model, x = nn.Identity(), torch.ones(2)
    recorded(lambda: model(x), to=tmp_path / "run")
    rec = modtrace.open_recording(tmp_path / "run")
    assert outputs(rec) == ["0 Identity@0 output: input [0] of Identity"]
    assert len(rec.table("ops")) == 0


def test_call_that_was_given_what_an_op_had_made_and_runs_none_has_it(tmp_path):
    model = Returns(lambda model, x: None)
    recorded(lambda: model(torch.ones(2)), to=tmp_path / "run")
    assert inputs(modtrace.open_recording(tmp_path / "run")) == ["0 Returns@0 input[0]: ones"]


def test_tensors_without_storage_have_none():
    """A returned one has a row, without the op that made it; one that was given has none."""

    def run(model, x):
        y = torch.sparse.mm(x, model.layer.weight).to_sparse()
        return y, y

    model = Returns(run)
    rec = recorded(lambda: model(torch.ones(2, 3).to_sparse()))
    assert inputs(rec) == []
    rows = Rows(rec)
    first, second = (rows.tensors[use["tensor_id"]] for use in rows.of_calls("output"))
    assert first is second
    assert (first["layout"], first["shape"], first["storage"]) == ("sparse_coo", [2, 3], None)


def test_nothing_and_numbers_are_no_tensors():
    model = Returns(lambda model, *args, **kwargs: (None, 3, "text", []))
    assert Rows(recorded(lambda: model(3, None, "text", [], more={}))).uses == []


def test_targets_and_constants_are_leaves_of_where_they_are_read():
    """A target given to a loss module is its input; to a function it belongs to nobody."""
    model = Returns(lambda model, x: model.layer(x) + torch.from_numpy(np.ones(3, np.float32)))
    x, target, other = torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)

    def run():
        nn.MSELoss()(model(x), target)
        nn.functional.mse_loss(model(x), other)

    read = sources(recorded(run))
    assert [source for source in read if "leaf" in source] == [
        "leaf  of Returns",
        "leaf  of Returns",
        "leaf  of nobody's",
    ]
    assert "input [1] of MSELoss" in read


# Which calls.


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
    assert outputs(rec) == ["0 Returns@0 output: relu"]


def test_call_that_raised_has_what_it_was_given_and_no_output():
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


def test_forward_that_is_called_directly_is_no_call():
    model = nn.Linear(3, 3)
    assert Rows(recorded(lambda: model.forward(torch.ones(2, 3)))).of_calls("") == []


def test_compiled_call_returns_a_leaf_of_its_own_that_the_loss_reads():
    """As inductor's code, what this backend makes runs no op that a mode could see."""

    def backend(graph, inputs):
        def run(*given):
            with unseen():
                return [torch.ones(2)]

        return run

    model = torch.compile(Returns(lambda model, x: x * 2), backend=backend)
    rec = recorded(lambda: model(torch.ones(2)).sum(), values="stats")
    rows = Rows(rec)
    assert outputs(rec) == ["0 OptimizedModule@0 output: leaf  of OptimizedModule"]
    uses = [use for use in rows.uses if use["slot"] != "input[0]"]
    assert len({use["tensor_id"] for use in uses}) == 1
    assert [use["consumer_op"] is None for use in uses] == [False, True]


def test_steps_that_are_not_kept_have_none():
    model = nn.Linear(3, 3)

    def run():
        x = torch.ones(2, 3)
        for _ in range(4):
            model(x)

    rec = recorded(run, steps="1:3")
    assert inputs(rec) == ["2 Linear@0 input[0]: input [0] of Linear"]
    assert sources(rec).count("input [0] of Linear") == 1
    assert outputs(rec) == ["1 Linear@0 output: addmm", "2 Linear@0 output: addmm"]


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

    rec = recorded(run)
    assert inputs(rec) == ["0 Linear#1@0 input[0]: ones"]
    assert outputs(rec) == ["0 Linear#1@0 output: addmm"]


def test_root_in_a_transform_is_given_and_returns_what_ops_have_made():
    model = nn.Linear(3, 3)
    parameters = dict(model.named_parameters())

    def loss(given, x):
        return torch.func.functional_call(model, given, (x,)).sum()

    def run():
        x = torch.ones(2, 3)
        torch.vmap(model)(x)
        torch.func.grad(loss)(parameters, x)

    rec = recorded(run)
    assert [line.split(": ")[1] for line in inputs(rec)] == ["ones", "ones"]
    assert [line.split(": ")[1] for line in outputs(rec)] == ["add", "addmm"]


# What it leaves alone.


def test_what_is_given_and_returned_lives_no_longer_than_it_would():
    model = Returns(lambda model, x, more: (x, model.layer(x)))

    def run():
        x, more = torch.ones(2, 3), torch.ones(2)
        refs = [weakref.ref(tensor) for tensor in (x, more, *model(x, [more]))]
        del x, more
        assert [ref() for ref in refs] == [None] * 4

    recorded(run)


def test_modes_of_the_users_see_nothing_of_it():
    seen = []
    for ops in (False, True):
        model = Returns(lambda model, x, more: {"x": x, "y": model.layer(x)})
        with SeesFunctions() as functions, SeesOps() as ran:
            recorded(lambda: model(torch.ones(2, 3), more=torch.ones(2)), ops=ops)  # noqa: B023
        seen.append((functions.seen, ran.seen))
    assert seen[0] == seen[1]
    assert seen[0][0] != [] != seen[0][1]


@pytest.mark.parametrize("place", ["was given", "returned"])
def test_failure_of_ours_ends_ops_and_not_the_run(monkeypatch, place):
    from modtrace.collect.ops import boundary as op_boundary

    def find(value):
        if (type(value) is tuple) == (place == "was given"):
            raise RuntimeError("out of order")
        return find_slots(value)

    find_slots = op_boundary.find_slots
    monkeypatch.setattr(op_boundary, "find_slots", find)
    model = nn.Linear(3, 3)
    warns = pytest.warns(modtrace.ModtraceWarning, match=rf"what Linear {place}: .* records no more ops")
    with warns, modtrace.record(ops=True, values=None) as rec:
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert rec.meta.marks == (
        f"ops are incomplete from step 0: modtrace failed at what Linear {place}: RuntimeError: out of order",
    )
    assert len(rec.table("calls")) == 2


def test_uses_stay_with_their_ops_when_an_interrupt_has_broken_one_off():
    def run():
        x = torch.ones(2)
        y = x + 1
        with pytest.raises(KeyboardInterrupt):
            x.mul(y)
        (x - y).sum()

    interrupts = iter([False, False, True])

    def interrupt(*given):
        if next(interrupts, False):
            raise KeyboardInterrupt

    with modtrace.record(ops=True, values=None, strict=True) as rec:
        rec._recorder._ops.mode.before.append(interrupt)
        run()
    rows = Rows(rec)
    assert [(rows.ops[use["consumer_op"]]["name"], rows.source(use["tensor_id"])) for use in rows.uses] == [
        ("aten.add.Tensor", "ones"),
        ("aten.sub.Tensor", "ones"),
        ("aten.sub.Tensor", "add"),
        ("aten.sum.default", "sub"),
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
    rows = Rows(rec)
    for step in range(2):
        read = set()
        for use in rows.uses:
            op = rows.ops.get(use["consumer_op"])
            site = rows.sites.get(rows.tensors[use["tensor_id"]]["site_id"])
            if op is not None and site is not None and (op["step"], op["phase"]) == (step, "forward"):
                path = rows.modules[site["module_id"]]["path"] if site["module_id"] is not None else None
                read.add((path, site["role"], site["slot"]))
        assert read >= {
            ("0", "parameter", "weight"),
            ("0", "parameter", "bias"),
            ("1", "parameter", "weight"),
            ("1", "parameter", "bias"),
            ("1", "buffer", "running_mean"),
        }
