"""A recomputed call points at the forward call that it repeats."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.architectures import ARCHITECTURES
from zoo import TiedGPT


class Fingerprints:
    """What each call of each module was given, in order: a recompute gets exactly what its original got."""

    def __init__(self, model):
        self.seen = {name: [] for name, _ in model.named_modules()}
        self.handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in model.named_modules()
        ]

    def _hook(self, name):
        def keep(module, args, kwargs):
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            self.seen[name].append([each.detach().double().sum().item() for each in tensors])

        return keep


def check_originals(recording, fingerprints, *, at_least):
    rows = recording.table("calls").to_pylist()
    names = {row["module_id"]: row for row in recording.table("modules").to_pylist()}
    given, order = {}, {}
    for row in sorted(rows, key=lambda row: row["start_ns"]):
        if (
            row["phase"] in ("forward", "recompute")
            and names[row["module_id"]]["raw_path"] in fingerprints.seen
        ):
            place = names[row["module_id"]]["raw_path"]
            given[row["call_id"]] = fingerprints.seen[place][order.get(place, 0)]
            order[place] = order.get(place, 0) + 1
    by_id = {row["call_id"]: row for row in rows}
    recomputed = [row for row in rows if row["phase"] == "recompute" and row["call_id"] in given]
    assert len(recomputed) >= at_least
    for row in recomputed:
        assert row["recompute_of"] is not None, (names[row["module_id"]]["path"], row)
        original = by_id[row["recompute_of"]]
        assert original["phase"] == "forward"
        assert (original["module_id"], original["nth"]) == (row["module_id"], row["nth"])
        # a forward without grad may take kernels that round otherwise
        assert given[row["call_id"]] == pytest.approx(given[original["call_id"]], rel=1e-5, abs=1e-5)
        assert not row["raised"]
        if row["triggered_by"] is not None:
            assert by_id[row["triggered_by"]]["phase"] in ("forward", "recompute")
    return recomputed


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recomputed_blocks_point_at_their_originals_the_shared_linear_included(seeded, reentrant):
    model, tokens = TiedGPT(), torch.randint(0, 17, (2, 8))
    fingerprints = Fingerprints(model)
    with modtrace.record(model, strict=True) as rec:
        F.cross_entropy(model(tokens, reentrant).flatten(0, 1), tokens.flatten()).backward()
    recomputed = check_originals(rec, fingerprints, at_least=40)
    shared = next(
        row["module_id"] for row in rec.table("modules").to_pylist() if row["path"] == "blocks.0.shared"
    )
    assert [row["nth"] for row in recomputed if row["module_id"] == shared] == [3, 2, 1, 0]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recomputed_calls_of_transformers_point_at_their_originals(seeded, name, reentrant):
    model, inputs = ARCHITECTURES[name]()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{name} offers no gradient checkpointing")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fingerprints = Fingerprints(model)
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        model(**inputs).loss.backward()
    check_originals(rec, fingerprints, at_least=8)


class Parts(nn.Module):
    """Checkpoints functions that call parts of its modules, one of them three times over two regions."""

    def __init__(self):
        super().__init__()
        self.a, self.shared, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, reentrant):
        x = checkpoint(lambda x: self.shared(self.a(x).tanh()).tanh(), x, use_reentrant=reentrant)
        x = self.b(x).tanh()
        return checkpoint(lambda x: self.shared(self.shared(x).tanh()).exp(), x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_functions_are_told_apart(seeded, reentrant):
    model = Parts()
    fingerprints = Fingerprints(model)
    with modtrace.record(model, strict=True) as rec:
        model(torch.randn(2, 4, requires_grad=True), reentrant).sum().backward()
    recomputed = check_originals(rec, fingerprints, at_least=4)
    names = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    assert [(names[row["module_id"]], row["nth"]) for row in recomputed] == [
        ("shared", 1),
        ("shared", 2),
        ("a", 0),
        ("shared", 0),
    ]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_blocks_that_the_script_itself_checkpoints_point_at_their_originals(seeded, reentrant):
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    fingerprints = Fingerprints(blocks)
    with modtrace.record(blocks, strict=True) as rec:
        x = torch.randn(2, 4, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        x.sum().backward()
    check_originals(rec, fingerprints, at_least=9)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoints_inside_checkpoints_point_at_the_forward(seeded, reentrant):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=reentrant)
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Inner() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Outer()
    fingerprints = Fingerprints(model)
    with modtrace.record(model, strict=True) as rec:
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    check_originals(rec, fingerprints, at_least=8)


def test_a_module_that_a_custom_function_runs_in_its_own_backward_is_no_recompute(seeded):
    probe = nn.Linear(4, 4)

    class Probing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return probe(grad)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return Probing.apply(self.layer(x))

    model = Net()
    with modtrace.record({"net": model, "probe": probe}, strict=True) as rec:
        model(torch.randn(2, 4)).sum().backward()
    [row] = [row for row in rec.table("calls").to_pylist() if row["phase"] not in ("forward",)]
    assert (row["phase"], row["recompute_of"], row["triggered_by"]) == ("backward", None, 0)


def test_early_stopped_calls_have_not_raised(seeded):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Identity()))
    with modtrace.record(model, strict=True) as rec:
        x = torch.randn(2, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
    rows = [row for row in rec.table("calls").to_pylist() if row["phase"] == "recompute"]
    assert [row["raised"] for row in rows] == [False] * len(rows)
    assert all(row["end_ns"] is not None for row in rows)
    assert len(rows) < 5
