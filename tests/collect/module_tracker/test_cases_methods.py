"""Methods of modules that run no hooks."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn

from helpers.asked import GLOBAL
from helpers.tracker_runs import (
    M_TRAINS,
    MARKS,
    M,
    asked,
    asked_in_threads,
    compiled_graphs,
    loss_of,
    replicas_of,
    train,
)
from modtrace import ModuleTracker

pytestmark = MARKS


# Methods.


class Encoder(nn.Module):
    """Has entry points that are no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def encode(self, x):
        return self.l(x).tanh()

    def generate(self, x):
        return self.encode(x).relu()

    def forward(self, x):
        return self.encode(x).mul(2)


@pytest.fixture
def plain_classes() -> Iterator[None]:
    """The classes have their own methods again, whatever a test has left there."""
    kept = {kind: dict(vars(kind)) for kind in (Encoder, Louder)}
    yield
    for kind, members in kept.items():
        kind.encode = members["encode"]


ENCODE_FORWARD = [
    "addmm forward: Encoder Encoder.encode() Encoder.l",
    "tanh forward: Encoder Encoder.encode()",
]


ENCODE_BACKWARD = [
    "tanh_backward backward: Encoder Encoder.encode()",
    "mm backward: Encoder Encoder.encode() Encoder.l",
]


def test_scope_of_a_module_stands_below_it_and_opens_it():
    model = Encoder()
    tracker = ModuleTracker(strict=True)

    def run() -> None:
        with tracker.scope("encode", model):
            output = model.l(torch.ones(2, 4)).tanh()
            assert tracker.stack == ("Encoder", "Encoder.encode")
            assert tracker.paths == ("", "encode")
        assert tracker.parents == {GLOBAL}
        output.sum().backward()

    assert asked(run, tracker) == [
        "addmm forward: Encoder Encoder.encode Encoder.l",
        "tanh forward: Encoder Encoder.encode",
        "tanh_backward backward: Encoder Encoder.encode",
        "mm backward: Encoder Encoder.encode Encoder.l",
    ]


def test_scope_of_a_module_that_runs_already_does_not_open_it_again():
    class Uses(Encoder):
        def forward(self, x):
            with tracker.scope("encode", self):
                return self.encode(x)

    with ModuleTracker(strict=True) as tracker:
        assert asked(lambda: train(Uses()), tracker) == [
            "addmm forward: Uses Uses.encode Uses.l",
            "tanh forward: Uses Uses.encode",
            "tanh_backward backward: Uses Uses.encode",
            "mm backward: Uses Uses.encode Uses.l",
        ]


def test_methods_are_scopes_of_their_module_in_forward_and_backward():
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode", "generate")
    assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
    assert asked(lambda: train(model.generate), tracker) == [
        "addmm forward: Encoder Encoder.generate() Encoder.encode() Encoder.l",
        "tanh forward: Encoder Encoder.generate() Encoder.encode()",
        "relu forward: Encoder Encoder.generate()",
        "threshold_backward backward: Encoder Encoder.generate()",
        "tanh_backward backward: Encoder Encoder.generate() Encoder.encode()",
        "mm backward: Encoder Encoder.generate() Encoder.encode() Encoder.l",
    ]


def test_method_called_by_the_forward_opens_no_second_module():
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    lines = asked(lambda: train(model), tracker)
    assert lines == [
        *ENCODE_FORWARD,
        "mul forward: Encoder",
        "mul backward: Encoder",
        *ENCODE_BACKWARD,
    ]


def test_method_of_a_child_stands_below_the_modules_that_run():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = Encoder()

        def forward(self, x):
            return self.enc.encode(x).relu()

    model = Holder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model.enc, "encode")
    assert asked(lambda: train(model), tracker) == [
        "addmm forward: Holder Holder.enc Holder.enc.encode() Holder.enc.l",
        "tanh forward: Holder Holder.enc Holder.enc.encode()",
        "relu forward: Holder",
        "threshold_backward backward: Holder",
        "tanh_backward backward: Holder Holder.enc Holder.enc.encode()",
        "mm backward: Holder Holder.enc Holder.enc.encode() Holder.enc.l",
    ]


def test_methods_given_inside_the_context_are_followed_at_once_and_until_removed():
    model = Encoder()
    with ModuleTracker(strict=True) as tracker:
        handle = tracker.methods(model, "encode")
        assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
        handle.remove()
        assert Encoder.encode.__code__.co_filename == __file__
        assert asked(lambda: model.encode(torch.ones(2, 4)), tracker)[1] == "tanh None:"
        handle.remove()


def test_methods_are_plain_before_and_after_and_followed_in_each_context():
    model = Encoder()
    plain = vars(Encoder)["encode"]
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    for _ in range(2):
        assert vars(Encoder)["encode"] is plain
        with tracker:
            assert vars(Encoder)["encode"] is not plain
            assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
        assert vars(Encoder)["encode"] is plain
    assert "encode" not in model.__dict__


