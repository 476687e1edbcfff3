"""Which module each node of a torch.fx graph comes from: paths, calls, leaves, and what one tracer leaves in it."""

import contextlib
import copy
import gc
import math
import pickle
import re
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from modtrace import ModtraceError
from modtrace.collect.fx.tracer import ModulePathTracer, UntraceableError

Names = dict[str, str | None]


def paths(tracer: ModulePathTracer, graph: torch.fx.Graph) -> Names:
    return {node.name: tracer.node_to_originating_module[node] for node in graph.nodes}


def calls(tracer: ModulePathTracer, graph: torch.fx.Graph) -> Names:
    return {node.name: tracer.node_to_call[node] for node in graph.nodes}


def paths_of(model: Any, **options: Any) -> Names:
    tracer = ModulePathTracer(**options)
    return paths(tracer, tracer.trace(model))


def calls_of(model: Any, **options: Any) -> Names:
    tracer = ModulePathTracer(**options)
    return calls(tracer, tracer.trace(model))


class Block(nn.Module):
    """A linear layer, then an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + x


class Net(nn.Module):
    """Two blocks in a Sequential, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).relu())


class Of(nn.Module):
    """Runs one module with what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# Paths and calls.


def test_each_node_has_the_module_whose_code_made_it() -> None:
    assert paths_of(Net()) == {
        "x": "",
        "blocks_0_fc": "blocks.0.fc",
        "add": "blocks.0",
        "blocks_1_fc": "blocks.1.fc",
        "add_1": "blocks.1",
        "relu": "",
        "head": "head",
        "output": None,
    }


def test_first_calls_are_named_like_their_modules() -> None:
    assert calls_of(Net()) == paths_of(Net())


class Scale(nn.Module):
    """Reads a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


class Repeated(nn.Module):
    """Runs one block twice, and one layer of it once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block.fc(self.block(self.block(x)))


def test_repeated_calls_are_told_apart() -> None:
    assert calls_of(Repeated()) == {
        "x": "",
        "block_fc": "block.fc",
        "add": "block",
        "block_fc_1": "block.fc@1",
        "add_1": "block@1",
        "block_fc_2": "block.fc@2",
        "output": None,
    }
    assert set(paths_of(Repeated()).values()) == {"", "block.fc", "block", None}


class Recursive(nn.Module):
    """Calls itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.layer(x).relu()
        return self(x, depth - 1) if depth else x


def test_a_root_that_calls_itself_has_a_call_for_each_time() -> None:
    tracer = ModulePathTracer()
    found = calls(tracer, tracer.trace(Recursive(), concrete_args={"depth": 2}))
    assert [(name, call) for name, call in found.items() if name.startswith(("layer", "relu"))] == [
        ("layer", "layer"),
        ("relu", ""),
        ("layer_1", "layer@1"),
        ("relu_1", "@1"),
        ("layer_2", "layer@2"),
        ("relu_2", "@2"),
    ]


class Shared(nn.Module):
    """Two parents have one block."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.left, self.right = Of(block), Of(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def test_a_shared_module_has_the_path_below_its_caller() -> None:
    tracer = ModulePathTracer()
    graph = tracer.trace(Shared())
    assert [
        (node.name, node.target, tracer.node_to_call[node]) for node in graph.nodes if "fc" in node.name
    ] == [
        ("left_inner_fc", "left.inner.fc", "left.inner.fc"),
        ("left_inner_fc_1", "left.inner.fc", "right.inner.fc@1"),
    ]
    assert paths(tracer, graph)["add"] == "left.inner"
    assert paths(tracer, graph)["add_1"] == "right.inner"


def test_a_module_with_two_names_in_one_parent_has_the_first() -> None:
    model = nn.Sequential(Block())
    model.add_module("again", model[0])
    assert calls_of(model)["_0_fc_1"] == "0.fc@1"


class ByKeyword(nn.Module):
    """Calls a module with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fc = Scale(), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.fc(input=self.scale(x=x)) * mask


def test_modules_may_be_called_with_keywords() -> None:
    assert paths_of(ByKeyword()) == {
        "x": "",
        "mask": "",
        "scale_gain": "scale",
        "mul": "scale",
        "scale_shift": "scale",
        "add": "scale",
        "fc": "fc",
        "mul_1": "",
        "output": None,
    }


