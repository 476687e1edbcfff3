"""Ranks find the recording of their own run, and take that of an earlier launch of the same name for what it is."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modtrace.errors import RecordingExistsError
from modtrace.recording.meta import RunMeta
from modtrace.recording.process import name_process, process_start_ns
from modtrace.store import folder as folder_module
from modtrace.store.folder import may_join
from modtrace.store.layout import rank_folder
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

MINUTE_NS = 60 * 10**9
LAUNCH = "node-0:29500"


def meta_of(rank: int, run_id: str, **more: object) -> RunMeta:
    known = {"launch": LAUNCH, "process": name_process(), "world_size": 2}
    return RunMeta(rank=rank, run_id=run_id, **{**known, **more})


@pytest.fixture
def running() -> Iterator[str]:
    """The name of another process that runs."""
    code = "from modtrace.recording.process import name_process; print(name_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def leave(
    path: Path,
    rank: int,
    process: str,
    *,
    closed: bool,
    minutes_before: float,
    run_id: str = "first",
    attempt: int = 0,
    launch: str = LAUNCH,
) -> None:
    """What a rank has left that has written for the last time so long before this process began."""
    writer = FolderWriter(
        path, meta_of(rank, run_id, attempt=attempt, launch=launch), new_attempt=attempt > 0
    )
    if closed:
        writer.close()
    else:
        writer.abandon()
    file = writer.folder / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "process": process}))
    then_ns = process_start_ns() - int(minutes_before * MINUTE_NS)
    for each in (file, writer.folder):
        os.utime(each, ns=(then_ns, then_ns))


def folders(path: Path) -> dict[str, str]:
    """The run id of each rank's folder."""
    return {
        folder.name: FolderReader(folder).meta.run_id
        for folder in sorted(path.iterdir())
        if folder.name.startswith("rank-")
    }


DEAD = name_process() + "1"
ELSEWHERE = "another" + name_process()


