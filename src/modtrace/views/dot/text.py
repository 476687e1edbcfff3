"""Writes texts and attributes in the DOT language, in which every name appears unchanged."""

import html
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from ..common.columns import printable_lines

#: Text that graphviz would read as an entity.
_ENTITY = re.compile("&(?=#?\\w+;)")
_WORD = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)


class Html(str):
    """A text in Graphviz' HTML-like language, which is written unchanged; names in it need `escape_html`."""

    __slots__ = ()


def quote(value: Any) -> str:
    """Returns a value in the DOT language: `"conv1"`, `"0.5"`, `"true"`. An `Html` stays unchanged."""
    if isinstance(value, Html):
        return f"<{value}>"
    if isinstance(value, bool):
        return '"true"' if value else '"false"'
    text = printable_lines(str(value)).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    # Needed for every node, and searching is much faster than replacing.
    return f'"{_ENTITY.sub("&amp;", text)}"' if "&" in text else f'"{text}"'


def escape_html(text: str) -> str:
    """Returns a text escaped for an `Html`, with line breaks kept."""
    return html.escape(printable_lines(text)).replace("\n", "<br/>")


def to_html(label: object) -> Html:
    """Returns a label, plain or `Html`, as `Html`."""
    return label if isinstance(label, Html) else Html(escape_html(str(label)))


def stack(lines: Sequence[str], grounds: Sequence[str | None] = ()) -> Html:
    """Stacks lines or tables of `Html`; `grounds` are their background colours."""
    cells = [_cell(line, ground) for line, ground in zip_longest(lines, grounds)]
    return Html(f'<table border="0" cellspacing="0" cellpadding="1">{"".join(cells)}</table>')


def _cell(line: str, ground: str | None) -> str:
    attribute = f' bgcolor="{ground}"' if ground else ""
    return f"<tr><td{attribute}>{line}</td></tr>"


def render_attributes(attributes: Mapping[str, Any]) -> str:
    """Returns attributes in brackets, after a space: ` [label="conv1" shape="box"]`, without those that are None."""
    listed = [
        # not cached, as tooltips are hardly ever equal
        f"tooltip={quote(value)}" if name == "tooltip" else _attribute(name, value)
        for name, value in attributes.items()
        if value is not None
    ]
    return f" [{' '.join(listed)}]" if listed else ""


@lru_cache(16384, typed=True)
def _attribute(name: str, value: Hashable) -> str:
    return f"{name if _WORD.match(name) else quote(name)}={quote(value)}"
