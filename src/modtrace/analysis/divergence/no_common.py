"""Explains why two recordings have nothing that could be compared."""

from difflib import get_close_matches

from ...recording.protocols import RecordingData
from ...recording.suggestions import count_of
from ...surface import choose_phrase
from ..alignment.contract import Alignment
from ..tables.chosen_step import name_steps
from ..tables.columns import column_of

#: So many modules without a partner are named, with those whose names are near.
_NAMED = 5


def explain_nothing(a: RecordingData, b: RecordingData, alignment: Alignment) -> str:
    """Returns why no tensor of one recording is one of the other, and which names are near each other."""
    if not len(alignment.steps):
        steps = [sorted({int(step) for step in column_of(data.table("values"), "step")}) for data in (a, b)]
        argument = choose_phrase(python="step=(A, B)", command_line="--step A:B")
        return (
            "the two recordings have no step in common: the first has measured steps "
            f"{name_steps(steps[0])}, the second {name_steps(steps[1])}. "
            f"{argument} compares two steps of different numbers."
        )
    if alignment.modules:
        modules = count_of(len(alignment.modules), "aligned module")
        text = f"no tensor was measured in both recordings, of {modules}."
        return f"{text} Record both with the same captures, and both with ops or without."
    argument = choose_phrase(python="map=['EXPRESSION=PATH']", command_line="--map 'EXPRESSION=PATH'")
    near = _name_nearest(alignment)
    advice = f"{argument} says how modules of the first are called in the second."
    return f"the two recordings have no module in common. {near} {advice}"


def _name_nearest(alignment: Alignment) -> str:
    here = list(dict.fromkeys(each.path or each.root for each in alignment.missing.modules))
    there = list(dict.fromkeys(each.path or each.root for each in alignment.extra.modules))
    if not here or not there:
        return "One of them has no modules that were called."
    pairs = [(name, get_close_matches(name, there, 1, 0.0)) for name in here[:200]]
    near = [f"{name} ~ {found[0]}" for name, found in pairs if found][:_NAMED]
    return f"The nearest names are: {', '.join(near)}."
