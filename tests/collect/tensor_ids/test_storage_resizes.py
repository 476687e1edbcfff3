"""`UntypedStorage.resize_` is wrapped while somebody watches, and is itself again when all have left."""

import torch

from modtrace.collect.tensor_ids.storage_resizes import unwatch_resizes, watch_resizes


def test_watchers_leave_in_any_order():
    before = vars(torch.UntypedStorage).get("resize_")  # MemTracker of torch leaves one of its own
    seen: list[str] = []
    first, second = (lambda stored, name=name: seen.append(f"{name} {stored.nbytes()}") for name in "ab")
    watch_resizes(first)
    watch_resizes(second)
    storage = torch.ones(2).untyped_storage()
    storage.resize_(16)
    unwatch_resizes(first)
    storage.resize_(0)
    unwatch_resizes(second)
    storage.resize_(8)
    assert seen == ["a 16", "b 16", "b 0"]
    assert vars(torch.UntypedStorage).get("resize_") is before


def test_patch_of_others_over_ours_stays_and_passes_calls_on():
    seen: list[int] = []

    def receive(stored: torch.UntypedStorage) -> None:
        seen.append(stored.nbytes())

    watch_resizes(receive)
    ours = torch.UntypedStorage.resize_

    def theirs(self: torch.UntypedStorage, size: int) -> object:
        return ours(self, size)

    torch.UntypedStorage.resize_ = theirs
    unwatch_resizes(receive)
    storage = torch.ones(2).untyped_storage()
    storage.resize_(16)
    watch_resizes(receive)
    storage.resize_(24)
    unwatch_resizes(receive)
    assert torch.UntypedStorage.resize_ is theirs
    del torch.UntypedStorage.resize_
    assert (storage.nbytes(), set(seen)) == (24, {24})
