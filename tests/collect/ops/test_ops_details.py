"""What is known of single ops: leaves by name, costs by call, lines and Python names."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, *, scale):
        return F.gelu(self.norm(self.first(x))) * scale["by"] + self.shift


def recorded(steps=1, foreach=False, **options):
    """One or more training steps of a Net."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    with modtrace.record(model, strict=True, **{"ops": True, "values": None, **options}) as rec:
        for _ in range(steps):
            x, by = torch.randn(3, 4), torch.ones(1)
            model(x, scale={"by": by}).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rec


def rows(rec, table):
    return rec.table(table).to_pylist()


def leaves(rec):
    """Path of the module, role and slot of every tensor that has a site."""
    sites = {row["site_id"]: row for row in rows(rec, "sites")}
    paths = {row["module_id"]: row["path"] for row in rows(rec, "modules")}
    found = [sites[row["site_id"]] for row in rows(rec, "tensors") if row["site_id"] is not None]
    return [(paths.get(site["module_id"]), site["role"], site["slot"]) for site in found]


def test_parameters_buffers_and_inputs_are_named_where_they_are_read_first():
    found = leaves(recorded())
    assert [*dict.fromkeys(found)] == [
        ("first", "parameter", "weight"),
        ("first", "parameter", "bias"),
        ("norm", "buffer", "num_batches_tracked"),
        ("norm", "parameter", "weight"),
        ("norm", "parameter", "bias"),
        ("norm", "buffer", "running_mean"),
        ("norm", "buffer", "running_var"),
        ("", "buffer", "shift"),
    ]
    assert found.count(("first", "parameter", "weight")) == 2  # and what the optimizer has made of it


def test_input_that_was_made_before_the_recording_has_its_place_among_the_arguments():
    model, x, by = Net(), torch.randn(3, 4), torch.ones(1)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(x, scale={"by": by})
    assert [each for each in leaves(rec) if each[1] == "input"] == [
        ("", "input", "[0]"),
        ("", "input", "['scale']['by']"),
    ]


def test_tensor_that_nobody_owns_is_a_leaf_of_the_module_that_reads_it():
    constant = torch.ones(4)

    class Adds(nn.Module):
        def forward(self, x):
            return x + constant

    model, x = nn.Sequential(Adds()), torch.ones(4)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(x)
    assert leaves(rec) == [("", "input", "[0]"), ("0", "leaf", "")]


def test_calls_have_the_costs_of_all_that_runs_in_them():
    rec = recorded()
    paths = {row["module_id"]: row["path"] for row in rows(rec, "modules")}
    forward = {paths[row["module_id"]]: row for row in rows(rec, "calls") if row["phase"] == "forward"}
    backward = {paths[row["module_id"]]: row for row in rows(rec, "calls") if row["phase"] == "backward"}
    assert forward["first"]["flops"] == forward[""]["flops"] == 2 * 3 * 4 * 8
    assert backward["first"]["flops"] == 2 * 3 * 4 * 8  # the input needs no gradient
    assert forward["first"]["allocated_bytes"] == forward["first"]["peak_bytes"] == 3 * 8 * 4
    # what norm returns, and the mean and the deviation that it keeps
    assert forward["norm"]["allocated_bytes"] == 3 * 8 * 4 + 2 * 8 * 4
    # of first and norm, gelu, the product and the sum
    assert forward[""]["allocated_bytes"] == 5 * 3 * 8 * 4 + 2 * 8 * 4
    # of these five at most four live at once: nobody needs what gelu returns once it is scaled
    assert forward[""]["peak_bytes"] == 4 * 3 * 8 * 4 + 2 * 8 * 4


def test_without_saved_nothing_is_said_of_ops_that_have_a_node():
    rec = recorded(ops=modtrace.Ops(saved=False))
    saved = {row["name"]: row["saved_bytes"] for row in rows(rec, "ops") if row["phase"] == "forward"}
    assert saved["aten.gelu.default"] is None
    assert saved["aten.empty.memory_format"] == 0


def test_every_output_of_an_op_and_every_leaf_is_measured_once():
    rec = recorded(values="stats")
    sites = {row["site_id"]: row for row in rows(rec, "sites")}
    names = {row["op_id"]: row["name"] for row in rows(rec, "ops")}
    measured = [
        (names[row["op_id"]], sites[row["site_id"]]["role"], sites[row["site_id"]]["slot"], row["numel"])
        for row in rows(rec, "values")
        if row["op_id"] is not None and row["phase"] == "forward"
    ]
    assert measured == [
        ("aten.t.default", "parameter", "weight", 32),
        ("aten.addmm.default", "parameter", "bias", 8),
        ("aten.addmm.default", "op_output", "", 24),
        ("aten.add_.Tensor", "buffer", "num_batches_tracked", 1),
        ("aten.add_.Tensor", "op_output", "", 1),
        ("aten.empty.memory_format", "op_output", "", 0),
        ("aten.native_batch_norm.default", "parameter", "weight", 8),
        ("aten.native_batch_norm.default", "parameter", "bias", 8),
        ("aten.native_batch_norm.default", "buffer", "running_mean", 8),
        ("aten.native_batch_norm.default", "buffer", "running_var", 8),
        ("aten.native_batch_norm.default", "op_output", "[0]", 24),
        ("aten.native_batch_norm.default", "op_output", "[1]", 8),
        ("aten.native_batch_norm.default", "op_output", "[2]", 8),
        ("aten.gelu.default", "op_output", "", 24),
        ("aten.mul.Tensor", "op_output", "", 24),
        ("aten.add.Tensor", "buffer", "shift", 8),
        ("aten.add.Tensor", "op_output", "", 24),
    ]


