"""No call of ours ends the capture of a CUDA graph, from any thread, and nothing is lost by it.

The device is simulated by main memory.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import modtrace
from helpers.simulated_captures import SimulatedCaptures, simulated_captures
from modtrace import Capture
from modtrace.measure.moments.rows import DeviceRows
from modtrace.torch_internals import graph_captures as graph_captures_module
from modtrace.torch_internals.graph_captures import GraphCaptures

TIMEOUT_S = 30


@pytest.fixture
def captures(monkeypatch) -> Iterator[SimulatedCaptures]:
    with simulated_captures(monkeypatch) as simulated:
        yield simulated


NOT_MEASURED = "not measured: a CUDA graph was being captured"
NOT_KEPT = "not kept: a CUDA graph was being captured"

EVERYTHING = Capture(
    roles="all",
    stats=2,
    hash=True,
    sketch=True,
    sample=2,
    tensors="lazy",
    function=lambda tensor: tensor.sum(),
)

OPTIONS: dict[str, dict[str, Any]] = {
    "ops": {"ops": True},
    "everything of each": {"values": EVERYTHING},
    "micro-batches": {"values": Capture(roles="parameter_grad", micro_batches=True)},
    "whole tensors in memory": {"values": Capture(tensors=True), "to": None},
    "keep_last": {"keep_last": 50},
    "stop": {"on_nonfinite": "stop"},
}


class Training:
    """A model that is trained under a recording, and captured on the thread of the test."""

    def __init__(self, captures: SimulatedCaptures, *, is_capturing: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)
        self.data = torch.randn(2, 3)
        self.was_captured = False  # anything that is recorded
        self._captures = captures
        self._is_capturing = is_capturing
        self._graph: Any = None

    def step(self, *, captured: str = "") -> torch.Tensor:
        """Trains one step, of which a part may be captured."""
        self.was_captured |= bool(self._captures.open or captured)
        self.optimizer.zero_grad()
        with self._around(captured == "forward"):
            loss = self.model(self.data).square().sum()
        with self._around(captured == "backward"):
            loss.backward()
        with self._around(captured == "optimizer"):
            self.optimizer.step()
        return loss

    def _around(self, is_wanted: bool) -> Any:
        is_free = self._is_capturing and self._graph is None
        return self._captures.capture() if is_wanted and is_free else nullcontext()

    def begin(self) -> None:
        if self._is_capturing and self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()


def on_another_thread(function: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run_guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_guarded)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


ACTIONS: dict[str, Callable[[Training, Any], object]] = {
    "step": lambda training, rec: training.step(),
    "step elsewhere": lambda training, rec: on_another_thread(training.step),
    "captured forward": lambda training, rec: training.step(captured="forward"),
    "captured backward": lambda training, rec: training.step(captured="backward"),
    "captured optimizer": lambda training, rec: training.step(captured="optimizer"),
    "begin": lambda training, rec: training.begin(),
    "end": lambda training, rec: training.end(),
    "read": lambda training, rec: rec.data,
    "read elsewhere": lambda training, rec: on_another_thread(lambda: rec.data),
    "step()": lambda training, rec: rec.step(),
    "dump": lambda training, rec: rec.dump("asked") if rec._options.keep_last else None,
    "raise": lambda training, rec: 1 / 0,
}


def record_run(training: Training, actions: list[str], **options: Any) -> Any:
    """Returns the recording of what is done; a capture that is open at its end is ended after it."""
    try:
        with (
            suppress(ZeroDivisionError),
            modtrace.record(training.model, strict=True, overwrite=True, **options) as rec,
        ):
            for action in actions:
                ACTIONS[action](training, rec)
            if options.get("keep_last"):
                rec.dump("the end")
    finally:
        training.end()
    return rec


def rows_of(rec: Any) -> list[dict[str, Any]]:
    """The rows of values, each with its site in place of the number of the site."""
    sites = {row.pop("site_id"): row for row in rec.table("sites").to_pylist()}
    rows = rec.table("values").to_pylist()
    return [{**row, "site": sites[row["site_id"]]} for row in rows]


IDENTITY = ("step", "phase", "order", "shape", "dtype", "op_id", "site")
MEASURED = ("count", "min", "max", "sum", "sumsq", "sumabs", "hash", "sketch", "histogram", "sample", "user")


def columns_of(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[list[Any]]:
    return [[row[name] for name in names] for row in rows]


@pytest.mark.parametrize("case", OPTIONS)
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    actions=st.lists(st.sampled_from([*list(ACTIONS)[:-1], "begin", "step"]), min_size=4, max_size=12),
    last=st.sampled_from([[], ["raise"], ["begin"], ["end", "step"], ["begin", "step", "raise"]]),
)
def test_captures_change_nothing_but_the_rows_of_what_ran_in_them(captures, tmp_path, case, actions, last):
    """The rows are those of the same run without captures. Where a graph was captured they say so."""
    options = {"to": tmp_path / "run.modtrace", **OPTIONS[case]}
    expected_run = record_run(Training(captures, is_capturing=False), [*actions, *last], **options)
    expected = rows_of(expected_run), expected_run.meta.notes, counts_of(expected_run)
    training = Training(captures)
    rec = record_run(training, [*actions, *last], **options)

    rows = rows_of(rec)
    assert captures.ended_by == []
    assert counts_of(rec) == expected[2]
    assert [note.reason for note in rec.meta.notes] == [note.reason for note in expected[1]]
    assert columns_of(rows, IDENTITY) == columns_of(expected[0], IDENTITY)
    pairs = list(zip(rows, expected[0], strict=True))
    alike = [(row, before) for row, before in pairs if row["note"] == before["note"]]
    assert columns_of([row for row, _ in alike], MEASURED) == columns_of(
        [before for _, before in alike], MEASURED
    )
    assert all((row["blob"] is None) == (before["blob"] is None) for row, before in alike)
    others = [row for row, before in pairs if row["note"] != before["note"]]
    assert {note for row in others for note in row["note"].split("; ")} <= {NOT_MEASURED, NOT_KEPT}
    assert all(row["count"] is None and row["hash"] is None and row["blob"] is None for row in others)
    assert training.was_captured or not others


def counts_of(rec: Any) -> list[int]:
    return [rec.table(name).num_rows for name in ("calls", "ops", "steps", "values")]


def test_what_is_captured_is_not_measured_and_says_so(captures):
    training = Training(captures)
    rec = record_run(training, ["step", "begin", "step", "end", "step"])
    notes = {step: {row["note"] for row in rows_of(rec) if row["step"] == step} for step in range(3)}
    assert notes == {0: {None}, 1: {NOT_MEASURED}, 2: {None}}
    rows = {(row["site"]["role"], tuple(row["shape"])) for row in rows_of(rec) if row["step"] == 1}
    assert ("output", (2, 4)) in rows and ("parameter", (4, 3)) in rows  # shapes are known


def test_an_update_that_is_captured_in_part_is_not_measured(captures):
    """The copy from before would lie in the memory of the graph, and be written again by each replay."""
    rec = record_run(
        Training(captures), ["step", "captured optimizer", "step"], values=Capture(roles="update")
    )
    assert [(row["step"], row["note"]) for row in rows_of(rec)][::4] == [
        (0, None),
        (1, NOT_MEASURED),
        (2, None),
    ]


def test_a_capture_that_was_not_seen_to_begin_is_not_measured_in_either(captures):
    """As one that other code begins without torch's class, or one that had begun before the recording."""
    training = Training(captures)
    with captures.capture():
        rec = record_run(training, ["step"])
    assert {row["note"] for row in rows_of(rec)} == {NOT_MEASURED}


