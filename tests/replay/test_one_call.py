"""One call of a model is recorded, and afterwards everything is as if it had never been called."""

import copy
import gc
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import modtrace
from helpers.twins import bits
from modtrace.replay.one_call import record_call, try_call
from modtrace.replay.random_inputs import make_inputs
from zoo import Failing


class Residual(nn.Module):
    """BatchNorm, dropout, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x, state=None):
        return self.head(self.lstm(x, state)[0])


class Drawing(nn.Module):
    """Draws from every generator, keeps what it has seen, writes to its own parameter and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.generator = torch.Generator().manual_seed(7)
        self.register_buffer("count", torch.zeros(()))
        self.hidden = torch.zeros(4)
        self.seen: dict[str, list[Any]] = {"inner": []}

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(random.random() + float(np.random.rand()))
            self.hidden.add_(torch.rand(4, generator=self.generator))
        self.count += 1
        self.seen["inner"].append(x)
        self.last = x
        return self.layer(x) * self.scale * torch.rand(4) + self.hidden


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))


TOKENS = torch.arange(12).reshape(2, 6)

#: A model, and what it is called with.
CASES: dict[str, Any] = {
    "resnet": lambda: (Residual(), (torch.randn(4, 3, 8, 8),), {}),
    "gpt2": lambda: (gpt2(), (), {"input_ids": TOKENS, "labels": TOKENS}),
    "lstm": lambda: (Recurrent(), (torch.randn(2, 3, 4), None), {}),
    "lstm with a state": lambda: (
        Recurrent(),
        (torch.randn(2, 3, 4),),
        {"state": (torch.zeros(2, 2, 6), torch.zeros(2, 2, 6))},
    ),
    "drawing": lambda: (Drawing(), (torch.randn(2, 4),), {}),
}

EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def train(case: Any, between: Any) -> list[Any]:
    """All bits of two steps of training, with something done before, within and after each."""
    seed()
    model, args, kwargs = case()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        between(model, args, kwargs)
        output = model(*args, **kwargs)
        loss = output.loss if hasattr(output, "loss") else output.square().mean()
        between(model, args, kwargs)
        loss.backward()
        between(model, args, kwargs)
        optimizer.step()
        losses.append(loss)
    gradients = [each.grad for each in model.parameters()]
    state = [*model.state_dict().values(), *gradients, *losses, torch.get_rng_state(), torch.rand(3)]
    return [bits(each) for each in [*state, random.random(), float(np.random.rand())]]


@EACH
@pytest.mark.parametrize("values", [None, "stats"])
def test_training_goes_on_with_the_same_bits(case, values):
    def record(model, args, kwargs):
        assert len(record_call(model, args, kwargs, values=values).table("ops")) > 5

    plain = train(case, lambda *given: None)
    assert train(case, record) == plain


@EACH
def test_attributes_and_arguments_are_as_they_were(case, seeded):
    model, args, kwargs = case()
    attributes = {name: dict(vars(each)) for name, each in model.named_modules()}
    twin = copy.deepcopy((args, kwargs))
    record_call(model, args, kwargs)
    for name, each in model.named_modules():
        assert [*vars(each)] == [*attributes[name]]
        assert all(vars(each)[key] is value for key, value in attributes[name].items())
    assert str((args, kwargs)) == str(twin)


def test_what_lies_deep_in_attributes_is_put_back(seeded):
    model = Drawing()
    record_call(model, (torch.randn(2, 4),))
    assert model.seen == {"inner": []}
    assert model.hidden.tolist() == [0.0] * 4
    assert model.scale.tolist() == [1.0] * 4
    assert model.generator.initial_seed() == 7
    drawn = torch.rand(2, generator=model.generator)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(7)))


