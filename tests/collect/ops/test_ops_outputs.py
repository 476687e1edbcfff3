"""What outermost calls return is in `uses`: which tensor, at which slot, of which call."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from collect.ops.test_ops_lifetimes import small_step
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.collect.tensor_ids import tensor_ids
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
        found = [use for use in self.uses if use["consumer_call"] is not None]
        assert all(use["consumer_op"] is None for use in found)
        return [use for use in found if use["slot"].startswith(word)]

    def source(self, tensor_id: int) -> str:
        """`addmm`, the op that made a tensor; or `input [0] of Linear`, what it is if none has."""
        row = self.tensors[tensor_id]
        if row["producer_op"] is not None:
            return f"{self.ops[row['producer_op']]['name'].split('.')[1]}{row['slot']}"
        if row["site_id"] is None:
            return "unknown"
        site = self.sites[row["site_id"]]
        return f"{site['role']} {site['slot']} of {self.path(site['module_id'])}"


def at_roots(rec: modtrace.Recording, word: str) -> list[str]:
    """A line for each tensor that was returned: `0 Linear@1 output: addmm`, with the step before it; or was given."""
    rows = Rows(rec)
    lines = []
    for use in rows.of_calls(word):
        call = rows.calls[use["consumer_call"]]
        where = f"{call['step']} {rows.path(call['module_id'])}@{call['nth']}"
        lines.append(f"{where} {use['slot']}: {rows.source(use['tensor_id'])}")
    return lines


def outputs(rec: modtrace.Recording) -> list[str]:
    """Of the tensors that were returned."""
    return at_roots(rec, "output")


class Returns(nn.Module):
    """Returns what a function makes of it and its input."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3))
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def returned(run: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The lines of one call, without the step and the module."""
    model, given = Returns(run), args or (torch.ones(2, 3),)
    lines = outputs(recorded(lambda: model(*given), **options))
    assert all(line.startswith("0 Returns@0 ") for line in lines)
    return [line.removeprefix("0 Returns@0 ") for line in lines]


@dataclass
class Answer:
    """As models of transformers return it."""

    logits: Any
    hidden: Any = None


@pytest.mark.parametrize("values", [None, "stats"])
def test_tensors_in_any_structure_have_their_slots(values):
    def run(model, x):
        y = model.layer(x)
        return {"a": y, "more": [Answer(y.relu(), (y * 2, None)), 3], "none": None}

    assert returned(run, values=values) == [
        "output['a']: addmm",
        "output['more'][0].logits: relu",
        "output['more'][0].hidden[0]: mul",
    ]


def test_model_of_transformers_returns_loss_logits_and_its_cache():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    tokens = torch.ones(1, 4, dtype=torch.int64)
    lines = outputs(recorded(lambda: model(tokens, labels=tokens)))
    assert [line.removeprefix("0 GPT2LMHeadModel@0 ") for line in lines] == [
        "output.loss: nll_loss_forward[0]",
        "output.logits: _unsafe_view",
        "output.past_key_values.layers[0].keys: cat",
        "output.past_key_values.layers[0].values: cat",
    ]


def test_one_tensor_at_two_slots_is_one_tensor():
    def run(model, x):
        y = model.layer(x)
        return y, y, y.detach(), y.view(6)

    model = Returns(run)
    rows = Rows(recorded(lambda: model(torch.ones(2, 3))))
    numbers = [use["tensor_id"] for use in rows.of_calls("output")]
    assert numbers[0] == numbers[1]
    assert len({*numbers}) == 3
    assert len({rows.tensors[each]["storage"] for each in numbers}) == 1
    assert [rows.tensors[each]["requires_grad"] for each in numbers] == [True, True, False, True]


@pytest.mark.parametrize("values", [None, "stats"])
def test_what_no_op_has_made_says_what_it_is(values):
    def run(model, x, y):
        return x, y, model.layer.weight, model.table, torch.from_numpy(np.ones(2, np.float32))

    given = torch.ones(2, 3), torch.ones(2, 3) * 2
    assert returned(run, *given, values=values) == [
        "output[0]: input [0] of Returns",
        "output[1]: input [1] of Returns",
        "output[2]: parameter weight of layer",
        "output[3]: buffer table of Returns",
        "output[4]: leaf  of Returns",
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


def test_tensors_without_storage_are_there_without_the_op_that_made_them():
    def run(model, x):
        y = model.layer(x).to_sparse()
        return y, y

    model = Returns(run)
    rows = Rows(recorded(lambda: model(torch.ones(2, 3))))
    first, second = (rows.tensors[use["tensor_id"]] for use in rows.of_calls("output"))
    assert first is second
    assert (first["layout"], first["shape"], first["storage"]) == ("sparse_coo", [2, 3], None)


def test_nothing_and_numbers_are_no_tensors():
    assert returned(lambda model, x: None) == []
    assert returned(lambda model, x: (3, "text", [])) == []


def test_only_outermost_calls_have_rows_and_each_has_its_own():
    model, loss = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.MSELoss()
    x, target = torch.ones(2, 3), torch.zeros(2, 3)
    rec = recorded(lambda: (loss(model(x), target), model(x)))
    assert outputs(rec) == [
        "0 Sequential@0 output: relu",
        "0 MSELoss@0 output: mse_loss",
        "1 Sequential@0 output: relu",
    ]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_and_modules_in_hooks_of_a_backward_have_none(reentrant):
    model = Returns(lambda model, x: checkpoint(model.layer, x, use_reentrant=reentrant).relu())
    hooked = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    x.register_hook(lambda gradient: hooked(gradient))
    rec = recorded(lambda: model(x).sum().backward())
    assert "recompute" in rec.table("calls").column("phase").to_pylist()
    assert outputs(rec) == ["0 Returns@0 output: relu"]


def test_call_that_raised_has_none():
    def run(model, x):
        model.layer(x)
        raise ValueError("boom")

    model = Returns(run)

    def catch():
        with pytest.raises(ValueError, match="boom"):
            model(torch.ones(2, 3))
        nn.ReLU()(torch.ones(1))

    assert outputs(recorded(catch)) == ["0 ReLU@0 output: relu"]


def test_forward_that_is_called_directly_has_none_as_it_is_no_call():
    model = nn.Linear(3, 3)
    assert outputs(recorded(lambda: model.forward(torch.ones(2, 3)))) == []


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
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rec = recorded(lambda: [small_step(model, optimizer) for _ in range(4)], steps="1:3")
    assert outputs(rec) == ["1 Linear@0 output: addmm", "2 Linear@0 output: addmm"]
    assert len(Rows(rec).of_calls("output")) == 2


def test_without_ops_nothing_is_noted():
    model = nn.Linear(3, 3)
    rec = recorded(lambda: model(torch.ones(2, 3)), ops=False)
    assert len(rec.table("uses")) == 0


def test_other_threads_whose_ops_are_not_seen_have_none():
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    x = torch.ones(2, 3)

    def run():
        thread = threading.Thread(target=lambda: other(x))
        thread.start()
        thread.join()
        model(x)

    assert outputs(recorded(run)) == ["0 Linear#1@0 output: addmm"]


def test_root_in_a_transform_returns_what_its_ops_made():
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    parameters = dict(model.named_parameters())

    def loss(given):
        return torch.func.functional_call(model, given, (x,)).sum()

    rec = recorded(lambda: (torch.vmap(model)(x), torch.func.grad(loss)(parameters)))
    assert [line.split(": ")[1] for line in outputs(rec)] == ["add", "addmm"]


def test_output_lives_no_longer_than_it_would():
    import weakref

    model = Returns(lambda model, x: (x, model.layer(x)))

    def run():
        x = torch.ones(2, 3)
        refs = [weakref.ref(each) for each in (x, *model(x))]
        del x
        assert [ref() for ref in refs] == [None, None, None]

    recorded(run)


@pytest.mark.parametrize("mode_type", [SeesOps, SeesFunctions])
def test_modes_of_the_users_see_nothing_of_it(mode_type):
    seen = []
    for ops in (False, True):
        model = Returns(lambda model, x: {"x": x, "y": model.layer(x)})
        with mode_type() as mode:
            recorded(lambda: model(torch.ones(2, 3)), ops=ops)  # noqa: B023
        seen.append(list(mode.seen))
    assert seen[0] == seen[1] != []


def test_failure_of_ours_ends_ops_and_not_the_run(monkeypatch):
    from modtrace.collect.ops import boundary as op_boundary

    def find(value):
        if type(value) is tuple:
            return find_slots(value)
        raise RuntimeError("out of order")

    find_slots = op_boundary.find_slots
    monkeypatch.setattr(op_boundary, "find_slots", find)
    model = nn.Linear(3, 3)
    warns = pytest.warns(modtrace.ModtraceWarning, match=r"what Linear returned: .* records no more ops")
    with warns, modtrace.record(ops=True, values=None) as rec:
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert rec.meta.marks == (
        "ops are incomplete from step 0: modtrace failed at what Linear returned: RuntimeError: out of order",
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

    torch.manual_seed(0)
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


def test_without_a_compiler_it_is_the_same(monkeypatch):
    def lines():
        model, x = Returns(lambda model, x: (x, model.layer(x), model.layer(x).to_sparse())), torch.ones(2, 3)
        return outputs(recorded(lambda: model(x)))

    expected = lines()
    monkeypatch.setattr(tensor_ids, "compiled", None)
    assert lines() == expected
    assert [line.split(": ")[1] for line in expected] == ["input [0] of Returns", "addmm", "unknown"]