@pytest.mark.parametrize(
    ("process", "closed", "minutes_before", "is_same"),
    [
        ("running", False, 20, True),  # it has waited for us since then
        ("running", False, 200, True),
        ("running", True, 20, False),  # it does something else now
        ("dead", False, 0.01, False),
        ("dead", False, -0.01, True),  # it has ended since we began
        ("dead", True, 0.01, False),
        ("dead", True, -0.01, True),
        ("elsewhere", False, 20, True),
        ("elsewhere", False, 40, False),  # longer than any rank waits
        ("elsewhere", True, 0.01, False),
        ("", False, 20, True),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_rank_joins_what_was_going_on_when_its_process_began(
    tmp_path: Path,
    running: str,
    process: str,
    closed: bool,
    minutes_before: float,
    is_same: bool,
    overwrite: bool,
) -> None:
    path = tmp_path / "run.modtrace"
    process = {"running": running, "dead": DEAD, "elsewhere": ELSEWHERE, "": ""}[process]
    leave(path, 0, process, closed=closed, minutes_before=minutes_before)
    if is_same:
        FolderWriter(path, meta_of(1, "second"), overwrite=overwrite).close()
        assert folders(path) == {"rank-00000": "first", "rank-00001": "first"}
    elif overwrite:
        FolderWriter(path, meta_of(1, "second"), overwrite=True).close()
        assert folders(path) == {"rank-00001": "second"}
        FolderWriter(path, meta_of(0, "third"), overwrite=True).close()
        assert folders(path) == {"rank-00000": "second", "rank-00001": "second"}
    else:
        with pytest.raises(RecordingExistsError, match="there is a recording here already"):
            FolderWriter(path, meta_of(1, "second"))
        assert folders(path) == {"rank-00000": "first"}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_each_rank_of_a_second_run_takes_the_place_of_the_first_run(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    path = tmp_path / "run.modtrace"
    for rank in range(4):
        leave(path, rank, DEAD, closed=rank > 0, minutes_before=1)
    for rank in order:
        FolderWriter(path, meta_of(rank, f"by rank {rank}"), overwrite=True).delete_replaced()
    assert folders(path) == {f"rank-0000{rank}": f"by rank {order[0]}" for rank in range(4)}
    assert sorted(entry.name for entry in path.iterdir()) == [*folders(path), "recording.json"]


def test_rank_of_another_launch_does_not_join(tmp_path: Path, running: str) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, running, closed=False, minutes_before=-1)
    with pytest.raises(RecordingExistsError):
        FolderWriter(path, meta_of(1, "second", launch="node-0:29501"))


def test_run_by_itself_joins_nobody(tmp_path: Path, running: str) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, running, closed=False, minutes_before=-1)
    with pytest.raises(RecordingExistsError):
        FolderWriter(path, meta_of(0, "second", launch="", world_size=1))
    leave(tmp_path / "alone", 0, running, closed=False, minutes_before=-1, launch="")
    with pytest.raises(RecordingExistsError):
        FolderWriter(tmp_path / "alone", meta_of(1, "second"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("closed", "minutes_before"), [(False, 20), (True, -0.01)])
def test_two_ranks_of_one_number_do_not_replace_each_other(
    tmp_path: Path, running: str, overwrite: bool, closed: bool, minutes_before: float
) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, running, closed=closed, minutes_before=minutes_before)
    with pytest.raises(RecordingExistsError) as caught:
        FolderWriter(path, meta_of(0, "second"), overwrite=overwrite)
    assert str(caught.value) == (
        f"{path}: another process of this run writes here as rank 0 (rank-00000). "
        "Give each rank its number (RANK), or another path."
    )
    assert folders(path) == {"rank-00000": "first"}


@pytest.mark.parametrize("closed", [False, True])
def test_child_does_not_replace_what_the_process_that_has_started_it_records(
    tmp_path: Path, closed: bool
) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, name_process(os.getppid()), closed=closed, minutes_before=1, launch="")
    child = meta_of(0, "second", launch=name_process(os.getppid()), world_size=1)
    if not closed:
        with pytest.raises(RecordingExistsError, match="another process of this run writes here"):
            FolderWriter(path, child, overwrite=True)
    else:
        FolderWriter(path, child, overwrite=True).close()
        assert folders(path) == {"rank-00000": "second"}


