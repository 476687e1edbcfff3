"""The ops inside of compiled code are recorded with their modules, and with the kernels that they were fused into."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
import torch._dynamo.backends.common
from torch import nn

import modtrace
from helpers.report_pages import read_payload
from modtrace import ModtraceWarning
from modtrace.analysis.tables.inside import with_all_inside
from modtrace.collect.compile.compiled_ops import CompiledOpRecorder
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.schema import schemas

WIDTH = 8


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 2


def train(model: nn.Module, called: nn.Module, *, sizes: tuple[int, ...] = (4,), **options: Any) -> Any:
    torch.manual_seed(0)
    to = options.pop("to", None)
    with modtrace.record(model, to, **{"ops": True, "values": None, "strict": True, **options}) as rec:
        for size in sizes:
            called(torch.randn(size, WIDTH)).sum().backward()
            model.zero_grad()
    return rec


def inside(rec: Any) -> list[dict[str, Any]]:
    """The rows of ops inside of compiled code, with the paths of their modules."""
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    return [row | {"path": paths.get(row["module_id"])} for row in rec.table("compiled_ops").to_pylist()]


def eager_ops(rec: Any) -> list[tuple[str, str, str]]:
    """Phase, path and name of the ops of modules of an eager run."""
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    calls = {row["call_id"]: paths[row["module_id"]] for row in rec.table("calls").to_pylist()}
    return [
        (row["phase"], calls[row["call_id"]], row["name"])
        for row in rec.table("ops").to_pylist()
        if row["call_id"] is not None
    ]


def test_every_op_is_there_once_and_of_the_module_that_an_eager_run_has_it_of() -> None:
    model = Net()
    eager = Counter(eager_ops(train(model, model)))
    found = inside(train(model, torch.compile(model, backend="aot_eager", fullgraph=True)))

    forward = Counter((row["path"], row["name"]) for row in found if row["phase"] == "forward")
    expected = Counter(
        {(path, name): count for (phase, path, name), count in eager.items() if phase == "forward"}
    )
    for path in ("blocks.0", "blocks.1"):
        expected.subtract([(path, "aten.detach.default")])  # of what relu saves: only in eager code
    assert forward == +expected
    products = Counter(row["path"] for row in found if row["name"] == "aten.mm.default")
    layers = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    assert products == dict.fromkeys(
        layers, 2
    )  # of the input, which a bias before it makes need one, and of the weight
    sums = [row for row in found if row["phase"] == "backward" and row["name"] == "aten.add.Tensor"]
    assert {row["path"] for row in sums} == {None}  # of gradients, which belong to no op


@pytest.mark.parametrize("default_device", [nullcontext(), torch.device("cpu")], ids=["", "default device"])
def test_inputs_shapes_and_lines_are_told(default_device: Any) -> None:
    with default_device:  # which calls functions of torch through one of its own
        model = Net()
        found = inside(train(model, torch.compile(model, backend="aot_eager", fullgraph=True)))
    forward = [row for row in found if row["phase"] == "forward"]
    assert [row["nth"] for row in forward] == list(range(len(forward)))
    last = forward[-1]
    assert (last["name"], last["shape"], last["dtype"], last["path"]) == (
        "aten.mul.Tensor",
        [4, 3],
        "float32",
        "",
    )
    [made] = last["inputs"]
    assert (forward[made]["name"], forward[made]["path"]) == ("aten.addmm.default", "head")
    assert [forward[each]["name"] for each in forward[made]["inputs"]] == [
        "aten.add.Tensor",
        "aten.t.default",
    ]
    file, _, line = last["source"].rpartition(":")
    assert Path(file) == Path(__file__)
    assert "self.head(x) * 2" in Path(file).read_text().splitlines()[int(line) - 1]
    assert not any(row["kernels"] for row in found)
    assert {row["is_view"] for row in found if row["name"] == "aten.t.default"} == {True}


def test_regions_of_blocks_and_recompilations_have_their_own() -> None:
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    rec = train(model, model, sizes=(4, 6, 9))
    compilations = {row["compilation_id"]: row for row in rec.table("compilations").to_pylist()}
    found = inside(rec)
    assert len({row["compilation_id"] for row in found}) > 1
    assert all(row["compilation_id"] in compilations for row in found)
    assert [-1, WIDTH] in [row["shape"] for row in found]  # it is compiled for any size in the end
    assert {row["path"] for row in found} - {None} == {
        path for path, _ in model.named_modules() if path.startswith("blocks.")
    }


class Broken(Net):
    """Its graph breaks in front of the head, which is then on the stack of what is compiled behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.shown(x))

    @torch.compiler.disable
    def shown(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_modules_behind_a_graph_break_are_known() -> None:
    model = Broken()
    found = inside(train(model, torch.compile(model, backend="aot_eager")))
    products = Counter(row["path"] for row in found if row["name"] == "aten.addmm.default")
    assert products == dict.fromkeys(
        ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"], 1
    )


def test_nothing_is_wrapped_without_ops_nor_after_the_recording() -> None:
    model = Net()
    common: Any = torch._dynamo.backends.common
    plain = common.aot_module_simplified
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with modtrace.record(model, strict=True):
        compiled(torch.randn(4, WIDTH))
        assert common.aot_module_simplified is plain
    assert inside(train(model, compiled, ops=False, values="stats")) == []
    train(model, compiled)
    assert common.aot_module_simplified is plain


def test_what_was_compiled_before_is_said_to_be() -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(4, WIDTH)).sum().backward()
    rec = train(model, compiled)
    assert inside(rec) == []
    assert rec.op_table().compiled_before == ("Net",)
    assert "what ran inside of Net is not known: it was compiled before the recording began" in str(
        rec.op_table()
    )