class TwoReaders(nn.Module):
    """A child's parameter is read by the child, then by the root; the root gives a constant to a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bilinear = Scale(), nn.Bilinear(4, 4, 4)
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(self.scale(x) + self.scale.gain, self.other)


def test_a_parameter_has_the_module_that_reads_it_first_and_a_buffer_the_one_that_hands_it_on() -> None:
    assert paths_of(TwoReaders()) == {
        "x": "",
        "scale_gain": "scale",
        "mul": "scale",
        "scale_shift": "scale",
        "add": "scale",
        "add_1": "",
        "other": "",
        "bilinear": "bilinear",
        "output": None,
    }


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class GivesPair(nn.Module):
    """Hands a named tuple to a leaf."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(Pair(x, x + 1))


def test_a_tuple_made_for_a_leaf_comes_from_the_caller() -> None:
    assert paths_of(Of(GivesPair(nn.Identity()))) == {
        "x": "",
        "add": "inner",
        "pair": "inner",
        "inner_inner": "inner.inner",
        "output": None,
    }


class Tries(nn.Module):
    """Goes another way where a module fails."""

    def __init__(self) -> None:
        super().__init__()
        self.branching, self.fc = Of(Branching()), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.branching(x)
        except ValueError:
            return self.fc(x) + 1


class Branching(nn.Module):
    """Decides by a value, which torch.fx cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        return x if total > 0 else -x


def test_a_module_that_fails_and_is_caught_is_left() -> None:
    tracer = ModulePathTracer()
    graph = tracer.trace(Tries())
    stacks = {node.name: list(node.meta.get("nn_module_stack", {})) for node in graph.nodes}
    assert (stacks["fc"], stacks["add"]) == (["fc"], [])
    assert paths(tracer, graph) == {
        "x": "",
        "sum_1": "branching.inner",
        "gt": "branching.inner",
        "fc": "fc",
        "add": "",
        "output": None,
    }


# Functions.


def double(x: Tensor) -> Tensor:
    return x * 2


class UsesFunctions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return double(x) * math.sqrt(x.shape[0])


def test_functions_can_be_kept_as_nodes() -> None:
    model = nn.Sequential(UsesFunctions())
    traced_through = {"input_1": "", "mul": "0", "getattr_1": "0", "getitem": "0", "sqrt": "0", "mul_1": "0"}
    assert paths_of(model) == {**traced_through, "output": None}
    kept = {"input_1": "", "double": "0", "getattr_1": "0", "getitem": "0", "sqrt": "0", "mul": "0"}
    assert paths_of(model, autowrap_functions=(double,)) == {**kept, "output": None}


def test_options_of_torch_come_in_its_order() -> None:
    tracer = ModulePathTracer((math,), (double,), True)
    assert tracer.param_shapes_constant is True
    assert "double" in paths(tracer, tracer.trace(UsesFunctions()))


def test_a_function_is_traced_as_a_root() -> None:
    assert paths_of(lambda x: F.relu(x) + 1) == {"x": "", "relu": "", "add": "", "output": None}


def test_a_function_does_not_find_the_modules_of_a_model_that_failed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branching())
    tracer = ModulePathTracer()
    for root in (model, lambda x: model[0](x)):
        with pytest.raises(UntraceableError):
            tracer.trace(root)
    assert list(tracer.node_to_call.values()) == [
        ""
    ]  # the input; no node refers to a module that is not there


# Leaves.


def test_a_class_is_a_leaf_beside_those_of_torch() -> None:
    found = {
        "x": "",
        "blocks_0": "blocks.0",
        "blocks_1": "blocks.1",
        "relu": "",
        "head": "head",
        "output": None,
    }
    assert paths_of(Net(), leaves=Block) == found
    assert paths_of(Net(), leaves=(Block,)) == found
    assert paths_of(Net(), leaves=[Block, nn.Flatten]) == found


@pytest.mark.parametrize(
    "leaves", ["blocks.*", "re:^blocks\\.", re.compile("blocks[.]"), ["blocks.0", "blocks.1"]]
)
def test_modules_are_leaves_by_their_paths(leaves: Any) -> None:
    found = paths_of(Net(), leaves=leaves)
    assert [name for name in found if "blocks" in name] == ["blocks_0", "blocks_1"]


def test_any_path_of_a_shared_module_makes_it_a_leaf() -> None:
    assert calls_of(Shared(), leaves="right.inner") == {
        "x": "",
        "left_inner": "left.inner",
        "left_inner_1": "right.inner@1",
        "add": "",
        "output": None,
    }


def test_without_leaves_everything_is_traced_through() -> None:
    assert paths_of(Repeated(), leaves=()) == {
        "x": "",
        "block_fc_weight": "block.fc",
        "block_fc_bias": "block.fc",
        "linear": "block.fc",
        "add": "block",
        "linear_1": "block.fc",
        "add_1": "block",
        "linear_2": "block.fc",
        "output": None,
    }
    assert calls_of(Repeated(), leaves=())["linear_2"] == "block.fc@2"


def test_a_function_decides_alone_which_modules_are_leaves() -> None:
    asked = []

    def is_leaf(module: nn.Module, path: str) -> bool:
        asked.append((type(module).__name__, path))
        return path == "right"

    found = calls_of(Shared(), leaves=is_leaf)
    assert asked == [("Of", "left"), ("Block", "left.inner"), ("Linear", "left.inner.fc"), ("Of", "right")]
    assert found["linear"] == "left.inner.fc" and found["right"] == "right"


@pytest.mark.parametrize(
    ("leaves", "shown"),
    [
        (3, "3"),
        ([Block, int], "<class 'int'>"),
        (nn.ReLU(), "a ReLU itself"),
        ([nn.ReLU()], "a ReLU itself"),
        ([lambda module, path: True], "<function "),
    ],
)
def test_leaves_of_another_kind_are_refused(leaves: Any, shown: str) -> None:
    with pytest.raises(TypeError) as raised:
        ModulePathTracer(leaves=leaves)
    text = str(raised.value)
    assert text.startswith(f"leaves holds {shown}")
    assert text.endswith(
        "Give classes of modules, path patterns such as 'layers.*', or a list of those; "
        "or one function (module, path) -> bool; or None for the leaves of torch.fx."
    )


def test_a_pattern_that_cannot_be_read_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=re.escape("is not a glob: the [ at position 7 is not closed")):
        ModulePathTracer(leaves=["blocks.[0"])


def test_a_pattern_that_matches_no_module_is_an_error_of_the_trace() -> None:
    tracer = ModulePathTracer(leaves=["blocks.0", "block.1"])
    with pytest.raises(ValueError) as raised:
        tracer.trace(Net())
    assert not isinstance(raised.value, ModtraceError)
    assert str(raised.value).startswith("leaves='block.1' matches no module; the nearest are: blocks.")
    assert paths(tracer, tracer.trace(double)) == {"x": "", "mul": "", "output": None}  # it has no modules


class Chooser(ModulePathTracer):
    """Overrides the rule, as one does with torch's tracer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)


