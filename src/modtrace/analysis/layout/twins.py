"""At which height of its box something stands that goes back to, or repeats, something of the forward."""

from ...recording.phase import BACKWARD, FORWARD, RECOMPUTE
from ..graph.columns import PHASE
from ..graph_view.records import GraphView, ViewBox
from .tree import ItemTree
from .work import Work


class Twins:
    """The forward items that items of other phases belong to."""

    def __init__(self, view: GraphView, tree: ItemTree) -> None:
        size = tree.nodes
        self.is_phase = [box.kind == PHASE for box in view.boxes]
        phases = [box.phase if box.kind == PHASE else None for box in (view.boxes[each] for each in tree.top)]
        self.is_forward = [phase == FORWARD for phase in phases]
        self.is_mirrored = [*(phase == BACKWARD for phase in phases), False]
        forward = {_key(box): at for at, box in enumerate(view.boxes) if self.is_forward[at]}
        boxes = [
            forward.get(_key(box), -1) if phases[at] in (BACKWARD, RECOMPUTE) else -1
            for at, box in enumerate(view.boxes)
        ]
        self.of_level = [*boxes, -1]
        self.of_item = [node.twin for node in view.nodes] + [size + at if at >= 0 else -1 for at in boxes]

    def heights_in(self, work: Work, level: int) -> dict[int, float]:
        """How far down the items of a level stand that have a twin in the forward twin of the level."""
        twin_level = self.of_level[level]
        if twin_level < 0:
            return {}
        level_of, heights = work.tree.level_of, {}
        content = work.content_height[twin_level]
        for item in work.tree.children[level]:
            twin = self.of_item[item]
            if twin >= 0 and level_of[twin] == twin_level:
                y = work.y[twin]
                heights[item] = content - y - work.height[twin] if self.is_mirrored[level] else y
        return heights


def _key(box: ViewBox) -> tuple[object, ...]:
    if box.kind == PHASE:
        return (PHASE,)
    return box.kind, box.root, box.path, box.call, box.name
