"""Callbacks of training frameworks: the bits stay the same, and steps, `global_step` and scalars are recorded."""

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import modtrace
from helpers.framework_cases import Case, Outcome
from modtrace.collect.scopes import process

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def on_transformers() -> Any:
    """The module of the helpers, which imports the framework: here, as it takes seconds."""
    return import_module("helpers.transformers_runs")


@pytest.fixture(scope="module")
def on_lightning() -> Any:
    """Likewise. The import replaces `warnings.formatwarning`, so it comes before what looks for that in each test."""
    return import_module("helpers.lightning_runs")


@pytest.fixture(scope="module")
def pytorch_lightning() -> Any:
    """The package of Lightning by its older name."""
    return import_module("pytorch_lightning")


@pytest.fixture(scope="module", params=["transformers", "lightning"])
def framework(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"on_{request.param}")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what Lightning sets for its processes."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def steps_of(rec: modtrace.Recording) -> list[tuple[str, float | None]]:
    """The kind of each step, and the global_step beside it."""
    rows = [row for row in rec.table("scalars").to_pylist() if row["name"] == "global_step"]
    logged = {row["step"]: row["value"] for row in rows}
    assert len(logged) == len(rows)
    return [(row["kind"], logged.get(row["step"])) for row in rec.table("steps").to_pylist()]


def assert_equal(outcome: Outcome, other: Outcome) -> None:
    assert len(outcome.losses) >= 2
    assert outcome.losses == other.losses
    assert all(map(torch.equal, outcome.parameters, other.parameters))


FOUR = [("train", 1), ("train", 2), ("train", 3), ("train", 4)]
EVALUATED = [*FOUR[:2], ("eval", 2), ("eval", 2), *FOUR[2:], ("eval", 4), ("eval", 4)]
CASES = {
    "plain": (Case(), FOUR),
    "evaluation": (Case(evaluate=True, accumulate=2), EVALUATED),
    "resumed": (Case(resume=True), FOUR[2:]),
}


@pytest.mark.parametrize("case", CASES)
def test_training_has_the_same_bits_and_its_steps_have_global_step(
    framework: Any, case: str, tmp_path: Path
) -> None:
    wanted, steps = CASES[case]
    unrecorded = framework.train(tmp_path / "unrecorded", wanted)
    callback = framework.ModtraceCallback(strict=True)
    assert_equal(framework.train(tmp_path / "recorded", wanted, callback), unrecorded)

    assert process.current() is None
    rec = callback.recording
    assert (rec.meta.marks, rec.meta.complete) == ((), True)
    assert steps_of(rec) == steps
    scalars = rec.table("scalars").to_pylist()
    for number, (kind, _) in enumerate(steps):
        if kind == "train":
            names = {row["name"] for row in scalars if row["step"] == number}
            assert names >= {"global_step", *framework.SCALARS}
    forwards = [call for call in rec.table("calls").to_pylist() if call["phase"] == "forward"]
    of_root = [call for call in forwards if call["module_id"] == 0 and steps[call["step"]][0] == "train"]
    assert len(of_root) == wanted.accumulate * sum(kind == "train" for kind, _ in steps)
    if wanted.evaluate:
        logged = [row["step"] for row in scalars if row["name"] == framework.EVALUATION_LOSS]
        assert logged == [3, 7]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_ends_the_recording_while_its_traceback_is_kept(
    framework: Any, error: type[BaseException], tmp_path: Path
) -> None:
    """As a notebook keeps it, with all frames and what is in them (`sys.last_exc`)."""
    callback = framework.ModtraceCallback(to=tmp_path / "run.modtrace", strict=True)
    raised = framework.RAISED.get(error, error)
    with pytest.raises(raised) as kept:
        framework.train(tmp_path, Case(fail=error), callback)
    assert kept.traceback
    assert process.current() is None
    [mark] = callback.recording.meta.marks
    assert mark.startswith(f"the run ended by {error.__name__}: mine")
    assert callback.recording.meta.complete is False
    assert steps_of(callback.recording)[:2] == FOUR[:2]

    framework.train(tmp_path, Case(), callback)
    assert sorted(path.name for path in tmp_path.glob("*.modtrace")) == ["run-2.modtrace", "run.modtrace"]
    second = modtrace.open_recording(tmp_path / "run-2.modtrace")
    assert (second.meta.marks, second.meta.complete, steps_of(second)) == ((), True, FOUR)


