"""A tracker leaves nothing behind, hides from the user's modes, and survives what users do."""

import copy
import gc
import io
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.collect.scopes import process
from modtrace.collect.stash.gradients import OutputGradients
from modtrace.errors import ModtraceWarning
from modtrace.tensor_tracker import Event, Stash, Tracker, track
from zoo import Twice


class Wanted(Exception):
    """What a test raises."""


def names(tracker: Tracker) -> list[tuple[str, bool]]:
    return [(each.name, each.grad) for each in tracker]


@pytest.mark.parametrize("error", [Wanted, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["body", "forward", "backward"])
def test_every_hook_is_gone_after_an_exception(error: type[BaseException], where: str) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if where == "forward":
                raise error
            y = x * 2
            if where == "backward":
                y.register_hook(raises)
            return y * 2

    def raises(gradient: Any) -> None:
        raise error

    model, x = nn.Sequential(Twice(), Raises()), torch.ones(1, 4, requires_grad=True)
    with pytest.raises(error), track(model, strict=True) as tracker:
        model(x).sum().backward()
        raise error
    assert process.current() is None
    assert not x._backward_hooks
    assert str(tracker).endswith("tracking=0)")
    assert ("1", False) not in names(tracker) or where != "forward"


def test_call_that_an_exception_leaves_is_not_stashed_and_one_that_returns_none_is() -> None:
    class Maybe(nn.Module):
        def forward(self, fails: bool) -> None:
            if fails:
                raise Wanted

    model = Maybe()
    with track(model, strict=True) as tracker:
        model(False)
        with pytest.raises(Wanted):
            model(True)
        try:
            raise Wanted
        except Wanted:
            model(False)  # while another exception is handled
    assert [each.value for each in tracker] == [None, None]


def test_gradients_of_a_backward_that_fails_are_not_told_in_the_next() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x * 2
            return y.sin(), y

    model, x = Two(), torch.ones(1, requires_grad=True)
    with track(model, strict=True) as tracker:
        a, b = model(x)
        handle = a.grad_fn.register_hook(lambda *gradients: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (a + b).sum().backward(retain_graph=True)
        handle.remove()
        assert [each for each in tracker if each.grad] == []
        (3 * b).sum().backward()
    [stash] = [each for each in tracker if each.grad]
    assert stash.value[0] is None
    assert stash.value[1].item() == 3


def test_what_a_function_for_stashes_raises_comes_to_the_caller_and_training_may_go_on() -> None:
    failing = {"forward": True, "backward": True}

    def keep(event: Event) -> Stash:
        if failing["backward" if event.grad else "forward"]:
            raise Wanted
        return Stash(event.name, event.type, event.grad, None)

    model = Twice()
    with track(model, stash=keep, strict=True) as tracker:
        with pytest.raises(Wanted):
            model(torch.ones(1, 4))
        failing["forward"] = False
        loss = model(torch.ones(1, 4)).sum()
        with pytest.raises(Wanted):
            loss.backward()
        failing["backward"] = False
        model(torch.ones(1, 4)).sum().backward()
    assert names(tracker)[-3:] == [("", True), ("layer", True), ("layer", True)]
    assert process.current() is None


def test_unregister_inside_of_a_hook_and_inside_of_a_forward_ends_it() -> None:
    model = Twice()
    tracker = track(model, strict=True)
    model.layer.register_forward_hook(lambda *given: tracker.unregister())
    model(torch.ones(1, 4)).sum().backward()
    assert process.current() is None
    assert len(tracker) <= 1

    model = Twice()
    tracker = track(model, strict=True, stash=lambda event: tracker.unregister() if event.grad else event)
    model(torch.ones(1, 4)).sum().backward()
    assert process.current() is None
    assert len(tracker) == 4


def test_tracker_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputGradients, "__init__", interrupted)
    tracker = Tracker(strict=True)
    with pytest.raises(KeyboardInterrupt):
        tracker.register(nn.ReLU())
    assert process.current() is None
    assert str(tracker) == "Tracker(stashes=0, tracking=0)"


def test_forked_child_stashes_no_gradient_of_a_graph_that_it_has_inherited() -> None:
    model = nn.Linear(2, 2)
    with track(model, strict=True) as tracker:
        loss = model(torch.ones(2)).sum()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                loss.backward()
                os.write(write, bytes([len(tracker), model.weight.grad is not None]))
            finally:
                os._exit(0)
        os.close(write)
        assert list(os.read(read, 2)) == [1, True]
        os.close(read)
        os.waitpid(child, 0)
        loss.backward()
    assert names(tracker) == [("", False), ("", True)]


def test_nested_trackers_are_independent() -> None:
    model = Twice()
    with track(model, strict=True) as outer:
        with track(model, include="layer", strict=True) as inner:
            loss = model(torch.ones(1, 4)).sum()
        loss.backward()
    assert names(inner) == [("layer", False)] * 2
    assert names(outer) == [("layer", False)] * 2 + [("", False), ("", True)] + [("layer", True)] * 2


def test_modes_of_the_user_see_none_of_our_ops() -> None:
    def seen(tracked: bool) -> tuple[list[str], list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
        tracker = track(model, strict=True) if tracked else None
        with SeesOps() as ops, SeesFunctions() as functions:
            model(torch.ones(3, 1, 2)).sum().backward()
        if tracker is not None:
            assert len(tracker) == 6
            tracker.unregister()
        return ops.seen, functions.seen

    assert seen(True) == seen(False)


def test_graph_and_tensors_die_as_they_would_without_a_tracker() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.LSTM(4, 4),
    )
    alive: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        with track(model, stash_value=lambda t: t.shape, strict=True) as tracker:
            for backward in (True, False):
                x = torch.ones(2, 4, requires_grad=True)
                hidden = x * 2
                out, (h, c) = model(hidden)
                alive += [weakref.ref(each) for each in (hidden, out, h, c)]
                if backward:
                    out.sum().backward()
                del out, h, c, hidden, x
                assert [each() for each in alive] == [None] * len(alive)
            assert len(tracker._collector._gradients._runs) == 0
            assert len(list(tracker._collector._gradients._watches.items())) == 0
    finally:
        gc.enable()


def test_cleared_stashes_are_let_go() -> None:
    model = nn.Linear(2, 2)
    with track(model, strict=True) as tracker, torch.no_grad():
        model(torch.ones(2))
        value = weakref.ref(tracker[0].value)
        tracker.clear()
        assert value() is None


def test_memory_of_a_tracker_does_not_grow_with_steps() -> None:
    model = Twice()
    with track(model, stash_value=lambda t: None, strict=True) as tracker:
        sizes = []
        for _ in range(300):
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
            tracker.clear()
            collector = tracker._collector
            sizes.append(
                (
                    len(collector.steps._labelled),
                    len(collector.steps._steps),
                    len(list(collector._gradients._watches.items())),
                )
            )
            assert (
                len(collector._gradients._watches._items) <= 16
            )  # dead ones are swept when there are so many
    assert max(sizes[200:]) <= max(sizes[:100])
    assert max(sizes)[0] < 70


def test_memory_of_a_tracker_does_not_grow_where_no_backward_runs() -> None:
    model = nn.Linear(2, 2)
    with track(model, stash_value=lambda t: None, strict=True) as tracker, torch.no_grad():
        steps = tracker._collector.steps
        for _ in range(300):
            model(torch.ones(2))
            assert max(len(steps._labelled), len(steps._steps)) <= 70


def test_threads_have_their_own_calls_and_no_stash_is_lost() -> None:
    model = Twice()
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for _ in range(20):
            x = torch.full((1, 4), float(number), requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)

    with track(model, strict=True) as tracker:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counted = {each: names(tracker).count(each) for each in set(names(tracker))}
    assert counted == {("layer", False): 160, ("", False): 80, ("layer", True): 160, ("", True): 80}
    assert {each.phase for each in tracker} == {"forward", "backward"}


def test_model_and_outputs_can_be_copied_and_saved_while_tracked() -> None:
    model = Twice()
    with track(model, strict=True) as tracker:
        out = model(torch.ones(1, 4))
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save({"model": model, "out": out.detach(), "with graph": out}, file)
        copied(torch.ones(1, 4))
    assert len(tracker) == 3
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)["out"], out)


