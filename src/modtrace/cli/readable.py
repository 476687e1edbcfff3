"""Chooses how deep a graph is drawn, and refuses a part of it that is empty."""

from ..analysis.tables.missing_rows import say_missing
from ..api.model_graph import ModelGraph
from ..errors import NothingRecordedError
from ..recording.phase import PHASES

#: The number of nodes above which a picture is hard to read, so that a smaller depth is chosen by default.
_READABLE = 250


def at_depth(whole: ModelGraph, depth: int | None, *, is_drawn: bool) -> tuple[ModelGraph, str]:
    """Returns the graph at the requested depth, or else at the deepest legible one, with a sentence about that."""
    if depth is not None:
        return whole.collapse(depth=depth), ""
    size = len(whole.nodes)
    if not is_drawn or size <= _READABLE:
        return whole, ""
    deepest = int(whole.columns.layers.depth.max(initial=0))
    shown, chosen = whole, deepest + 1
    while chosen > 1 and len(shown.nodes) > _READABLE:
        chosen -= 1
        shown = whole.collapse(depth=chosen)
    return shown, f"at depth {chosen}: the whole graph has {size} nodes; choose with --depth\n"


def require_nodes(whole: ModelGraph, part: ModelGraph) -> ModelGraph:
    """Returns the part of a graph, and refuses an empty one.

    Raises:
        NothingRecordedError: the part is empty, and the whole is not.
    """
    ran = whole.columns.nodes.phase
    if len(ran) and not len(part.columns.nodes):
        phases = ", ".join(phase for code, phase in enumerate(PHASES) if code in ran) or "none"
        missing = say_missing(whole.columns.marks)
        raise NothingRecordedError(
            f"no op of the step is in the part that was chosen; ops ran in: {phases}.{missing}"
        )
    return part
