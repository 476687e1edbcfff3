"""Runs Graphviz' `dot` on pictures, and tidies the SVG that it writes."""

import os
import re
import shutil
import subprocess
import warnings

from ...analysis.graph_view.records import GraphView
from ...errors import MissingLibraryError, ModtraceError, ModtraceWarning
from ..common.whole_file import write_content, write_pieces
from .fixed_labels import FixedLabels
from .render import render_dot
from .style import GraphStyle

_Path = str | os.PathLike[str]

#: The time that a picture may take; `dot` needs 10 s for 10,000 nodes and a minute for 20,000.
_PATIENCE_S = 300

#: The options to try in turn. On 600 random graphs with nested boxes, `dot` 2.43 fails to bend the edges of 1 in 30
#: ("triangulation failed"), and to place the boxes of 1 in 150 (an assertion in merge_chain).
_SIMPLER: tuple[tuple[str, ...], ...] = ((), ("-Gsplines=line",), ("-Gsplines=line", "-Gclusterrank=none"))

_HOW_TO_INSTALL = (
    "Install Graphviz: `apt-get install graphviz`, `brew install graphviz`, `conda install graphviz` or "
    "`winget install graphviz`, and see that `dot` is found on PATH. Writing a .dot file needs no program."
)


def render_svg(
    view: GraphView,
    *,
    style: GraphStyle | None = None,
    overlay: str | None = None,
    patience_s: float = _PATIENCE_S,
) -> str:
    """Returns the picture as a self-contained SVG.

    Args:
        view: the visible part of a graph.
        style: the look; None for `GraphStyle()`.
        overlay: the number by which nodes are coloured; see `render_dot`.
        patience_s: the seconds after which drawing is abandoned.

    Raises:
        ValueError: there is no such number.
        MissingLibraryError: the program `dot` is missing; the message says how to install it.
        ModtraceError: it fails, or takes too long.
    """
    labels = FixedLabels()
    text = render_dot(view, style=style, overlay=overlay, labels=labels)
    drawn = _draw(text, len(view.nodes), "svg", patience_s=patience_s)
    return tidy_svg(labels.fill(drawn.decode("utf-8")))


def write_dot(
    view: GraphView, path: _Path, *, style: GraphStyle | None = None, overlay: str | None = None
) -> None:
    """Writes the text of the picture, for which Graphviz is not needed.

    Raises:
        ValueError: there is no such number to colour by.
        ModtraceError: the file cannot be written.
    """
    write_pieces([render_dot(view, style=style, overlay=overlay)], path)


def write_svg(
    view: GraphView, path: _Path, *, style: GraphStyle | None = None, overlay: str | None = None
) -> None:
    """Writes the picture as SVG. Errors are those of `render_svg` and `write_dot`."""
    write_pieces([render_svg(view, style=style, overlay=overlay)], path)


def write_png(
    view: GraphView,
    path: _Path,
    *,
    style: GraphStyle | None = None,
    overlay: str | None = None,
    dpi: int = 96,
) -> None:
    """Writes the picture as PNG, with `dpi` pixels an inch. Errors are also those of `write_svg`.

    Raises:
        ValueError: `dpi` is not above 0.
    """
    if dpi <= 0:
        raise ValueError(f"dpi={dpi!r}: give the pixels of an inch, 96 for a screen or 300 for print")
    text = render_dot(view, style=style, overlay=overlay)
    drawn = _draw(text, len(view.nodes), "png", f"-Gdpi={dpi}", patience_s=_PATIENCE_S)
    write_content(drawn, path)


def _draw(text: str, nodes: int, form: str, *options: str, patience_s: float) -> bytes:
    failed: list[_DotFailed] = []
    for simpler in _SIMPLER:
        try:
            return _run_dot(text, [f"-T{form}", *options, *simpler], nodes, patience_s)
        except _DotFailed as error:
            failed.append(error)
    raise failed[0]


