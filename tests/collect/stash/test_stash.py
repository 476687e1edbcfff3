"""tensor_tracker's interface, behaviour by behaviour."""

import copy
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace import tensor_tracker
from modtrace.tensor_tracker import Event, Stash, Tracker, rmap_tensor, track


class Triple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


@dataclass
class Result:
    thing: Tensor
    status: str


class Structured(nn.Module):
    """Calls a part with keyword arguments alone, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.triple = Triple()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Result:
        return Result(thing=self.sigmoid(self.triple(x=x)), status="ok")


def tracked(**options: Any) -> tuple[Tracker, Tensor]:
    """A step of a model under a tracker, and the model's input."""
    model, x = Structured(), torch.linspace(-1, 1, 8, requires_grad=True)
    with track(model, strict=True, **options) as tracker:
        model(x).thing.backward(torch.full((8,), 1000.0))
    return tracker, x.detach()


def test_the_names_are_those_of_tensor_tracker() -> None:
    assert sorted(tensor_tracker.__all__) == [
        "Event",
        "Stash",
        "StashFn",
        "StashValueFn",
        "Tracker",
        "default_stash",
        "default_stash_value",
        "get_stash_fn",
        "rmap_tensor",
        "track",
    ]
    assert modtrace.track is tensor_tracker.track


def test_modules_are_registered_at_once_and_the_root_is_one_of_them() -> None:
    tracker = track(Structured())
    assert str(tracker) == "Tracker(stashes=0, tracking=6)"
    tracker.unregister()
    assert str(tracker) == "Tracker(stashes=0, tracking=0)"


def test_stashes_stay_when_the_block_has_ended_and_nothing_is_added() -> None:
    model, x = Structured(), torch.ones(2, requires_grad=True)
    with track(model) as tracker:
        out = model(x)
    model(x)
    out.thing.sum().backward()  # the graph of the block
    assert [(each.name, each.grad) for each in tracker] == [
        ("triple", False),
        ("sigmoid", False),
        ("", False),
    ]
    assert str(tracker) == "Tracker(stashes=3, tracking=0)"


def test_outputs_come_as_calls_end_and_gradients_in_reverse() -> None:
    tracker, _ = tracked()
    assert [(each.name, each.type, each.grad) for each in tracker] == [
        ("triple", Triple, False),
        ("sigmoid", nn.Sigmoid, False),
        ("", Structured, False),
        ("", Structured, True),
        ("sigmoid", nn.Sigmoid, True),
        ("triple", Triple, True),
    ]
    assert str(tracker) == "Tracker(stashes=6, tracking=0)"


def test_values_and_gradients_have_the_structure_of_the_output_and_its_bits() -> None:
    tracker, x = tracked()
    above, sigmoid = torch.full((8,), 1000.0), torch.sigmoid(x * 3)
    assert torch.equal(tracker[0].value, x * 3)
    assert torch.equal(tracker[1].value, sigmoid)
    [gradient] = tracker[3].value
    for value, expected in ((tracker[2].value, sigmoid), (gradient, above)):
        assert type(value) is Result
        assert torch.equal(value.thing, expected)
        assert value.status == "ok"
    assert torch.equal(tracker[4].first_value, above)
    assert torch.equal(tracker[5].first_value, above * (1 - sigmoid) * sigmoid)
    assert {type(each.value) for each in tracker[3:]} == {tuple}


def test_tracker_is_a_sequence() -> None:
    tracker, _ = tracked()
    assert len(tracker) == 6
    assert tracker[0] is tracker.stashes[0]
    assert tracker[-1].name == "triple"
    assert tracker[1:3] == tracker.stashes[1:3]
    assert list(tracker) == tracker.stashes
    with pytest.raises(IndexError):
        tracker[6]


def test_default_value_is_a_copy_without_graph() -> None:
    model, x = nn.ReLU(), torch.ones(3, requires_grad=True)
    with track(model) as tracker:
        out = model(x)
    with torch.no_grad():
        out.zero_()
    assert tracker[0].value.tolist() == [1, 1, 1]
    assert not tracker[0].value.requires_grad


@pytest.mark.parametrize(
    ("value", "expected"),
    [((1, 2), 1), ([(7,), 2], 7), ((), ()), (([],), []), ({"a": 1}, {"a": 1}), (3, 3), (("ab",), "ab")],
)
def test_first_value_is_the_first_of_tuples_and_lists(value: Any, expected: Any) -> None:
    assert Stash("", nn.Module, False, value).first_value == expected