def test_methods_that_are_none_are_refused():
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    with pytest.raises(AttributeError, match="decode"):
        tracker.methods(model, "decode")
    with pytest.raises(TypeError, match="'l'"):
        tracker.methods(model, "l")
    with pytest.raises(TypeError):
        tracker.methods(model)
    with pytest.raises(TypeError):
        tracker.methods("model", "encode")


def test_other_instances_of_the_class_are_not_followed():
    model, other = Encoder(), Encoder()
    tracker = ModuleTracker({"one": model, "other": other}, strict=True)
    tracker.methods(model, "encode")
    assert asked(lambda: train(other.encode), tracker) == [
        "addmm forward: other other.l",
        "tanh None:",
        "tanh_backward backward:",
        "mm backward: other other.l",
    ]


def test_both_of_two_instances_are_followed_when_both_are_given(plain_classes):
    model, other = Encoder(), Encoder()
    tracker = ModuleTracker(strict=True)
    first = tracker.methods(model, "encode")
    tracker.methods(other, "encode")
    with tracker:
        assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
        lines = [each.replace("Encoder", "Encoder#1") for each in ENCODE_FORWARD + ENCODE_BACKWARD]
        assert asked(lambda: train(other.encode), tracker) == lines
        first.remove()
        assert asked(lambda: train(other.encode), tracker) == lines
    assert Encoder.encode.__code__.co_filename == __file__


def test_copy_and_pickle_of_a_model_inside_the_context_are_models_of_their_own():
    model = Encoder()
    tracker = ModuleTracker(model, strict=True)
    tracker.methods(model, "encode")
    with tracker:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
        for each in copies:
            assert each.encode.__self__ is each
            assert "encode" not in each.__dict__
            lines = asked(lambda each=each: each.encode(torch.ones(2, 4)), tracker)
            assert lines[1] == "tanh None:"
        with torch.no_grad():
            model.l.weight.zero_()
            model.l.bias.zero_()
        assert model.encode(torch.ones(2, 4)).abs().sum() == 0
        assert copies[0].encode(torch.ones(2, 4)).abs().sum() > 0
    assert [each.encode(torch.ones(2, 4)).shape for each in copies] == [(2, 4)] * 3


class Louder(Encoder):
    """Overrides a method and calls the one it overrides."""

    def encode(self, x):
        return super().encode(x).mul(2)


LOUDER_LINES = [
    "addmm forward: Louder Louder.encode() Louder.l",
    "tanh forward: Louder Louder.encode()",
    "mul forward: Louder Louder.encode()",
    "mul backward: Louder Louder.encode()",
    "tanh_backward backward: Louder Louder.encode()",
    "mm backward: Louder Louder.encode() Louder.l",
]