class _DotFailed(ModtraceError):
    """Raised if `dot` ran without producing a picture."""


def _run_dot(text: str, options: list[str], nodes: int, patience_s: float) -> bytes:
    program = shutil.which("dot")
    if program is None:
        raise MissingLibraryError(
            f"pictures are drawn by the program `dot`, which is not on PATH. {_HOW_TO_INSTALL}", name="dot"
        )
    try:
        done = subprocess.run(
            [program, *options], input=text.encode("utf-8"), capture_output=True, timeout=patience_s
        )
    except subprocess.TimeoutExpired:
        raise ModtraceError(
            f"dot did not finish a picture of {nodes} nodes in {patience_s:g} s. {_HOW_TO_SHRINK}"
        ) from None
    except OSError as error:
        raise ModtraceError(
            f"{program}: the program cannot be run: {error.strerror or error}. {_HOW_TO_INSTALL}"
        ) from error
    if done.returncode or not done.stdout:
        said = done.stderr.decode("utf-8", "replace").strip() or "it said nothing"
        raise _DotFailed(
            f"dot failed with exit status {done.returncode} on a picture of {nodes} nodes: {said[:500]}. "
            f"Look at what the style gives, and at the text that write_dot() writes. {_HOW_TO_SHRINK}"
        )
    if b"Scaling" in done.stderr:
        warnings.warn(
            "the picture is smaller than was asked for: dot cannot draw so many pixels. "
            "Give a smaller dpi, or write SVG.",
            ModtraceWarning,
            stacklevel=4,
        )
    return done.stdout


_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_FIRST_BOX = re.compile(r'^<g id="[^"]*" class="cluster">$', re.MULTILINE)
_FIRST_OTHER = re.compile(r'^<g id="[^"]*" class="(?:node|edge)">$', re.MULTILINE)
_TEXT = re.compile(r"^<text .*</text>\n", re.MULTILINE)
_FONT = re.compile(r'(?<=")( font-family="[^"]*")(?= )')
_END = "</g>\n</svg>"

#: A light rim around the letters; the pointer passes through the text to the box with its tooltip.
_RAISED = (
    '<g class="box-labels" pointer-events="none" style="paint-order:stroke" stroke="#f6f9fd" stroke-width="2.5" '
    'stroke-linejoin="round">\n{}</g>\n'
)


def tidy_svg(svg: str) -> str:
    """Returns the SVG without comments, with one font and with box labels on top."""
    # Replaces a colour name of CSS that some programs do not know.
    plain = _COMMENT.sub("", svg).replace('stroke="transparent"', 'stroke="none"')
    return raise_box_labels(_say_font_once(plain))


def _say_font_once(svg: str) -> str:
    """Returns the picture with the font named once if all texts share it, which makes it a tenth smaller."""
    fonts = set(_FONT.findall(svg))
    if len(fonts) != 1:
        return svg
    return _FONT.sub("", svg).replace("<svg ", f"<svg{fonts.pop()} ", 1)


def raise_box_labels(svg: str) -> str:
    """Returns the picture with the labels of all boxes above everything else, because `dot` draws edges over them.

    A picture of an unexpected form is returned unchanged.
    """
    boxes, others, end = _FIRST_BOX.search(svg), _FIRST_OTHER.search(svg), svg.rfind(_END)
    if boxes is None or end < 0:
        return svg
    until = others.start() if others else end
    labels = _TEXT.findall(svg, boxes.start(), until)
    without = _TEXT.sub("", svg[boxes.start() : until])
    raised = _RAISED.format("".join(labels))
    return f"{svg[: boxes.start()]}{without}{svg[until:end]}{raised}{svg[end:]}"


_HOW_TO_SHRINK = (
    "Show less: collapse(depth=...), fold(), filter(...) (--depth, --fold, --phase, --path); "
    "or write a .dot file and draw it with another program."
)