def test_recording_that_the_user_stops_does_not_stop_training(framework: Any, tmp_path: Path) -> None:
    callback = framework.ModtraceCallback(strict=True)
    begin = callback._begin

    def begin_and_stop(model: object) -> None:
        begin(model)
        callback.recording.stop()

    callback._begin = begin_and_stop
    assert_equal(framework.train(tmp_path, Case(), callback), framework.train(tmp_path, Case()))
    assert steps_of(callback.recording) == []


def test_wrong_option_is_refused_before_training(framework: Any) -> None:
    with pytest.raises(ValueError, match="steps='5:5'"):
        framework.ModtraceCallback(steps="5:5")
    with pytest.raises(TypeError, match="op"):
        framework.ModtraceCallback(op=True)


def test_callback_is_pickled_without_its_recording(framework: Any, tmp_path: Path) -> None:
    callback = framework.ModtraceCallback(to=tmp_path / "run.modtrace", ops=False)
    framework.train(tmp_path, Case(), callback)
    copy = pickle.loads(pickle.dumps(callback))
    assert (copy.recording, callback.recording.path) == (None, tmp_path / "run.modtrace")
    framework.train(tmp_path, Case(), copy)
    assert copy.recording.path == tmp_path / "run-2.modtrace"


def test_import_of_modtrace_imports_no_framework() -> None:
    program = "import sys, modtrace.api.record, modtrace.integrations.training_recorder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"transformers", "lightning", "pytorch_lightning"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_framework_that_is_missing_is_named_with_the_remedy(name: str) -> None:
    missing = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'lightning', 'pytorch_lightning']))"
    )
    program = f"{missing}; import modtrace.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"modtrace.errors.MissingLibraryError: modtrace.integrations.{name} needs {name}, which is not installed here. "
        f"Install it with `pip install 'modtrace[{name}]'`."
    )


# transformers


def test_callback_that_is_added_later_records_too(on_transformers: Any, tmp_path: Path) -> None:
    trainer = on_transformers.make_trainer(tmp_path, Case(fail=RuntimeError))
    trainer.add_callback(on_transformers.ModtraceCallback)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    [callback] = [each for each in trainer.callback_handler.callbacks if hasattr(each, "recording")]
    assert callback.recording.meta.marks[0].startswith("the run ended by RuntimeError: mine")
    trainer.train()
    assert steps_of(callback.recording) == FOUR


def test_attempt_with_a_smaller_batch_is_a_recording_of_its_own(on_transformers: Any, tmp_path: Path) -> None:
    def fail_once(*_: object) -> None:
        handle.remove()
        raise RuntimeError("CUDA out of memory.")

    callback = on_transformers.ModtraceCallback(to=tmp_path / "run.modtrace")
    trainer = on_transformers.make_trainer(tmp_path, Case(), [callback], auto_find_batch_size=True)
    handle = trainer.model.lm_head.register_forward_pre_hook(fail_once)
    trainer.train()
    assert callback.recording.path == tmp_path / "run-2.modtrace"
    assert steps_of(callback.recording) == FOUR
    assert steps_of(modtrace.open_recording(tmp_path / "run.modtrace")) == [("eval", None)]


def ranks_of(path: Path) -> list[modtrace.Recording]:
    ranks = [modtrace.open_recording(path, rank=rank) for rank in (0, 1)]
    assert [(rec.meta.rank, rec.meta.world_size) for rec in ranks] == [(0, 2), (1, 2)]
    return ranks


