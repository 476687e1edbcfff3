"""However a recording is damaged, it is refused by a named error or answered; what is missing is marked."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.fuzzing import ORIGINALS, Outcome, fuzz, make_originals, summarize
from modtrace.recording.schema import schemas
from modtrace.store.reader import FolderReader


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    make_originals(folder)
    return folder


def test_there_are_rows_of_every_table_to_damage(originals: Path) -> None:
    """`change_cells` draws from the columns of the schema, and so comes to each of them."""
    recordings = [FolderReader(originals / name) for name in ORIGINALS]
    assert [table for table in schemas() if not any(each.table(table).num_rows for each in recordings)] == []


def test_twenty_four_damaged_recordings_are_refused_or_marked(originals: Path) -> None:
    """`python tests/helpers/fuzzing.py FOLDER None SEED` asks everything of one of them."""
    outcomes = fuzz(originals, range(24), questions=4)
    print(summarize(outcomes))
    assert len(outcomes) == 24
    assert [each for each in outcomes if each.is_fault] == []


@pytest.mark.soak
def test_20_000_damaged_recordings_are_refused_or_marked(originals: Path) -> None:
    with ThreadPoolExecutor(2) as pool:  # each waits for a process
        halves = pool.map(lambda start: fuzz(originals, range(start, 21_000, 2), questions=4), (1000, 1001))
        outcomes: list[Outcome] = [each for half in halves for each in half]
    print(summarize(outcomes))
    assert len(outcomes) == 20_000
    assert [each for each in outcomes if each.is_fault] == []
