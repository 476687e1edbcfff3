"""The folder of CSV files: what stands in them, to the letter, and what other programs read."""

import os
from pathlib import Path

import pandas
import pyarrow as pa
import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.exported import broken_recording
from modtrace.errors import RecordingError, RecordingExistsError
from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schemas
from modtrace.store.copy import write_recording
from modtrace.store.csv_tables import write_csv

NAN, INF = float("nan"), float("inf")


def recording() -> TypedRecording:
    build = RecordingBuilder(run_id="first", argv=("train.py", 'say "hi"'), complete=True)
    net = build.module("", "Net")
    build.module("head", "Linear", parent=net, aliases=["tail", 'x"ä'], parameters=6)
    build.step(0, 100, 900)
    build.call(net, 100, None)
    return build.data()


def test_there_is_a_file_for_each_table(tmp_path: Path) -> None:
    write_csv(recording(), tmp_path / "tables")
    assert sorted(os.listdir(tmp_path / "tables")) == sorted(f"{each}.csv" for each in [*schemas(), "runs"])


def test_texts_are_quoted_and_unknown_values_empty(tmp_path: Path) -> None:
    write_csv(recording(), tmp_path)
    assert (tmp_path / "modules.csv").read_text(encoding="utf-8") == (
        '"module_id","root_id","path","raw_path","aliases","name","type","parent_id","parameters","buffers"\n'
        '0,0,"","","[]","Net","Net",,0,0\n'
        '1,0,"head","head","[""tail"", ""x\\""ä""]",,"Linear",0,6,0\n'
    )
    assert (tmp_path / "steps.csv").read_text() == (
        '"step","kind","start_ns","end_ns","overhead_ns","uncleared","next_start_ns","resident_bytes","device_bytes"\n'
        '0,"train",100,900,,,,,\n'
    )
    assert (tmp_path / "scalars.csv").read_text() == '"step","name","value"\n'


def test_run_stands_in_a_file_of_its_own(tmp_path: Path) -> None:
    write_csv(recording(), tmp_path)
    assert (tmp_path / "runs.csv").read_text() == (
        '"run_id","created","modtrace_version","argv","versions","device","git_commit","options","world_size",'
        '"clock_time_ns","clock_perf_counter_ns","marks","complete","flags"\n'
        '"first","","","[""train.py"", ""say \\""hi\\""""]","{}","",,"{}",1,0,0,"[]",true,\n'
    )


class OneTable(TypedRecording):
    """A recording of one batch of values."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        super().__init__({}, RunMeta(run_id="first"))
        self.batch = batch

    def table(self, name: str) -> pa.Table:
        return pa.Table.from_batches([self.batch]) if name == "values" else super().table(name)


def test_lists_are_json_and_bytes_hexadecimal(tmp_path: Path) -> None:
    columns = {
        "phase": ["forward", None, "backward"],
        "shape": [[16, 128], [], [1]],
        "sketch": [[0.5, NAN, INF, -INF], None, []],
        "hash": [b"\x00\xff", b"", None],
        "min": [NAN, -INF, None],
    }
    write_csv(OneTable(to_batch("values", columns)), tmp_path)
    read = pandas.read_csv(tmp_path / "values.csv", dtype=str, keep_default_na=False)
    assert read[list(columns)].to_dict("list") == {
        "phase": ["forward", "", "backward"],
        "shape": ["[16, 128]", "[]", "[1]"],
        "sketch": ['[0.5, "NaN", "Infinity", "-Infinity"]', "", "[]"],
        "hash": ["00ff", "", ""],
        "min": ["nan", "-inf", ""],
    }


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    columns = {"min": [0.1, 1e300, -0.0, 5e-324], "order": [2**62, 1, 2, 3]}
    write_csv(OneTable(to_batch("values", columns)), tmp_path)
    read = pandas.read_csv(tmp_path / "values.csv")
    assert repr(read[["min", "order"]].to_dict("list")) == repr(columns)


def test_export_replaces_an_older_one_and_leaves_other_files(tmp_path: Path) -> None:
    write_csv(RecordingBuilder(run_id="older").data(), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    write_csv(recording(), tmp_path)
    assert '"first"' in (tmp_path / "runs.csv").read_text()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_failed_export_leaves_what_was_there(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            write_csv(recording(), folder)
        with pytest.raises(RecordingError, match="values cannot be read"):
            write_csv(broken_recording("second"), folder)
    assert os.listdir(tmp_path) == ["old"]
    assert '"first"' in (tmp_path / "old" / "runs.csv").read_text()
    assert len(os.listdir(tmp_path / "old")) == 17


def test_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    write_recording(recording(), path)
    with pytest.raises(RecordingExistsError, match="a folder that is no export is here already"):
        write_csv(recording(), path)
    assert sorted(os.listdir(path)) == ["rank-00000", "recording.json"]


def test_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tables.csv"
    path.write_text("mine")
    with pytest.raises(RecordingExistsError) as raised:
        write_csv(recording(), path)
    assert (
        str(raised.value) == f"{path}: a file is here already, and the export is a folder. Give another path."
    )
    assert path.read_text() == "mine"
