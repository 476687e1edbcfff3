"""Modules have the paths of `state_dict`, however and whenever they are met."""

import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from zoo import Encoder, Hidden, Late, Recursive, TwoParents


def x():
    return torch.ones(2, 4)


def modules(recording):
    """The last row of each module, by module_id."""
    return {row["module_id"]: row for row in recording.table("modules").to_pylist()}


def paths(recording):
    """Root name, path and raw path of every module that was called, in order of their first calls."""
    rows = modules(recording)
    found = {}
    for call in sorted(recording.table("calls").to_pylist(), key=lambda call: call["start_ns"]):
        row = rows[call["module_id"]]
        found[rows[row["root_id"]]["name"], row["path"], row["raw_path"]] = None
    return list(found)


@pytest.fixture
def record():
    return lambda *arguments, **options: modtrace.record(*arguments, strict=True, **options)


def test_the_tables_say_type_parent_and_sizes(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with record(model) as rec:
        model(x())
    assert list(modules(rec).values()) == [
        row(0, 0, "", "Sequential", None, 28, 9, name="Sequential"),
        row(1, 0, "0", "Linear", 0, 20, 0),
        row(2, 0, "1", "BatchNorm1d", 0, 8, 9),
    ]


def row(module_id, root_id, path, kind, parent_id, parameters, buffers, name=None, aliases=(), raw_path=None):
    return {
        "module_id": module_id,
        "root_id": root_id,
        "path": path,
        "raw_path": path if raw_path is None else raw_path,
        "aliases": list(aliases),
        "name": name,
        "type": kind,
        "parent_id": parent_id,
        "parameters": parameters,
        "buffers": buffers,
    }


def test_a_shared_parameter_counts_once(record):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    with record(model) as rec:
        model(torch.tensor([1]))
    assert [each["parameters"] for each in modules(rec).values()] == [20, 20, 20]


def test_roots_have_the_names_that_the_user_gives(record):
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 4)
    with record({"G": generator, "D": critic}) as rec:
        critic(generator(x()))
    assert paths(rec) == [("G", "", ""), ("D", "", "")]


def test_a_list_of_roots_is_numbered(record):
    roots = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with record(roots) as rec:
        roots[1](roots[0](x()))
    assert [each["name"] for each in modules(rec).values()] == ["Linear", "Linear#1"]


def test_a_shared_module_keeps_its_aliases_and_each_call_its_own_parent(record):
    model = TwoParents()
    with record(model) as rec:
        model(x())
    rows = modules(rec)
    shared = next(each for each in rows.values() if each["type"] == "Linear")
    assert (shared["path"], shared["aliases"]) == ("x.0", ["y.0"])
    calls = {call["call_id"]: call for call in rec.table("calls").to_pylist()}
    parents = [
        (call["nth"], rows[calls[call["parent_call_id"]]["module_id"]]["path"])
        for call in calls.values()
        if call["module_id"] == shared["module_id"]
    ]
    assert parents == [(0, "x"), (1, "y")]
    [x_tree, y_tree] = rec.module_tree().roots[0].children
    assert [child.path for child in x_tree.children] == ["x.0"]
    assert {child.path for child in y_tree.children} == {"y.0", "y.1"}


def test_a_module_that_calls_itself_has_a_call_for_each_time(record):
    model = Recursive()
    with record(model) as rec:
        model(x(), depth=2)
    calls = rec.table("calls").to_pylist()
    assert [(modules(rec)[call["module_id"]]["path"], call["nth"]) for call in calls] == [
        ("", 0),
        ("layer", 0),
        ("", 1),
        ("layer", 1),
        ("", 2),
        ("layer", 2),
    ]
    assert [call["parent_call_id"] for call in calls] == [None, 0, 0, 2, 2, 4]


def test_a_child_called_before_its_root_gets_its_name_when_the_root_comes(record):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    with record() as rec:
        model[0](x())
        model(x())
    assert paths(rec) == [
        ("Sequential#1", "0", "0"),
        ("Sequential#1", "0.0", "0.0"),
        ("Sequential#1", "", ""),
    ]


def test_a_child_registered_late_gets_its_path(record):
    model = Late()
    with record(model) as rec:
        model(x())
        model.late = nn.Sequential(nn.Linear(4, 4))
        model(x())
    assert ("Late", "late.0", "late.0") in paths(rec)
    assert modules(rec)[0]["parameters"] == 40


def test_modules_that_are_registered_nowhere_are_named_below_their_caller(record):
    model = Hidden()
    with record(model) as rec:
        for _ in range(3):
            model(x())
    assert [path for _, path, _ in paths(rec)] == ["", "(Linear#0)", "(Linear#1)", "(Softmax#0)"]
    assert len(modules(rec)) == 4


