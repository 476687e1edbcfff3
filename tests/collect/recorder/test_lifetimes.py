"""A recording, of ops too, keeps nothing of the run alive, stays small, and leaves nothing behind in the run."""

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
import zoo
from collect.ops.test_ops_steps import small_step
from helpers.ours import assert_bounded, objects_of_ours, settled
from helpers.twins import bits, grads
from modtrace.collect.backward.graph_watch import GraphWatch
from zoo import TiedGPT

CHECKPOINTS = pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"]
)
BACKWARD_TIMES = pytest.mark.parametrize("backward_times", [False, True], ids=["", "backward times"])
OPTIONS: dict[str, dict[str, Any]] = {
    "values": {},
    "backward times": {"backward_times": True},
    "ops": {"ops": True, "values": None},
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Only reference counts free anything, as fast as they can."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Deaths:
    """When the outputs of a model's modules, and what autograd saved of them, were freed."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._born: dict[str, int] = {}

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.follow(name, output)

        return hook

    def follow(self, name: str, value: Any) -> Any:
        number = self._born[name] = self._born.get(name, -1) + 1
        weakref.finalize(value, self.order.append, f"{name}@{number}")
        return value

    def mark(self, what: str) -> None:
        self.order.append(f"-- {what}")

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Follows what autograd saves inside."""

        class Packed:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor = tensor

        def pack(tensor: torch.Tensor) -> Packed:
            packed: Packed = self.follow("saved", Packed(tensor))
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            yield


def deaths_of(run: Callable[[Deaths], None], recording: Any) -> list[str]:
    torch.manual_seed(0)
    deaths = Deaths()
    with recording:
        run(deaths)
        deaths.mark("end")
    return list(deaths.order)


def assert_same_deaths(run: Callable[[Deaths], None], **options: Any) -> list[str]:
    plain = deaths_of(run, nullcontext())
    recording = modtrace.record(strict=True, **options)
    assert deaths_of(run, recording) == plain
    assert recording.meta.marks == ()
    return plain


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@CHECKPOINTS
def test_activations_of_a_training_run_die_in_the_same_order(reentrant, options):
    def run(deaths: Deaths) -> None:
        model = TiedGPT(layers=2)
        deaths.watch(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            tokens = torch.randint(0, 17, (2, 8))
            optimizer.zero_grad()
            logits = model(tokens, reentrant)
            deaths.mark("forward")
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            del logits
            deaths.mark("loss")
            loss.backward()
            deaths.mark("backward")
            optimizer.step()
            del loss
            deaths.mark("step")

    plain = assert_same_deaths(run, **options)
    assert len(plain) > 50


@BACKWARD_TIMES
def test_what_autograd_saved_dies_in_the_same_order(backward_times):
    def run(deaths: Deaths) -> None:
        model = TiedGPT(layers=2)
        for _ in range(2):
            with deaths.saved():
                loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
            deaths.mark("forward")
            loss.backward()
            deaths.mark("backward")
        del loss

    plain = assert_same_deaths(run, backward_times=backward_times)
    assert len(plain) > 50


def test_outputs_without_gradients_die_in_the_same_order():
    def run(deaths: Deaths) -> None:
        model = TiedGPT(layers=2)
        deaths.watch(model)
        with torch.no_grad():
            model(torch.zeros(2, 8, dtype=torch.long))
        deaths.mark("no_grad")
        with torch.inference_mode():
            model(torch.zeros(2, 8, dtype=torch.long))

    assert_same_deaths(run)


def test_what_dies_at_which_statement_stays_the_same():
    def run(deaths: Deaths) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        deaths.watch(model)
        for runs_backward in (True, False):
            with deaths.saved():
                x = deaths.follow("x", torch.ones(2, 4))
                hidden = deaths.follow("hidden", x * 2)
                del x
                deaths.mark("input")
                loss = model(hidden).sum()
                del hidden
                deaths.mark("forward")
                if runs_backward:
                    loss.backward()
                    deaths.mark("backward")
                del loss
                deaths.mark("loss")
        with torch.no_grad():
            model(deaths.follow("x", torch.ones(2, 4)))
        deaths.mark("evaluation")

    # Within one `del` torch frees a graph in another order if anyone has as much as read `grad_fn` of one of its
    # tensors (2.13), and so do we; what dies at which `del` stays the same.
    plain = by_mark(deaths_of(run, nullcontext()))
    for options in (*OPTIONS.values(), {"values": None}, {"ops": True}):
        assert by_mark(deaths_of(run, modtrace.record(strict=True, **options))) == plain
    assert sum(map(len, plain)) > 15


def by_mark(order: list[str]) -> list[list[str]]:
    """What died between two marks, sorted."""
    found: list[list[str]] = [[]]
    for each in order:
        if each.startswith("-- "):
            found.append([])
        else:
            found[-1].append(each)
    return [sorted(each) for each in found]


@BACKWARD_TIMES
def test_inputs_of_autograd_grad_die_in_the_same_order(backward_times):
    def run(deaths: Deaths) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        deaths.watch(model)
        for _ in range(2):
            x = deaths.follow("x", torch.ones(2, 4)).requires_grad_()
            hidden = deaths.follow("hidden", x * 2)
            value = model(hidden).sum()
            slopes = torch.autograd.grad(value, [x, hidden], create_graph=True)
            del x, hidden, value
            deaths.mark("first")
            (slopes[0].norm() + slopes[1].norm()).backward()
            del slopes
            deaths.mark("second")

    assert_same_deaths(run, backward_times=backward_times)


def test_locals_of_a_method_that_runs_a_model_die_in_the_same_order():
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def encode(self, deaths: Deaths) -> torch.Tensor:
            large = deaths.follow("large", torch.ones(2, 4))
            hidden = self.layer(large)
            del large
            deaths.mark("encoded")
            return hidden

    def run(deaths: Deaths) -> None:
        model = Trainer()
        for _ in range(2):
            model.encode(deaths).sum().backward()
            deaths.mark("backward")

    assert_same_deaths(run)


def test_locals_of_a_function_that_is_given_a_model_die_in_the_same_order():
    def encode(*given: Any) -> torch.Tensor:
        model, deaths = given
        large = deaths.follow("large", torch.ones(2, 4))
        hidden = model[0](large)
        del large
        deaths.mark("encoded")
        return hidden

    def run(deaths: Deaths) -> None:
        for _ in range(2):
            encode(nn.Sequential(nn.Linear(4, 4)), deaths).sum().backward()
            deaths.mark("backward")

    assert_same_deaths(run)


def test_an_exception_of_a_module_frees_the_same():
    def run(deaths: Deaths) -> None:
        model = zoo.Failing(ValueError("on purpose"))
        deaths.watch(model)
        for _ in range(2):
            try:
                model(deaths.follow("x", torch.ones(3, 4)))
            except ValueError:
                deaths.mark("caught")
            deaths.mark("left")
            model.error = ValueError("a fresh one")

    assert_same_deaths(run)


# What a method keeps in `locals()` is the user's.


def test_locals_that_a_method_keeps_stay_as_they_are():
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def run(self, width: int) -> dict[str, Any]:
            options = locals()
            self.layer(torch.ones(2, width))
            return options

    with modtrace.record(strict=True):
        trainer = Trainer()
        options = trainer.run(4)
    assert options["self"] is trainer
    assert options["width"] == 4


# Modules.


@BACKWARD_TIMES
@CHECKPOINTS
def test_model_dies_with_its_last_name_while_the_recording_runs(reentrant, backward_times):
    with modtrace.record(strict=True, backward_times=backward_times):
        model = TiedGPT(layers=1)
        watched = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
        for _ in range(2):
            loss = model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum()
            loss.backward()
            model.zero_grad()
        del loss, model
        assert [each() for each in watched if each() is not None] == []


def test_given_model_dies_with_its_last_name_while_the_recording_runs():
    model = TiedGPT(layers=1)
    watched = weakref.ref(model)
    with modtrace.record(model, strict=True) as rec:
        del model
        assert watched() is None
        assert rec.table("calls").num_rows == 0


def test_given_model_dies_where_its_recording_is_never_entered():
    model = TiedGPT(layers=1)
    watched = weakref.ref(model)
    rec = modtrace.record(model)
    del model
    assert watched() is not None  # it is still to be recorded
    del rec
    assert watched() is None


# What stays.


@CHECKPOINTS
def test_nothing_of_ours_is_left_when_the_recording_is_gone(tmp_path, reentrant):
    before = objects_of_ours()
    model = TiedGPT(layers=2)
    with modtrace.record(model, to=tmp_path / "run.modtrace", strict=True, backward_times=True) as rec:
        model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum().backward()
        held = model(torch.zeros(2, 8, dtype=torch.long), reentrant)  # a graph that outlives the recording
    del rec
    assert objects_of_ours() - before == {"GraphWatch": 1}  # empty: torch has no way to take it out
    referents = gc.get_referents(held.grad_fn.metadata["modtrace"])
    assert [each for each in referents if each is not None] == [GraphWatch]
    held.sum().backward()
    del held
    assert objects_of_ours() - before == {}


@CHECKPOINTS
def test_nothing_of_recorded_ops_is_left_when_the_recording_is_gone(tmp_path, reentrant):
    model = TiedGPT(layers=1)
    with modtrace.record(model, ops=True):  # what is learnt of the tables is kept for good
        model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum().backward()
    before = objects_of_ours()
    with modtrace.record(model, to=tmp_path / "run", strict=True, ops=True) as rec:
        model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum().backward()
    del rec
    assert objects_of_ours() - before == {}


def test_nothing_is_called_when_a_storage_dies_after_the_recording():
    model = nn.Linear(4, 4)
    storages = [each.untyped_storage() for each in model.parameters()]
    with modtrace.record(model, ops=True, strict=True):
        model(torch.ones(2, 4)).sum().backward()
        assert all(weakref.getweakrefs(each) for each in storages)
    assert not any(weakref.getweakrefs(each) for each in storages)


@CHECKPOINTS
@pytest.mark.parametrize("recorded", ["forward", "backward", "both"])
def test_graph_runs_backward_outside_of_the_recording_that_it_was_built_in(reentrant, recorded):
    def recording(is_wanted: bool) -> Any:
        return modtrace.record(strict=True, backward_times=True) if is_wanted else nullcontext()

    def gradients(recorded: str) -> list[Any]:
        torch.manual_seed(0)
        model = TiedGPT(layers=2)
        with recording(recorded in ("forward", "both")):
            loss = model(torch.zeros(2, 8, dtype=torch.long), reentrant).square().mean()
        with recording(recorded in ("backward", "both")) as rec:
            loss.backward()
        if rec is not None and reentrant is None:
            assert rec.table("calls").num_rows == 0  # whose backward it was is not known here
        return [bits(each) for each in grads(model).values()]

    assert gradients(recorded) == gradients("nothing")


# Many steps.


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.parametrize(
    ("reentrant", "options"),
    [(True, {}), (False, {"backward_times": True}), (None, {"ops": True})],
    ids=["reentrant", "non-reentrant", "ops"],
)
def test_number_of_our_objects_is_the_same_after_many_steps(tmp_path, reentrant, options):
    model = TiedGPT(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with modtrace.record(to=tmp_path / "run.modtrace", strict=True, **options) as rec:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.zeros(1, 8, dtype=torch.long), reentrant).sum().backward()
            optimizer.step()
            if step in (19, 39, 59):
                counts.append(settled(rec, lambda: evaluate(model)))
    assert_bounded(counts)


def allocated_by_us() -> int:
    """Bytes that are held by what our own lines have allocated."""
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/modtrace/collect/*")])
    return sum(trace.size for trace in ours.traces)


def test_memory_of_ours_grows_by_less_than_a_step_takes(tmp_path):
    """What stays of a step is which op made which node, 17 bytes each, of so many ops as a bound allows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    with modtrace.record(to=tmp_path / "run", strict=True, ops=True, values=None) as rec:
        for step in range(150):
            if step == 20:
                tracemalloc.start()
            small_step(model, optimizer)
            if step in (49, 149):
                rec.data  # noqa: B018 (writes what has ended)
                sizes.append(allocated_by_us())
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 100 * 512  # the numbers of one step's ops alone take ten times that


def test_evaluation_leaves_as_little(tmp_path):
    model = TiedGPT(layers=1).eval()
    counts = []
    with modtrace.record(to=tmp_path / "run.modtrace", strict=True) as rec, torch.no_grad():
        for step in range(75):
            model(torch.zeros(1, 8, dtype=torch.long))
            if step in (24, 49, 74):
                counts.append(settled(rec, lambda: evaluate(model)))
    assert_bounded(counts)


def test_models_that_come_and_go_leave_their_names_only(tmp_path):
    model = TiedGPT(layers=1)
    counts = []
    with modtrace.record(to=tmp_path / "run.modtrace", strict=True) as rec:
        evaluate(model)
        for step in range(90):
            nn.Sequential(nn.Linear(4, 4), nn.Tanh())(torch.ones(3, 4)).sum().backward()
            if step in (29, 59, 89):
                counts.append(settled(rec, lambda: evaluate(model)))
    for name in ("NamedModule", "CallContext", "contexts", "modules", "contexts by module"):
        found = [each.pop(name) for each in counts]
        assert [later - earlier for earlier, later in pairwise(found)] == [90, 90]
    assert_bounded(counts)


def in_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_threads_that_come_and_go_leave_nothing(tmp_path):
    model = TiedGPT(layers=1)
    counts = []

    def step() -> None:
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()

    with modtrace.record(to=tmp_path / "run.modtrace", strict=True) as rec:
        for number in range(60):
            in_a_thread(step)
            model.zero_grad()
            if number in (19, 39, 59):
                counts.append(settled(rec, lambda: in_a_thread(step)))  # a new thread lets go of dead ones
    assert_bounded(counts)
