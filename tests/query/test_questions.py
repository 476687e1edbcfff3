"""Each question finds in a dataset what was planted there, also where the dataset has more or less than that."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import modtrace
from helpers.planted_dataset import PlantedRun
from modtrace.query.dataset import question_text, questions
from modtrace.query.views import RENAMED, partitions, tables, view_name

RUN = PlantedRun()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("datasets") / "runs.parquet"
    RUN.write(to)
    return to


@pytest.fixture
def dataset(path: Path) -> Iterator[modtrace.Dataset]:
    with modtrace.open_dataset(path) as opened:
        yield opened


def test_every_question_has_a_planted_answer_and_says_what_it_answers() -> None:
    assert set(questions()) == set(RUN.answers())
    for name, about in questions().items():
        assert about[0].isupper() and about.endswith(".") and question_text(name).startswith(f"-- {about}\n")


@pytest.mark.parametrize("question", questions())
def test_planted_answer_is_found(dataset: modtrace.Dataset, question: str) -> None:
    expected = {"run": "planted", **RUN.answers()[question]}
    first = dataset.ask(question).to_pylist()[0]
    assert {name: first[name] for name in expected} == expected


def test_answers_are_the_same_of_one_of_two_runs(path: Path, tmp_path: Path) -> None:
    """The dataset has another run, whose answers come beside."""
    both = tmp_path / "both.parquet"
    for run_id in ("another", "planted"):
        PlantedRun(run_id=run_id).write(both)
    opened = (
        modtrace.open_dataset(path),
        modtrace.open_dataset(both),
        modtrace.open_dataset(both, run="planted"),
    )
    for question in questions():
        expected, of_both, chosen = (dataset.ask(question).to_pylist() for dataset in opened)
        assert chosen == expected
        assert {row["run"] for row in of_both} == {"another", "planted"}
        assert [row for row in of_both if row["run"] == "planted"] == expected
    for dataset in opened:
        dataset.close()


def test_question_with_nothing_to_find_has_no_rows(path: Path) -> None:
    with modtrace.open_dataset(path, steps=slice(0, 9)) as healthy:
        for question in ("nonfinite", "replicas", "missing-steps"):
            assert healthy.ask(question).num_rows == 0


def test_steps_limit_each_view(path: Path) -> None:
    with modtrace.open_dataset(path, steps="10:31:10") as some:
        for table in tables():
            if "step" in tables()[table].names:
                steps = some.sql(f"SELECT DISTINCT step FROM {view_name(table)}")["step"].to_pylist()
                assert set(steps) <= {10, 20, 30}
        assert some.sql("SELECT DISTINCT step FROM stats ORDER BY step")["step"].to_pylist() == [10, 20, 30]


def column_names() -> list[tuple[str, str]]:
    of_all = {table: [*(partitions(table).keys() - {"block"}), *tables()[table].names] for table in tables()}
    return [(view_name(table), view_name(name)) for table, names in of_all.items() for name in names]


def test_names_of_views_and_columns_need_no_quotes(dataset: modtrace.Dataset) -> None:
    for view, column in column_names():
        dataset.sql(f"SELECT {column}, {view}.{column} AS other FROM {view} WHERE {column} IS NOT NULL")
    assert not set(RENAMED) & {name for pair in column_names() for name in pair}


def test_replicas_that_never_agreed_come_behind_those_that_did(tmp_path: Path) -> None:
    """Such as the experts of each rank, which have one name."""
    with modtrace.open_dataset(written(tmp_path)) as dataset:
        rows = dataset.ask("replicas").to_pylist()
    assert [row["agreed_before"] for row in rows] == sorted(
        (row["agreed_before"] for row in rows), reverse=True
    )


def written(folder: Path) -> Path:
    RUN.write(folder / "runs.parquet")
    return folder / "runs.parquet"


def test_infinities_of_masks_are_not_accused(tmp_path: Path) -> None:
    import torch

    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    mask = torch.full((4, 4), -math.inf).triu(1)
    with modtrace.record(model, to=tmp_path / "run.modtrace", ops=True, values=modtrace.Capture(roles="all")):
        x = torch.ones(1, 4, 8)
        model(x, x, x, attn_mask=mask)[0].sum().backward()
    export(tmp_path / "run.modtrace", tmp_path / "runs.parquet")
    with modtrace.open_dataset(tmp_path / "runs.parquet") as dataset:
        assert dataset.sql("SELECT count(*) AS n FROM stats WHERE inf_count > 0")["n"].to_pylist() != [0]
        assert dataset.ask("nonfinite").num_rows == 0


def export(recording: Path, to: Path) -> None:
    from modtrace.store.parquet import write_parquet
    from modtrace.store.reader import FolderReader

    write_parquet(FolderReader(recording), str(to))