def test_clear_forgets_the_stashes_and_tracking_goes_on() -> None:
    model = Structured()
    with track(model) as tracker:
        model(torch.ones(2))
        tracker.clear()
        assert str(tracker) == "Tracker(stashes=0, tracking=6)"
        model(torch.ones(2))
        assert len(tracker) == 3


def test_stash_value_is_applied_to_each_tensor() -> None:
    tracker, x = tracked(stash_value=lambda t: t.std().cpu().detach())
    assert tracker[0].value == (3 * x).std()
    assert [each.first_value.ndim for each in tracker if isinstance(each.first_value, Tensor)] == [0] * 4
    assert tracker[2].value.status == "ok"


def test_stash_gets_the_event_with_arguments_and_may_add_to_its_stash() -> None:
    events: list[Event] = []

    def keep(event: Event) -> Stash:
        events.append(event)
        made = tensor_tracker.default_stash(event, tensor_tracker.default_stash_value)
        made.args = rmap_tensor(event.args, tensor_tracker.default_stash_value)
        made.kwargs = rmap_tensor(event.kwargs, tensor_tracker.default_stash_value)
        return made

    tracker, x = tracked(stash=keep)
    assert torch.equal(tracker[0].kwargs["x"], x)
    assert tracker[0].args == ()
    assert torch.equal(tracker[1].args[0], 3 * x)
    assert [(each.name, each.type, each.grad) for each in events] == [
        (each.name, each.type, each.grad) for each in tracker
    ]
    assert (events[3].args, events[3].kwargs) == ((), {})
    assert list(tracker.to_frame().columns) == ["name", "type", "grad", "args", "kwargs", "std"]


def test_stash_and_stash_value_together_are_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"^stash_value= and stash= are both given\. Give one"):
        track(Structured(), stash=lambda event: event, stash_value=lambda t: t)
    with pytest.raises(ValueError, match=r"^stash_value= and stash= are both given"):
        tensor_tracker.get_stash_fn(lambda t: t, lambda event: event)


def test_stash_fn_without_arguments_copies() -> None:
    event = Event("a", nn.ReLU, False, [torch.ones(2), "b"], (), {})
    stash = tensor_tracker.get_stash_fn()(event)
    assert (stash.name, stash.type, stash.grad, stash.value[1]) == ("a", nn.ReLU, False, "b")
    assert stash.value[0] is not event.value[0]
    assert tensor_tracker.get_stash_fn(stash_value=lambda t: t.numel())(event).value == [2, "b"]


def test_stash_is_made_again_of_its_dict() -> None:
    tracker, _ = tracked(stash_value=lambda t: t.numel())
    assert [Stash(**each.__dict__) for each in tracker] == list(tracker)
    again = Stash(**tracker[3].__dict__)
    assert (again.step, again.phase, again.call) == (0, "backward", 0)


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_saved_tracker_has_the_stashes_and_tracks_nothing(again) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with modtrace.track(model, stash_value=lambda tensor: tensor.detach().clone()) as tracker:
        model(torch.randn(1, 2)).sum().backward()
        copied = again(tracker)
    assert str(copied) == "Tracker(stashes=6, tracking=0)"
    assert [(each.name, each.grad) for each in copied] == [(each.name, each.grad) for each in tracker]
    assert torch.equal(copied[0].value, tracker[0].value)
    assert copied[0].value is not tracker[0].value
    assert [(each.step, each.phase, each.call) for each in copied][3:] == [(0, "backward", 0)] * 3
    with copied:  # it may be used on
        copied.register(model[0], "first")
        model(torch.randn(1, 2))
    assert [(each.name, each.grad) for each in copied[6:]] == [("first", False)]


# Registering by hand.


def test_bare_tracker_stashes_what_is_registered_by_hand() -> None:
    model, x = Structured(), torch.ones(2, requires_grad=True)
    tracker = Tracker()
    tracker.register(model.triple, "a")
    tracker.register(model.sigmoid, "b", grad=False)
    tracker.register(model)
    assert str(tracker) == "Tracker(stashes=0, tracking=5)"
    model(x).thing.sum().backward()
    tracker.unregister()
    model(x)
    assert [(each.name, each.grad) for each in tracker] == [
        ("a", False), ("b", False), ("", False), ("", True), ("a", True),
    ]  # fmt: skip


