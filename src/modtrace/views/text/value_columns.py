"""Makes the columns of values for the module tree, of which one marks what is not finite."""

import math
from collections.abc import Mapping, Sequence

from ...analysis.modules.value_summary import Kind, SlotValues, ValueSummary
from ...analysis.values.nonfinite import describe_counts
from ...recording.statistics.moments import Stats, columns_of
from ..common.columns import Column, Legend, Text
from ..common.numbers import format_number

#: The explanation below a tree that has these columns.
VALUES_LEGEND: Legend = (
    (
        (("out rms", "out max"), "out: outputs, all calls and slots merged"),
        (("grad rms", "grad max"), "grad: gradients at outputs"),
        (("out max", "grad max"), "max: largest magnitude"),
    ),
    ((("grad/param",), "grad/param: RMS of the gradients of a module's parameters, divided by theirs"),),
)

#: Columns that are left out in this order if the width is too small.
DISPENSABLE_VALUES = ("out max", "grad max", "grad/param", "grad rms", "out rms")

_SHORT: Mapping[Kind, str] = {
    "output": "out",
    "recomputed output": "recomputed out",
    "gradient": "grad",
    "parameter": "param",
    "parameter gradient": "param grad",
}

_NONFINITE_STYLE = "bold red"


def value_columns(rows: Sequence[ValueSummary | SlotValues | None]) -> list[Column]:
    """Returns the columns, with one cell a row; a cell is empty if nothing was measured."""
    columns = list[Column]()
    for title, of in (("out", "output"), ("grad", "gradient")):
        stats = [getattr(row, of, None) or Stats() for row in rows]
        merged = columns_of(stats)
        columns += [
            Column(f"{title} {short}", [_number(number if own.count else None) for number, own in cells])
            for short, cells in (
                ("rms", zip(merged.rms.tolist(), stats, strict=True)),
                ("max", zip(merged.abs_max.tolist(), stats, strict=True)),
            )
        ]
    ratios = [row.gradient_to_parameter if isinstance(row, ValueSummary) else None for row in rows]
    return [*columns, Column("grad/param", [_number(ratio) for ratio in ratios])]


def nonfinite_column(rows: Sequence[ValueSummary | None]) -> Column:
    """Returns a column that tells which of a module's tensors are not finite, or else that some inside are not."""
    return Column("NaN, inf", [Text(_describe_nonfinite(row), _NONFINITE_STYLE) for row in rows], right=False)


def _describe_nonfinite(values: ValueSummary | None) -> str:
    counts = () if values is None else values.nonfinite
    if len(counts) == 1:
        [tensor] = counts
        return f"{_SHORT[tensor.kind]} {describe_counts(tensor.nan_count, tensor.inf_count)}"
    return ", ".join(_SHORT[tensor.kind] for tensor in counts) or (
        "inside" if values is not None and values.nonfinite_inside else ""
    )


def shown_slots(values: ValueSummary | None) -> Sequence[SlotValues]:
    """Returns the slots that deserve a line: all but the only slot of a plain tensor."""
    return [slot for slot in values.slots if slot.slot or len(values.slots) > 1] if values else ()


def _number(value: float | None) -> Text:
    if value is None:
        return Text("")
    return Text(format_number(value), "" if math.isfinite(value) else _NONFINITE_STYLE)
