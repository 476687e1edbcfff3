"""What is noted in C inside of a collective: on methods of any kind, whatever they are given, return or raise."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroup, Work

import modtrace
from helpers.ranks import group_of_one
from modtrace.collect.collectives import called
from modtrace.collect.collectives._called import CompiledMethod
from modtrace.collect.collectives.called import CalledCollectives
from modtrace.collect.collectives.rows import (
    BYTES_READ,
    BYTES_WRITTEN,
    END_NS,
    NUMBER,
    PEER,
    WAIT_NS,
    to_numbers,
)
from modtrace.collect.module_tracker.tracker import ModuleTracker
from modtrace.recording.protocols import LAST
from modtrace.torch_internals.collectives import ENTRY_POINTS, order_arguments


class Group:
    """Stands for a process group; it counts what is started."""

    def __init__(self, name: str = "g") -> None:
        self.group_name, self.started = name, 0

    def _get_sequence_number_for_group(self) -> int:
        return self.started

    def _get_backend_name(self) -> str:
        return "gloo"


class Done:
    """Stands for a `Work`."""


class Listener(CalledCollectives):
    """Is called by methods that are made here, and not by torch's."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        super().__init__(self.errors.append, lambda: None)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(called, "watch_collectives", lambda *_: None)
    monkeypatch.setattr(called, "number_reader", lambda: Group._get_sequence_number_for_group)
    monkeypatch.setattr(called, "describe_group", lambda group: (group.group_name, (0,)))
    listener = Listener()
    with ModuleTracker(nn.Linear(2, 2)) as tracker:
        listener.start(tracker._tracker)
        yield listener
        listener.stop()


def method(name: str, original: Any, *listeners: Listener) -> Any:
    entry = ENTRY_POINTS[name]
    return CompiledMethod(original, [*listeners], order_arguments, *entry, entry.is_message).start


def start(group: Group, *args: Any, **kwargs: Any) -> Done:
    group.started += 1
    return Done()


def column(listener: Listener, at: int) -> list[int]:
    return to_numbers(listener.read()[1])[:, at].tolist()


def test_arguments_results_and_exceptions_pass_through(listener: Listener) -> None:
    seen: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        raise ZeroDivisionError("of the user")

    group, x = Group(), torch.ones(2)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        method("allreduce", original, listener)(group, [x], opts=3)
    assert seen == [((group, [x]), {"opts": 3})]
    assert method("allreduce", lambda *_: 7, listener)(group, [x]) == 7
    with pytest.raises(TypeError):
        method("allreduce", lambda group: 7, listener)()
    assert listener.errors == [] and column(listener, BYTES_READ) == [8, 8]


_numbers = st.integers(0, 3).map(torch.zeros)
_tensors = st.one_of(
    _numbers,
    st.just(torch.eye(2).to_sparse()),
    st.just(nn.Parameter(torch.ones(3))),
    st.just(torch.ones(2, dtype=torch.float16)),
    st.just(torch.empty(0, 3)),
    st.just(torch.ones(4, 4)[::2, ::2]),
    st.none(),
)
_given = st.recursive(_tensors, lambda inside: st.lists(inside, max_size=3) | st.tuples(inside), max_leaves=6)