def test_two_processes_of_a_trainer_write_one_recording(on_transformers: Any, tmp_path: Path) -> None:
    outcomes, path = [], tmp_path / "run.modtrace"
    for to in (None, path):
        on_transformers.debug_launcher(
            on_transformers.train_rank, (tmp_path, Case(evaluate=True), to), num_processes=2
        )
        outcomes.append(Outcome(*torch.load(tmp_path / "outcome.pt")))
    assert_equal(*outcomes)
    one_batch_each = [*FOUR[:2], ("eval", 2), *FOUR[2:], ("eval", 4)]
    for rec in ranks_of(path):
        assert (rec.meta.marks, rec.meta.complete, steps_of(rec)) == ((), True, one_batch_each)


def test_exception_of_one_process_of_a_trainer_is_in_its_recording(
    on_transformers: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.modtrace"
    with pytest.raises(Exception, match="mine"):
        on_transformers.debug_launcher(
            on_transformers.train_rank, (tmp_path, Case(fail=RuntimeError), path), num_processes=2
        )
    assert ranks_of(path)[0].meta.marks[0].startswith("the run ended by RuntimeError: mine")


# Lightning


def test_trainer_of_the_older_package_takes_the_callback(
    on_lightning: Any, pytorch_lightning: Any, tmp_path: Path
) -> None:
    callback = on_lightning.ModtraceCallback(strict=True)
    on_lightning.train(tmp_path, Case(evaluate=True), callback, pytorch_lightning)
    assert steps_of(callback.recording) == EVALUATED
    with pytest.raises(RuntimeError, match="mine"):
        on_lightning.train(tmp_path, Case(fail=RuntimeError), callback, pytorch_lightning)
    assert callback.recording.meta.marks[0].startswith("the run ended by RuntimeError: mine")


def test_checkpoints_lie_where_they_lie_without_a_logger(on_lightning: Any, tmp_path: Path) -> None:
    found = []
    for callback in (None, on_lightning.ModtraceCallback()):
        folder = tmp_path / str(callback is None)
        on_lightning.train(folder, Case(), callback, enable_checkpointing=True)
        found.append(sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt")))
    assert found == [["checkpoints/epoch=1-step=4.ckpt"]] * 2


SPAWNED = pytest.param("ddp_spawn", marks=pytest.mark.ranks)  # whose processes import Lightning, in 20 s


@pytest.mark.parametrize("strategy", ["ddp_fork", SPAWNED])
def test_two_processes_that_lightning_starts_write_one_recording(
    strategy: str, on_lightning: Any, tmp_path: Path
) -> None:
    path, options = tmp_path / "run.modtrace", {"strategy": strategy, "devices": 2}
    callback = on_lightning.ModtraceCallback(to=path)
    recorded = on_lightning.train(tmp_path, Case(evaluate=True), callback, **options)
    unrecorded = on_lightning.train(tmp_path, Case(evaluate=True), strategy="ddp_fork", devices=2)
    assert all(map(torch.equal, recorded.parameters, unrecorded.parameters))
    assert callback.recording is None
    for rec in ranks_of(path):
        assert (rec.meta.marks, rec.meta.complete, steps_of(rec)) == ((), True, EVALUATED)
        names = {row["name"] for row in rec.table("scalars").to_pylist()}
        assert names >= {"loss", "val_loss", "global_step"}


def test_exception_in_a_process_that_lightning_starts_is_in_its_recording(
    on_lightning: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.modtrace"
    callback = on_lightning.ModtraceCallback(to=path)
    with pytest.raises(Exception, match="mine"):
        on_lightning.train(tmp_path, Case(fail=RuntimeError), callback, strategy="ddp_fork", devices=2)
    marks = [mark for rec in ranks_of(path) for mark in rec.meta.marks]
    assert any(mark.startswith("the run ended by RuntimeError: mine") for mark in marks)
