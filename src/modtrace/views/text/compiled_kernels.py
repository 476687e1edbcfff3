"""Renders the ops inside of compiled code, with the kernels that they were fused into."""

from collections.abc import Iterator, Sequence

from ...analysis.compile.kernels import CompiledInside, CompiledKernel
from ...recording.suggestions import count_of
from ..common.columns import Column, Legend, Text, render_columns, render_lines

#: Columns that are left out in this order if the width is too small.
DISPENSABLE_KERNELS = ("fused ops", "compiled in")

LEGEND: Legend = (
    (
        (("kernel",), "kernel: what runs at once; numbered are those that inductor has fused"),
        (("of modules",), "of modules: whose ops it runs, in backward the gradients of"),
    ),
)

#: The largest number of characters shown of the modules, and of the ops of a kernel.
_MODULES, _OPS = 56, 28

_ALONE = ", none fused: they are among the ops of their modules"

#: The largest number of kernels listed for each region, if there are several.
_LISTED = 200


def kernel_columns(regions: Sequence[CompiledInside], top: int | None) -> list[Column]:
    """Returns a row for each kernel, and for each op that runs by itself, in the order of the graphs."""
    rows = [(region, kernel) for region in regions for kernel in region.kernels][:top]
    fused = [(region.name, kernel.phase, kernel.name) for region, kernel in rows if kernel.is_fused]
    numbers = {key: at for at, key in enumerate(dict.fromkeys(fused), 1)}
    columns = [
        Column("kernel", [_kernel_cell(region, kernel, numbers) for region, kernel in rows], right=False),
        Column("phase", [Text(kernel.phase) for _, kernel in rows], right=False),
        Column("ops", [Text(str(len(kernel.ops))) for _, kernel in rows]),
        Column(
            "of modules", [Text(_shorten(kernel.modules, _MODULES, " + ")) for _, kernel in rows], right=False
        ),
        Column("fused ops", [Text(_describe_ops(kernel), "dim") for _, kernel in rows], right=False),
    ]
    if len(regions) > 1:
        columns.insert(0, Column("compiled in", [Text(region.name) for region, _ in rows], right=False))
    return columns


def describe_region(region: CompiledInside) -> list[str]:
    """Returns the lines about one region: its contents and its kernels."""
    top = min(_LISTED, len(region.kernels))
    told = render_lines(describe_regions([region], top), color=False).splitlines()
    return told[:1] + render_columns(kernel_columns([region], top), color=False).splitlines() + told[1:]


def describe_regions(regions: Sequence[CompiledInside], top: int | None) -> Iterator[Text]:
    """Yields a line for each region, and one for rows that are not shown."""
    for region in regions:
        fused = sum(kernel.is_fused for kernel in region.kernels)
        kernels = f", fused into {count_of(fused, 'kernel')}; times inside are not known" if fused else _ALONE
        yield Text(
            f"inside of {region.name}, compiled in step {region.step}: "
            f"{count_of(region.forward_ops, 'op')} of "
            f"forward and {region.backward_ops} of backward{kernels}",
            "dim",
        )
    hidden = sum(len(region.kernels) for region in regions if region.is_fused) - (top or 0)
    if top is not None and hidden > 0:
        yield Text(f"{count_of(hidden, 'more row')} of compiled code", "dim")


def _kernel_cell(
    region: CompiledInside, kernel: CompiledKernel, numbers: dict[tuple[str, str, str], int]
) -> Text:
    if kernel.is_fused:
        return Text(str(numbers[region.name, kernel.phase, kernel.name]))
    return Text(_bare(kernel.name))


def _describe_ops(kernel: CompiledKernel) -> str:
    if not kernel.is_fused:
        return ""
    return _shorten(list(dict.fromkeys(map(_bare, kernel.ops))), _OPS, " ")


def _bare(op: str) -> str:
    return op.split(".")[1] if op.count(".") > 1 else op


def _shorten(names: Sequence[str], width: int, between: str) -> str:
    """Returns as many of the names as fit, at least one, and how many are left out."""
    shown = list(names)
    while len(shown) > 1 and len(between.join(shown)) > width:
        shown.pop()
    more = len(names) - len(shown)
    return between.join(shown) + (f" and {more} more" if more else "")
