"""A custom Function that runs modules of its forward again in its backward recomputes them, all or a part."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace

pytestmark = pytest.mark.usefixtures("seeded")


class Block(nn.Module):
    """A reversible block: what goes in can be computed from what came out."""

    def __init__(self, f=None):
        super().__init__()
        self.f, self.g = f or nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x1, x2):
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)

    def backward_pass(self, y1, y2, d1, d2):
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g = self.g(y1)
        g.backward(d2)
        d1, x2 = d1 + y1.grad, y2 - g.detach()
        with torch.enable_grad():
            x2.requires_grad_()
            f = self.f(x2)
        f.backward(d1)
        return y1.detach() - f.detach(), x2.detach(), d1, d2 + x2.grad


class InverseFirst(Block):
    """Runs everything twice: without a graph for what went in, with one for the gradients."""

    def backward_pass(self, y1, y2, d1, d2):
        with torch.no_grad():
            x2 = y2 - self.g(y1)
            x1 = y1 - self.f(x2)
        with torch.enable_grad():
            x1.requires_grad_(), x2.requires_grad_()
            outputs = self(x1, x2)
        torch.autograd.backward(outputs, (d1, d2))
        return x1.detach(), x2.detach(), x1.grad, x2.grad


class Reversible(torch.autograd.Function):
    """A whole sequence of blocks, which goes through them in reverse in its backward."""

    @staticmethod
    def forward(ctx, x, blocks):
        x1, x2 = x.chunk(2, -1)
        for block in blocks:
            x1, x2 = block(x1, x2)
        ctx.blocks = blocks
        y = torch.cat([x1, x2], -1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        state = (*y.chunk(2, -1), *gradient.chunk(2, -1))
        for block in reversed(ctx.blocks):
            state = block.backward_pass(*state)
        return torch.cat(state[2:], -1), None


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.before, self.blocks, self.after = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 1)

    def forward(self, x):
        return self.after(Reversible.apply(self.before(x), self.blocks))


def run(model, *inputs, **options):
    with modtrace.record(model, strict=True, backward_times=True, **options) as rec:
        model(*inputs).sum().backward()
    return rec


def calls_in(rec):
    """Every call as (path, phase), and by its id the path and the number of the call that it repeats."""
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    rows = sorted(rec.table("calls").to_pylist(), key=lambda row: row["call_id"])
    by_id = {row["call_id"]: row for row in rows}
    for row in rows:
        row["path"] = paths.get(row["module_id"])  # None: an optimizer
        original = by_id.get(row["recompute_of"])
        if original is not None:
            assert (original["module_id"], original["phase"]) == (row["module_id"], "forward")
            row["original"] = (paths[original["module_id"]], original["nth"])
    return rows


def recomputed(rec):
    """The path of each recomputed call, and the path and number of the call that it repeats."""
    return [(row["path"], row.get("original")) for row in calls_in(rec) if row["phase"] == "recompute"]


def test_a_reversible_net_recomputes_its_blocks_in_reverse():
    model = Net([Block(), Block()])
    rec = run(model, torch.randn(3, 8))
    assert recomputed(rec) == [
        (path, (path, 0))
        for block in ("blocks.1", "blocks.0")
        for path in (f"{block}.g", f"{block}.f", f"{block}.f.0", f"{block}.f.1")
    ]


def test_modules_that_are_rerun_twice_repeat_the_same_call_both_times():
    model = Net([InverseFirst(), InverseFirst()])
    rec = run(model, torch.randn(3, 8))
    found = recomputed(rec)
    assert all(original == (path, 0) for path, original in found)
    assert Counter(path for path, _ in found) == {
        **{f"blocks.{at}": 1 for at in (0, 1)},
        **{f"blocks.{at}.{each}": 2 for at in (0, 1) for each in ("f", "f.0", "f.1", "g")},
    }


def test_the_backward_of_a_rerun_belongs_to_the_recomputed_call():
    rec = run(Net([Block()]), torch.randn(3, 8))
    rows = calls_in(rec)
    again = {row["call_id"]: row["path"] for row in rows if row["phase"] == "recompute"}
    backward = [row for row in rows if row["phase"] == "backward"]
    inner = [again[row["forward_call_id"]] for row in backward if row["forward_call_id"] in again]
    assert sorted(inner) == ["blocks.0.f", "blocks.0.f.0", "blocks.0.f.1", "blocks.0.g"]
    assert sorted(row["path"] for row in backward) == sorted([*inner, "", "before", "after"])


def test_ops_of_a_rerun_and_of_its_backward_are_attributed():
    rec = run(Net([Block()]), torch.randn(3, 8), ops=True, values=None)
    paths = {row["call_id"]: (row["path"], row["phase"]) for row in calls_in(rec)}
    found = Counter(
        (*paths.get(row["call_id"], (None, None)), row["phase"], row["name"])
        for row in rec.table("ops").to_pylist()
        if row["name"] in ("aten.addmm.default", "aten.tanh_backward.default")
    )
    assert found == {
        ("before", "forward", "forward", "aten.addmm.default"): 1,
        ("after", "forward", "forward", "aten.addmm.default"): 1,
        ("blocks.0.f.0", "forward", "forward", "aten.addmm.default"): 1,
        ("blocks.0.g", "forward", "forward", "aten.addmm.default"): 1,
        ("blocks.0.f.0", "recompute", "recompute", "aten.addmm.default"): 1,
        ("blocks.0.g", "recompute", "recompute", "aten.addmm.default"): 1,
        ("blocks.0.f.1", "backward", "backward", "aten.tanh_backward.default"): 1,
    }


def test_the_tracker_names_what_is_around_a_rerun():
    model = Net([Block(), Block()])
    seen = []

    def look(module, args):
        if tracker.phase != "forward":
            seen.append((tracker.phase, tracker.is_bw, tracker.parents))

    model.blocks[1].f[0].register_forward_pre_hook(look)
    with modtrace.ModuleTracker() as tracker:
        model(torch.randn(3, 8)).sum().backward()
    [(phase, is_backward, parents)] = seen
    assert (phase, is_backward) == ("recompute", True)
    assert parents == {"Global", "Net", "Net.blocks.1", "Net.blocks.1.f", "Net.blocks.1.f.0"}


def test_steps_and_values_of_reruns_are_those_of_their_originals():
    model = Net([Block()])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with modtrace.record(model, strict=True) as rec:
        for _ in range(2):
            model(torch.randn(3, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    again = [(row["path"], row["step"], row["nth"]) for row in calls_in(rec) if row["phase"] == "recompute"]
    assert again == [
        (path, step, 0)
        for step in (0, 1)
        for path in ("blocks.0.g", "blocks.0.f", "blocks.0.f.0", "blocks.0.f.1")
    ]
    values = [row for row in rec.table("values").to_pylist() if row["phase"] == "recompute"]
    assert {row["step"] for row in values} == {0, 1}
    assert {row["call_id"] for row in values} <= {
        row["call_id"] for row in calls_in(rec) if row["phase"] == "recompute"
    }


class Partly(torch.autograd.Function):
    """Runs `first` and `second`; in its backward `first` again, and `helper`, which its forward has not run."""

    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        ctx.save_for_backward(x)
        return net.second(net.first(x))

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        gradient = ctx.net.helper(gradient @ ctx.net.second.weight)
        with torch.enable_grad():
            y = ctx.net.first(x)
        y.backward(gradient)
        return x.grad, None


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.helper, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return Partly.apply(self.helper(x), self)


def test_a_function_may_rerun_a_part_and_what_only_its_backward_runs_is_no_recompute():
    rec = run(Part(), torch.randn(3, 4))
    found = [
        (row["path"], row["phase"], row.get("original"))
        for row in calls_in(rec)
        if row["triggered_by"] is not None
    ]
    assert found == [("helper", "backward", None), ("first", "recompute", ("first", 0))]


def test_functions_that_the_script_applies_itself_are_understood():
    block = Block()
    with modtrace.record(block, strict=True) as rec:
        x = torch.randn(3, 8, requires_grad=True)
        Reversible.apply(x * 2, nn.ModuleList([block])).sum().backward()
    assert recomputed(rec) == [(path, (path, 0)) for path in ("g", "f", "f.0", "f.1")]


def test_a_function_around_outermost_calls_belongs_to_training_or_to_evaluation_as_the_script_does():
    block = Block()
    blocks = nn.ModuleList([block])
    with modtrace.record(block, strict=True) as rec:
        output = Reversible.apply(torch.randn(3, 8, requires_grad=True), blocks)
        with torch.no_grad():
            Reversible.apply(torch.randn(3, 8, requires_grad=True), blocks)
        output.sum().backward()
    kinds = {row["step"]: row["kind"] for row in rec.table("steps").to_pylist()}
    roots = [row for row in calls_in(rec) if row["path"] == "" and row["phase"] == "forward"]
    assert [kinds[row["step"]] for row in roots] == ["train", "eval"]


def test_a_function_for_each_block_repeats_its_own_calls_of_a_shared_module():
    shared = nn.Linear(4, 4)

    class Stack(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = Reversible.apply(x, [block])
            return self.after(x)

    rec = run(Stack([Block(shared), Block(shared), Block(shared)]), torch.randn(3, 8))
    assert recomputed(rec) == [
        ("blocks.2.g", ("blocks.2.g", 0)),
        ("blocks.0.f", ("blocks.0.f", 2)),
        ("blocks.1.g", ("blocks.1.g", 0)),
        ("blocks.0.f", ("blocks.0.f", 1)),
        ("blocks.0.g", ("blocks.0.g", 0)),
        ("blocks.0.f", ("blocks.0.f", 0)),
    ]


class Again(torch.autograd.Function):
    """Runs some layers one after the other, and each of them again in the reverse order."""

    @staticmethod
    def forward(ctx, x, *layers):
        ctx.layers, ctx.given = layers, []
        for layer in layers:
            ctx.given.append(x)
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        for layer, given in zip(reversed(ctx.layers), reversed(ctx.given), strict=True):
            x = given.detach().requires_grad_()
            with torch.enable_grad():
                y = layer(x)
            y.backward(gradient)
            gradient = x.grad
        return gradient, *[None] * len(ctx.layers)


class Layers(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.function = function

    def forward(self, x):
        return self.function(self, x * 1)


def test_functions_one_after_the_other_repeat_each_its_own_call():
    model = Layers(lambda net, x: Again.apply(Again.apply(Again.apply(x, net.a), net.a), net.a))
    rec = run(model, torch.randn(3, 4, requires_grad=True))
    assert recomputed(rec) == [("a", ("a", 2)), ("a", ("a", 1)), ("a", ("a", 0))]


def test_the_order_of_reruns_tells_which_calls_of_a_module_they_repeat():
    model = Layers(lambda net, x: Again.apply(x, net.a, net.b, net.a, net.c))
    rec = run(model, torch.randn(3, 4, requires_grad=True))
    assert recomputed(rec) == [("c", ("c", 0)), ("a", ("a", 1)), ("b", ("b", 0)), ("a", ("a", 0))]


def test_the_block_that_reruns_a_shared_module_tells_which_call_is_repeated():
    shared = nn.Linear(4, 4)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = shared

        def forward(self, x1, x2):
            return x1 + self.f(x2), x2

        def backward_pass(self, y1, x2, d1, d2):
            x2 = x2.detach().requires_grad_()
            with torch.enable_grad():
                f = self.f(x2)
            f.backward(d1)
            return y1 - f.detach(), x2.detach(), d1, d2 + x2.grad

    rec = run(Net([Half(), Half()]), torch.randn(3, 8))
    assert recomputed(rec) == [("blocks.0.f", ("blocks.0.f", 1)), ("blocks.0.f", ("blocks.0.f", 0))]


def test_which_call_a_rerun_repeats_is_unknown_where_it_may_be_one_of_several():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.layer = layer
            first = layer(x)
            ctx.save_for_backward(first)
            return layer(first)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.layer(x)
            y.backward(gradient)
            return x.grad, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return Twice.apply(x * 1, self.layer)

    rec = run(Model(), torch.randn(3, 4, requires_grad=True))
    assert recomputed(rec) == [("layer", None)]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoints_inside_of_what_a_function_reruns_point_at_the_forward(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=reentrant)

    rec = run(Net([Block(Checkpointed()), Block(Checkpointed())]), torch.randn(3, 8))
    found = recomputed(rec)
    assert all(original == (path, 0) for path, original in found)
    assert Counter(path for path, _ in found) == {
        **{f"blocks.{at}.{each}": 1 for at in (0, 1) for each in ("f", "g")},
        **{f"blocks.{at}.f.layer": 2 for at in (0, 1)},
    }


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_functions_inside_of_a_checkpoint_point_at_the_forward(reentrant):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net([Block()])

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=reentrant)

    rec = run(Outer(), torch.randn(3, 8, requires_grad=True))
    found = recomputed(rec)
    assert all(original == (path, 0) for path, original in found)
    assert Counter(path for path, _ in found)["net.blocks.0.g"] == 2


def test_recording_a_reversible_net_changes_no_bit_of_its_gradients():
    def gradients(is_recorded):
        torch.manual_seed(0)
        model, x = Net([Block(), InverseFirst()]), torch.randn(3, 8)
        if is_recorded:
            run(model, x, ops=True)
        else:
            model(x).sum().backward()
        return [each.grad for each in model.parameters()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_reformer_recomputes_the_halves_of_its_layers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        vocab_size=32,
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=32,
        attn_layers=["local", "lsh"],
        num_buckets=4,
        num_hashes=1,
        lsh_attn_chunk_length=8,
        local_attn_chunk_length=8,
        axial_pos_shape=(4, 8),
        axial_pos_embds_dim=(8, 8),
        chunk_size_feed_forward=8,
        max_position_embeddings=32,
        is_decoder=True,
        hidden_dropout_prob=0.1,
    )
    model = transformers.ReformerModelWithLMHead(config).train()
    tokens = torch.randint(32, (2, 32))
    with modtrace.record(model, strict=True) as rec:
        model(tokens, labels=tokens).loss.backward()
    rows = calls_in(rec)
    found = recomputed(rec)
    layers = "reformer.encoder.layers"
    assert [path for path, _ in found if path.count(".") == 4] == [
        f"{layers}.{at}.{half}" for at in (1, 0) for half in ("feed_forward", "attention")
    ]
    assert all(original is not None and original[0] == path for path, original in found)
    forward = [
        row["path"] for row in rows if row["phase"] == "forward" and f"{layers}.0.feed_forward" in row["path"]
    ]
    assert sorted(path for path, _ in found if f"{layers}.0.feed_forward" in path) == sorted(forward)
    assert not [row for row in rows if row["triggered_by"] is not None and row["phase"] == "backward"]
