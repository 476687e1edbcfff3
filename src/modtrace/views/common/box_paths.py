"""Names for the boxes of a graph view that tell how they nest: `forward/GPT/blocks/0/attn`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...analysis.graph_view.records import ViewBox, ViewNode


def name_boxes(boxes: Sequence[ViewBox]) -> list[str]:
    """Returns for each box the labels of the boxes around it and its own, joined by `/`; no two are the same.

    In a label itself a slash is written `\\/`, which is how Model Explorer tells it from the one between labels.
    """
    found: list[str] = []
    taken: set[str] = set()
    counts: defaultdict[str, int] = defaultdict(int)
    for box in boxes:
        around = f"{found[box.box]}/" if box.box >= 0 else ""
        distinct = next(
            each for each in _number_on(around + _escape(label_layer(box)), counts) if each not in taken
        )
        taken.add(distinct)
        found.append(distinct)
    return found


def label_layer(layer: ViewBox | ViewNode) -> str:
    """Returns what a layer is called inside the one around it: `attn`, in its second call `attn@1`, folded `0 x32`."""
    call = f"@{layer.call}" if layer.call else ""
    folded = f" x{layer.repeats}" if layer.repeats > 1 else ""
    return f"{layer.label or layer.type or layer.kind}{call}{folded}"


def _escape(label: str) -> str:
    # Model Explorer takes what stands in front of a semicolon for another namespace.
    return label.replace("\\", "_").replace(";", ",").replace("/", "\\/")


def _number_on(name: str, counts: defaultdict[str, int]) -> Iterator[str]:
    """Yields the name, then with `~2` behind it, `~3` and so on; what was given before is not given again."""
    while True:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}~{counts[name]}"
