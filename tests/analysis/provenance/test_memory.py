"""The state of memory: equal to that of a plain list of all writes, at a cost that does not depend on their number."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import modtrace
from helpers.growth import count_lines
from modtrace.analysis.provenance.memory import (
    BAD,
    MEANT,
    UNSEEN,
    Finiteness,
    Memory,
    list_events,
    set_of_events,
)
from modtrace.analysis.provenance.search import find_all, find_first
from modtrace.analysis.tables.one_step import MemoryRegion

REGIONS = st.builds(
    lambda storage, start, size, is_dense: MemoryRegion(storage, start, start + size, is_dense),
    st.sampled_from([None, 0, 1]),
    st.integers(0, 6),
    st.integers(0, 6),
    st.booleans(),
)


class ListedMemory:
    """The same as `Memory`, as one list of all writes, of which those that are covered are taken out."""

    def __init__(self, regions: list[MemoryRegion]) -> None:
        self.regions = regions
        self.writes: list[tuple[object, MemoryRegion, Finiteness]] = []
        self.unread: list[tuple[int, int]] = []
        self.doubted: set[object] = set()

    def storage_of(self, tensor: int) -> object:
        storage = self.regions[tensor].storage
        return ("alone", tensor) if storage is None else storage

    def overlap(self, storage: object, region: MemoryRegion, tensor: int) -> bool:
        own = self.regions[tensor]
        return storage == self.storage_of(tensor) and region.start < own.stop and own.start < region.stop

    def read(self, tensor: int) -> Finiteness:
        states = [state for storage, region, state in self.writes if self.overlap(storage, region, tensor)]
        worst = max(states, default=Finiteness())
        if worst.kind != BAD:
            return worst
        numbers = {number for state in states if state.kind == BAD for number in list_events(state.origin)}
        return Finiteness(BAD, sum(1 << number for number in numbers))

    def write(self, tensor: int, state: Finiteness) -> None:
        own, place = self.regions[tensor], self.storage_of(tensor)
        self.writes = [
            (storage, region, held)
            for storage, region, held in self.writes
            if storage != place
            or not (region == own or (own.is_dense and own.start <= region.start and region.stop <= own.stop))
        ]
        self.writes.append((place, own, state))

    def doubt(self, tensor: int) -> None:
        place = self.storage_of(tensor)
        if place not in self.doubted:
            self.doubted.add(place)
            same = [one for number, one in enumerate(self.regions) if self.storage_of(number) == place]
            stop = max(region.stop for region in same)
            self.writes.append((place, MemoryRegion(same[0].storage, 0, stop, True), Finiteness(UNSEEN)))

    def keep_unread(self, tensor: int, events: int) -> None:
        self.unread.append((tensor, events))

    def mark_read(self, tensor: int, events: int) -> None:
        self.unread = [
            (one, left & ~events if self.overlap(self.storage_of(one), self.regions[one], tensor) else left)
            for one, left in self.unread
        ]

    def list_unread(self) -> list[tuple[int, int]]:
        return [(tensor, events) for tensor, events in self.unread if events]


@given(st.lists(REGIONS, min_size=1, max_size=12), st.data())
def test_memory_answers_as_a_list_of_all_writes(regions: list[MemoryRegion], data: st.DataObject) -> None:
    tensors, events = st.integers(0, len(regions) - 1), st.integers(1, 7)
    storages = [-1 - row if one.storage is None else one.storage for row, one in enumerate(regions)]
    step = SimpleNamespace(regions=regions, tensors=SimpleNamespace(memory=np.array(storages)))
    ours, listed = Memory(step), ListedMemory(regions)  # type: ignore[arg-type]
    states = st.one_of(
        st.just(Finiteness()),
        st.builds(Finiteness, st.sampled_from([MEANT, UNSEEN]), st.integers(-1, 3)),
        st.builds(Finiteness, st.just(BAD), events),
    )
    for call in data.draw(
        st.lists(st.sampled_from(["write", "write", "doubt", "keep", "mark"]), max_size=30)
    ):
        tensor: int = data.draw(tensors)
        arguments: tuple[Any, ...] = {
            "write": lambda: (data.draw(states),),
            "doubt": lambda: (),
            "keep": lambda: (data.draw(events),),
            "mark": lambda: (data.draw(events),),
        }[call]()
        name = {"keep": "keep_unread", "mark": "mark_read"}.get(call, call)
        if regions[tensor].start == regions[tensor].stop and call in ("write", "keep"):
            continue  # a tensor without elements holds nothing
        for memory in (ours, listed):
            getattr(memory, name)(tensor, *arguments)
        assert [ours.read(one) for one in range(len(regions))] == list(map(listed.read, range(len(regions))))
        assert sorted(ours.list_unread()) == sorted(listed.list_unread())


@given(st.sets(st.integers(0, 200)))
def test_set_of_events_lists_the_numbers_that_it_was_made_of(numbers: set[int]) -> None:
    events = set_of_events(number in numbers for number in range(201))
    assert events == sum(1 << number for number in numbers)
    assert list_events(events) == sorted(numbers)


def write_nan(rows: torch.Tensor, x: torch.Tensor) -> None:
    for row in range(len(rows)):
        rows[row] = x


def make_nan_for_each(rows: torch.Tensor, x: torch.Tensor) -> None:
    for row in range(len(rows)):
        rows[row] = torch.ones(2) / 0 * (x - x)


def write_masks(rows: torch.Tensor, x: torch.Tensor) -> None:
    mask = torch.full((2,), -math.inf)
    for row in range(len(rows)):
        rows[row] = mask


def fill_views(rows: torch.Tensor, x: torch.Tensor) -> None:
    for row in rows.unbind():
        row.copy_(x)
    for row in rows.unbind():
        row.add_(1)


def write_together(rows: torch.Tensor, x: torch.Tensor) -> None:
    copies = [row.clone() for row in rows]
    torch._foreach_add_(copies, float("nan"))
    rows.copy_(torch.stack(copies))


@pytest.mark.parametrize("write", [write_nan, make_nan_for_each, write_masks, fill_views, write_together])
@pytest.mark.parametrize("asks", [find_first, find_all])
def test_search_grows_with_the_number_of_writes_and_no_faster(
    write: Callable[[torch.Tensor, torch.Tensor], None], asks: Callable[..., Any]
) -> None:
    class Buffered(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.zeros(self.size, 2)
            write(rows, x)
            return rows.sum()

    def count(size: int) -> int:
        model = Buffered(size)
        with modtrace.record(model, ops=True) as rec, torch.no_grad():
            model(torch.full((2,), math.nan))
        return count_lines(lambda: asks(rec.data) if asks is find_first else next(find_all(rec.data), None))

    count(8)  # imports, and what is read once
    small, large = count(60), count(120)
    assert large < 2.5 * small, (small, large)


def test_finite_ops_before_the_first_bad_one_take_a_line_each_and_no_more() -> None:
    class Long(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.size):
                x = (x + 1).view(2, 1).view(2)
            return x / torch.zeros(())

    def count(size: int) -> int:
        with modtrace.record(model := Long(size), ops=True) as rec, torch.no_grad():
            model(torch.ones(2))
        return count_lines(lambda: next(find_all(rec.data)))

    count(8)
    small, large = count(60), count(120)
    assert large - small <= 3 * 60  # in which the names of the ops are listed
