"""Writes docs/schema.md from the text that the schemas themselves are made of: `python docs/make_schema.py`."""

from pathlib import Path

from modtrace.recording.schema import SCHEMA_VERSION, TABLES_TEXT

TARGET = Path(__file__).parent / "schema.md"

_HEAD = f"""# The tables of a recording

Written by `python docs/make_schema.py` from `src/modtrace/recording/schema.py`; change that file, not this one.
Schema version {SCHEMA_VERSION}. `rec.table("calls")` gives a table as `pyarrow.Table`, `rec.frame("calls")` as pandas.

Ids are per rank. Times are those of `time.perf_counter_ns`; `meta.json` anchors them to the wall clock
(`clock_time_ns` and `clock_perf_counter_ns` are of one moment). A `dictionary` is a dictionary-encoded string, a
`phase` is one out of forward, backward, recompute, optimizer. Null means unknown, or that the column does
not apply to the row.

`ops`, `tensors` and `uses` have rows where ops are recorded (`record(ops=True)`), and so have columns that are marked
"with ops"; what is marked "later" is where later versions will put things.
"""


def render_schema() -> str:
    """The page: a heading and a table of columns for each table of a recording."""
    lines = [_HEAD.rstrip()]
    for line in TABLES_TEXT.strip().splitlines():
        if line.startswith("table "):
            _, name, about = line.split(None, 2)
            lines += ["", f"## {name}", "", _sentence(about), "", "| column | type | null | what it says |"]
            lines.append("|---|---|---|---|")
        elif line.startswith(" " * 8) and lines[-1].startswith("|--"):  # the table's sentence goes on
            lines[-4] = f"{lines[-4].removesuffix('.')} {line.strip()}."
        elif line.startswith(" " * 8):
            lines[-1] = f"{lines[-1].removesuffix(' |')} {line.strip()} |"
        elif line.strip():
            lines.append(_row(*line.split(None, 2)))
    return "\n".join(lines) + "\n"


def _sentence(about: str) -> str:
    about = about.strip()
    return f"{about[0].upper()}{about[1:]}."


def _row(name: str, type_name: str, about: str = "") -> str:
    may_be_null = "yes" if type_name.endswith("?") else ""
    about = about.strip().replace("|", r"\|")
    return f"| `{name}` | `{type_name.rstrip('?')}` | {may_be_null} | {about} |"


if __name__ == "__main__":
    TARGET.write_text(render_schema(), encoding="utf-8")