def test_same_numbers_are_computed() -> None:
    results = []
    for options in ({}, {"ops": False, "values": "stats"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        train(model, torch.compile(model, backend="aot_eager", fullgraph=True), sizes=(4, 5), **options)
        results.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *results))


def test_internal_error_leaves_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(CompiledOpRecorder, "_find_modules", fail)
    model = Net()
    with pytest.warns(ModtraceWarning, match="records no more compilations"):
        rec = train(model, torch.compile(model, backend="aot_eager", fullgraph=True), strict=False)
    assert rec.table("ops").num_rows


def test_ops_command_lists_ops_that_ran_one_by_one_only_with_their_modules() -> None:
    model = Net()
    text = str(train(model, torch.compile(model, backend="aot_eager", fullgraph=True)).op_table())
    assert "inside of Net, compiled in step 0: " in text
    assert {line.split()[0] for line in text.splitlines() if "LayerNorm" in line} == {
        "blocks.0.norm",
        "blocks.1.norm",
    }
    assert not any(line.startswith(("kernel", "native_layer_norm")) for line in text.splitlines())


def test_ops_of_a_step_are_those_of_the_compilation_that_ran() -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        for is_training in (True, False, True):
            with torch.set_grad_enabled(is_training):
                loss = compiled(torch.randn(4, WIDTH)).sum()
            if is_training:
                loss.backward()
            rec.step()
    found = [rec.op_table(step=step).compiled for step in range(3)]
    assert [[each.step for each in regions or ()] for regions in found] == [[0], [1], [0]]
    assert [[each.backward_ops > 0 for each in regions or ()] for regions in found] == [
        [True],
        [False],
        [True],
    ]


SCRIPT = """
import json, sys
import torch
import modtrace
from test_compiled_ops import Net, inside

torch.manual_seed(0)
model = Net()
compiled = torch.compile(model, fullgraph=True)
with modtrace.record(model, ops=True, values=None, strict=True) as rec:
    compiled(torch.randn(4, 8)).sum().backward()
table = rec.op_table()
rows = [[each["path"], each["name"], each["kernels"]] for each in inside(rec)]
kernels = [[each.name, each.phase, each.modules] for each in table.compiled[0].kernels if each.is_fused]
print(json.dumps({"rows": rows, "kernels": kernels, "text": str(table)}))
"""


#: What copies and detaches around the graphs of AOTAutograd, which are no ops of theirs.
AROUND = {"aten.detach.default", "aten.empty_strided.default", "aten.copy_.default"}
if torch.__version__ < "2.12":
    AROUND.add("aten.clone.default")  # torch 2.11 copies the gradients of outputs by it