def test_captures_of_one_thread_hold_while_others_train_and_read(captures, tmp_path):
    """Threads that are not told when captures begin: 50 captures, training all the while, the timer of flushes."""
    training = Training(captures)
    is_over = threading.Event()
    with modtrace.record(training.model, to=tmp_path / "run.modtrace", values=EVERYTHING, strict=True) as rec:
        rec._recorder._timer._after_s = 0.001

        def capture() -> None:
            for _ in range(50):
                with captures.capture():
                    is_over.wait(0.0005)
            is_over.set()

        capturing, steps = threading.Thread(target=capture), 0
        capturing.start()
        while not is_over.is_set():
            training.step()
            steps += 1
        capturing.join(TIMEOUT_S)
        training.step()
    rows = rows_of(rec)
    assert captures.ended_by == []
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    of_step = [[row for row in rows if row["step"] == step] for step in range(steps + 1)]
    assert {len(rows) for rows in of_step} == {len(of_step[-1])}
    assert {row["note"] for row in of_step[-1] if row["shape"]} == {None}
    [loss] = [row for row in of_step[-1] if not row["shape"]]
    assert loss["note"] == "no channel_max: a tensor of no dimensions has no channels"
    for row in rows:
        assert row["count"] is not None or NOT_MEASURED in row["note"].split("; ")
        assert row["blob"] is not None or {NOT_KEPT, NOT_MEASURED}.intersection(row["note"].split("; "))


# What reads a device because a user asks for it.


