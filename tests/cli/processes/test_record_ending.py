"""The last line of `modtrace record` is always there, and true: what is in the recording, and what is not."""

import re
import signal
import sys
from pathlib import Path

import pytest

import modtrace
from cli.processes.test_record import TRAIN, run
from helpers.command_ends import End
from modtrace.cli.children import StartedProcesses, runs_python

END = "Look at it with: modtrace show train.modtrace"

#: 60 steps of 8 layers; one takes 3 kB of values.
TRAIN_LONG = """
import sys
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(60):
    optimizer.zero_grad()
    bad = float("nan") if step == 50 else 1.0
    model(torch.ones(2, 4) * bad).sum().backward()
    optimizer.step()
    if step == 9:
        LIMIT
"""
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))"


def closing_line(done: End) -> str:
    said = [line for line in done.stderr.splitlines() if line.startswith("modtrace: ")]
    assert len([line for line in said if re.match("modtrace: (recorded|wrote) ", line)]) == 1
    assert said[-1] == done.stderr.splitlines()[-1]
    return re.sub(r"[\d,]+ rows?, \d+\.\d MB", "ROWS", said[-1])


def test_disk_that_is_full_in_the_middle_is_told_with_the_steps_that_are_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "record", "train.py", script=TRAIN_LONG.replace("LIMIT", LIMIT))
    rec = modtrace.open_recording(tmp_path / "train.modtrace")
    kept = rec.table("steps").num_rows
    assert 0 < kept < 60
    assert "\nmodtrace: warning: train.modtrace: the recording stops at step " in f"\n{done.stderr}"
    assert "ModtraceWarning" not in done.stderr  # no place in our source, and no line of it
    assert "warnings.warn" not in done.stderr
    (mark,) = rec.meta.marks
    # Which table reaches the limit depends on how many steps the batch has that does not fit.
    assert re.fullmatch(rf"incomplete from step {kept}: File too large \((calls|values)\.arrow\)", mark)
    assert closing_line(done) == f"modtrace: recorded {kept} of 60 steps, ROWS; {mark}. {END}"
    rows = sum(rec.table(name).num_rows for name in modtrace.recording.schema.schemas())
    assert f", {rows:,} rows, " in done.stderr.splitlines()[-1]
    assert f"! {mark}" in str(rec)
    step = rec.module_tree().step
    assert step is not None
    assert (step.count, step.last) == (kept, kept - 1)


def test_disk_that_is_full_from_the_first_batch_on_leaves_a_recording_that_opens(tmp_path: Path) -> None:
    # The calls of one step take more than 4,000 bytes. A busy machine may write what is held in several batches.
    script = TRAIN_LONG.replace("LIMIT", "pass").replace(
        "model = ", LIMIT.replace("30_000", "4_000") + "\nmodel = "
    )
    done = run(tmp_path, "record", "--ops", "--keep-last", "20", "train.py", script=script)
    rec = modtrace.open_recording(tmp_path / "train.modtrace")
    assert closing_line(done).startswith(
        "modtrace: wrote 0 of 60 steps, ROWS; incomplete from step 0: File too large ("
    )
    assert rec.triggers[0].step == 50
    shown = run(tmp_path, "show", "train.modtrace", status=2)
    assert "no calls are in this recording" in shown.stderr
    assert "incomplete from step 0: File too large (" in shown.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_that_ends_the_program_leaves_the_line_and_ends_the_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = (
        TRAIN + f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(9)\nprint('not reached')\n"
    )
    done = run(tmp_path, "record", "train.py", script=script, status=-number)
    ended_by = "KeyboardInterrupt" if number == signal.SIGINT else f"Terminated: {number.name}"
    assert closing_line(done) == (
        f"modtrace: recorded 5 steps, ROWS; the run ended by {ended_by}; step 3 was the last to end. {END}"
    )
    assert done.stdout == ""
    assert ("Traceback" in done.stderr) == (number == signal.SIGINT)
    assert ("\nKeyboardInterrupt\nmodtrace: " in done.stderr) == (number == signal.SIGINT)


def test_signal_that_the_starter_ignores_stays_ignored(tmp_path: Path) -> None:
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('went on')\n"
    as_nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    done = run(tmp_path, "record", "train.py", script=script, before=as_nohup)
    assert done.stdout == "went on\n"


def test_handler_of_the_programs_own_and_a_forked_child_hear_sigterm_as_without_us(tmp_path: Path) -> None:
    script = """
    import os, signal, sys, time
    child = os.fork()
    if not child:
        time.sleep(9)
        os._exit(3)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1] == signal.SIGTERM, flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    os.kill(os.getpid(), signal.SIGTERM)
    """
    done = run(tmp_path, "record", "train.py", script=script, status=7)
    assert done.stdout == "True\n"


def test_exception_is_told_with_the_steps(tmp_path: Path) -> None:
    done = run(tmp_path, "record", "train.py", script=TRAIN + "raise ValueError('boom')\n", status=1)
    line = len((tmp_path / "train.py").read_text().splitlines())
    mark = f"the run ended by ValueError: boom, at train.py:{line}; step 3 was the last to end"
    assert closing_line(done) == f"modtrace: recorded 5 steps, ROWS; {mark}. {END}"
    shown = run(tmp_path, "show", "train.modtrace")
    assert f"! {mark}" in shown.stdout