def test_graph_of_the_users_that_holds_what_was_written_to_goes_backward(seeded):
    """A BatchNorm in evaluation keeps its running statistics for backward."""
    model, x = nn.BatchNorm1d(4).eval(), torch.randn(3, 4, requires_grad=True)
    loss = model(x).square().sum()
    version = model.running_mean._version
    record_call(model.train(), (torch.randn(3, 4),))
    assert model.running_mean._version == version
    loss.backward()
    assert x.grad is not None


def test_gradients_stay_the_same_objects_with_the_same_content(seeded):
    class TakesGradients(nn.Linear):
        def forward(self, x):
            super().forward(x).sum().backward()
            return x

    model = TakesGradients(2, 2)
    model.weight.grad = given = torch.ones(2, 2)
    record_call(model, (torch.ones(1, 2),))
    assert model.weight.grad is given and given.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert model.bias.grad is None


def test_parameter_whose_memory_is_exchanged_is_put_back(seeded):
    class Exchanges(nn.Linear):
        def forward(self, x):
            self.weight.data = self.weight.data.double()
            self.bias.requires_grad_(False)
            return x

    model = Exchanges(2, 3)
    model.weight.grad = torch.ones(3, 2)
    before = model.weight.data_ptr(), model.weight.tolist()
    record_call(model, (torch.ones(1, 2),))
    assert (model.weight.data_ptr(), model.weight.tolist()) == before
    assert model.weight.dtype is torch.float32 and model.bias.requires_grad


def test_hooks_that_the_call_puts_on_are_taken_off(seeded):
    class Hooks(nn.Linear):
        def forward(self, x):
            self.register_forward_hook(lambda *given: None)
            self.weight.register_hook(lambda gradient: gradient * 2)
            return super().forward(x)

    model = Hooks(2, 2)
    record_call(model, (torch.ones(1, 2),))
    assert not model._forward_hooks
    model.weight.sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


# Arguments.


def test_inputs_that_are_written_to_are_put_back(seeded):
    class Doubles(nn.Module):
        def forward(self, given, *, cache):
            given["x"][0].mul_(2)
            cache.append(given["x"][0])
            cache[0].add_(1)
            given["more"] = 1

    wide, kept = torch.ones(1, 2), torch.zeros(2)
    given, cache = {"x": (torch.ones(3), None)}, [kept]
    record_call(Doubles(), ({**given, "wide": wide.expand(3, 2)},), {"cache": cache})
    assert given["x"][0].tolist() == [1.0, 1.0, 1.0] and [*given] == ["x"]
    assert len(cache) == 1 and cache[0] is kept and kept.tolist() == [0.0, 0.0]


def test_cache_of_keys_and_values_stays_empty(seeded):
    from transformers import DynamicCache

    cache = DynamicCache()
    record_call(gpt2(), (TOKENS,), {"past_key_values": cache, "use_cache": True})
    assert cache.get_seq_length() == 0


def test_no_graph_leads_out_of_the_call(seeded):
    x = torch.ones(2, 2, requires_grad=True)
    y = x * 2
    data = record_call(nn.Linear(2, 2), (y,))
    sites = data.table("sites").to_pylist()
    assert [row["slot"] for row in sites if row["role"] == "input"] == ["[0]"]
    y.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


# Exceptions.


def test_exception_is_the_models_own_with_a_note_of_the_place(seeded):
    notes = ["modtrace: raised in 1.second"]
    error = ValueError("boom")
    model = nn.Sequential(nn.BatchNorm1d(4), Failing(error))  # which has counted by then
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^boom") as caught:
        record_call(model, (torch.randn(2, 4),))
    assert caught.value is error and str(error) == "boom"
    assert caught.traceback[-1].path.name == "zoo.py"
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert getattr(error, "__notes__", notes) == notes