def test_a_number_that_is_logged_in_a_capture_is_left_out(captures):
    training = Training(captures)
    with modtrace.record(training.model) as rec:
        rec.log(before=training.step())
        with (
            captures.capture(),
            pytest.warns(modtrace.ModtraceWarning, match=r"log\(loss=...\) is left out") as told,
        ):
            for _ in range(3):
                rec.log(loss=training.step(), rate=0.1)
        rec.log(after=training.step())
    assert len(told) == 1
    assert [row["name"] for row in rec.table("scalars").to_pylist()] == [
        "before",
        "rate",
        "rate",
        "rate",
        "after",
    ]
    assert [mark for mark in rec.meta.marks if "log(loss=...)" in mark] == list(rec.meta.marks)


@pytest.mark.parametrize("ask", ["log", "stash", "frame"])
def test_what_a_user_asks_for_waits_for_the_capture_of_another_thread(captures, ask):
    training = Training(captures)
    began, may_end = threading.Event(), threading.Event()

    def capture() -> None:
        with captures.capture():
            began.set()
            may_end.wait(TIMEOUT_S)

    with modtrace.record(training.model) as rec, modtrace.track(training.model, include="0") as tracker:
        loss = training.step()
        capturing = threading.Thread(target=capture)
        capturing.start()
        assert began.wait(TIMEOUT_S)
        threading.Timer(0.05, may_end.set).start()
        if ask == "log":
            rec.log(loss=loss)
        elif ask == "stash":
            training.model(training.data)
        else:
            assert not tracker.to_frame()["std"].isna().any()
        assert may_end.is_set()
        capturing.join(TIMEOUT_S)
    assert rec.table("scalars").num_rows == (ask == "log")
    assert all(isinstance(stash.first_value, torch.Tensor) for stash in tracker)


def test_a_capture_that_lasts_is_not_waited_for(captures, monkeypatch):
    monkeypatch.setattr(graph_captures_module, "_PATIENCE_S", 0.01)
    with watched(GraphCaptures()) as found:
        with captures.capture():
            answers: list[bool] = []

            def ask() -> None:
                with found.device_work(waits=True) as is_allowed:
                    answers.append(is_allowed)

            on_another_thread(ask)
            on_another_thread(ask)
        assert answers == [False, False]


def test_what_is_stashed_in_a_capture_is_none(captures):
    training = Training(captures)
    with modtrace.track(training.model, include="0") as tracker:
        training.step()
        with captures.capture(), pytest.warns(modtrace.ModtraceWarning, match="is not stashed: a CUDA graph"):
            training.step()
        training.step()
    values = [stash.first_value for stash in tracker]
    assert [value is None for value in values] == [False, False, True, True, False, False]


def test_whether_an_optimizer_skips_its_step_is_not_read_in_a_capture(captures):
    """A fused optimizer leaves it to the device whether it skips, where a GradScaler has found infinities."""
    training = Training(captures)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=True)
    training.optimizer.found_inf = torch.tensor(0.0)
    rec = record_run(training, ["step", "begin", "step", "end", "step"], on_nonfinite="stop", keep_last=5)
    assert rec.table("steps").num_rows == 3
    training.data[:] = float("nan")
    with pytest.raises(modtrace.NonFiniteError):
        record_run(training, ["begin", "step", "end", "step", "step"], on_nonfinite="stop")


# The captures that are open.


@contextmanager
def watched(found: GraphCaptures) -> Iterator[GraphCaptures]:
    found.watch(found)
    try:
        yield found
    finally:
        found.unwatch(found)


def is_free(found: GraphCaptures) -> bool:
    with found.device_work() as is_allowed:
        return is_allowed


class Results:
    """What lies on a device, and whether it could be read when it was fetched."""

    def __init__(self, found: GraphCaptures) -> None:
        self.captures = found
        self.fetched: list[bool] = []
        found.add(self)

    def fetch(self) -> None:
        self.fetched.append(is_free(self.captures))


def test_results_are_fetched_right_before_a_capture(captures):
    with watched(GraphCaptures()) as found:
        results = Results(found)
        with captures.capture():
            assert (results.fetched, is_free(found)) == ([True], False)
            on_another_thread(
                lambda: captures.capture().__enter__()
            )  # a second one, and nothing was measured
            assert (results.fetched, is_free(found)) == ([True], False)
        del captures.open[:]
        gc.collect()
        assert is_free(found)


def test_a_capture_begins_when_our_work_has_ended(captures):
    with watched(GraphCaptures()) as found:
        has_begun = threading.Event()

        def capture() -> None:
            with captures.capture():
                has_begun.set()

        with found.device_work() as is_allowed:
            assert is_allowed
            capturing = threading.Thread(target=capture)
            capturing.start()
            assert not has_begun.wait(0.05)
            with found.device_work() as is_allowed:  # inside of work that has begun
                assert is_allowed
        assert has_begun.wait(TIMEOUT_S)
        capturing.join(TIMEOUT_S)


