"""What modules inside of compiled code return is measured, and is what an eager run has."""

import copy
import io
import json
import os
import runpy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.architectures import ARCHITECTURES
from helpers.compiled_runs import Make, rows_of, run, same_bits
from modtrace import Capture
from modtrace.analysis.modules.module_tree import iterate_nodes

ROLES = ("output", "grad_output")
WIDTH = 8
EXAMPLES = Path(__file__).parents[3] / "examples"


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Blocks(nn.Module):
    """Two MLPs and a head."""

    def __init__(self, around=None):
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.around = around

    def forward(self, x):
        for block in self.blocks:
            x = x + (block(x) if self.around is None else self.around(block, x))
        return self.head(x)


class Thrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP()

    def forward(self, x):
        return self.mlp(self.mlp(self.mlp(x)))


class ReturnsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP()

    def forward(self, x):
        return self.mlp(x)


class Structured(nn.Module):
    """Returns tensors in a tuple, a list, a dict and a named tuple."""

    class Part(nn.Module):
        def forward(self, x):
            return x * 2, {"key": [x + 1], 3: torch.max(x, 1, keepdim=True)[0]}, None

    def __init__(self):
        super().__init__()
        self.part = self.Part()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        double, others, _ = self.part(self.lin(x))
        return double + others["key"][0] * others[3]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.down(self.act(self.up(x)))
        x += 1
        return x


class Frozen(nn.Module):
    """A part without gradients, a part under no_grad, and one that is trained."""

    def __init__(self):
        super().__init__()
        self.frozen = MLP().requires_grad_(False)
        self.unseen = MLP()
        self.trained = MLP()

    def forward(self, x):
        with torch.no_grad():
            y = self.unseen(x)
        return self.trained(self.frozen(x) + y)


checkpointed = partial(checkpoint, use_reentrant=False)

CASES = {
    "blocks": (Blocks, {}),
    "checkpoint inside": (lambda: Blocks(checkpointed), {}),
    "checkpoint inside, micro-batches": (lambda: Blocks(checkpointed), {"calls": 2}),
    "called three times": (Thrice, {}),
    "region called three times before its backward": (Thrice, {"calls": 3}),
    "root that returns its child's tensor": (ReturnsChild, {}),
    "structures": (Structured, {}),
    "in place": (InPlace, {}),
    "frozen": (Frozen, {}),
}


def make_of(kind: Any) -> Make:
    return lambda: (kind(), {"x": torch.randn(4, WIDTH)})


#: The others run with the tests that compile for long.
QUICK = ("blocks", "checkpoint inside", "structures")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.compile) for case in CASES]
)
def test_rows_are_those_of_an_eager_run_and_nothing_is_computed_otherwise(case):
    kind, options = CASES[case]
    plain = run(make_of(kind), "aot_eager", compiled=None, **options)
    tapped = run(make_of(kind), "aot_eager", compiled="inside", **options)
    assert same_bits(plain, tapped)
    assert tapped.graphs == plain.graphs == 1
    found, expected = rows_of(tapped.rec, *ROLES), rows_of(run(make_of(kind), **options).rec, *ROLES)
    here = {
        site for site in expected if site[-1] != "recompute"
    }  # what a checkpoint inside computes again is not seen
    assert found.keys() == here
    assert all(close(found[site], expected[site]) for site in here)
    assert not tapped.rec.meta.marks


