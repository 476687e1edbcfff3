"""A recording that starts without compiled parts says once what that costs, or that it cannot."""

import sys
import warnings

import pytest
import torch
from torch import nn

import modtrace
from modtrace.collect import compiled_parts
from modtrace.errors import MissingLibraryError

MOMENTS = "modtrace.measure.moments._moments"
TENSOR_IDS = "modtrace.collect.tensor_ids._tensor_ids"


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_parts, "_has_warned", False)


def warnings_of(**options: object) -> list[str]:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with modtrace.record(model, **options):
            model(torch.ones(1, 2))
    return [f"{each.category.__name__}: {each.message}" for each in caught]


def test_recording_that_is_slower_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MOMENTS, None)
    assert warnings_of() == [
        "ModtraceWarning: modtrace runs without all of its compiled parts: measuring values takes three times as "
        "long. Install a C compiler, then modtrace again; `modtrace doctor` says what is missing."
    ]
    assert warnings_of() == []


@pytest.mark.parametrize(
    ("missing", "options", "count"),
    [
        (MOMENTS, {"values": None}, 0),
        (TENSOR_IDS, {}, 0),
        ("nothing", {"ops": True}, 0),
    ],
)
def test_only_what_is_recorded_is_told(
    missing: str, options: dict[str, object], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert len(warnings_of(**options)) == count


@pytest.mark.parametrize("missing", [TENSOR_IDS, "modtrace.collect.ops._op_mode"])
def test_ops_are_refused_where_what_sees_them_is_not_compiled(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingLibraryError, match=r"record\(ops=...\), --ops: .* not compiled when"):
        warnings_of(ops=True)
    assert warnings_of() == []


def test_part_that_cannot_be_loaded_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: PyBuffer_Release")

    monkeypatch.setattr(compiled_parts.importlib, "import_module", fail)
    assert {each.problem for each in compiled_parts.find_missing_parts()} == {
        "cannot be loaded (undefined symbol: PyBuffer_Release)"
    }