def test_parameter_that_an_optimizer_wrote_to_is_the_same_parameter_and_is_measured_again():
    for foreach in (False, True):
        rec = recorded(steps=2, values="stats", foreach=foreach)
        sites = {row["site_id"]: row for row in rows(rec, "sites")}
        versions = [
            row["version"]
            for row in rows(rec, "tensors")
            if row["site_id"] is not None
            and sites[row["site_id"]]["slot"] == "weight"
            and row["shape"] == [8, 4]
        ]
        assert versions == ([0, 1] if foreach else [0, 1, 2])  # what nobody reads any more has no row
        read = [row for row in rows(rec, "values") if row["op_id"] is not None and row["numel"] == 32]
        weights = [row["step"] for row in read if sites[row["site_id"]]["slot"] == "weight"]
        written = [row["step"] for row in read if row["phase"] == "optimizer"]
        # An op that returns what it has written to is measured then; one on lists returns nothing.
        assert (weights, written) == (([0, 1], []) if foreach else ([0], [0, 1]))


def test_memory_that_nothing_was_written_to_is_not_measured():
    class Empty(nn.Module):
        def forward(self, x):
            return torch.empty_like(x).fill_(1.0)

    model = Empty()
    with modtrace.record(model, ops=True, strict=True) as rec:
        model(torch.ones(3))
    names = {row["op_id"]: row["name"] for row in rows(rec, "ops")}
    notes = {names[row["op_id"]]: row["note"] for row in rows(rec, "values") if row["op_id"] is not None}
    assert notes["aten.empty_like.default"] == "not measured: nothing has been written to it yet"
    assert notes["aten.fill_.Scalar"] is None


def test_ops_do_not_change_what_modules_are_said_to_have_returned():
    with_ops, without = recorded(values="stats"), recorded(values="stats", ops=False)
    wanted = ["path", "call", "role", "slot", "phase", "numel", "min", "max", "sum", "sumsq"]
    frame = with_ops.frame("values")
    assert frame[frame["op_id"].isna()][wanted].to_csv(index=False) == without.frame("values")[wanted].to_csv(
        index=False
    )


def test_source_line_and_python_name_are_those_of_the_forward_op_where_they_are_asked_for():
    rec = recorded(ops=modtrace.Ops(source=True, python_names=True))
    line = next(
        at
        for at, text in enumerate(Path(__file__).read_text().splitlines(), start=1)
        if "F.gelu(self" in text
    )
    known = {row["name"]: (row["source"], row["python_name"]) for row in rows(rec, "ops")}
    assert known["aten.addmm.default"] == (f"{__file__}:{line}", "linear")
    assert known["aten.gelu.default"] == (f"{__file__}:{line}", "gelu")
    assert known["aten.gelu_backward.default"] == (f"{__file__}:{line}", "gelu")
    assert known["aten.native_batch_norm_backward.default"] == (f"{__file__}:{line}", "batch_norm")
    assert {(row["source"], row["python_name"]) for row in rows(recorded(), "ops")} == {(None, None)}


def test_something_else_for_ops_is_refused():
    with pytest.raises(ValueError, match=r"^ops='all': give True, False or modtrace.Ops\(...\)$"):
        modtrace.record(Net(), ops="all")


def test_ops_of_hooks_that_pack_what_is_saved_do_not_take_the_node_of_the_op():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 1, lambda kept: kept * 1):
            out = model(torch.ones(2, 4))
        out.sum().backward()
    found = rows(rec, "ops")
    names = {row["op_id"]: row["name"] for row in found}
    joined = {row["name"]: names.get(row["forward_op_id"]) for row in found if row["phase"] == "backward"}
    assert joined["aten.gelu_backward.default"] == "aten.gelu.default"
    assert joined["aten.mm.default"] == "aten.addmm.default"
    saved = {row["name"]: row["saved_bytes"] for row in found if row["phase"] == "forward"}
    assert saved["aten.gelu.default"] is None  # a hook has packed it
    assert saved["aten.mul.Tensor"] == 0
