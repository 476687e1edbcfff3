"""Writes the labels and tooltips of a picture's nodes, boxes and edges."""

from collections.abc import Iterator
from functools import lru_cache

from ...analysis.graph.columns import CALL, INPUT, OP, OUTPUT, PHASE
from ...analysis.graph_view.records import LAYER, ViewBox, ViewEdge, ViewNode
from ..common.numbers import format_bytes, format_flops, format_number, format_time
from .text import Html, escape_html, stack, to_html

# Cached, as it is needed for every node, and equal layers have equal texts.
_write_bytes, _write_flops, _write_number = map(lru_cache(4096), (format_bytes, format_flops, format_number))

#: The number of characters of an op's arguments that are shown.
_ARGS_SHOWN = 300

#: The colour of nodes that raised or are not finite.
RED = "#b91c1c"


@lru_cache(4096)
def format_shape(shape: tuple[int, ...] | None) -> str:
    """Returns the sizes of a tensor: `1×64×32×32`, `scalar`; "" if they are not known."""
    if shape is None:
        return ""
    return "×".join(map(str, shape)) or "scalar"


def title_of(item: ViewNode | ViewBox) -> str:
    """Returns the title of an item: `blocks.0`, or `blocks.0@1` for its second call.

    The title of an input begins with its kind.
    """
    name = item.name if item.kind in (LAYER, CALL) or isinstance(item, ViewBox) else item.label
    if item.call and item.kind != OP:
        return f"{name}@{item.call}"
    return f"{item.kind} {name}" if item.kind in (INPUT, OUTPUT) and item.kind not in name else name


def render_label(node: ViewNode, mark: str = "") -> Html:
    """Returns path and class of a layer, followed by a mark, or name and shape of another node, on two lines."""
    if node.kind in (LAYER, CALL):
        text = _render_path(title_of(node), _suffix(node, mark))
    else:
        text = _render_text(" ".join(filter(None, (title_of(node), _suffix(node)))), _shape_line(node))
    badges = [f'<font color="white" point-size="8"><b> {badge} </b></font>' for badge in _badges(node)]
    return stack([text, *badges], [None, *[RED] * len(badges)]) if badges else text


def _render_path(path: str, suffix: str) -> Html:
    """Returns the path in bold, with the following space, which SVG would drop at the beginning of the suffix."""
    return Html(f"<b>{escape_html(path)}{' ' if suffix else ''}</b>{escape_html(suffix)}")


@lru_cache(4096)
def _render_text(line: str, small: str) -> Html:
    second = f'<br/><font point-size="9">{escape_html(small)}</font>' if small else ""
    return Html(f"{escape_html(line)}{second}")


def render_box_label(box: ViewBox, mark: str = "") -> Html:
    """Returns path and class of an open layer, followed by a mark; for a phase, its name."""
    return _render_path(box.phase if box.kind == PHASE else title_of(box), _suffix(box, mark))


def _suffix(item: ViewNode | ViewBox, mark: str = "") -> str:
    parts = (f"({item.type})" if item.type else "", f"×{item.repeats}" if item.repeats > 1 else "", mark)
    return " ".join(filter(None, parts))


def _shape_line(node: ViewNode) -> str:
    shape = format_shape(node.shape)
    return f"{shape} {node.dtype}" if shape and node.kind in (INPUT, OUTPUT) and node.dtype else shape


def _badges(node: ViewNode) -> Iterator[str]:
    if node.raised:
        yield "raised"
    if node.nonfinite:
        yield f"{node.nonfinite} not finite"


def with_line(label: object, line: str) -> Html:
    """Returns a label, plain or `Html`, with one more line below it."""
    return stack([to_html(label), f"<b>{escape_html(line)}</b>"])


def with_number(label: object, number: str) -> Html:
    """Returns a label, plain or `Html`, followed by a number."""
    return Html(f"{to_html(label)} · {escape_html(number)}")


def describe_node(node: ViewNode) -> str:
    """Returns everything that is known of a node, one line for each property."""
    lines = [node.key]
    if node.type:
        lines.append(f"class: {node.type}")
    if node.shape is not None:
        lines.append(
            f"{'returns' if node.kind == OP else 'shape'}: {format_shape(node.shape)} {node.dtype or ''}"
        )
    if node.args:
        lines.append(f"args: {_cut(node.args)}")
    return "\n".join([*lines, *_numbers(node)])


def describe_box(box: ViewBox) -> str:
    """Returns everything that is known of an open layer, one line for each property."""
    return "\n".join([box.key, *([f"class: {box.type}"] if box.type else []), *_numbers(box)])


def describe_edge(edge: ViewEdge) -> str:
    """Returns shape and dtype of the tensor, the argument that reads it, and the number of reads."""
    return _describe_read(edge.shape, edge.dtype or "", edge.slot, edge.reads) or edge.kind


@lru_cache(4096)
def _describe_read(shape: tuple[int, ...] | None, dtype: str, slot: str, reads: int) -> str:
    parts = (
        format_shape(shape),
        dtype,
        f"as {slot}" if slot else "",
        f"and {reads - 1} more" if reads > 1 else "",
    )
    return " ".join(filter(None, parts))


def _numbers(item: ViewNode | ViewBox) -> Iterator[str]:
    if item.kind != OP and item.ops:
        yield f"ops: {item.ops}"
    if item.repeats > 1:
        yield f"×{item.repeats}: what follows is their sum"
    if item.duration_ns:
        yield f"time: {format_time(item.duration_ns)}"
    if item.flops:
        yield f"flops: {_write_flops(item.flops)}"
    if item.bytes_read or item.bytes_written:
        yield f"bytes: {_bytes(item.bytes_read)} read, {_bytes(item.bytes_written)} written"
    if item.saved_bytes:
        yield f"saved for backward: {_write_bytes(item.saved_bytes)}"
    if item.rms is not None:
        yield f"rms: {_write_number(item.rms)}"
    if item.nonfinite:
        yield f"not finite: {item.nonfinite}"
    if item.raised:
        yield "raised"
    if item.compiled:
        yield "compiled"


def _bytes(size: int | None) -> str:
    return "?" if size is None else _write_bytes(size)


def _cut(text: str) -> str:
    return text if len(text) <= _ARGS_SHOWN else f"{text[: _ARGS_SHOWN - 1]}…"