def test_processes_that_may_have_trained_are_counted_and_others_are_not(tmp_path: Path) -> None:
    script = """
    import multiprocessing, subprocess, sys
    import torch
    from torch import nn

    def train(rank=0):
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    if __name__ == "__main__":
        torch.set_num_threads(1)
        torch.multiprocessing.spawn(train, nprocs=1)
        forked = multiprocessing.get_context("fork").Process(target=train)
        forked.start()
        forked.join()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        subprocess.run(["true"], check=True)
        assert list(torch.utils.data.DataLoader(range(4), num_workers=2)) == [0, 1, 2, 3]
    """
    done = run(tmp_path, "record", "train.py", script=script)
    assert closing_line(done) == (
        "modtrace: recorded nothing; no module was called in this process; "
        "not recorded: 3 Python processes that it started. train.modtrace is empty and can be deleted."
    )


def test_option_that_the_program_refuses_is_told_to_stand_in_front_of_it(tmp_path: Path) -> None:
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    done = run(tmp_path, "record", "train.py", "--to=x", script=script, status=2)
    assert closing_line(done) == (
        "modtrace: the program was given --to=x; if it was meant for modtrace record, put it in front of the program."
    )


def test_recording_that_cannot_be_read_back_is_told(tmp_path: Path) -> None:
    script = (
        TRAIN + "import pathlib\npathlib.Path('train.modtrace/rank-00000/steps.arrow').write_text('x' * 99)\n"
    )
    done = run(tmp_path, "record", "train.py", script=script)
    assert done.stderr.splitlines()[-1].startswith(
        "modtrace: 5 steps ran, and what was recorded of them cannot be read: "
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "100:200"], "recorded 0 of 5 steps, ROWS; no step of 100:200 ran."),
        (["--keep-last", "2"], "wrote 0 of 5 steps, ROWS."),
    ],
)
def test_recording_without_calls_is_not_advised_to_be_shown(
    tmp_path: Path, options: list[str], said: str
) -> None:
    done = run(tmp_path, "record", *options, "train.py", script=TRAIN)
    assert closing_line(done) == f"modtrace: {said}"


def test_step_with_a_backward_alone_says_that_no_module_was_called(tmp_path: Path) -> None:
    script = "import torch\ntorch.ones(1, requires_grad=True).sum().backward()\n"
    done = run(tmp_path, "record", "train.py", script=script)
    assert closing_line(done) == "modtrace: recorded 1 step, ROWS; no module was called in this process."


def test_program_that_cannot_be_compiled_leaves_the_recording_that_it_would_replace(tmp_path: Path) -> None:
    run(tmp_path, "record", "train.py", script=TRAIN)
    done = run(tmp_path, "record", "--overwrite", "train.py", script="def f(:\n", status=1)
    assert closing_line(done) == "modtrace: recorded nothing: the program could not be started."
    assert done.stderr.startswith(f'  File "{tmp_path}/train.py", line 1\n')
    assert "SyntaxError" in done.stderr
    assert modtrace.open_recording(tmp_path / "train.modtrace").table("steps").num_rows == 5


def test_step_before_the_exception_is_the_one_that_is_shown(tmp_path: Path) -> None:
    script = TRAIN + "model(torch.ones(2, 4)).sum().backward()\nraise ValueError('boom')\n"
    run(tmp_path, "record", "train.py", script=script, status=1)
    shown = run(tmp_path, "show", "train.modtrace")
    assert "median of 3 steps, 2 to 4 (train), " in shown.stdout
    assert "; 6 steps recorded, 0 to 5" in shown.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([sys.executable, "-c", "pass"], True),
        (("python3", "train.py"), True),
        ([b"/usr/bin/python3.12"], True),
        ([Path("/opt/python")], True),
        ("python train.py", True),
        (["sh", "-c", "python train.py"], True),
        (["bash", "-c", "git add python"], False),
        (["git", "add", "train.py"], False),
        ("git status", False),
        ([], False),
        ("", False),
        (None, False),
        (["/no/such/program"], False),
    ],
)
def test_command_is_one_of_python_or_not(command: object, expected: bool) -> None:
    assert runs_python(command) is expected


@pytest.mark.parametrize(
    ("starter", "expected"), [("torch._inductor.compile_worker.subproc_pool", 0), ("train", 2)]
)
def test_processes_that_inductor_starts_are_not_counted(starter: str, expected: int) -> None:
    code = (
        "import multiprocessing, subprocess, sys\n"
        "from concurrent import futures\n"
        "subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
        "with futures.ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool:\n"
        "    pool.submit(int).result()\n"
    )
    with StartedProcesses() as started:
        exec(code, {"__name__": starter})
    assert started.count == expected


@pytest.mark.parametrize(("first_line", "expected"), [("#!/usr/bin/env python3", True), ("#!/bin/sh", False)])
def test_script_tells_what_runs_it_by_its_first_line(tmp_path: Path, first_line: str, expected: bool) -> None:
    script = tmp_path / "torchrun"
    script.write_text(first_line + "\n")
    script.chmod(0o755)
    assert runs_python([script, "train.py"]) is expected
