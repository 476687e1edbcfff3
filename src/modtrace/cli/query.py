"""`modtrace query`: asks a dataset of exported runs."""

from pathlib import Path

import click

from ..query.dataset import ENGINES, open_dataset, question_text, questions
from ..views.text.answer_table import render_answer, render_answer_json
from .open_run import usage_errors
from .output import print_text, print_view, tell_marks, wrap

_SHOWN = 20


@click.command()
@click.argument("dataset", required=False)
@click.argument("question", required=False)
@click.option(
    "--sql", metavar="TEXT", help="Run this query in place of a question; `@FILE` reads it from a file."
)
@click.option(
    "--run", "only_run", metavar="ID", help="Only this run; the begin of its id will do. Default: all."
)
@click.option("--steps", metavar="START:STOP", help="Only these steps. Default: all.")
@click.option(
    "--engine", default="duckdb", metavar=f"[{'|'.join(ENGINES)}]", help="What runs it. Default: duckdb."
)
@click.option("--memory-limit", metavar="SIZE", help="How much memory it may use, such as 8GB.")
@click.option("--top", type=click.IntRange(min=1), default=_SHOWN, show_default=True, help="Rows to show.")
@click.option("--show-sql", is_flag=True, help="Print the question's SQL, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="All rows as JSON.")
def query(
    dataset: str | None,
    question: str | None,
    sql: str | None,
    only_run: str | None,
    steps: str | None,
    engine: str,
    memory_limit: str | None,
    top: int,
    show_sql: bool,
    as_json: bool,
) -> None:
    """Answers QUESTION about all runs and ranks in DATASET, or lists the questions.

    DATASET is a folder, or the URL of one, to which `modtrace export RUN -o PATH.parquet` has written runs. Its tables
    are those of docs/schema.md; docs/query.md has their names in SQL.
    """
    if show_sql:
        with usage_errors():
            print_text(question_text(_find_question(dataset, question)) if sql is None else f"{_read(sql)}\n")
        return
    if dataset is None and sql is not None:
        raise click.UsageError("give the DATASET that --sql is run on.")
    if dataset is None or (question is None and sql is None):
        print_text(wrap(_list_questions()))
        return
    if question is not None and sql is not None:
        raise click.UsageError(f"give the question {question!r} or --sql, not both.")
    with (
        usage_errors(),
        open_dataset(
            dataset,
            engine,  # type: ignore[arg-type]  # checked there
            run=only_run,
            steps=steps,
            memory_limit=memory_limit,
        ) as opened,
    ):
        rows = opened.ask(str(question)) if sql is None else opened.sql(_read(sql))
        notes = opened.notes
    if as_json:
        print_text(render_answer_json(rows.to_pylist(), notes))
        return
    print_view(render_answer, rows.slice(0, min(top, rows.num_rows)).to_pylist(), rows.num_rows)
    tell_marks(notes)


def _find_question(dataset: str | None, question: str | None) -> str:
    """Returns the question whose SQL is to be printed, for which no dataset is needed."""
    if question is None and (dataset is None or (dataset not in questions() and Path(dataset).exists())):
        raise click.UsageError(f"name the question that --show-sql prints: {', '.join(questions())}.")
    return question or str(dataset)


def _list_questions() -> str:
    lines = [f"{name}: {about}" for name, about in questions().items()]
    return "\n".join(["modtrace query DATASET QUESTION answers:", "", *lines]) + "\n"


def _read(sql: str) -> str:
    if not sql.startswith("@"):
        return sql
    try:
        return Path(sql[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise click.BadParameter(f"{sql[1:]}: cannot be read: {why}.", param_hint="--sql") from error
