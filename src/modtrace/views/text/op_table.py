"""Renders the costs of ops, as text for a terminal or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from ...analysis.ops.op_table import OpRow, OpTable
from ...analysis.ops.sums import OpSums
from ...analysis.tables.chosen_step import ShownStep
from ...recording.phase import PHASES
from ...recording.suggestions import count_of
from ..common.columns import (
    Color,
    Column,
    FittedColumns,
    Legend,
    Text,
    count_cell,
    explain_columns,
    fit_columns,
    render_tables,
    text_column,
)
from ..common.headline import NO_DEVICE_TIMES, QUARTILES_LEGEND, describe_head
from ..common.numbers import (
    format_bytes,
    format_flops,
    format_gflops_rate,
    format_quartile_range,
    format_share,
    format_time,
    mark_unknown,
)
from .compiled_kernels import DISPENSABLE_KERNELS, describe_regions, kernel_columns
from .compiled_kernels import LEGEND as KERNEL_LEGEND

#: Columns that are left out in this order if the width is too small.
_DISPENSABLE = (
    "allocated", "written", "read", "type", *reversed(PHASES), "GFLOP/s", "spread", "%", "most in", "ops",
)  # fmt: skip

UNKNOWN_NOTE = "+, ?: the sum leaves out ops of which the number is not known"
OWN_NOTE = "of a module: its own ops, without those of the modules inside it"

_LEGEND: Legend = (
    (
        (("ops",), "ops: how often ops were called"),
        (("most in",), "most in: the module in which they took most time"),
    ),
    *QUARTILES_LEGEND,
    (
        (("%",), "%: of the time of all ops"),
        (("flops",), "flops: floating-point operations; empty where none are counted"),
    ),
    (
        (("read", "written"), "read, written: the size of what ops are given and return"),
        (("allocated",), "allocated: the size of new memory"),
    ),
)

DEVICE_TIMES_NOTE = "device time: from when a device could begin an op until it had ended it"

#: The last cell of columns without a sum.
_END = [Text("")]


def render_op_table(
    table: OpTable,
    *,
    top: int | None = None,
    more: str | None = None,
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns the rows with their times and costs, and the sum of all.

    Args:
        top: rows to show; None for all.
        more: the option that shows more rows; None: there is none.
        width: the width of the terminal, in characters; columns that do not fit are left out.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    head = describe_head(
        table.command, table.step, table.marks, outliers=table.outliers, took="took {} the median in ops"
    )
    if not table.rows and not table.compiled:
        return render_tables(head, width=width, color=color)
    rows = table.rows[:top]
    fitted = [fit_columns(_columns(table, rows), width, _DISPENSABLE)]
    rest = _describe_rest(table, len(rows), fitted[0], more)
    if table.compiled:
        rest += describe_regions(table.compiled, top)
    if fused := [region for region in table.compiled or () if region.is_fused]:
        fitted.append(fit_columns(kernel_columns(fused, top), width, DISPENSABLE_KERNELS))
        rest += explain_columns(KERNEL_LEGEND, fitted[-1].titles)
    return render_tables(head, *fitted, rest=rest, width=width, color=color)


def render_op_table_json(table: OpTable, *, top: int | None = None) -> str:
    """Returns the fields of the table and its rows as JSON; times are nanoseconds."""
    return json.dumps(asdict(replace(table, rows=table.rows[:top]))) + "\n"


def _columns(table: OpTable, rows: Sequence[OpRow]) -> list[Column]:
    """Returns the columns of the rows, with the sum of all as the last cell."""
    sums = [*(row.sums.together for row in rows), table.sums.together]
    by_phase = [*(row.sums for row in rows), table.sums]
    columns = [
        *_name_columns(table, rows),
        Column("ops", [Text(str(total.ops)) for total in sums]),
        Column(
            "device time" if table.device_times else "time",
            [Text(format_time(total.time_ns)) for total in sums],
        ),
        Column(
            "%", [Text("" if row.share is None else format_share(row.share), "dim") for row in rows] + _END
        ),
        Column("spread", [Text(_format_range(total)) for total in sums]),
        *(Column(name, [_time_cell(own.phase(name)) for own in by_phase]) for name in _phases(table)),
        Column("flops", [_flops_cell(total) for total in sums]),
        Column("GFLOP/s", [Text(format_gflops_rate(total.flops, total.time_ns), "dim") for total in sums]),
        Column("read", [_bytes_cell(total.bytes_read, total) for total in sums]),
        Column("written", [_bytes_cell(total.bytes_written, total) for total in sums]),
        Column("allocated", [_allocated_cell(row) for row in rows] + _END),
        Column("", [_notes(table, row) for row in rows] + _END, right=False),
    ]
    return [column for column in columns if any(column.cells)]


def _name_columns(table: OpTable, rows: Sequence[OpRow]) -> list[Column]:
    columns = [Column(table.by, [_name_cell(row) for row in rows] + [Text("all", "bold")], right=False)]
    if len({row.root for row in table.rows} - {None}) > 1:
        columns.append(text_column("root", [*(row.root for row in rows), None]))
    columns.append(text_column("type", [*(row.type for row in rows), None]))
    if table.by == "op":
        columns.append(text_column("most in", [*(_describe_busiest(table, row) for row in rows), None]))
    return columns


def _name_cell(row: OpRow) -> Text:
    is_place = row.path is not None or row.busiest is not None
    return Text.join([Text(row.name, "" if is_place else "dim"), count_cell(row.count)])


def _describe_busiest(table: OpTable, row: OpRow) -> str | None:
    roots = {other.busiest_root for other in table.rows} - {None}
    prefix = f"{row.busiest_root}: " if len(roots) > 1 and row.busiest_root else ""
    return f"{prefix}{row.busiest}"


def _phases(table: OpTable) -> list[str]:
    """Returns the phases that have ops, if there are several."""
    found = [name for name in PHASES if table.sums.phase(name).ops]
    return found if len(found) > 1 else []


def _format_range(sums: OpSums) -> str:
    return format_quartile_range(sums.over_steps.time_ns.range) if sums.over_steps else ""


def _time_cell(sums: OpSums) -> Text:
    return Text(format_time(sums.time_ns) if sums.ops else "")


def _flops_cell(sums: OpSums) -> Text:
    return Text(mark_unknown(format_flops(sums.flops) if sums.flops else "", sums.flops_unknown))


def _bytes_cell(size_bytes: int, sums: OpSums) -> Text:
    return Text(mark_unknown(format_bytes(size_bytes) if size_bytes else "", sums.bytes_unknown))


def _allocated_cell(row: OpRow) -> Text:
    return Text(format_bytes(row.allocated_bytes) if row.allocated_bytes else "")


def _notes(table: OpTable, row: OpRow) -> Text:
    sums = row.sums.together
    notes = [
        _describe_forward(row.call_step, table.step),
        _describe_absence(sums, table.step),
        f"raised {sums.raised}x" if sums.raised else "",
        f"{'no device time' if table.device_times else 'end not seen'} {sums.unfinished}x"
        if sums.unfinished
        else "",
    ]
    return Text.join((Text(note, "yellow") for note in notes if note), "; ")


def _describe_forward(forward: int | None, step: ShownStep | None) -> str:
    """Returns when the forward of a call ran, if that was in another step."""
    if forward is None or step is None or forward == step.step:
        return ""
    return (
        f"forward in step {forward}"
        if step.sample is None
        else f"forward {count_of(step.step - forward, 'step')} before"
    )


def _describe_absence(sums: OpSums, step: ShownStep | None) -> str:
    """Returns in how many of several steps ops ran, if not in all."""
    if step is None or step.sample is None or sums.over_steps is None:
        return ""
    steps, count = sums.over_steps.steps, len(step.sample.steps)
    return f"in {steps} of {count} steps" if steps < count else ""


def _describe_rest(table: OpTable, shown: int, columns: FittedColumns, more: str | None) -> list[Text]:
    lines = []
    if table.compiled_before:
        names = ", ".join(table.compiled_before)
        lines.append(
            Text(
                f"what ran inside of {names} is not known: it was compiled before the recording began, or by a backend "
                "without AOTAutograd",
                "dim",
            )
        )
    hidden = [row.sums.together.time_ns for row in table.rows[shown:]]
    if hidden:
        hint = f" ({more} {len(table.rows)} shows all)" if more else ""
        lines.append(
            Text(f"{count_of(len(hidden), 'more row')} with {format_time(sum(hidden))}{hint}", "dim")
        )
    if table.device_times:
        lines.append(Text(DEVICE_TIMES_NOTE, "dim"))
    if table.lacks_device_times:
        lines.append(Text(NO_DEVICE_TIMES, "dim"))
    if table.phase is None and table.step is not None and table.step.duration_ns is not None:
        lines.append(Text(_describe_uncovered(table, table.step.duration_ns), "dim"))
    if table.by == "module":
        lines.append(Text(OWN_NOTE, "dim"))
    lines += explain_columns(_LEGEND, columns.titles)
    bytes_shown = not columns.titles.isdisjoint(("read", "written"))
    if table.sums.together.flops_unknown or (table.sums.together.bytes_unknown and bytes_shown):
        lines.append(Text(UNKNOWN_NOTE, "dim"))
    return lines


def _describe_uncovered(table: OpTable, step_ns: int) -> str:
    """Returns the share of all ops in the step's time, and where the rest of the step went."""
    all_ns, rest = table.sums.together.time_ns, "Python between ops and recording them"
    if table.device_times:
        step_ns, rest = (
            table.device_step_ns or step_ns,
            "kernels of no op, or a device that waits for the host",
        )
    return f"all: {format_time(all_ns)} of {format_time(step_ns)}; the rest is {rest}"
