"""Whole tensors of a real run: modules with odd names, threads that share a small buffer, a folder that was moved."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import modtrace

ODD_NAMES = (
    *("ü", 'a"b', "a\nb", "a:b", "😀", "a/b", "x" * 5000, "__metadata__", " ", "\x00", "a\\"),
    "tensors-00000.safetensors:000000.x",
)


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


class Named(nn.Module):
    """Its modules have names that torch takes although `setattr` does not."""

    def __init__(self) -> None:
        super().__init__()
        for name in ODD_NAMES:
            self._modules[name] = nn.Linear(2, 2)

    def forward(self, x):
        return {name: module(x) for name, module in self._modules.items()}


def test_tensors_of_modules_with_odd_names_are_found_also_in_a_copy_that_was_moved(tmp_path: Path) -> None:
    model, kept = Named(), modtrace.Capture(roles="output", tensors=True)
    with modtrace.record(model, to=tmp_path / "run", values=kept, strict=True):
        outputs = model(torch.randn(1, 2))
    modtrace.open_recording(tmp_path / "run").write(tmp_path / "copy")
    moved = (tmp_path / "copy").rename(tmp_path / "moved to ü")
    for place in (tmp_path / "run", moved):
        rec = modtrace.open_recording(place)
        found = {name: rec.tensor(name, role="output") for name in ODD_NAMES}
        assert {name: torch.equal(found[name], outputs[name]) for name in ODD_NAMES} == dict.fromkeys(
            ODD_NAMES, True
        )
        (file,) = (place / "rank-00000").glob("*.safetensors")
        assert len(load_file(file)) == len(ODD_NAMES)


class Doubled(nn.Module):
    """Returns twice what it gets."""

    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("keep_last", [None, 3])
def test_rows_of_many_threads_refer_to_their_own_tensors(tmp_path: Path, keep_last: int | None) -> None:
    model, kept = Doubled(), modtrace.Capture(roles=("input", "output"), tensors=True)
    options = modtrace.TensorOptions(max_bytes=2**14)  # 15 tensors: threads wait for room, and for each other
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for nth in range(20):
                model(torch.full((257,), 1000.0 * number + nth))
        except BaseException as error:
            failures.append(error)

    with modtrace.record(
        model,
        to=tmp_path / "run",
        values=kept,
        tensors=options,
        keep_last=keep_last,
        triggers=[],
        strict=True,
    ) as rec:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                rec.step()
                if keep_last is not None:
                    rec.dump()
                thread.join(0.01)
        rec.step()
        if keep_last is not None:
            rec.dump()
    rec = modtrace.open_recording(tmp_path / "run")
    table = rec.table("values")
    assert failures == []
    assert list(rec.meta.marks) == []
    assert table.num_rows == 160
    assert table["blob"].null_count == 0
    for blob, least, most in zip(*(table[name].to_pylist() for name in ("blob", "min", "max")), strict=True):
        assert rec.data.tensor(blob).to_torch().unique().tolist() == [least] == [most]