def test_module_registered_twice_has_a_stash_under_each_name() -> None:
    model, x = nn.ReLU(), torch.ones(2, requires_grad=True)
    with Tracker(strict=True) as tracker:
        tracker.register(model, "a")
        tracker.register(model, "b")
        (model(x) * 2).sum().backward()
    assert [(each.name, each.grad) for each in tracker] == [
        ("a", False), ("b", False), ("a", True), ("b", True),
    ]  # fmt: skip


def test_what_is_no_module_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"^register\(module=3\): give a torch.nn.Module$"):
        Tracker().register(3)


def test_module_is_not_kept_alive() -> None:
    tracker = Tracker()
    tracker.register(nn.Linear(2, 2), "gone")
    other = nn.Linear(2, 2)  # may well have the place in memory of the first
    other(torch.ones(2))
    tracker.unregister()
    assert len(tracker) == 0


def test_list_of_stashes_may_be_replaced() -> None:
    model = nn.ReLU()
    with track(model) as tracker:
        model(torch.ones(1))
        first, tracker.stashes = tracker.stashes, []
        model(torch.ones(1))
    assert (len(first), len(tracker)) == (1, 1)


# Frames.


def test_frame_has_a_row_for_each_stash() -> None:
    tracker, x = tracked()
    frame = tracker.to_frame()
    assert list(frame.columns) == ["name", "type", "grad", "std"]
    assert frame["name"].tolist() == ["triple", "sigmoid", "", "", "sigmoid", "triple"]
    assert frame["type"].tolist()[1:3] == ["torch.nn.modules.activation.Sigmoid", f"{__name__}.Structured"]
    assert frame["grad"].tolist() == [False] * 3 + [True] * 3
    assert frame["std"][0] == (3 * x).std().item()
    assert frame["std"].isna().tolist() == [False, False, True, True, False, False]


def test_column_has_the_name_of_the_statistic_or_the_one_given() -> None:
    tracker, _ = tracked()
    assert list(tracker.to_frame(torch.mean).columns)[-1] == "mean"
    assert list(tracker.to_frame(lambda t: t.abs().max(), "absmax").columns)[-1] == "absmax"
    assert tracker.to_frame(torch.numel, stat_name="n")["n"][0] == 8


def test_frame_tells_where_when_asked_to() -> None:
    tracker, _ = tracked()
    frame = tracker.to_frame(where=True)
    assert list(frame.columns) == ["name", "type", "grad", "std", "step", "phase", "call"]
    assert frame["step"].tolist() == frame["call"].tolist() == [0] * 6
    assert frame["phase"].tolist() == ["forward"] * 3 + ["backward"] * 3


def test_frame_without_stashes_has_its_columns() -> None:
    assert list(Tracker().to_frame().columns) == ["name", "type", "grad", "std"]
    assert list(Tracker().to_frame(where=True).columns)[4:] == ["step", "phase", "call"]


class Odd(nn.Module):
    """Returns what has no standard deviation in torch, or nothing at all."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1, 3]), 2**0.5),
        (torch.tensor([True, False]), 0.5**0.5),
        (torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn), 2**0.5),
        (torch.tensor([1j, 3j]), 2**0.5),
        (torch.empty(0), None),
        (torch.ones(1), None),
        (torch.tensor([1.0, float("nan")]), None),
        (None, None),
        ("text", None),
        ({"a": torch.ones(2)}, None),
        ((), None),
    ],
    ids=repr,
)
def test_any_output_has_a_row(value: Any, expected: float | None) -> None:
    model = Odd(value)
    with track(model, strict=True) as tracker:
        model()
    [found] = tracker.to_frame()["std"].tolist()
    assert pandas.isna(found) if expected is None else found == pytest.approx(expected)


def test_statistic_that_raises_raises() -> None:
    tracker, _ = tracked()
    with pytest.raises(ZeroDivisionError):
        tracker.to_frame(lambda t: 1 / 0)


# Names of modules.


def test_shared_module_has_the_first_of_its_names() -> None:
    layer = nn.ReLU()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with track(model) as tracker:
        assert str(tracker) == "Tracker(stashes=0, tracking=6)"
        model(torch.ones(1))
    assert [each.name for each in tracker] == ["0", "1", "0", ""]


def test_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "track.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert capsys.readouterr().out.startswith(
        "Tracker(stashes=8, tracking=0)\n[('1', True, (3, 8)), ('0', True, (3, 8))]\n"
    )
    assert [each.inputs for each in names["kept"]] == [((3, 4),), ((3, 8),), ((3, 8),), ((3, 4),)]