def ops_in_graph(rec: Any, step: int | None = None) -> Counter[tuple[str | None, str | None, str]]:
    """Phase, path and name of the ops of modules in the execution graph, without `AROUND`."""
    found = (each for each in rec.graph(step).unfold().nodes if each.kind == "op" and each.path is not None)
    return Counter((each.phase, each.path, each.name) for each in found if each.name not in AROUND)


def ops_inside(rec: Any, root: str = "") -> Counter[tuple[str | None, str | None, str]]:
    """The same of the ops inside of compiled code; those of no module are in the region."""
    found = (row for row in inside(rec) if row["name"] not in AROUND)
    return Counter((row["phase"], row["path"] or root, row["name"]) for row in found)


def test_graph_of_a_compiled_step_has_each_op_once_and_in_the_module_of_an_eager_one() -> None:
    model = Net()
    eager = ops_in_graph(train(model, model))
    rec = train(model, torch.compile(model, backend="aot_eager", fullgraph=True), sizes=(4, 4))
    found = ops_in_graph(rec)
    assert found == ops_inside(rec)
    assert {key: count for key, count in found.items() if key[0] == "forward"} == {
        key: count for key, count in eager.items() if key[0] == "forward"
    }


def test_graph_has_the_compilation_that_ran() -> None:
    model = Net()
    rec = train(model, torch.compile(model, backend="aot_eager", dynamic=False), sizes=(4, 6, 4))
    graphs = [ops_in_graph(rec, step) for step in range(3)]
    assert graphs[0] == graphs[1] == graphs[2]
    shapes = [{each.shape for each in rec.graph(step).nodes if each.label == "relu"} for step in range(3)]
    assert shapes == [{(4, WIDTH)}, {(6, WIDTH)}, {(4, WIDTH)}]


def test_compilations_behind_a_reset_of_dynamo_are_others() -> None:
    model = Net()
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        called = torch.compile(model, backend="aot_eager")
        for step in range(3):
            if step == 2:
                torch._dynamo.reset()
            called(torch.randn(4, WIDTH)).sum().backward()
            model.zero_grad()
    graphs = [ops_in_graph(rec, step) for step in range(3)]
    assert graphs[0] == graphs[1] == graphs[2]
    assert graphs[0]["forward", "blocks.0.up", "aten.addmm.default"] == 1
    assert {row["compile_id"] for row in rec.table("compilations").to_pylist()} == {"0/0", "1:0/0"}


def test_graph_has_each_call_of_a_region() -> None:
    net = Net()
    compiled = torch.compile(net.blocks[0], backend="aot_eager", fullgraph=True)
    with modtrace.record(net, ops=True, values=None, strict=True) as rec:
        compiled(compiled(torch.randn(4, WIDTH, requires_grad=True))).sum().backward()
    found = ops_in_graph(rec)
    expected = Counter({key: 2 * count for key, count in ops_inside(rec, "blocks.0").items()})
    sums = Counter(
        {("backward", "blocks.0", "aten.add.Tensor"): 6}
    )  # of the gradients of 6 parameters, by the engine
    assert found == expected + sums
    relus = [each for each in rec.graph().unfold().nodes if each.name == "aten.relu.default"]
    assert [each.call for each in relus] == [0, 1]