def close(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Compares rows. Several calls before one backward add gradients in another order, with other rounding."""
    return found[:3] == expected[:3] and found[3:] == pytest.approx(expected[3:], rel=1e-5, abs=1e-6)


def without_labels(name: str) -> Make:
    def make():
        model, inputs = ARCHITECTURES[name]()
        labels = inputs.pop("labels")
        if name == "T5":
            inputs |= {"decoder_input_ids": labels, "use_cache": False}
        model.config.use_cache = False  # a cache is an object of its own, whose tensors are not found inside
        if name == "Mixtral":  # with them it does not compile as one graph
            model.config.output_router_logits = False
        return model.eval(), inputs

    return make


def make_albert():
    """One layer that is called three times."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.AlbertModel(config), {"input_ids": torch.randint(64, (2, 8))}


def make_gpt():
    """The reference of the benchmarks, smaller."""
    gpt = runpy.run_path(str(EXAMPLES / "train_gpt.py"))["GPT"]
    return gpt(64, layers=3, width=32, heads=4, context=16), {"tokens": torch.randint(64, (2, 16))}


def check_architecture(name: str | Make, backend: str, tolerance: float, *, same: bool = True) -> None:
    make = without_labels(name) if isinstance(name, str) else name
    plain = run(make, backend, compiled=None)
    tapped = run(make, backend, compiled="inside")
    eager = run(make)
    assert same_bits(plain, tapped) is same
    assert tapped.graphs == plain.graphs == 1
    found, expected = rows_of(tapped.rec, *ROLES), rows_of(eager.rec, *ROLES)
    assert found.keys() == expected.keys()
    of_root = (("", "grad_output"),)  # that of a region's output leaves out its uses inside
    compared = [site for site in expected if (site[1], site[3]) not in of_root]
    assert [site for site in compared if not near(found[site], expected[site], tolerance)] == []


def near(found: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float) -> bool:
    scale = (expected[4] / expected[2]) ** 0.5 if expected[2] else 0.0
    rms = (found[4] / found[2]) ** 0.5 if found[2] else 0.0
    return found[:3] == expected[:3] and abs(rms - scale) <= tolerance * max(scale, 1e-6)


@pytest.mark.compile
def test_gpt2_has_the_very_rows_of_an_eager_run():
    check_architecture("GPT-2", "aot_eager", 0)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "BERT", "T5", "ViT"])
def test_architectures_have_the_rows_of_an_eager_run(name):
    check_architecture(name, "aot_eager", 1e-4)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [make_albert, make_gpt])
def test_shared_layer_and_the_reference_have_the_rows_of_an_eager_run(make, backend):
    check_architecture(make, backend, 1e-4 if backend == "aot_eager" else 1e-3)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Mixtral", "BERT", "T5", "ViT"])
def test_architectures_under_inductor_have_the_rows_of_an_eager_run(name):
    # Inductor fuses the sums of T5LayerNorm otherwise where their results are read.
    check_architecture(name, "inductor", 1e-3, same=name != "T5")


# When and how it is compiled.


def train(
    model: nn.Module, call: Any, *, steps: int = 2, sizes: tuple[int, ...] = (4,), **options: Any
) -> Any:
    torch.manual_seed(1)
    with modtrace.record(model, strict=True, **options) as rec:
        for step in range(steps):
            call(torch.randn(sizes[step % len(sizes)], WIDTH)).sum().backward()
            model.zero_grad()
    return rec


def blocks(**options: Any) -> Blocks:
    torch.manual_seed(0)
    return Blocks(**options)


@pytest.fixture
def eager_rows():
    model = blocks()
    return rows_of(train(model, model), *ROLES)


