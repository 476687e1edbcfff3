"""Makes names for the boxes of a graph view that show their nesting: `forward/GPT/blocks/0/attn`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...analysis.graph_view.records import ViewBox, ViewNode


def name_boxes(boxes: Sequence[ViewBox]) -> list[str]:
    """Returns for each box the labels of the boxes around it and its own, joined by `/`; each result is unique.

    A slash in a label is written `\\/`, by which Model Explorer distinguishes it from the separator.
    """
    found: list[str] = []
    taken: set[str] = set()
    counts: defaultdict[str, int] = defaultdict(int)
    for box in boxes:
        around = f"{found[box.box]}/" if box.box >= 0 else ""
        distinct = next(
            path for path in _number_on(around + _escape(label_layer(box)), counts) if path not in taken
        )
        taken.add(distinct)
        found.append(distinct)
    return found


def label_layer(layer: ViewBox | ViewNode) -> str:
    """Returns the label of a layer inside its parent: `attn`, `attn@1` for its second call, `0 x32` if it is folded."""
    call = f"@{layer.call}" if layer.call else ""
    folded = f" x{layer.repeats}" if layer.repeats > 1 else ""
    return f"{layer.label or layer.type or layer.kind}{call}{folded}"


def _escape(label: str) -> str:
    # Model Explorer treats the text before a semicolon as another namespace.
    return label.replace("\\", "_").replace(";", ",").replace("/", "\\/")


def _number_on(name: str, counts: defaultdict[str, int]) -> Iterator[str]:
    """Yields the name, then `name~2`, `name~3` and so on, skipping names in use."""
    while True:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}~{counts[name]}"
