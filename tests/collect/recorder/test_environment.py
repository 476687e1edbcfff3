"""What a recording knows about the run beside its rows."""

import subprocess

import pytest

from modtrace.collect.recorder.environment import describe_run


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
