"""Each question finds in a dataset what was planted there, also where the dataset has more or less than that."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import modtrace
from builders import RecordingBuilder
from helpers.planted_dataset import MS, PlantedRun
from modtrace.errors import NothingRecordedError
from modtrace.query.dataset import question_text, questions
from modtrace.query.views import RENAMED, partitions, tables, view_name
from modtrace.store.parquet import write_parquet

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
        assert same_rows(chosen, expected)
        assert {row["run"] for row in of_both} == {"another", "planted"}
        assert same_rows([row for row in of_both if row["run"] == "planted"], expected)
    for dataset in opened:
        dataset.close()


def same_rows(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether the rows are equal but for the last digits of sums."""
    rounded = [
        [{name: round_off(value) for name, value in row.items()} for row in of_both]
        for of_both in (rows, others)
    ]
    return rounded[0] == rounded[1]


def round_off(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


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
    of_views: dict[str, list[str]] = {}
    for view, column in column_names():
        of_views.setdefault(view, []).append(column)
    for view, columns in of_views.items():
        chosen = ", ".join(f"{column}, {view}.{column} AS other_{at}" for at, column in enumerate(columns))
        dataset.sql(
            f"SELECT {chosen} FROM {view} WHERE {' AND '.join(f'{each} IS NOT NULL' for each in columns)}"
        )
    assert not set(RENAMED) & {name for pair in column_names() for name in pair}


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
    from modtrace.store.reader import FolderReader

    write_parquet(FolderReader(recording), str(to))


@pytest.fixture
def typed(tmp_path: Path) -> Any:
    """Returns a function that opens a dataset of recordings typed by hand."""

    def opened(*recordings: Any, **options: Any) -> modtrace.Dataset:
        for recording in recordings:
            write_parquet(recording, tmp_path / "typed.parquet")
        return modtrace.open_dataset(tmp_path / "typed.parquet", **options)

    return opened


def rank_of_run(rank: int, fill: Any, *, world_size: int = 3, roots: Sequence[str] = ("Net",)) -> Any:
    """A rank of a run with two steps of 10 ms and 20 ms between them, in which `fill` adds what is measured."""
    build = RecordingBuilder(run_id="typed", rank=rank, world_size=world_size, complete=True)
    modules = [build.module("", name, name=name) for name in roots]
    layers = [build.module("fc", "Linear", parent=module) for module in modules]
    for step in (0, 1):
        build.step(step, step * 30 * MS, (step * 30 + 10) * MS)
        calls = [build.call(module, step * 30 * MS, (step * 30 + 5) * MS) for module in layers]
        fill(build, rank, step, layers, calls)
    return build.data()


def hashed(build: Any, layer: int, number: int) -> None:
    build.parameter(layer, "weight", [1.0], hash=number.to_bytes(8, "little"))


def test_one_rank_that_measures_a_parameter_twice_in_a_step_is_no_replica_of_itself(typed: Any) -> None:
    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        for layer in layers:
            for number in (2 * step, 2 * step + 1):
                hashed(build, layer, number + 100 * layer)

    with typed(rank_of_run(0, fill, world_size=1, roots=("D", "G"))) as dataset:
        assert dataset.ask("replicas").num_rows == 0


def test_rank_is_alone_only_where_all_others_agree(typed: Any) -> None:
    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        hashed(build, layers[0], rank if step else 0)
        build.parameter(layers[0], "bias", [1.0], hash=bytes([step * (rank == 2)] * 8))

    with typed(*(rank_of_run(rank, fill) for rank in range(3))) as dataset:
        found = {
            row["slot"]: (row["step"], row["versions"], row["rank_alone"])
            for row in dataset.ask("replicas").to_pylist()
        }
    assert found == {"weight": (1, 3, None), "bias": (1, 2, 2)}


def test_replicas_that_never_agreed_come_behind_those_that_did(typed: Any) -> None:
    """Such as the experts of each rank, which have one name."""

    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        build.parameter(layers[0], "expert", [1.0], hash=bytes([rank] * 8))
        build.parameter(layers[0], "weight", [1.0], hash=bytes([step * rank] * 8))

    with typed(*(rank_of_run(rank, fill) for rank in range(2))) as dataset:
        rows = dataset.ask("replicas").to_pylist()
    found = [(row["slot"], row["step"], row["agreed_before"]) for row in rows]
    assert found == [("weight", 1, True), ("expert", 0, False)]


def test_first_nan_is_told_beside_an_earlier_infinity_and_bad_data_as_such(typed: Any) -> None:
    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        is_bad = step == 1 and rank == 2
        build.value(
            build.site(layers[0], "input", "[0]", nth=0), [math.nan if is_bad else 1.0], call=calls[0]
        )
        build.output(calls[0], [math.nan if is_bad else -math.inf, 1.0])

    with typed(*(rank_of_run(rank, fill) for rank in range(3))) as dataset:
        rows = dataset.ask("nonfinite").to_pylist()
    found = {row["kind"]: (row["step"], row["rank"], row["role"], row["ranks"]) for row in rows}
    assert found == {"NaN": (1, 2, "input", 1), "infinity": (0, 0, "output", 3)}


def test_nan_of_several_ranks_is_that_of_the_rank_where_it_was_first(typed: Any) -> None:
    """A later stage of a pipeline numbers what it measures from 0 again."""

    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        late = build.call(layers[0], (step * 30 + 6 + rank) * MS, (step * 30 + 7 + rank) * MS, nth=1)
        build.output(late, [math.nan], order=9 - rank)

    with typed(*(rank_of_run(rank, fill) for rank in range(3))) as dataset:
        [row] = dataset.ask("nonfinite").to_pylist()
    assert (row["rank"], row["ranks"]) == (0, 3)


def test_scalars_are_those_of_all_ranks(typed: Any) -> None:
    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        build.scalar("loss", math.nan if step and rank == 2 else 3.0 + rank)
        build.scalar("twice", 1.0)
        build.scalar("twice", 3.0)

    with typed(*(rank_of_run(rank, fill) for rank in range(3))) as dataset:
        loss, twice = dataset.ask("scalars").to_pylist()
    assert (loss["first"], loss["lowest_in_step"], loss["not_finite_since"], loss["on_rank"]) == (
        4.0,
        0,
        1,
        2,
    )
    assert (twice["first"], twice["last"], twice["not_finite_since"]) == (2.0, 2.0, None)


def test_gradient_that_is_not_finite_hides_no_other(typed: Any) -> None:
    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        build.parameter_grad(layers[0], "weight", [3.0, 4.0 if not step else math.nan])
        build.parameter_grad(layers[-1], "weight", [12.0])

    with typed(*(rank_of_run(rank, fill, roots=("D", "G")) for rank in range(2))) as dataset:
        [row] = dataset.ask("gradients").to_pylist()
    assert (row["median_norm"], row["largest"], row["largest_in_step"]) == (13.0, 13.0, 0)
    assert (row["not_finite"], row["not_finite_since"]) == (1, 1)


def test_waiting_between_steps_is_taken_from_the_time_between_them(typed: Any) -> None:
    def fill(build: Any, rank: int, step: int, layers: Sequence[int], calls: Sequence[int]) -> None:
        if rank == 0:
            build.collective("all_reduce", step, (step * 30 + 12) * MS, wait_ns=15 * MS)

    with typed(*(rank_of_run(rank, fill) for rank in range(2))) as dataset:
        rows = dataset.ask("slowest-ranks").to_pylist()
    assert [(row["rank"], row["wait_ms"]) for row in rows] == [(1, None), (0, 15.0)]


@pytest.mark.parametrize(
    "question", ["replicas", "nonfinite", "gradients", "magnitudes", "scalars", "waiting"]
)
def test_what_was_not_recorded_is_no_answer(typed: Any, question: str) -> None:
    with typed(rank_of_run(0, lambda *_: None, world_size=1)) as dataset:
        with pytest.raises(
            NothingRecordedError, match=f"nothing was recorded that could answer {question!r}: no rows of"
        ):
            dataset.ask(question)
        assert dataset.ask("missing-steps").num_rows == 0
