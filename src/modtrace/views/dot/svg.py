"""Tidies SVG that `dot` wrote: labels of boxes stand above the edges, and comments are gone."""

import re

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_FIRST_BOX = re.compile(r'^<g id="[^"]*" class="cluster">$', re.MULTILINE)
_FIRST_OTHER = re.compile(r'^<g id="[^"]*" class="(?:node|edge)">$', re.MULTILINE)
_TEXT = re.compile(r"^<text .*</text>\n", re.MULTILINE)
_FONT = re.compile(r'(?<=")( font-family="[^"]*")(?= )')
_END = "</g>\n</svg>"

#: A light rim around the letters; the pointer passes through to the box, which has a tooltip.
_RAISED = (
    '<g class="box-labels" pointer-events="none" style="paint-order:stroke" stroke="#f6f9fd" stroke-width="2.5" '
    'stroke-linejoin="round">\n{}</g>\n'
)


def tidy_svg(svg: str) -> str:
    """The picture as it is meant to be seen."""
    # A colour of CSS that not every program knows.
    plain = _COMMENT.sub("", svg).replace('stroke="transparent"', 'stroke="none"')
    return raise_box_labels(_say_font_once(plain))


def _say_font_once(svg: str) -> str:
    """Where all texts are of one font it stands at the top, which makes the file a tenth smaller."""
    fonts = set(_FONT.findall(svg))
    if len(fonts) != 1:
        return svg
    return _FONT.sub("", svg).replace("<svg ", f"<svg{fonts.pop()} ", 1)


def raise_box_labels(svg: str) -> str:
    """The picture with the labels of all boxes above everything else: `dot` draws edges over them.

    What does not look as expected is given back as it is.
    """
    boxes, others, end = _FIRST_BOX.search(svg), _FIRST_OTHER.search(svg), svg.rfind(_END)
    if boxes is None or end < 0:
        return svg
    until = others.start() if others else end
    labels = _TEXT.findall(svg, boxes.start(), until)
    without = _TEXT.sub("", svg[boxes.start() : until])
    raised = _RAISED.format("".join(labels))
    return f"{svg[: boxes.start()]}{without}{svg[until:end]}{raised}{svg[end:]}"