def compile_whole(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def compile_in_place(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


def compile_blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def wrap_blocks(model, backend):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize("compile_it", [compile_whole, compile_in_place, compile_blocks, wrap_blocks])
def test_each_way_to_compile_has_the_same_rows(compile_it, eager_rows):
    model = blocks()
    assert rows_of(train(model, compile_it(model, "aot_eager"), compiled="inside"), *ROLES) == eager_rows


def test_what_was_compiled_before_is_compiled_once_more_and_once_after(eager_rows):
    model, counter = blocks(), CompileCounterWithBackend("aot_eager")
    called = compile_whole(model, counter)
    called(torch.randn(4, WIDTH)).sum().backward()
    model.zero_grad()
    assert rows_of(train(model, called, compiled="inside"), *ROLES) == eager_rows
    assert counter.frame_count == 2
    called(torch.randn(4, WIDTH))
    assert counter.frame_count == 2  # the first code is used again
    assert not any(each._forward_hooks or "forward" in vars(each) for each in model.modules())


def test_another_model_of_a_class_compiled_before_is_measured(eager_rows):
    compile_whole(blocks(), "eager")(torch.randn(4, WIDTH))
    model = blocks()
    assert rows_of(train(model, compile_whole(model, "eager"), compiled="inside"), *ROLES) == eager_rows


def test_another_compiled_model_is_not_compiled_again():
    counter = CompileCounterWithBackend("eager")
    other = torch.compile(MLP(), backend=counter)
    other(torch.randn(4, WIDTH))
    model = blocks()
    train(model, compile_whole(model, "eager"), compiled="inside")
    other(torch.randn(4, WIDTH))
    assert counter.frame_count == 1


def test_a_model_that_is_not_given_is_tapped_when_it_is_first_called():
    model = blocks()
    called = compile_whole(model, "eager")
    with modtrace.record(strict=True, compiled="inside") as rec:
        called(torch.randn(4, WIDTH)).sum().backward()
    paths = {path for _, path, *_ in rows_of(rec, "grad_output")}
    assert paths == {"", "head", "blocks.0", "blocks.1"} | {
        f"blocks.{number}.{part}" for number in range(2) for part in ("up", "act", "down")
    }


@pytest.mark.compile
def test_batches_of_three_sizes_compile_as_often_as_without_taps():
    graphs = []
    for compiled in ("boundary", "inside"):
        torch._dynamo.reset()
        model, counter = blocks(), CompileCounterWithBackend("aot_eager")
        train(model, compile_whole(model, counter), steps=100, sizes=(4, 6, 9), compiled=compiled)
        graphs.append(counter.frame_count)
    assert graphs == [2, 2]


class Scaled(MLP):
    def forward(self, x, scale):
        return self.down(self.act(self.up(x) * scale))


def test_recompute_that_differs_inside_of_a_compiled_block_is_named():
    scales = iter([1.0, 1.0, 1.0, 1.5])  # two forwards, two recomputes, the last block's first
    net = nn.Module()
    net.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def run_block(block, x):
        return block(x, torch.tensor(next(scales)))

    def forward(x):
        for block in net.blocks:
            x = x + checkpoint(run_block, block, x, use_reentrant=False)
        return x

    net.forward = forward
    for block in net.blocks:
        block.compile(backend="eager", fullgraph=True)
    check = train(net, net, steps=1, compiled="inside").recompute_check()
    assert [(each.path, each.slot) for each in check.differences] == [("blocks.0.act", "")]


def test_whole_tensors_inside_are_those_of_an_eager_run():
    recs = []
    for compiled in (None, "eager"):
        model = blocks()
        called = model if compiled is None else compile_whole(model, compiled)
        options = {} if compiled is None else {"compiled": "inside"}
        recs.append(train(model, called, values=Capture(include="blocks.*.act", tensors=True), **options))
    eager, inside = ([rec.tensor("blocks.1.act", step) for step in range(2)] for rec in recs)
    assert all((one == other).all() for one, other in zip(eager, inside, strict=True))


def test_a_capture_selects_modules_inside_by_path_and_steps():
    model = blocks()
    capture = Capture(include="blocks.*.up", roles="output", steps="1:")
    rec = train(model, compile_whole(model, "eager"), steps=3, values=capture, compiled="inside")
    assert {site[:2] for site in rows_of(rec, *ROLES)} == {
        (step, f"blocks.{number}.up") for step in (1, 2) for number in (0, 1)
    }


def test_tensor_that_a_module_returns_after_its_part_is_measured_once():
    """The rows of one measurement have one order."""
    model = blocks()
    rec = train(model, compile_whole(model, "eager"), steps=1, compiled="inside")
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    sites = {
        row["site_id"]: (row["role"], paths.get(row["module_id"])) for row in rec.table("sites").to_pylist()
    }
    order = {sites[row["site_id"]]: row["order"] for row in rec.table("values").to_pylist()}
    assert order["output", "blocks.0"] == order["output", "blocks.0.down"] != order["output", "blocks.0.act"]
    assert order["grad_output", "blocks.0"] == order["grad_output", "blocks.0.down"]


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(x).add_(1)


@pytest.mark.parametrize("include", [None, "0"], ids=["", "without its part"])
def test_tensor_that_was_written_to_since_or_whose_part_is_not_wanted_is_measured(include):
    rows = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(AddsInPlace(), MLP(), nn.Linear(WIDTH, WIDTH))
        called = compile_whole(model, "eager") if compiled else model
        options = {"compiled": "inside"} if compiled else {}
        rows.append(rows_of(train(model, called, include=include, **options), *ROLES))
    assert rows[0] == rows[1] and len(rows[0]) >= 4


def test_two_recordings_at_once_each_measure_what_they_want(eager_rows):
    model = blocks()
    part = modtrace.record(model, compiled="inside", include="blocks.*.down")
    with part:
        rec = train(model, compile_whole(model, "eager"), compiled="inside")
    assert rows_of(rec, *ROLES) == eager_rows
    downs = {site: row for site, row in eager_rows.items() if site[1].endswith("down")}
    assert rows_of(part, *ROLES) == downs


def test_tree_shows_modules_inside_with_their_values():
    model = blocks()
    tree = train(model, compile_whole(model, "eager"), compiled="inside").module_tree()
    inside = {node.path: node for _, node in iterate_nodes(tree.roots)}["blocks.1.up"]
    assert inside.values.output.count == inside.values.gradient.count == 4 * WIDTH
    assert not inside.called


def test_copy_of_a_tapped_model_is_not_tapped_and_can_be_saved():
    model = blocks()
    called = compile_whole(model, "eager")
    file = io.BytesIO()
    with modtrace.record(model, strict=True, compiled="inside") as rec:
        copied = copy.deepcopy(model)
        torch.save(model, file)
        called(torch.ones(4, WIDTH))
        torch.compile(copied, backend="eager", fullgraph=True)(torch.ones(4, WIDTH))
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = model(torch.ones(4, WIDTH))
    assert all(torch.equal(each(torch.ones(4, WIDTH)), expected) for each in (copied, loaded))
    roots = {row["module_id"]: row["root_id"] for row in rec.table("modules").to_pylist()}
    sites = [row for row in rec.table("sites").to_pylist() if row["role"] == "output"]
    of_roots = [roots[row["module_id"]] for row in sites]
    assert len(set(of_roots)) > 1  # the copy is a model of its own, tapped when it was called


def test_forward_that_the_user_sets_during_the_recording_stays():
    model = blocks()
    with modtrace.record(model, compiled="inside"):
        model.head.forward = lambda x: x
    assert torch.equal(model.head(torch.ones(2)), torch.ones(2))


# What it cannot do.


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x):
        return self.second(torch.cond(x.sum() > 0, self.first, lambda x: self.first(x) * 2, (x,)))


def test_modules_in_a_branch_of_cond_are_said_not_to_be_measured():
    torch.manual_seed(0)
    model = Chooses()
    with pytest.warns(
        modtrace.ModtraceWarning, match=r"nothing is measured in functions that are given to torch\.cond"
    ):
        rec = train(model, compile_whole(model, "aot_eager"), compiled="inside")
    assert {site[1] for site in rows_of(rec, *ROLES)} == {
        "",
        "second",
        "second.up",
        "second.act",
        "second.down",
    }


class Region(MLP):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x)