def test_method_that_calls_the_one_it_overrides_is_one_scope_beside_an_instance_of_that_class(plain_classes):
    """The overridden one is wrapped too, for the other instance."""
    model, other = Louder(), Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(other, "encode")
    tracker.methods(model, "encode")
    with tracker:
        assert asked(lambda: train(model.encode), tracker) == LOUDER_LINES
        assert asked(lambda: train(other.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
    assert {each.encode.__code__.co_filename for each in (Louder, Encoder)} == {__file__}


class Inherits(Encoder):
    """Has its methods from its parent."""


def test_inherited_method_is_followed_and_inherited_again():
    model = Inherits()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        lines = [each.replace("Encoder", "Inherits") for each in ENCODE_FORWARD + ENCODE_BACKWARD]
        assert asked(lambda: train(model.encode), tracker) == lines
    assert "encode" not in vars(Inherits)


def test_method_that_stands_in_the_instance_is_followed_and_put_back():
    model = Encoder()
    model.encode = own_method = lambda x: model.l(x).tanh()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
    assert model.__dict__["encode"] is own_method


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    @staticmethod
    def squash(x):
        return x.tanh()

    @classmethod
    def scale(cls, x):
        assert cls is Static
        return x.mul(2)


def test_static_and_class_methods_are_followed_and_put_back():
    model = Static()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "squash", "scale")
    assert asked(lambda: model.scale(model.squash(torch.ones(2, 4))), tracker) == [
        "tanh forward: Static Static.squash()",
        "mul forward: Static Static.scale()",
    ]
    assert isinstance(vars(Static)["squash"], staticmethod)
    assert isinstance(vars(Static)["scale"], classmethod)
    assert {"squash", "scale"}.isdisjoint(model.__dict__)
    assert model.scale(model.squash(torch.zeros(2, 4))).sum() == 0


def test_method_keeps_its_signature_and_what_it_returns():
    class Documented(nn.Module):
        def encode(self, x, *, twice: bool = False):
            """Says something."""
            return (x, twice)

    model = Documented()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        assert model.encode(1, twice=True) == (1, True)
        assert (model.encode.__name__, model.encode.__doc__) == ("encode", "Says something.")
        assert Documented.encode(model, 2) == (2, False)


class Fails(Encoder):
    """Raises in the middle of a method."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.__dict__["error"] = error

    def encode(self, x):
        x = self.l(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt()], ids=["", "interrupt"])
def test_exception_in_a_method_closes_it_and_is_the_users(error):
    model, other = Fails(error), M()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode", "generate", "forward")
    with tracker:
        for call in (model.encode, model.generate, model.forward, model):
            with pytest.raises(type(error)) as raised:
                call(torch.ones(2, 4))
            assert raised.value is error
            if not isinstance(error, KeyboardInterrupt):
                assert tracker.parents == {GLOBAL}
        assert asked(lambda: train(other), tracker) == M_TRAINS


def test_methods_of_replicas_run_on_the_replica():
    """d11b: a method of the module that was given is followed in its replicas too, on their own parameters."""
    model = Encoder()
    tracker = ModuleTracker(model, strict=True)
    tracker.methods(model, "encode")
    with tracker:
        for replica in replicas_of(model, 2):
            assert replica.encode.__self__ is replica
            assert "encode" not in replica.__dict__
            assert asked(lambda replica=replica: replica.encode(torch.ones(2, 4)), tracker) == [
                "addmm forward: Encoder Encoder.encode() Encoder.l",
                "tanh forward: Encoder Encoder.encode()",
            ]
        lines = [
            "addmm forward: Encoder Encoder.encode() Encoder.l",
            "tanh forward: Encoder Encoder.encode()",
            "mul forward: Encoder",
        ]
        assert asked_in_threads(tracker, replicas_of(model, 2)) == [lines, lines]


def test_forward_called_directly_counts_as_a_call():
    model = Encoder()
    numbers: list[Any] = []
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "forward")
    lines = [
        "addmm forward: Encoder Encoder.l",
        "tanh forward: Encoder",
        "mul forward: Encoder",
        "mul backward: Encoder",
        "tanh_backward backward: Encoder",
        "mm backward: Encoder Encoder.l",
    ]
    with tracker:
        assert asked(lambda: train(model.forward), tracker) == lines
        model.zero_grad()
        assert asked(lambda: train(model), tracker) == lines
        model.zero_grad()
        model.l.register_forward_pre_hook(lambda *_: numbers.append(tracker.call.nth))
        train(model)
        train(model.forward)
        train(model)
    assert numbers == [0, 1, 2]


def test_methods_of_a_fully_compiled_model_make_no_break(dynamo):
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode", "forward")
    with tracker:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        train(compiled)
        assert compiled_graphs() == (1, {})
        lines = asked(lambda: train(compiled), tracker)
        assert compiled_graphs() == (1, {})
    assert lines == [
        "addmm forward: Encoder",
        "tanh forward: Encoder",
        "mul forward: Encoder",
        "mul backward: Encoder",
        "tanh_backward backward: Encoder",
        "mm backward: Encoder",
    ]


def test_compiled_method_of_a_followed_model_makes_no_break(dynamo):
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        compiled = torch.compile(model.encode, backend="aot_eager", fullgraph=True)
        train(compiled)
        train(compiled)
        assert compiled_graphs() == (1, {})


def test_user_hooks_hear_of_no_scope():
    model = M()
    heard: list[tuple[str, str]] = []

    def hear(kind: str) -> Callable[..., None]:
        return lambda module, *_: heard.append((kind, type(module).__name__))

    with ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(hear("pre_fw"), hear("post_fw"), hear("pre_bw"), hear("post_bw"))
        x = torch.ones(2, 4, requires_grad=True)
        with tracker.scope("loop"):
            with tracker.scope("loss"):
                loss = loss_of(model(x).mul(2))
            loss.backward()
    assert heard == [
        ("pre_fw", "M"),
        ("pre_fw", "Linear"),
        ("post_fw", "Linear"),
        ("post_fw", "M"),
        ("pre_bw", "M"),
        ("pre_bw", "Linear"),
        ("post_bw", "M"),  # both end at one node, and the input of both needs a gradient: outer before inner
        ("post_bw", "Linear"),
    ]


def test_user_hooks_hear_of_a_forward_that_is_called_directly():
    """It counts as a call of the module."""
    model = M()
    heard: list[tuple[str, str]] = []

    def hear(kind: str) -> Callable[..., None]:
        return lambda module, *_: heard.append((kind, type(module).__name__))

    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "forward")
    with tracker:
        tracker.register_user_hooks(hear("pre_fw"), hear("post_fw"), hear("pre_bw"), hear("post_bw"))
        train(model.forward, torch.ones(2, 4, requires_grad=True))
        directly = list(heard)
        heard.clear()
        train(model, torch.ones(2, 4, requires_grad=True))
    assert directly == heard