def test_the_rule_can_be_overridden_in_a_subclass() -> None:
    tracer = Chooser()
    assert list(paths(tracer, tracer.trace(Net()))) == ["x", "blocks_0", "blocks_1", "relu", "head", "output"]


# What a tracer holds.


def test_a_node_without_a_module_gives_none_and_is_not_inside() -> None:
    tracer = ModulePathTracer()
    graph = tracer.trace(Block())
    output = next(node for node in graph.nodes if node.op == "output")
    for names in (tracer.node_to_originating_module, tracer.node_to_call):
        assert names[output] is None
        assert names.get(output) is None
        assert output not in names
        assert len(names) == 3
    with graph.inserting_before(output):
        added = graph.call_function(torch.relu, (output.args[0],))
    assert tracer.node_to_originating_module[added] is None


def test_two_tracers_do_not_see_each_other() -> None:
    first, second = ModulePathTracer(), ModulePathTracer()
    graph = first.trace(Repeated())
    before = calls(first, graph)
    other = second.trace(Repeated())
    assert calls(first, graph) == before == calls(second, other)
    assert set(second.node_to_call).isdisjoint(first.node_to_call)
    assert "node_to_originating_module" not in vars(ModulePathTracer)


def test_a_second_trace_starts_afresh_and_leaves_what_was_taken_from_the_first() -> None:
    tracer = ModulePathTracer()
    graph = tracer.trace(Repeated())
    taken, shown = tracer.node_to_call, calls(tracer, graph)
    again = tracer.trace(Repeated())
    assert calls(tracer, again) == shown
    assert {node.name: taken[node] for node in graph.nodes} == shown
    assert [node for node in graph.nodes if node in tracer.node_to_call] == []
    stacks = [list(node.meta["nn_module_stack"]) for node in again.nodes if "fc" in node.name]
    assert stacks == [["block", "block.fc"], ["block@1", "block.fc@1"], ["block.fc@2"]]
    tracer.trace(Block())
    assert list(tracer.node_name_to_scope) == ["x", "fc", "add", "output"]