class RegionOfParameters(nn.Module):
    """No module inside of the region has a hook."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return x @ self.weight


class CheckpointAroundRegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.region = MLP(), Region()

    def forward(self, x):
        return checkpointed(lambda x: self.region(self.mlp(x)), x)


#: Blocks whose calls Dynamo takes for each other, and the modules of each that are measured.
REGIONS = {
    "forward": (lambda: nn.Sequential(*[Region() for _ in range(3)]), [""]),
    "forward without modules": (lambda: nn.Sequential(*[RegionOfParameters() for _ in range(3)]), [""]),
    "function": (lambda: Regions(lambda block, x: block(x)), []),
    "in a checkpoint": (
        lambda: nn.Sequential(*[CheckpointAroundRegion() for _ in range(3)]),
        ["", "mlp", "mlp.up", "mlp.act", "mlp.down", "region"],
    ),
}


class Chain(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class Regions(nn.Sequential):
    """Calls its blocks in a region."""

    def __init__(self, function):
        super().__init__(*[MLP() for _ in range(3)])
        self.call = torch.compiler.nested_compile_region(function)

    def forward(self, x):
        for block in self:
            x = x + self.call(block, x)
        return x


@pytest.mark.filterwarnings("ignore:in compiled code, nothing is measured in functions")
@pytest.mark.parametrize(
    "case",
    [
        case
        if case in ("forward", "forward without modules")
        else pytest.param(case, marks=pytest.mark.compile)
        for case in REGIONS
    ],
)
def test_nested_regions_compute_the_same_and_what_is_inside_is_not_measured(case):
    kind, parts = REGIONS[case]
    make = make_of(lambda: Chain(nn.Linear(WIDTH, WIDTH), kind()))
    plain = run(make, "aot_eager", compiled=None)
    tapped = run(make, "aot_eager", compiled="inside")
    assert same_bits(plain, tapped)
    assert tapped.graphs == plain.graphs == 1
    blocks = len(make()[0][1])
    inside = {f"1.{number}.{part}".rstrip(".") for number in range(blocks) for part in parts}
    found, expected = rows_of(tapped.rec, *ROLES), rows_of(run(make).rec, *ROLES)
    assert {site[1] for site in found} == {"", "0", "1"} | inside
    assert all(close(found[site], expected[site]) for site in found)
    warned = any("functions that are given to torch.cond" in mark for mark in tapped.rec.meta.marks)
    assert warned is (case != "forward without modules")


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces each call of a region by itself")
def test_dynamo_uses_regions_again_after_the_recording():
    from torch._dynamo.variables import invoke_subgraph

    original = invoke_subgraph.save_reuse_entry
    model = nn.Sequential(Region())
    with modtrace.record(model, compiled="inside"), modtrace.record(model, compiled="inside"):
        assert invoke_subgraph.save_reuse_entry is not original
    assert invoke_subgraph.save_reuse_entry is original


def test_compiled_function_around_a_model_is_said_not_to_be_measured():
    model = blocks()
    called = torch.compile(lambda x: model(x), backend="eager")
    with pytest.warns(modtrace.ModtraceWarning, match="nothing is measured inside of a compiled function"):
        rec = train(model, called, compiled="inside")
    assert "compile the model, not the function" in rec.meta.marks[0]


def test_bfloat16_is_said_to_be_rounded_otherwise():
    model = blocks().bfloat16()
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with modtrace.record(model, compiled="inside"):
            called(torch.randn(4, WIDTH, dtype=torch.bfloat16))
    [warned] = [each for each in caught if issubclass(each.category, modtrace.ModtraceWarning)]
    assert "emulate_precision_casts" in str(warned.message)


def test_own_reason_for_a_break_is_raised_as_without_us():
    class Breaks(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    model = nn.Sequential(Breaks())
    messages = []
    for options in ({}, {"compiled": "inside"}):
        torch._dynamo.reset()
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        with modtrace.record(model, **options), pytest.raises(torch._dynamo.exc.Unsupported) as raised:
            called(torch.randn(2))
        messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_backend_that_refuses_taps_is_said_to_be_one_for_the_boundary():
    def refuse(graph_module, inputs):
        if any("tap" in str(node.target) for node in graph_module.graph.nodes):
            raise RuntimeError("unknown function")
        return graph_module.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    called = torch.compile(model, backend=refuse, fullgraph=True)
    called(torch.randn(2))
    with (
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="unknown function") as raised,
        modtrace.record(model, compiled="inside"),
    ):
        called(torch.randn(2))
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__[-1].endswith("record with compiled='boundary' (--compiled boundary)")


#: Compiles a model with its values, and tells what of it was in the caches of compilers.
CACHED = """
import json, sys, torch, torch._inductor.config, modtrace
from torch import nn
from torch._dynamo.utils import counters
from torch._library.effects import EffectType

