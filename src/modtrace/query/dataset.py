"""Opens a dataset of exported runs, and answers questions about all of them."""

import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args
from urllib.parse import unquote

import pyarrow as pa

from ..errors import DamagedRecordingError, NothingRecordedError, RecordingError, RecordingNotFoundError
from ..optional import require
from ..recording.options.schedule import StepRange, to_step_range
from ..recording.suggestions import did_you_mean, first_few
from ..store.export import RUNS
from ..store.layout import HEADER
from ..store.object_store import open_store, store_errors
from .engines import DuckDB, Engine, Spark
from .views import tables, view_name, view_text

EngineName = Literal["duckdb", "spark"]

ENGINES: tuple[str, ...] = get_args(EngineName)

#: A text of SQL for each question, whose first line says what it answers.
_QUESTIONS = Path(__file__).with_name("questions")


class Dataset:
    """Runs that `modtrace export --format parquet` has written to one folder.

    It is a context manager, which closes it. Its views are the tables of docs/schema.md, with the columns `run` and
    `rank`, and names that SQL does not reserve: `values` is `stats`, and its `order` is `nr` (docs/query.md).
    """

    def __init__(
        self, engine: Engine, path: str, notes: list[str], unreadable: dict[str, RecordingError]
    ) -> None:
        self._engine = engine
        self._unreadable = unreadable  # by the name of the view
        self.path = path
        #: What the dataset lacks, a sentence each: ranks of which an export was cut off.
        self.notes = notes

    def ask(self, question: str) -> pa.Table:
        """Returns the answer to one of `questions()`.

        Raises:
            ValueError: there is no such question.
            NothingRecordedError: nothing is there that could answer it.
            DamagedRecordingError: a file cannot be read.
        """
        text = question_text(question)
        answer = self.sql(text)
        needs = text.splitlines()[1].removeprefix("-- Needs: ")
        if not answer.num_rows and not self.sql(f"SELECT 1 AS found FROM {needs} LIMIT 1").num_rows:
            raise NothingRecordedError(
                f"{self.path}: nothing was recorded that could answer {question!r}: no rows of {needs}"
            )
        return answer

    def sql(self, text: str) -> pa.Table:
        """Returns the rows of a query in DuckDB's dialect of SQL, which is translated for other engines.

        Raises:
            ValueError: the engine cannot run it.
            DamagedRecordingError: a file cannot be read.
        """
        try:
            answer = self._engine.run(text)
        except ValueError:
            damaged = [error for view, error in self._unreadable.items() if re.search(rf"\b{view}\b", text)]
            if damaged:
                raise damaged[0] from None
            raise
        names = answer.column_names
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two columns are named {repeated[0]!r}: name one of them with AS")
        return answer

    @staticmethod
    def questions() -> dict[str, str]:
        """Returns the names of all questions, with a sentence on what each answers."""
        return questions()

    def close(self) -> None:
        """Ends the engine. A session of Spark that was there before goes on."""
        self._engine.close()

    def __enter__(self) -> "Dataset":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Dataset {self.path} ({self._engine.name})>"


