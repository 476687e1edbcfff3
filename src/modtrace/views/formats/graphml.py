"""Writes a graph as GraphML, which networkx, igraph, Gephi and yEd read.

Few of them read nested graphs, so boxes are an attribute `box` of the nodes in them.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints
from xml.sax.saxutils import escape, quoteattr

from ...analysis.graph_view.records import GraphView, ViewEdge, ViewNode
from ..common.box_paths import name_boxes
from ..common.numbers import to_json_number
from ..common.whole_file import write_pieces

_HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns"
    xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
    xsi:schemaLocation="http://graphml.graphdrawing.org/xmlns http://graphml.graphdrawing.org/xmlns/1.0/graphml.xsd">
"""

#: How GraphML calls the types of Python. Of `int | None` the first one counts; all others are text.
_TYPES = {bool: "boolean", int: "long", float: "double"}

#: Attributes and their types, those of nodes and edges as in `ViewNode` and `ViewEdge`.
GRAPH_KEYS = {
    "command": "string",
    "marks": "string",
    "step": "long",
    "step_kind": "string",
    "has_ops": "boolean",
}


def _keys_of(record: type[ViewNode] | type[ViewEdge], *left_out: str) -> dict[str, str]:
    """Returns the type of each field, except for those that are left out."""
    hints = {name: hint for name, hint in get_type_hints(record).items() if name not in left_out}
    return {name: _TYPES.get((get_args(hint) or (hint,))[0], "string") for name, hint in hints.items()}


NODE_KEYS = _keys_of(ViewNode, "key", "first") | {"box": "string", "twin": "string"}
EDGE_KEYS = _keys_of(ViewEdge, "source", "target", "output")

#: What XML cannot hold, not even escaped.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_graphml(view: GraphView, path: str | os.PathLike[str]) -> None:
    """Writes the graph to a file, one node at a time. If writing fails, an existing file is unchanged.

    Raises:
        ModtraceError: the file cannot be written.
    """
    write_pieces(iterate_graphml(view), path)


def iterate_graphml(view: GraphView) -> Iterator[str]:
    """Yields the text of the graph in pieces. Unknown and empty values are left out."""
    yield _HEAD
    for owner, keys in (("graph", GRAPH_KEYS), ("node", NODE_KEYS), ("edge", EDGE_KEYS)):
        for name, kind in keys.items():
            yield f'<key id="{owner}.{name}" for="{owner}" attr.name="{name}" attr.type="{kind}"/>\n'
    yield '<graph edgedefault="directed">\n'
    yield f"{_to_data('graph', GRAPH_KEYS, _graph_values(view))}\n"
    yield from _nodes(view)
    for edge in view.edges:
        source, target = (_quote(view.nodes[each].key) for each in (edge.source, edge.target))
        yield f"<edge source={source} target={target}>{_to_data('edge', EDGE_KEYS, edge._asdict())}</edge>\n"
    yield "</graph>\n</graphml>\n"


def _graph_values(view: GraphView) -> dict[str, Any]:
    return {
        "command": shlex.join(view.command),
        "marks": "\n".join(view.marks),
        "step": view.step and view.step.step,
        "step_kind": view.step and view.step.kind,
        "has_ops": view.has_ops,
    }


def _nodes(view: GraphView) -> Iterator[str]:
    boxes = name_boxes(view.boxes)
    for node in view.nodes:
        values = node._asdict()
        values["box"] = boxes[node.box] if node.box >= 0 else None
        values["twin"] = view.nodes[node.twin].key if node.twin >= 0 else None
        yield f"<node id={_quote(node.key)}>{_to_data('node', NODE_KEYS, values)}</node>\n"


def _to_data(owner: str, keys: Iterable[str], values: Mapping[str, Any]) -> str:
    told = ((key, _to_text(values[key])) for key in keys if values[key] is not None)
    return "".join(f'<data key="{owner}.{key}">{text}</data>' for key, text in told if text)


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return str(list(value))
    return escape(_make_valid(str(to_json_number(value))), {"\r": "&#13;"})


def _quote(text: str) -> str:
    return quoteattr(_make_valid(text))


def _make_valid(text: str) -> str:
    """Returns the text with characters that XML cannot hold escaped: `\\x00`."""
    return _NO_XML.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