def test_a_trace_that_failed_leaves_nothing_in_the_next() -> None:
    tracer = ModulePathTracer()
    with pytest.raises(UntraceableError):
        tracer.trace(nn.Sequential(Block(), Branching()))
    graph = tracer.trace(Net())
    assert calls(tracer, graph) == paths_of(Net())
    stacks = [list(node.meta.get("nn_module_stack", {})) for node in graph.nodes]
    assert stacks[1:4] == [
        ["blocks", "blocks.0", "blocks.0.fc"],
        ["blocks", "blocks.0"],
        ["blocks", "blocks.1", "blocks.1.fc"],
    ]
    assert stacks[-1] == []


def test_the_graph_runs_and_computes_the_same() -> None:
    model, x = Net(), torch.ones(3, 4)
    traced = torch.fx.GraphModule(model, ModulePathTracer(leaves=()).trace(model))
    assert torch.equal(traced(x), model(x))
    assert torch.equal(copy.deepcopy(traced)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))


def test_a_graph_module_can_be_traced_again() -> None:
    model = Net()
    traced = torch.fx.GraphModule(model, ModulePathTracer().trace(model))
    assert paths_of(traced) == {
        **paths_of(model),
        "add": "",  # it is in the generated code of the root now
        "add_1": "",
    }


# What torch.fx cannot trace.


def test_what_cannot_be_traced_is_said_with_its_place_and_a_way_out() -> None:
    with pytest.raises(UntraceableError) as raised:
        paths_of(nn.Sequential(Block(), Of(Branching())))
    assert str(raised.value) == (
        "1.inner: torch.fx cannot trace it: TraceError: symbolically traced variables cannot be used as inputs to "
        "control flow. Add '1.inner' to leaves=, so that it stays one node, or record a run instead: rec.paths() "
        "and `modtrace paths` give the module of everything that ran."
    )
    assert isinstance(raised.value, ModtraceError)
    assert isinstance(raised.value, torch.fx.proxy.TraceError)
    assert type(raised.value.__cause__) is torch.fx.proxy.TraceError


def test_the_way_out_works() -> None:
    model = nn.Sequential(Block(), Of(Branching()))
    assert paths_of(model, leaves="1.inner") == {
        "input_1": "",
        "_0_fc": "0.fc",
        "add": "0",
        "_1_inner": "1.inner",
        "output": None,
    }


def test_a_root_that_cannot_be_traced_has_the_name_of_its_class() -> None:
    with pytest.raises(
        UntraceableError, match=r"^Branching: torch\.fx cannot .* control flow\. Record a run instead: "
    ):
        paths_of(Branching())


def test_the_place_is_that_of_the_error_that_was_not_caught() -> None:
    with pytest.raises(UntraceableError, match=r"^1\.inner: "):
        paths_of(nn.Sequential(Tries(), Of(Branching())))


class Marked(nn.Module):
    """Fails while its forward holds something."""

    def forward(self, x: Tensor) -> Tensor:
        held = Block()
        self.__dict__["seen"] = weakref.ref(held)
        return x if x > 0 else held(x)


def test_a_trace_that_failed_keeps_nothing_of_the_forward() -> None:
    model, tracer = Of(Marked()), ModulePathTracer()
    with contextlib.suppress(UntraceableError):
        tracer.trace(model)
    gc.collect()
    assert model.inner.seen() is None


class Unregistered(nn.Module):
    """Holds its layers in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_a_module_that_is_not_registered_cannot_be_traced() -> None:
    with pytest.raises(
        UntraceableError, match=r"^0: .* NameError: module is not installed as a submodule\. Add '0'"
    ):
        paths_of(nn.Sequential(Unregistered()))


def test_what_is_no_function_cannot_be_traced() -> None:
    with pytest.raises(
        UntraceableError, match=r"^max: torch\.fx cannot trace it: AssertionError: Expected Function"
    ):
        paths_of(max)


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interrupt_goes_through() -> None:
    tracer = ModulePathTracer()
    with pytest.raises(KeyboardInterrupt):
        tracer.trace(Of(Interrupted()))
    assert paths(tracer, tracer.trace(Net())) == paths_of(Net())