def test_region_has_ops_that_were_compiled_for_another_of_its_class() -> None:
    net = Net()

    def record() -> Any:
        with modtrace.record(net, ops=True, values=None, strict=True) as rec:
            net(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
        return rec

    eager = ops_in_graph(record())
    for block in net.blocks:
        block.compile(backend="aot_eager")
    rec = record()
    assert {row["compile_id"] for row in rec.table("compiled_runs").to_pylist()} == {"0/0"}
    found = ops_in_graph(rec)
    assert {key: count for key, count in found.items() if key[0] == "forward"} == {
        key: count for key, count in eager.items() if key[0] == "forward"
    }


class Repeated(nn.Module):
    """Calls a block three times, and the layer inside of it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(MLP())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.block[0].down(x)


def calls_in_graph(rec: Any) -> Counter[tuple[str | None, str | None, int | None, str]]:
    """Phase, path, number of the call and name of the ops of modules in the execution graph, without `AROUND`."""
    found = (each for each in rec.graph().unfold().nodes if each.kind == "op" and each.path is not None)
    return Counter((each.phase, each.path, each.call, each.name) for each in found if each.name not in AROUND)


def test_each_call_of_a_module_inside_has_its_own_ops() -> None:
    net = Repeated()
    eager = calls_in_graph(train(net, net, sizes=(4,)))
    rec = train(net, torch.compile(net, backend="aot_eager", fullgraph=True))
    found = calls_in_graph(rec)
    once = "aten.t.default"  # AOTAutograd computes it once
    assert {key: count for key, count in found.items() if key[0] == "forward" and key[3] != once} == {
        key: count for key, count in eager.items() if key[0] == "forward" and key[3] != once
    }
    products = ("block.0.up", "block.0.down")
    assert {key: count for key, count in found.items() if key[1] in products and "mm" in key[3]} == {
        key: count for key, count in eager.items() if key[1] in products and "mm" in key[3]
    }
    boxes = Counter(each.path for each in rec.graph().unfold().boxes if each.phase == "forward")
    assert boxes["block"] == boxes["block.0"] == boxes["block.0.up"] == 3 and boxes["block.0.down"] == 4


def test_calls_of_modules_in_a_region_that_is_called_again_are_counted_on() -> None:
    net = Repeated()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with modtrace.record(net, ops=True, values=None, strict=True) as rec:
        compiled(compiled(torch.randn(4, WIDTH, requires_grad=True))).sum().backward()
    calls = {key[2] for key in calls_in_graph(rec) if key[:2] == ("backward", "block.0.down")}
    assert calls == set(range(8))


def leaves_of(rec: Any) -> Counter[tuple[str, str]]:
    """What the ops of the execution graph read and no op has made: kind and name."""
    return Counter(
        (each.kind, each.name) for each in rec.graph().unfold().nodes if each.kind not in ("op", "output")
    )


def test_graph_knows_what_goes_into_a_region_and_comes_out() -> None:
    net = Net()
    eager = leaves_of(train(net, net))
    assert leaves_of(train(net, torch.compile(net, backend="aot_eager", fullgraph=True))) == eager


def test_runs_are_held_with_their_steps() -> None:
    net = Net()
    rec = train(net, torch.compile(net, backend="aot_eager", fullgraph=True), sizes=(4, 4, 4), keep_last=1)
    assert not rec.table("compiled_runs").num_rows
    torch._dynamo.reset()  # else the code of the first recording runs
    rec = train(net, torch.compile(net, backend="aot_eager", fullgraph=True), sizes=(4, 4, 4), steps="1:2")
    assert {*rec.table("compiled_runs")["step"].to_pylist()} == {1}


def test_recording_on_disk_has_sizes_that_vary_and_all_runs(tmp_path: Path) -> None:
    net = Net()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    rec = train(net, compiled, sizes=(4, 5, 6), to=tmp_path / "run")
    opened = modtrace.open_recording(tmp_path / "run")
    assert -1 in {size for row in inside(opened) for size in row["shape"] or ()}
    assert ops_in_graph(opened, 2) == ops_in_graph(opened, 1) == ops_in_graph(rec, 1)
    assert opened.table("compiled_runs").num_rows == rec.table("compiled_runs").num_rows == 6


def test_ops_that_ran_one_by_one_are_listed_with_their_modules() -> None:
    net = Net()
    eager = train(net, net)
    rec = train(net, torch.compile(net, backend="aot_eager", fullgraph=True))

    def products(rec: Any) -> Counter[tuple[str | None, str]]:
        paths = rec.paths().rows
        return Counter(
            (each.path, each.op) for each in paths if each.op.startswith(("aten.mm", "aten.addmm"))
        )

    assert products(rec) == products(eager)
    flops = [{row.name: row.sums.together.flops for row in each.op_table().rows} for each in (eager, rec)]
    assert all(flops[1][path] == flops[0][path] > 0 for path in ("blocks.0.up", "blocks.1.down", "head"))


def test_module_whose_parent_is_not_in_the_recording_is_called_by_the_region() -> None:
    model = Net()
    rec = train(model, torch.compile(model, backend="aot_eager"))
    damaged = MemoryRecording(rec.data.meta)
    for table in schemas():
        rows = rec.table(table)
        if table == "modules":
            rows = rows.filter(pc.not_equal(rows["path"], "blocks"))
        if rows.num_rows:
            damaged.write(table, {name: rows[name] for name in rows.schema.names})
    tables, _ = with_all_inside(damaged)
    paths = {row["module_id"]: row["path"] for row in damaged.table("modules").to_pylist()}
    calls = {row["call_id"]: row for row in tables.table("calls").to_pylist()}
    parents = {
        paths[calls[row["parent_call_id"]]["module_id"]]
        for row in calls.values()
        if paths[row["module_id"]] == "blocks.1" and row["parent_call_id"] is not None
    }
    assert parents == {""}


def test_compiled_layers_and_ops_are_known_to_be() -> None:
    net = Net()
    net.blocks[0].compile(backend="aot_eager")
    graph = train(net, net).graph().unfold()
    region = {"blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.down"}
    assert {each.path for each in graph.boxes if each.compiled} == region
    assert {each.path for each in graph.nodes if each.compiled} == region
    assert graph.render_dot().count("(MLP) compiled") == 2  # the box in forward, and in backward


def test_report_tells_what_is_inside_of_each_region(tmp_path: Path) -> None:
    net = Net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    train(net, net).write_html(tmp_path / "run.html")
    payload = read_payload((tmp_path / "run.html").read_text(encoding="utf-8"))
    rows = [each for each in payload["findings"] if each["severity"] == "note"]
    assert [each["title"].split(":")[0] for each in rows] == [
        "inside of blocks.0, compiled in step 0",
        "inside of blocks.1, compiled in step 0",
    ]
    assert all(each["module"] > 0 and each["step"] == 0 for each in rows)
    assert any("blocks.0.norm" in line and "layer_norm" in line for line in rows[0]["lines"])


class Interrupted(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()  # in a loop: the function runs uncompiled, the blocks do not
            x = block(x)
        return self.head(x)


def test_module_whose_function_torch_has_given_up_is_not_marked_as_compiled() -> None:
    model = Interrupted()
    model.compile(backend="aot_eager")
    graph = train(model, model).graph().unfold()
    assert {box.path for box in graph.boxes if box.compiled} == {
        f"blocks.{at}{part}" for at in range(2) for part in ("", ".norm", ".up", ".down")
    }


def test_ops_of_modtrace_in_compiled_code_are_no_ops_of_the_run() -> None:
    names = []
    for options in ({}, {"values": "stats", "compiled": "inside"}):
        model = Net()
        rec = train(model, torch.compile(model, backend="aot_eager", fullgraph=True), **options)
        names.append([row["name"] for row in rec.table("ops").to_pylist()])
    assert names[0] == names[1] != []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.compile)])
def test_region_saves_what_its_autograd_node_has(backend: str) -> None:
    model = MLP()
    called = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(4, WIDTH)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        out = called(x)
        kept = {each.untyped_storage().data_ptr(): each.nbytes for each in out.grad_fn.saved_tensors}
        out.sum().backward()
    for each in (x, *model.parameters()):
        kept.pop(each.untyped_storage().data_ptr(), None)
    [region] = [row for row in rec.memory_table().rows if row.path == ""]
    assert region.saved.saved_bytes == sum(kept.values()) > 0


@pytest.mark.compile
def test_graph_has_what_inductor_was_given() -> None:
    model = Net()
    rec = train(model, torch.compile(model, fullgraph=True))
    assert ops_in_graph(rec) == ops_inside(rec)
    assert leaves_of(rec) == leaves_of(train(model, model))
    relu = next(each for each in rec.graph().unfold().nodes if each.name == "aten.relu.default")
    assert (relu.path, relu.shape, relu.duration_ns) == ("blocks.0", (4, WIDTH), 0)


@pytest.mark.compile
def test_kernels_of_inductor_are_named_by_their_modules_also_with_warm_caches(tmp_path: Path) -> None:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    assert [runs[0][key] == runs[1][key] for key in ("rows", "kernels")] == [True, True]
    found = {(phase, frozenset(modules)) for _, phase, modules in runs[0]["kernels"]}
    assert ("forward", frozenset({"blocks.0.norm"})) in found
    assert all(name.startswith("cpp_fused_") for name, _, _ in runs[0]["kernels"])
    assert "fused into " in runs[0]["text"]
    products = [kernels for path, name, kernels in runs[0]["rows"] if name == "aten.addmm.default"]
    assert len(products) == 5 and not any(products)  # they run by themselves