def bytes_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    if value is None:
        return 0
    if value.is_sparse:
        return int(value._indices().nbytes + value._values().nbytes)
    return int(value.numel() * value.element_size())


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(_given, _given), max_size=4))
def test_bytes_are_those_of_all_tensors(pairs: list[tuple[Any, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for notes in listener.__wrapped__(patched):  # type: ignore[attr-defined]  # a fixture would live too long
            group, gather = Group(), method("allgather", start, notes)
            for outputs, inputs in pairs:
                gather(group, outputs, inputs)
            assert notes.errors == []
            wanted = [(bytes_of(outputs), bytes_of(inputs)) for outputs, inputs in pairs]
            assert [*zip(column(notes, BYTES_WRITTEN), column(notes, BYTES_READ), strict=True)] == wanted


def test_what_is_no_tensor_ends_the_noting_alone(listener: Listener) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert isinstance(method("allreduce", start, listener)(Group(), deep), Done)
    assert [type(error) for error in listener.errors] == [RecursionError]
    listener.is_on = True
    assert isinstance(method("allreduce", start, listener)(Group(), ["text"]), Done)
    assert len(listener.errors) == 2
    while deep:
        [deep] = deep


def test_numbers_are_those_of_the_group_although_others_start_collectives_too(listener: Listener) -> None:
    group, reduce = Group(), method("allreduce", start, listener)
    for others in (0, 0, 3, 0):
        group.started += others
        reduce(group, [torch.ones(1)])
    assert column(listener, NUMBER) == [1, 2, 6, 7]


def test_messages_are_numbered_by_the_other_rank_and_left_out_of_the_numbers_of_collectives(
    listener: Listener,
) -> None:
    group = Group()
    for name in ("allreduce", "recv", "recv_anysource", "allreduce", "recv", "barrier"):
        given = ([torch.ones(1)],) if name != "barrier" else ()
        method(name, start, listener)(group, *given, *((0, 7) if name == "recv" else ()))
    assert column(listener, NUMBER) == [1, 1, -1, 2, 2, 3]
    assert column(listener, PEER) == [-1, 0, -1, -1, 0, -1]


class Sized(list[torch.Tensor]):
    """Does not say how many there are."""

    def __len__(self) -> int:
        raise ZeroDivisionError("no size")


def test_list_that_raises_ends_the_noting_alone(listener: Listener) -> None:
    assert isinstance(method("allreduce", start, listener)(Group(), Sized([torch.ones(1)])), Done)
    assert [str(error) for error in listener.errors] == ["no size"]


def test_groups_that_are_freed_are_forgotten(listener: Listener) -> None:
    """Another one may get the address, as well as the name."""
    reduce = method("allreduce", start, listener)
    for _ in range(50):
        group = Group()
        life = weakref.ref(group)
        reduce(group, [])
        del group
        gc.collect()
        assert life() is None
    assert column(listener, NUMBER) == [1] * 50


def test_the_oldest_are_lost_where_no_step_ends(listener: Listener) -> None:
    group, reduce = Group(), method("allreduce", start, listener)
    for _ in range(70_000):
        reduce(group, [])
    first, content = listener.read()
    assert first == 2**15 and first + len(to_numbers(content)) == 70_000
    assert column(listener, NUMBER)[-1] == 70_000


def test_works_are_told_apart_however_many_wait(listener: Listener) -> None:
    group, reduce = Group(), method("allreduce", start, listener)
    wait = CompiledMethod(lambda work: True, [listener], order_arguments, "wait", -1, -1, -1, False).wait
    works = [reduce(group, []) for _ in range(300)]
    assert wait(works[7]) is True and wait(works[200]) is True
    assert wait(Done()) is True  # of another
    for at in (END_NS, WAIT_NS):
        assert [row for row, time_ns in enumerate(column(listener, at)) if time_ns] == [7, 200]
    for work in works:
        wait(work)
    assert sum(map(bool, column(listener, END_NS))) > 290  # 16 in one place push each other out


def test_listeners_are_all_notified_and_each_may_leave(listener: Listener) -> None:
    listeners = [listener]
    entry = ENTRY_POINTS["allreduce"]
    reduce = CompiledMethod(start, listeners, order_arguments, *entry, False).start
    other = Listener()
    group = Group()
    with ModuleTracker(nn.Linear(2, 2)) as tracker:
        other.start(tracker._tracker)
        listeners.append(other)
        reduce(group, [])
        listeners.clear()
        reduce(group, [])
        listeners.append(other)
        reduce(group, [])
        other.stop()
    assert (len(column(listener, NUMBER)), len(column(other, NUMBER))) == (1, 2)


def test_threads_note_at_the_same_time(listener: Listener) -> None:
    def call() -> None:
        group = Group(str(threading.get_ident()))
        for _ in range(2000):
            reduce(group, [torch.ones(1)])

    reduce, taken = method("allreduce", start, listener), 0
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        batch = listener.take_until(2**63)
        taken += 0 if batch is None else len(batch)
    batch = listener.take_until(2**63)
    assert taken + (0 if batch is None else len(batch)) == 8000 and listener.errors == []


def test_interrupt_while_something_new_is_noted_reaches_the_program(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(listener, "_add_site", interrupt)
    group = Group()
    with pytest.raises(KeyboardInterrupt):
        method("allreduce", start, listener)(group, [])
    assert group.started == 0 and listener.errors == []


def rows_of(recording: Any) -> list[dict[str, Any]]:
    return [row for row in recording.table("collectives").to_pylist() if row["name"] != LAST]


def test_recordings_may_end_in_any_order() -> None:
    before = vars(ProcessGroup)["allreduce"], vars(Work)["wait"]
    model = nn.Linear(2, 2)
    with group_of_one():
        first, second = (modtrace.record(model, strict=True) for _ in range(2))
        first.__enter__()
        second.__enter__()
        dist.all_reduce(model(torch.ones(2, 2)).detach())
        first.__exit__(None, None, None)
        dist.all_reduce(torch.ones(2))
        second.__exit__(None, None, None)
        dist.all_reduce(torch.ones(2))
    assert (vars(ProcessGroup)["allreduce"], vars(Work)["wait"]) == before
    assert [len(rows_of(recording)) for recording in (first, second)] == [1, 2]


def test_work_that_is_waited_for_in_a_later_step_has_an_end_if_it_is_not_written_yet(
    listener: Listener,
) -> None:
    group, reduce = Group(), method("allreduce", start, listener)
    wait = CompiledMethod(lambda work: True, [listener], order_arguments, "wait", -1, -1, -1, False).wait
    works = [reduce(group, []) for _ in range(3)]
    batch = listener.take_until(2**63)
    assert batch is not None
    listener.placed += [batch.cut(0, 1), batch.cut(1, 3)]
    wait(works[1])
    ends = [to_numbers(part.content)[:, [END_NS, WAIT_NS]].all(axis=1).tolist() for part in listener.placed]
    assert ends == [[False], [True, False]]
    listener.placed.clear()
    assert wait(works[2]) is True and listener.errors == []


def test_collective_in_a_backward_hook_has_the_call_whose_gradients_are_computed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def reduce(grad: torch.Tensor) -> None:
        dist.all_reduce(grad)

    with group_of_one(), modtrace.record(model, strict=True) as rec:
        out = model[0](torch.ones(2, 2))
        out.register_hook(reduce)
        model[1](out).sum().backward()
    [row] = rows_of(rec)
    assert (row["phase"], row["path"]) == ("backward", "0")


def test_collective_in_a_backward_that_a_forward_runs_is_in_backward() -> None:
    class Penalty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x.detach())
            y = x * x
            y.register_hook(lambda grad: dist.all_reduce(grad.detach()))
            [grad] = torch.autograd.grad(y.sum(), x)
            dist.all_reduce(grad)
            return grad

    with group_of_one(), modtrace.record(model := Penalty(), strict=True) as rec:
        model(torch.ones(2, requires_grad=True))
    assert [row["phase"] for row in rows_of(rec)] == ["forward", "backward", "forward"]


def test_without_the_compiled_part_all_come_from_the_log_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(called, "state", None)
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, to=tmp_path / "run.modtrace", strict=True) as rec:
        for _ in range(3):
            dist.all_reduce(model(torch.ones(2, 2)).detach())
            rec.step()
    rows = rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))
    assert [(row["name"], row["seq_id"], row["thread"]) for row in rows] == [
        ("all_reduce", number, None) for number in (1, 2, 3)
    ]
