"""A recording that is broken on purpose is not proved, and the fault is named."""

import torch
from torch import nn

import modtrace
from helpers.proved import SMALL, Calls
from modtrace.collect.ops import mode as op_mode
from modtrace.collect.ops import rows as op_rows
from modtrace.collect.ops.schemas import OpSchema
from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.in_memory.recording import MemoryRecording


def failed(model, *args):
    found = modtrace.verify(model, args)
    return {each.name: each.why for each in found.checks if not each.passed}


def test_write_that_is_not_seen_is_named(seeded, monkeypatch):
    class Blind(OpSchema):
        def __init__(self, func, index):
            super().__init__(func, index)
            if self.name == "aten.mul_.Tensor":
                self.writes, self.written = False, ()

    monkeypatch.setattr(op_mode, "OpSchema", Blind)
    model, args, _ = SMALL["write through select"]()
    faults = failed(model, *args)
    assert {"undeclared writes", "replay in random order"} <= faults.keys()
    assert faults["undeclared writes"].startswith("op ")
    assert faults["undeclared writes"].endswith(
        "(aten.mul_.Tensor in Calls, forward) has changed its self, recorded as only read"
    )
    assert " has other bits than it had when it was recorded" in faults["replay in random order"]


def test_identity_that_is_used_again_is_named(seeded, monkeypatch):
    """As if storages were known by their addresses: a new one is taken for one that has died."""

    def give_again(self, table, columns, write=MemoryRecording.write):
        if table == "tensors":
            rows = to_batch(table, columns).to_pylist()
            made = [row for row in rows if row["producer_op"] is not None]
            dead = next(row["storage"] for row in made if row["shape"] == [2, 4])
            new = next(row["storage"] for row in made if row["shape"] == [2, 3])
            columns = {
                **columns,
                "storage": [dead if row["storage"] == new else row["storage"] for row in rows],
            }
        write(self, table, columns)

    monkeypatch.setattr(MemoryRecording, "write", give_again)
    faults = failed(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(2, 4))
    assert {"replay in order", "replay in random order"} == faults.keys()
    for fault in faults.values():
        assert ": its output is recorded as storage " in fault
        assert " in version 0, which op " in fault


def test_op_that_is_missing_is_named(seeded, monkeypatch):
    dropped = []

    def drop_one(self, table, columns, write=MemoryRecording.write):
        if table in ("ops", "uses"):
            batch = to_batch(table, columns)
            if table == "ops":
                [number] = [row["op_id"] for row in batch.to_pylist() if row["name"] == "aten.tanh.default"]
                dropped.append(number)
            rows = [
                row for row in batch.to_pylist() if row.get("op_id", row.get("consumer_op")) not in dropped
            ]
            columns = {name: [row[name] for row in rows] for name in batch.schema.names}
        write(self, table, columns)

    monkeypatch.setattr(MemoryRecording, "write", drop_one)
    faults = failed(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(2, 4))
    at = dropped[0] + 1
    assert faults["op count"].startswith(
        f"the {at}. op that ran is aten.tanh.default, recorded there is op {at} (aten."
    )
    assert f"which its recorded parent op {dropped[0]} has not made" in faults["replay in order"]


def test_recording_that_broke_off_is_not_proved(seeded, monkeypatch):
    def fail(self, *given):
        raise RuntimeError("out of order")

    monkeypatch.setattr(op_rows.OpTables, "of", fail)
    faults = failed(nn.Linear(4, 4), torch.randn(2, 4))
    assert faults["op count"] == (
        "the recording is not complete: ops are incomplete from step 1: modtrace failed at while writing ops: "
        "RuntimeError: out of order"
    )


def test_parent_that_is_another_tensor_of_the_same_shape_is_named(seeded, monkeypatch):
    def swap(self, table, columns, write=MemoryRecording.write):
        if table == "uses":
            tensors = columns["tensor_id"].tolist()
            at = columns["slot"].to_pylist().index("other")
            tensors[at] = tensors[at - 1]
            columns = {**columns, "tensor_id": tensors}
        write(self, table, columns)

    monkeypatch.setattr(MemoryRecording, "write", swap)
    model = Calls(lambda model, x: model.one(x).tanh() + model.two(x).tanh())
    assert (
        "has other bits than it had when it was recorded"
        in failed(model, torch.randn(2, 4))["replay in order"]
    )


def test_tensor_without_the_op_that_made_it_is_named(seeded, monkeypatch):
    def forget(self, table, columns, write=MemoryRecording.write):
        if table == "tensors":
            rows = to_batch(table, columns).to_pylist()
            for row in rows:
                row["producer_op"] = None if row["shape"] == [3, 2] else row["producer_op"]
            columns = {name: [row[name] for row in rows] for name in rows[0]}
        write(self, table, columns)

    monkeypatch.setattr(MemoryRecording, "write", forget)
    model = Calls(lambda model, x: (x * 2).t().relu())
    with torch.no_grad():
        faults = failed(model, torch.randn(2, 3))
    assert faults["replay in order"] == (
        "op 2 (aten.relu.default in Calls, forward): its self is recorded as made by no op, "
        "and op 0 (aten.mul.Tensor in Calls, forward) made its storage 1"
    )


def test_write_that_no_schema_declares_is_named(seeded):
    library = torch.library.Library("modtrace_test", "FRAGMENT")
    library.define("lies(Tensor x) -> Tensor")
    library.impl("lies", lambda x: x.mul_(2).sum(), "CompositeExplicitAutograd")
    model = Calls(lambda model, x: torch.ops.modtrace_test.lies(model.one(x).detach()) + model.two(x))
    faults = failed(model, torch.randn(2, 4))
    library._destroy()
    assert faults["undeclared writes"].endswith(
        "(modtrace_test.lies.default in Calls, forward) has changed its x, recorded as only read"
    )


def test_op_that_makes_nothing_of_what_it_reads_is_named(seeded):
    library = torch.library.Library("modtrace_test", "FRAGMENT")
    library.define("ignores(Tensor x) -> Tensor")
    library.impl("ignores", lambda x: torch.ones(3), "CompositeExplicitAutograd")
    model = Calls(
        lambda model, x: torch.ops.modtrace_test.ignores(model.one(x).detach()) + model.two(x).sum()
    )
    faults = failed(model, torch.randn(2, 4))
    library._destroy()
    assert list(faults) == ["perturbation"]
    assert "(modtrace_test.ignores.default in Calls, forward): whatever its x (" in faults["perturbation"]
    assert faults["perturbation"].endswith("it gives the same results, and no rule says why")


def test_hook_that_is_left_behind_is_named(seeded, monkeypatch):
    from modtrace.replay import recorded_run

    model, left = nn.Linear(4, 4), []

    class Leaving(recorded_run.Recorder):
        def stop(self, error=None):
            super().stop(error)
            left.append(model.register_forward_hook(lambda *given: None))

    monkeypatch.setattr(recorded_run, "Recorder", Leaving)
    faults = failed(model, torch.randn(2, 4))
    assert faults == {
        "nothing left behind": "hooks on the module '' is not what an unrecorded run leaves",
    }
    assert not model._forward_hooks


def test_path_that_leads_nowhere_is_named(seeded, monkeypatch):
    def misname(self, table, columns, write=MemoryRecording.write):
        if table == "modules":
            paths = [str(path).replace("0", "nowhere") for path in columns["raw_path"]]
            columns = {**columns, "raw_path": paths}
        write(self, table, columns)

    monkeypatch.setattr(MemoryRecording, "write", misname)
    assert failed(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)) == {
        "paths": "the model has no module 'nowhere', which is recorded as a Linear"
    }