def test_rank_that_records_twice_replaces_its_own_part_if_it_may(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    for rank in (0, 1):
        FolderWriter(path, meta_of(rank, f"by rank {rank}")).close()
    with pytest.raises(RecordingExistsError, match="rank 1 of run 'second' has written here already"):
        FolderWriter(path, meta_of(1, "second"))
    writer = FolderWriter(path, meta_of(1, "second"), overwrite=True)
    writer.mark("new")
    assert folders(path) == {"rank-00000": "by rank 0", "rank-00001": "by rank 0"}
    assert FolderReader(path / "rank-00001").meta.marks[0] == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_restarted_ranks_add_attempts_of_one_number(tmp_path: Path, overwrite: bool) -> None:
    """Rank 1 had not come so far the first time."""
    path = tmp_path / "run.modtrace"
    leave(path, 0, DEAD, closed=False, minutes_before=5)
    for rank in (1, 0):
        meta = meta_of(rank, "second", attempt=2)
        FolderWriter(path, meta, overwrite=overwrite, new_attempt=True).close()
    assert folders(path) == dict.fromkeys(
        ["rank-00000", "rank-00000.attempt-2", "rank-00001.attempt-2"], "first"
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("run_id", ["first", "second"])
def test_ranks_that_their_agent_has_restarted_without_counting_it_replace_nothing(
    tmp_path: Path, overwrite: bool, run_id: str
) -> None:
    """Machines have come or gone, or ranks have failed on another one."""
    path = tmp_path / "run.modtrace"
    leave(path, 0, DEAD, closed=False, minutes_before=5)
    agent_start_ns = process_start_ns() - 6 * MINUTE_NS
    for rank in (1, 0):
        meta = meta_of(rank, run_id)
        FolderWriter(path, meta, overwrite=overwrite, agent_start_ns=agent_start_ns).close()
    assert folders(path) == dict.fromkeys(["rank-00000", "rank-00000.attempt-1", "rank-00001"], "first")


def test_run_of_another_agent_is_a_second_run(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, DEAD, closed=True, minutes_before=5)
    agent_start_ns = process_start_ns() - 4 * MINUTE_NS
    with pytest.raises(RecordingExistsError):
        FolderWriter(path, meta_of(0, "second"), agent_start_ns=agent_start_ns)
    FolderWriter(path, meta_of(0, "second"), overwrite=True, agent_start_ns=agent_start_ns).close()
    assert folders(path) == {"rank-00000": "second"}


def test_rank_replaces_its_part_of_a_run_whose_machine_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, ELSEWHERE, closed=False, minutes_before=5)
    FolderWriter(path, meta_of(0, "second"), overwrite=True).close()
    assert list(folders(path)) == ["rank-00000"]


def test_ranks_choose_the_place_that_another_one_is_making(tmp_path: Path, running: str) -> None:
    path = tmp_path / "run.modtrace"
    path.mkdir()
    assert may_join(path, meta_of(1, "second"))
    assert not may_join(path, meta_of(1, "second", launch=""))
    leave(path, 0, running, closed=False, minutes_before=-1)
    assert may_join(path, meta_of(1, "second"))
    assert not may_join(path, meta_of(0, "second"))  # another process is rank 0


def test_restart_of_ranks_that_recorded_nothing_before_does_not_join_the_run_of_yesterday(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, DEAD, closed=True, minutes_before=24 * 60)
    meta = meta_of(0, "second", attempt=1)
    with pytest.raises(RecordingExistsError):
        FolderWriter(path, meta, new_attempt=True)
    FolderWriter(path, meta, overwrite=True, new_attempt=True).close()
    assert folders(path) == {"rank-00000.attempt-1": "second"}


def test_run_with_an_id_of_its_own_is_joined_at_any_time_but_not_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, DEAD, closed=True, minutes_before=60, run_id="same")
    FolderWriter(path, meta_of(1, "same")).close()
    leave(tmp_path / "again", 0, DEAD, closed=True, minutes_before=60, run_id="same")
    with pytest.raises(RecordingExistsError, match="there is a recording here already"):
        FolderWriter(tmp_path / "again", meta_of(0, "same"))


def test_copy_of_a_ranks_recording_is_no_rank_of_the_run(tmp_path: Path, running: str) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, running, closed=False, minutes_before=1)
    with pytest.raises(RecordingExistsError):
        FolderWriter(path, meta_of(1, "copied", process=DEAD))
    FolderWriter(path, meta_of(0, "copied", process=DEAD), overwrite=True).close()
    assert folders(path) == {"rank-00000": "copied"}


def test_ranks_that_begin_at_once_make_one_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    leave(path, 0, DEAD, closed=True, minutes_before=1)
    barrier = threading.Barrier(8)
    failed = []

    def begin(rank: int) -> None:
        barrier.wait()
        try:
            FolderWriter(path, meta_of(rank, f"by rank {rank}"), overwrite=True).close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(folders(path)) == 8
    assert len(set(folders(path).values())) == 1


def test_start_that_was_killed_keeps_others_waiting_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_STARTED_AFTER_S", 0.3)
    path = tmp_path / "run.modtrace"
    path.mkdir()
    (path / ".starting").touch()
    began_s = time.monotonic()
    FolderWriter(path, RunMeta(run_id="second")).close()
    assert 0.3 < time.monotonic() - began_s < 5
    assert sorted(entry.name for entry in path.iterdir()) == ["rank-00000", "recording.json"]


def test_launch_stands_in_the_header_and_what_tells_processes_apart_in_the_meta_data(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    FolderWriter(path, replace(meta_of(0, "first"), attempt=3), new_attempt=True).close()
    assert json.loads((path / "recording.json").read_text())["launch"] == LAUNCH
    meta = FolderReader(rank_folder(path, 0, 3)).meta
    assert (meta.launch, meta.attempt, meta.process) == (LAUNCH, 3, name_process())