class WithNoise(nn.Sequential):
    def forward(self, x):
        if "noise" in sys.argv:
            torch.ops.users.shout(x)
        return super().forward(x)

if "noise" in sys.argv:
    library = torch.library.Library("users", "DEF")
    library.define("shout(Tensor x) -> ()")
    library.impl("shout", lambda x: None, "CompositeExplicitAutograd")
    torch.library.register_fake("users::shout", lambda x: None, lib=library)
    torch.library._register_effectful_op("users::shout", EffectType.ORDERED, lib=library)
torch.manual_seed(0)
model = WithNoise(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
known = dict(torch._inductor.config.unsafe_marked_cacheable_functions)
with modtrace.record(model, compiled="inside", strict=True) as rec:
    torch.compile(model, fullgraph=True)(torch.randn(3, 4)).sum().backward()
assert torch._inductor.config.unsafe_marked_cacheable_functions == known
values = [[row["min"], row["max"]] for row in rec.table("values").to_pylist()]
print(json.dumps([values, counters["aot_autograd"], counters["inductor"]]))
"""


def compile_in_a_process(folder: Path, *arguments: str) -> Any:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CACHED, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.compile
def test_second_process_finds_the_graphs_with_taps_in_the_caches(tmp_path):
    (values, _, first), (same, of_aot, second) = (compile_in_a_process(tmp_path) for _ in range(2))
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"] == 2
    assert of_aot["autograd_cache_hit"] == 1
    assert len(values) > 6 and same == values


@pytest.mark.compile
def test_graph_with_effects_of_the_users_is_cached_as_little_as_without_us(tmp_path):
    for _ in range(2):
        _, of_aot, of_inductor = compile_in_a_process(tmp_path, "noise")
        assert of_inductor["fxgraph_cache_bypass"] == 1  # the forward; its backward has only ops of ours
        assert "autograd_cache_hit" not in of_aot


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiled": "outside"}, "compiled='outside': give boundary or inside"),
        (
            {"compiled": "inside", "values": None},
            "compiled='inside' measures values, and no values are wanted",
        ),
    ],
)
def test_wrong_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        modtrace.record(nn.Linear(1, 1), **options)