def test_note_names_the_op_that_raised(seeded):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    call = try_call(model, (torch.randn(2, 4),))
    assert type(call.error) is RuntimeError
    assert getattr(call.error, "__notes__", []) in (
        ["modtrace: raised in 1.1, at its op aten.addmm.default"],
        [],  # Python 3.10
    )
    ops = call.data.table("ops").to_pylist()
    assert [(row["name"], row["raised"]) for row in ops] == [
        ("aten.t.default", False),
        ("aten.addmm.default", False),
        ("aten.relu.default", False),
        ("aten.detach.default", False),
        ("aten.t.default", False),
        ("aten.addmm.default", True),
    ]
    assert call.data.meta.marks[0].startswith("the run ended by RuntimeError")


def test_exception_that_the_model_catches_is_not_where_it_failed(seeded):
    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Failing(ValueError("caught"))

        def forward(self, x):
            try:
                self.inner(x)
            except ValueError:
                x = x + 1
            raise KeyError("own")

    call = try_call(Catches(), (torch.randn(2, 4),))
    assert getattr(call.error, "__notes__", ["modtrace: raised in Catches"]) == [
        "modtrace: raised in Catches"
    ]


def test_interrupt_comes_out_at_once_and_everything_is_put_back(seeded):
    class Interrupted(Drawing):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    model, x = Interrupted(), torch.randn(2, 4)
    generator = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        record_call(model, (x,))
    assert model.scale.tolist() == [1.0] * 4 and model.count == 0 and not hasattr(model, "last")
    assert torch.equal(torch.get_rng_state(), generator)
    assert not _get_current_dispatch_mode_stack()


# Kinds of models.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no grad", "inference"])
def test_grad_mode_of_the_caller_holds(mode, seeded):
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    with mode():
        data = record_call(model, (torch.randn(2, 3, 4, 4),))
        assert not torch.is_grad_enabled()
    assert {row["sequence_nr"] for row in data.table("ops").to_pylist()} == {None}
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_lazy_model_stays_lazy(seeded):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    data = record_call(model, (torch.randn(2, 5),))
    assert [row["path"] for row in data.table("modules").to_pylist()] == ["", "0", "1"]
    assert model[0].has_uninitialized_params() and model[1].has_uninitialized_params()
    assert model(torch.randn(2, 7)).shape == (2, 3)


def test_lazy_model_that_cannot_be_copied_is_refused(seeded):
    model = nn.Sequential(nn.LazyLinear(3))
    model.lock = (each for each in ())
    with pytest.raises(ValueError, match=r"^0\.weight: this parameter has no shape yet, and the model can"):
        record_call(model, (torch.randn(2, 5),))


def test_model_on_the_meta_device(seeded):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    data = record_call(model, make_inputs(model, [(2, 4)]))
    assert {row["device"] for row in data.table("tensors").to_pylist()} == {"meta"}
    assert data.meta.marks == ()


def test_graph_module_and_scripted_model_are_recorded(seeded):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for made in (torch.fx.symbolic_trace(model), torch.jit.script(model)):
        before = copy.deepcopy(made.state_dict())
        data = record_call(made, (torch.randn(2, 4),))
        assert "aten.addmm.default" in data.table("ops").column("name").to_pylist()
        assert all(torch.equal(each, before[name]) for name, each in made.state_dict().items())


def test_model_in_ddp_is_called_without_the_other_processes(seeded, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch sets another
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), torch.randn(2, 4)
        data = record_call(model, (x,))
        model(x).sum().backward()
        model(x).sum().backward()
        del (
            model
        )  # before the group: a reducer that is the last to hold it waits for ever, now and then (torch 2.13)
        gc.collect()
    finally:
        dist.destroy_process_group()
    assert [row["type"] for row in data.table("modules").to_pylist()] == ["Linear"]


def test_fake_tensors_are_recorded(seeded):
    with torch._subclasses.FakeTensorMode():
        model = nn.Linear(4, 4)
        data = record_call(model, make_inputs(model, [(2, 4)]))
    assert "aten.addmm.default" in data.table("ops").column("name").to_pylist()
    assert data.meta.marks == ()


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)