def test_work_of_ours_that_does_not_end_holds_no_capture_up_for_ever(captures, monkeypatch):
    monkeypatch.setattr(graph_captures_module, "_PATIENCE_S", 0.01)
    with watched(GraphCaptures()) as found, found.device_work():
        on_another_thread(lambda: captures.capture().__enter__())
    del captures.open[:]


@pytest.mark.parametrize("when", ["beginning", "fetching", "ending"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_fails_is_over(captures, monkeypatch, when, kind):
    def fail(*args: Any) -> None:
        raise kind

    methods = {"beginning": {"capture_begin": fail}, "ending": {"capture_end": fail}}.get(when, {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Fails", (torch.cuda.CUDAGraph,), methods))
    with watched(GraphCaptures()) as found:
        if when == "fetching":
            results = Results(found)
            results.fetch = fail  # type: ignore[method-assign]
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(kind):
            graph.capture_begin()
            graph.capture_end()
        del captures.open[:]
        assert is_free(found)


@pytest.mark.parametrize("of", ["graph", "thread"])
def test_a_capture_whose_graph_or_thread_is_gone_is_over(captures, of):
    with watched(GraphCaptures()) as found:
        graph = torch.cuda.CUDAGraph()
        on_another_thread(graph.capture_begin) if of == "thread" else graph.capture_begin()
        del captures.open[:]
        if of == "graph":
            assert not is_free(found)
            del graph
            gc.collect()
        assert is_free(found)


def test_the_garbage_collector_rests_until_the_last_capture_has_ended(captures):
    with watched(GraphCaptures()):
        with captures.capture():
            with captures.capture():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled()
        gc.disable()
        try:
            with captures.capture():
                pass
            assert not gc.isenabled()  # the program's own choice
        finally:
            gc.enable()


def test_wrappers_of_others_around_ours_go_on(captures):
    kind = torch.cuda.CUDAGraph
    begin = kind.capture_begin
    calls: list[str] = []
    with watched(GraphCaptures()) as found:
        ours = kind.capture_begin

        def theirs(graph: Any, *args: Any) -> None:
            calls.append("theirs")
            ours(graph, *args)

        kind.capture_begin = theirs
    with captures.capture():
        assert (calls, kind.capture_begin, found._open) == (["theirs"], theirs, [])
    kind.capture_begin = begin


def test_the_last_watcher_restores_the_class(captures):
    kind = torch.cuda.CUDAGraph
    before = dict(vars(kind))
    found = GraphCaptures()
    found.watch("one")
    found.watch("other")
    found.unwatch("one")
    assert dict(vars(kind)) != before
    found.unwatch("nobody")
    found.unwatch("other")
    assert dict(vars(kind)) == before


def test_inherited_methods_are_inherited_again(captures, monkeypatch):
    kind = type("Inherits", (torch.cuda.CUDAGraph,), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    with watched(GraphCaptures()):
        assert "capture_begin" in vars(kind)
    assert "capture_begin" not in vars(kind)


def test_a_fork_restores_the_class_without_the_lock(captures):
    kind = torch.cuda.CUDAGraph
    before = dict(vars(kind))
    found = GraphCaptures()
    found.watch(found)
    with found._changed:
        on_another_thread(found.abandon)
    assert dict(vars(kind)) == before
    assert is_free(found)


def test_where_cuda_is_not_in_use_it_is_not_asked(monkeypatch):
    def fail() -> bool:
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    model = nn.Linear(2, 2)
    with modtrace.record(model, values=EVERYTHING, strict=True) as rec:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
    assert rec.meta.marks == ()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_torch_without_cuda_is_left_as_it_is():
    before = vars(torch.cuda.CUDAGraph).copy()
    with modtrace.record():
        assert vars(torch.cuda.CUDAGraph) == before


def test_rows_that_could_not_be_fetched_raise_and_no_capture_ends(captures, monkeypatch):
    def fail(self: Any) -> None:
        raise RuntimeError("the device has failed")

    training = Training(captures)
    with modtrace.record(training.model) as rec:
        training.step()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceRows, "_copy_blocks", fail)
            training.begin()
        with pytest.warns(
            modtrace.ModtraceWarning, match="measures no more values.*a CUDA graph was being captured"
        ):
            _ = (rec.step(), rec.data)
        training.end()
    assert rec.table("steps").num_rows == 1
