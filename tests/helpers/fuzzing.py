"""Damages recordings and asks them everything, each time in a process of its own: `python fuzzing.py BASE FIRST STOP`.

The processes are forks of one that has imported modtrace, and not torch. Each has limits of memory and time.
"""

import json
import linecache
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

import modtrace
from helpers.command_ends import end_of_program
from helpers.fuzz_questions import QUESTIONS
from helpers.recording_mutations import UNSEEN, copy_of, mutate
from modtrace.errors import ModtraceError
from modtrace.recording.schema import schemas
from modtrace.store.reader import FolderReader, open_ranks

ORIGINALS = ("closed", "killed", "kept", "compiled")
WHOLE, PARTIAL, REFUSED = "answered whole", "answered in part, with a mark", "refused by a named error"

_MEMORY_BYTES = 2**30  # beyond what the process has
_CPU_S, _WALL_S = 60, 300  # the wall of a machine on which much else runs
_PACKAGE = str(Path(modtrace.__file__).parent)


class Outcome(NamedTuple):
    """What came of a mutation."""

    seed: int
    original: str
    mutation: str
    result: str  # WHOLE, PARTIAL, REFUSED, or what went wrong
    is_fault: bool


def make_originals(folder: Path) -> None:
    """Records what is to be damaged, in a process with torch."""
    program = str(Path(__file__).with_name("fuzz_recordings.py"))
    code = f"import runpy, warnings; warnings.simplefilter('ignore'); runpy.run_path({program!r}, run_name='__main__')"
    done = end_of_program(folder, code, str(folder))
    assert done.status == 0, done.stderr


def fuzz(folder: Path, seeds: Iterable[int], questions: int | None = None) -> list[Outcome]:
    """What came of each seed, in a process of its own without torch.

    Args:
        folder: what `make_originals` made.
        seeds: each is one mutation.
        questions: how many of `QUESTIONS` are asked each time, others for each seed; None asks all.
    """
    command = [sys.executable, "-W", "ignore", __file__, str(folder), str(questions), *map(str, seeds)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tests)}, check=True, stdout=subprocess.PIPE, text=True
    )
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def _serve(folder: Path, questions: int | None, seeds: Iterable[int]) -> None:
    known = {name: _describe(folder / name) for name in ORIGINALS}
    # What is imported when it is needed is there then.
    with tempfile.TemporaryDirectory(dir=folder, prefix="closed-") as scratch:
        copy_of(folder / "closed", Path(scratch, "run"))
        for question in QUESTIONS:
            assert QUESTIONS[question](Path(scratch, "run")) != 2, question
            _delete_others(Path(scratch, "run"))
    for seed in seeds:
        name = Random(-seed - 1).choice(ORIGINALS)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}-") as scratch:
            mutation, result, is_fault = _try(folder / name, known[name], Path(scratch), seed, questions)
        print(json.dumps(Outcome(seed, name, mutation, result, is_fault)), flush=True)


Known = dict[str, tuple[dict[str, int], list[str]]]


def _describe(path: Path) -> Known:
    """Rows by table, and marks, of each rank."""
    return {
        each.data.folder.name: (
            {table: each.data.table(table).num_rows for table in schemas()},
            list(each.data.meta.marks),
        )
        for each in open_ranks(FolderReader(path))
    }


def _try(
    original: Path, known: Known, scratch: Path, seed: int, questions: int | None
) -> tuple[str, str, bool]:
    readable, writable = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(readable)
            _limit()
            found = _mutate_and_ask(original, known, scratch, seed, questions)
        except BaseException:
            found = "?", traceback.format_exc(), True
        os.write(writable, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return "?", f"killed by {signal.Signals(os.WTERMSIG(status)).name}", True
    mutation, result, is_fault = json.loads(said)
    return mutation, result, is_fault


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(_WALL_S)


def _mutate_and_ask(
    original: Path, known: Known, scratch: Path, seed: int, questions: int | None
) -> tuple[str, str, bool]:
    path = scratch / "run"
    path.mkdir()
    os.chdir(scratch)
    mutation = mutate(path, copy_of(original, path), seed)
    asked = sorted(QUESTIONS) if questions is None else Random(seed).sample(sorted(QUESTIONS), questions)
    results = set()
    for question in asked:
        try:
            results.add(_ask(question, path))
        except BaseException:
            return mutation.__name__, f"{question}: {traceback.format_exc()}", True
    read = _read(path, known)
    if read not in (WHOLE, PARTIAL, REFUSED) and mutation not in UNSEEN:
        return mutation.__name__, read, True
    return (
        mutation.__name__,
        REFUSED if REFUSED in results else read if read in (PARTIAL, REFUSED) else WHOLE,
        False,
    )


def _ask(question: str, path: Path) -> str:
    """Asks one question, and deletes what it wrote. An error that has no name of ours is raised."""
    try:
        is_refused = QUESTIONS[question](path) == 2
    except ModtraceError:
        is_refused = True
    except (ValueError, TypeError) as error:
        if not _is_ours(error):
            raise
        is_refused = False
    _delete_others(path)
    return REFUSED if is_refused else WHOLE


def _delete_others(path: Path) -> None:
    """Deletes what a question wrote beside the recording."""
    for made in path.parent.iterdir():
        if made != path:
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def _is_ours(error: BaseException) -> bool:
    """Whether modtrace raised it on purpose: nothing of what was asked for is there."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return last.filename.startswith(_PACKAGE) and line.startswith("raise ")


def _read(path: Path, known: Known) -> str:
    """Whether all rows are there, and if not, whether a mark or an error says so."""
    try:
        there = _describe(path)
    except ModtraceError:
        return REFUSED
    except BaseException:
        return f"tables: {traceback.format_exc()}"
    found = WHOLE
    for rank, (rows, marks) in known.items():
        seen, now = there.get(rank, ({}, []))
        if set(now) - set(marks):
            found = PARTIAL
        elif any(seen.get(table, 0) < count for table, count in rows.items()):
            if not now:
                return f"{rank}: rows are missing without a mark"
            found = PARTIAL
    return found


def summarize(outcomes: Iterable[Outcome]) -> str:
    """How many of each result, and all faults."""
    outcomes = list(outcomes)
    counts = Counter("a fault" if each.is_fault else each.result for each in outcomes)
    faults = [
        f"seed {each.seed} ({each.original}, {each.mutation}): {each.result}"
        for each in outcomes
        if each.is_fault
    ]
    return "\n".join([f"{len(outcomes)} mutations: {dict(counts)}", *faults])


if __name__ == "__main__":
    _serve(
        Path(sys.argv[1]),
        None if sys.argv[2] == "None" else int(sys.argv[2]),
        [int(each) for each in sys.argv[3:]],
    )