def open_dataset(
    path: str | os.PathLike[str],
    engine: EngineName = "duckdb",
    *,
    run: str | None = None,
    steps: object = None,
    memory_limit: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Opens the dataset of exported runs at a path.

    Args:
        path: a folder, or for DuckDB the URL of one on an object store, which fsspec opens; for Spark a URL that the
            session knows.
        engine: what runs the SQL: `duckdb`, in this process, or `spark`, in the active session or a local one.
        run: only the run whose id is this, or begins with it. None: all.
        steps: only these steps, as `record(steps=...)` takes them: `"100:200"`, a `range`, a `slice`. None: all.
        memory_limit: how much memory the engine may use, such as `"8GB"`. None: what is its default, of DuckDB 80 % of
            the machine's. What does not fit goes to temporary files.
        storage_options: given to fsspec's file system of the URL.

    Raises:
        RecordingNotFoundError: nothing is at `path`.
        RecordingError: something else is there, or it cannot be read.
        MissingLibraryError: a library that the engine needs is not installed.
        ValueError: there is no such engine or run, or the steps cannot be read.
    """
    if engine not in ENGINES:
        raise ValueError(
            f"engine={engine!r}: there are {' and '.join(ENGINES)}.{did_you_mean(engine, ENGINES)}"
        )
    require({"duckdb": "duckdb", "spark": "pyspark"}[engine], f"engine={engine!r}")
    text, chosen = os.fspath(path).rstrip("/"), None if steps is None else to_step_range(steps)
    complete, all_ranks = _find_ranks(text, storage_options)
    run = None if run is None else _find_run(run, complete)
    missing = {of: ranks - complete.get(of, set()) for of, ranks in all_ranks.items()}
    left_out = {of: ranks for of, ranks in missing.items() if ranks}
    opened: Engine = (
        Spark(memory_limit=memory_limit)
        if engine == "spark"
        else DuckDB(text, memory_limit=memory_limit, storage_options=storage_options)
    )
    try:
        unreadable = _add_views(opened, text, run, chosen, left_out)
    except BaseException:
        opened.close()
        raise
    notes = [
        f"rank {rank} of run {of} is left out: its export was cut off. Export the run again."
        for of, ranks in sorted(left_out.items())
        for rank in sorted(ranks)
    ]
    if chosen is not None:
        notes.append(f"only steps {chosen} were asked: what began before them is not seen")
    return Dataset(opened, text, notes, unreadable)


def _add_views(
    engine: Engine, path: str, run: str | None, steps: StepRange | None, left_out: Mapping[str, set[int]]
) -> dict[str, RecordingError]:
    """Makes the view of each table. Returns why those cannot be read whose files are damaged, by their names."""
    unreadable: dict[str, RecordingError] = {}
    for table in tables():
        try:
            source = engine.add_files(table, path)
            view = view_text(table, source, run=run, steps=steps, left_out=left_out)
            engine.add_view(view_name(table), view)
        except DamagedRecordingError as error:  # it stops only those who ask for it
            unreadable[view_name(table)] = error
    return unreadable


@cache
def questions() -> dict[str, str]:
    """Returns the names of all questions, with a sentence on what each answers."""
    names = sorted(file.name for file in _QUESTIONS.iterdir())
    return {name.removesuffix(".sql"): _read(name).splitlines()[0].removeprefix("-- ") for name in names}


def question_text(question: str) -> str:
    """Returns the SQL of a question.

    Raises:
        ValueError: there is no such question.
    """
    if question not in questions():
        known = ", ".join(questions())
        raise ValueError(f"no question {question!r}: there are {known}.{did_you_mean(question, questions())}")
    return _read(f"{question}.sql")


def _read(name: str) -> str:
    return (_QUESTIONS / name).read_text(encoding="utf-8")


def _find_run(run: str, known: Collection[str]) -> str:
    found = [run] if run in known else [name for name in known if name.startswith(run)]
    if len(found) != 1:
        raise ValueError(
            f"run={run!r}: the dataset has {first_few(sorted(known))}.{did_you_mean(run, known)}"
        )
    return found[0]


def _find_ranks(
    path: str, options: Mapping[str, Any] | None
) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Returns the ranks whose exports are complete, by run, and all of which there are folders."""
    store, root = open_store(path, options)
    with store_errors(lambda why: RecordingError(f"{path}: cannot be read: {why}.")):
        if not store.exists(root):
            raise RecordingNotFoundError(f"{path}: nothing is here. {_HOW}")
        if store.exists(f"{root}/{HEADER}"):
            raise RecordingError(f"{path}: this is a recording, and no dataset. {_HOW}")
        complete = _ranks(store.find(f"{root}/{RUNS}"))
        if not complete:
            raise RecordingError(f"{path}: no dataset is here, or no export to it was completed. {_HOW}")
        files = store.find(f"{root}/calls")  # an export writes these first
        if old := next((file for file in files if "/block=" not in file.removeprefix(root)), None):
            raise DamagedRecordingError(f"{old}: an older modtrace wrote this. Export its run again.")
        return complete, _ranks(files)


#: The folder of a rank, in the path of a file of it.
_RANK = re.compile(r"/run=(?P<run>[^/]+)/rank=(?P<rank>\d+)/(block=\d+/)?[^/]+\.parquet$")

_HOW = "Write a dataset with: modtrace export RUN -o PATH.parquet"


def _ranks(paths: list[str]) -> dict[str, set[int]]:
    ranks: dict[str, set[int]] = {}
    for path in paths:
        if found := _RANK.search(path):
            ranks.setdefault(unquote(found["run"]), set()).add(int(found["rank"]))
    return ranks