def test_transforms_of_functions_are_stashed_as_plain_tensors() -> None:
    model = nn.Linear(2, 2)
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    batch = torch.randn(3, 2)
    with track(model, strict=True) as tracker:
        torch.func.grad(loss)(parameters, batch[0])
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)
    for each in tracker:
        assert not torch._C._functorch.is_functorch_wrapped_tensor(each.first_value)
    assert torch.equal(tracker[0].value, model(batch[0]))
    whole = next(each for each in tracker if not each.grad and each.value.shape == (3, 2))
    assert torch.allclose(whole.value, model(batch))


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_traced_model_has_no_op_of_ours() -> None:
    def kinds(tracked: bool) -> list[str]:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        tracker = track(model, strict=True) if tracked else Tracker()
        graph = torch.jit.trace(model, torch.ones(1, 2)).inlined_graph
        tracker.unregister()
        assert bool(len(tracker)) == tracked
        return [node.kind() for node in graph.nodes()]

    assert kinds(True) == kinds(False)


def test_internal_error_ends_the_tracking_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Twice()

    def fails(*given: Any) -> None:
        raise LookupError("lost")

    with track(model) as tracker:
        monkeypatch.setattr(tracker._collector._gradients, "wait_for", fails)
        with pytest.warns(
            ModtraceWarning, match=r"layer: modtrace met an internal error and stashes nothing more"
        ):
            model(torch.ones(1, 4)).sum().backward()
    assert len(tracker) == 1
    with track(model, strict=True) as tracker, pytest.raises(LookupError):
        monkeypatch.setattr(tracker._collector._gradients, "wait_for", fails)
        model(torch.ones(1, 4))


def test_module_without_a_usual_hash_or_equality_is_tracked() -> None:
    class Odd(nn.Module):
        __hash__ = None

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = Odd()
    with Tracker(strict=True) as tracker:
        tracker.register(model, "odd")
        model(torch.ones(1))
    assert names(tracker) == [("odd", False)]