def test_parts_that_are_compiled_run_as_they_are_and_are_marked_so(seeded):
    model, graphs = nn.Sequential(OwnNorm(4), nn.Linear(4, 2)), []
    model[0].compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    before = copy.deepcopy(model.state_dict())
    data = record_call(model, (torch.randn(3, 4),))
    assert [row["compiled"] for row in data.table("calls").to_pylist()] == [False, True, False]
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert len(graphs) == 1


def test_part_of_torchs_own_class_that_is_compiled_runs_as_it_is(seeded):
    """Since torch 2.14 Dynamo compiles the hooks together with such a module, so that its call is not seen."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].compile(backend="eager")
    before = copy.deepcopy(model.state_dict())
    data = record_call(model, (torch.randn(3, 4),))
    seen = [] if torch.__version__ >= (2, 14) else [True]
    assert [row["compiled"] for row in data.table("calls").to_pylist()] == [False, *seen, False]
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_parameters_are_copied_only_where_an_op_writes_to_them(seeded, monkeypatch):
    from modtrace.replay import tensor_state

    copied = []
    clone = tensor_state._try_clone
    monkeypatch.setattr(
        tensor_state, "_try_clone", lambda each: copied.append(tuple(each.shape)) or clone(each)
    )
    record_call(Drawing(), (torch.randn(2, 4),))
    assert sorted(copied) == [(), (2, 4), (4,), (4,)]  # count, x, hidden, scale; not the layer's


def test_user_who_records_at_the_same_time_sees_the_call(seeded):
    model = nn.Linear(2, 2)
    with modtrace.record(model, values=None, strict=True) as rec:
        record_call(model, (torch.ones(1, 2),))
    assert len(rec.table("calls")) == 1


def test_what_is_no_call_is_refused():
    model = nn.Linear(2, 2)
    for args, kwargs, options, text in (
        (3, None, {}, r"^args=\.\.\.: give a tuple, \(x,\) for one argument, not a int$"),
        ((), 3, {}, r"^kwargs=\.\.\.: give a dict of names and values, not a int$"),
        ((), None, {"values": "all"}, r"""^values='all': give "stats" or None$"""),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            record_call(model, args, kwargs, **options)
    with pytest.raises(TypeError, match=r"^model=3: give a torch\.nn\.Module, not a int$"):
        record_call(3)


# Inputs from shapes.


def test_inputs_are_made_from_shapes(seeded):
    model = nn.Embedding(2, 3, dtype=torch.float64)
    one, two, three = make_inputs(model, [(2, 3), ((4,), torch.int64), ([], torch.bool)])
    assert (one.dtype, one.shape) == (torch.float64, (2, 3))
    assert (two.dtype, two.shape) == (torch.int64, (4,)) and set(two.tolist()) <= {0, 1}
    assert (three.dtype, three.shape) == (torch.bool, ())
    assert model(two).shape == (4, 3)


def test_inputs_are_the_same_each_time_and_no_generator_of_the_users_moves(seeded):
    before = torch.get_rng_state()
    one, two = (make_inputs(nn.ReLU(), [(5,)])[0] for _ in range(2))
    assert torch.equal(one, two) and one.dtype is torch.float32
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([(2,), "x"], "input_shapes[1]='x': give a tuple of ints, or (shape, dtype)"),
        ([(2, -1)], "input_shapes[0]=(2, -1): give a tuple of ints, or (shape, dtype)"),
        ((2, 3), "input_shapes[0]=2: give a tuple of ints, or (shape, dtype)"),
        ([((2,), int)], "input_shapes[0]=((2,), <class 'int'>): give a tuple of ints, or (shape, dtype)"),
        (3, "input_shapes=3: give a list with one entry for each argument"),
    ],
)
def test_shapes_that_are_none_are_refused(shapes, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        make_inputs(nn.ReLU(), shapes)
    assert str(caught.value) == text
