"""Of a recording of which a table is cut, NaN are told as what they are: nobody knows whether they were intended."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

import modtrace
from helpers.command_line import run_command
from helpers.nonfinite_models import Applied, record_planted
from modtrace.analysis.provenance.search import find_all
from modtrace.recording.protocols import RecordingData

TABLES = ("ops", "uses", "tensors")


def record_and_cut(function: object, table: str, folder: Path) -> modtrace.Recording:
    """Returns the recording of a layer with a function behind it, without one of its tables."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Applied(function), nn.Linear(8, 8))  # type: ignore[arg-type]
    with modtrace.record(model, folder, ops=True):
        model(torch.randn(2, 8)).sum().backward()
    [file] = folder.rglob(f"{table}.arrow")
    os.truncate(file, file.stat().st_size // 2)
    return modtrace.open_recording(folder)


@pytest.mark.parametrize("table", TABLES)
def test_nan_is_found_and_what_made_it_is_said_not_to_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    found = record_and_cut(torch.log, table, tmp_path / "run").first_nonfinite()
    assert found is not None
    assert (found.path, found.role, found.op) == ("1", "output", None)
    assert found.hint == (
        "what made them, and whether they are intended, is not known: rows of this step are missing"
    )
    assert run_command(monkeypatch, "nonfinite", str(tmp_path / "run")) == 1
    assert f"! {table}.arrow is cut" in capsys.readouterr().out


@pytest.mark.parametrize("table", TABLES)
def test_infinities_of_a_mask_are_no_finding(tmp_path: Path, table: str) -> None:
    def masked(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.eye(2, 8, dtype=torch.bool), -torch.inf).softmax(-1)

    assert record_and_cut(masked, table, tmp_path / "run").first_nonfinite() is None


class ReplacedTables:
    """A recording of which some tables are replaced."""

    def __init__(self, data: RecordingData, tables: dict[str, pa.Table]) -> None:
        self._data, self._tables = data, tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def table(self, name: str) -> pa.Table:
        return self._tables[name] if name in self._tables else self._data.table(name)


def test_step_that_lost_all_rows_but_those_of_ops_is_answered_for() -> None:
    rec = record_planted(torch.log, steps=1)
    lost = {name: rec.table(name).slice(0, 0) for name in ("steps", "calls")}
    found = next(find_all(ReplacedTables(rec.data, lost)))
    assert found.op == "aten.log.default"


def test_row_that_has_lost_its_op_is_one_of_those_whose_origin_is_not_known() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Applied(torch.log), nn.Linear(8, 8))  # type: ignore[arg-type]
    with modtrace.record(model, ops=True) as rec:
        model(torch.randn(2, 8)).sum().backward()
    values = rec.data.table("values")
    at = values.schema.get_field_index("op_id")
    lost = values.set_column(at, values.schema.field(at), pa.nulls(values.num_rows, pa.int64()))
    found = next(find_all(ReplacedTables(rec.data, {"values": lost})))
    assert (found.path, found.op) == ("1", None)
    assert found.hint is not None and found.hint.startswith("what made them")