def test_an_unregistered_module_below_a_child_carries_the_whole_path(record):
    model = nn.Sequential(nn.Sequential(Hidden()))
    with record(model) as rec:
        model(x())
    assert ("Sequential", "0.0.(Softmax#0)", "0.0.(Softmax#0)") in paths(rec)


def test_an_entry_point_that_bypasses_hooks_finds_its_root(record):
    model = Encoder()
    with record() as rec:
        model.encode(x())
    assert [each["path"] for each in modules(rec).values()] == ["", "inner", "inner.0", "inner.1"]
    assert modules(rec)[0]["name"] == "Encoder"


@pytest.mark.parametrize("ops", [False, True])
def test_a_module_that_calls_others_before_it_is_one_is_no_root(record, ops):
    class Late(nn.Module):
        def __init__(self) -> None:
            self.bounds = Encoder()(x())  # a plain module has no attributes of its own yet, but may hold such
            super().__init__()
            self.inner = nn.Linear(4, 4)

    with record(ops=ops) as rec:
        Late().inner(x())
    assert {each["name"] for each in modules(rec).values() if each["path"] == ""} == {"Encoder", "Linear"}


def passing(function):
    """A decorator that does not say what it wraps."""

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Entries(nn.Module):
    """Has entry points whose first parameter is not called `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def other_name(this, x):
        return this.layer(x)

    def any_arguments(*args):
        return args[0].layer(args[1])

    @passing
    def decorated(this, x):
        return this.layer(x)

    @torch.no_grad()
    def without_gradients(this, x):
        return this.layer(x)

    def captured(this, x):
        return next((lambda y: this.layer(y))(each) for each in (x,))

    def with_parent(this, x):
        super().__init__  # noqa: B018 (makes `this` a cell)
        return this.layer(x)

    def in_pieces(this, x):
        yield this.layer(x)

    @property
    def answer(this):
        return this.layer(x())

    @staticmethod
    def static(model, x):
        return model.layer(x)


class Derived(Entries):
    def other_name(this, x):
        return super().other_name(x)


def run_layer(model, x):
    return model.layer(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda *, model: model.other_name(x()),
        lambda *, model: model.any_arguments(x()),
        lambda *, model: model.decorated(x()),
        lambda *, model: model.without_gradients(x()),
        lambda *, model: model.captured(x()),
        lambda *, model: model.with_parent(x()),
        lambda *, model: list(model.in_pieces(x())),
        lambda *, model: model.answer,
        lambda *, model: model.static(model, x()),
        lambda *, model: run_layer(model, x()),
        lambda *, model: types.MethodType(run_layer, model)(x()),
    ],
    ids=[
        "other_name", "any_arguments", "decorated", "without_gradients", "captured", "with_parent", "in_pieces",
        "answer", "static", "function", "bound",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Entries, Derived])
def test_a_function_that_has_the_root_as_its_first_argument_tells_it(record, kind, run):
    with record() as rec:
        run(model=kind())  # by name: it is no first argument of the lambda
    assert paths(rec) == [(kind.__name__, "layer", "layer")]


def test_a_first_argument_that_does_not_hold_the_module_is_no_root(record):
    def distill(teacher, student):
        student[0](x())

    with record() as rec:
        distill(Encoder(), nn.Sequential(nn.Linear(4, 4)))
    assert paths(rec) == [("Linear", "", "")]


def test_wrapper_parts_are_stripped_and_kept_in_the_raw_path(record):
    model = nn.Sequential(nn.Linear(4, 4))
    with record() as rec:
        torch.compile(model, backend="eager")(x())
        nn.DataParallel(model)(x())
    rows = modules(rec)
    assert {(each["path"], each["raw_path"]) for each in rows.values()} >= {
        ("", "_orig_mod"),
        ("0", "_orig_mod.0"),
    }
    assert not any("module" in each["path"] for each in rows.values())


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_wrapper_met_later_takes_the_place_of_the_root_that_was_given(record, wrap):
    model = nn.Sequential(nn.Linear(4, 4))
    with record(model) as rec:
        model(x())
        wrapper = wrap(model)
        wrapper(x())
    rows = list(modules(rec).values())
    (root,) = (each for each in rows if each["root_id"] == each["module_id"])
    assert (root["type"], root["name"]) == (type(wrapper).__name__, "Sequential")
    assert {each["root_id"] for each in rows} == {root["module_id"]}
    assert {each["path"] for each in rows} == {"", "0"}


def test_a_given_root_stays_one_in_a_model_that_is_no_wrapper(record):
    encoder = nn.Sequential(nn.Linear(4, 4))
    with record(encoder) as rec:
        encoder(x())
        nn.Sequential(encoder)(x())
    roots = {each["name"] for each in modules(rec).values() if each["root_id"] == each["module_id"]}
    assert roots == {"Sequential", "Sequential#1"}


def test_a_module_registered_in_itself_is_no_endless_path(record):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].up = model
    with record(model) as rec:
        model(x())
    assert [path for _, path, _ in paths(rec)] == ["", "0"]


def test_two_thousand_modules_deep_are_named(record):
    top = inner = nn.Module()
    for _ in range(2000):
        inner.child = nn.Module()
        inner = inner.child
    with record(top) as rec:
        pass
    assert len(modules(rec)) == 2001


def test_a_module_that_defines_equality_and_bool_is_no_trouble(record):
    class Odd(nn.Module):
        def __eq__(self, other):
            raise AssertionError("nobody may compare me")

        __hash__ = None

        def __bool__(self):
            raise AssertionError("nor ask me")

        def __len__(self):
            raise AssertionError("nor count me")

        def forward(self, x):
            return x + 1

    model = nn.Sequential()
    model._modules["odd"] = Odd()
    model.forward = lambda value: model._modules["odd"](value)
    with record(backward_times=True) as rec:
        model(x())
    assert [path for _, path, _ in paths(rec)] == ["", "odd"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("resnet", "model is not a torch.nn.Module but 'resnet'. Give a module, a dict of named modules,"),
        (Path("run"), "or None to have the roots found. A folder to write to is given as to=."),
        (nn.Linear, "model is not a torch.nn.Module but the class Linear itself, not an instance."),
        ({"G": 3}, "model['G'] is not a torch.nn.Module but 3."),
        ([nn.Identity(), None], "model[1] is not a torch.nn.Module but None."),
        ({}, "model is not a torch.nn.Module but {}."),
    ],
)
def test_what_is_no_module_is_refused_by_name(model, text):
    with pytest.raises(TypeError) as caught:
        modtrace.record(model)
    assert text in str(caught.value)


class First(nn.Module):
    def forward(self, x):
        return x * 2


class Second(nn.Module):
    def forward(self, x):
        return x * 3


def test_module_at_the_address_of_a_dead_one_is_another(record):
    """CPython gives the memory of an object that has died to the next of its size."""
    addresses = []
    with record() as rec:
        for kind in (First, Second) * 3:
            module = kind()
            addresses.append(id(module))
            module(x())
            del module
    assert len(set(addresses)) < 6
    names = [(row["name"], row["type"]) for row in modules(rec).values()]
    assert names == [("First", "First"), ("Second", "Second")]
    calls = [rec.table("calls")["module_id"].to_pylist()]
    assert calls == [[0, 1, 0, 1, 0, 1]]


def test_child_at_the_address_of_a_dead_one_is_another(record):
    class Parent(nn.Module):
        def forward(self, x):
            for kind in (First, Second, First):
                x = kind()(x)
            return x

    parent = Parent()
    with record() as rec:
        parent(x())
        parent(x())
    assert paths(rec) == [
        ("Parent", "", ""), ("Parent", "(First#0)", "(First#0)"), ("Parent", "(Second#0)", "(Second#0)")
    ]  # fmt: skip
    assert rec.table("calls")["module_id"].to_pylist() == [0, 1, 2, 1, 0, 1, 2, 1]


def test_sizes_of_a_module_do_not_become_those_of_a_dead_one(record):
    with record() as rec:
        nn.Linear(4, 4)(x())
        for width in (1, 2, 3):
            nn.Sequential(nn.Linear(4, width))(x())
    found = [(row["type"], row["parameters"]) for row in modules(rec).values()]
    assert found == [
        ("Linear", 20), ("Sequential", 5), ("Linear", 5), ("Sequential", 10), ("Linear", 10),
        ("Sequential", 15), ("Linear", 15),
    ]  # fmt: skip


def test_replica_at_the_address_of_a_dead_one_is_a_replica_of_its_own_original(record):
    models = [nn.Linear(4, 4), nn.Linear(4, 2)]
    with record(models) as rec:
        for _ in range(3):
            for model in models:
                model._replicate_for_data_parallel().forward  # noqa: B018
                replica = model._replicate_for_data_parallel()
                replica._is_replica = True
                replica._parameters = dict(model._parameters)
                replica(x())
                del replica
    assert rec.table("calls")["module_id"].to_pylist() == [0, 1] * 3
    assert len(rec.table("modules")) == 2
