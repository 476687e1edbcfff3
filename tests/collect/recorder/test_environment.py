"""What a recording knows about the run beside its rows."""

import subprocess

import pytest
import torch

import modtrace
from modtrace.collect.recorder import environment
from modtrace.collect.recorder.environment import describe_run, read_flags


@pytest.fixture
def repository(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "Begin")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    return git


@pytest.mark.parametrize("state", ["a branch", "packed", "detached", "worktree"])
def test_the_commit_is_the_one_that_git_names(repository, state, tmp_path, monkeypatch):
    commit = repository("rev-parse", "HEAD")
    if state == "packed":
        repository("pack-refs", "--all")
    if state == "detached":
        repository("checkout", "-q", "--detach")
    if state == "worktree":
        repository("worktree", "add", "-q", str(tmp_path / "linked"))
        monkeypatch.chdir(tmp_path / "linked")
    assert describe_run({}).git_commit == commit


def test_without_a_repository_or_a_commit_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe_run({}).git_commit is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert describe_run({}).git_commit is None


def test_the_run_is_described(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    meta = describe_run({"steps": "0:"})
    assert (meta.rank, meta.world_size, meta.options) == (3, 4, {"steps": "0:"})
    assert meta.versions["torch"].startswith("2.")
    assert meta.clock_time_ns > 0


def test_settings_that_change_numbers_are_those_at_the_end():
    before = torch.get_float32_matmul_precision(), torch.initial_seed(), torch.get_rng_state()
    try:
        with modtrace.record() as recording:
            torch.set_float32_matmul_precision("medium")
            torch.manual_seed(7)
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        flags = recording.meta.flags
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.manual_seed(before[1])
        torch.set_rng_state(before[2])
    assert (flags["seed"], flags["float32_matmul_precision"]) == (7, "medium")
    assert (flags["default_dtype"], flags["deterministic_debug_mode"]) == ("float32", "default")
    assert (flags["cudnn.benchmark"], flags["mkldnn.enabled"], flags["autocast cpu"]) == (False, True, "off")


def test_kernels_of_the_cpu_are_known(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    flags = read_flags()
    assert flags["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert (flags["MKL_CBWR"], flags["ONEDNN_MAX_CPU_ISA"]) == ("COMPATIBLE", "")


def test_autocast_is_told_by_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert read_flags()["autocast cpu"] == "bfloat16"


def test_flag_that_torch_refuses_to_tell_is_not_known(monkeypatch):
    def refuse():
        raise RuntimeError("set by the new API")

    monkeypatch.setitem(environment._READERS, "float32_matmul_precision", refuse)
    assert read_flags()["float32_matmul_precision"] is None
