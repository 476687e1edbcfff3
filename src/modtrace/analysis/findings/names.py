"""Names modules and steps in the sentences of findings."""

import re
from collections.abc import Sequence

from ...recording.suggestions import count_of, first_few
from ..tables.placement import Module
from ..tables.sampled_steps import SampledSteps

#: A path that ends with the position in a list.
_NUMBERED = re.compile(r"(.*?)(\d+)")

#: The largest number of modules that are named one by one.
_NAMED = 3


def name_alike(modules: Sequence[Module]) -> str:
    """Returns the names of modules: `head`, `blocks.0..31`, `a and b`, or `a, b, c and 4 more`."""
    names = [module.path or module.name or module.type for module in modules]
    numbers = [_NUMBERED.fullmatch(name) for name in names]
    if len(names) > 1 and all(numbers) and len({found[1] for found in numbers if found}) == 1:
        last = [int(found[2]) for found in numbers if found]
        if last == [*range(last[0], last[0] + len(last))]:
            return f"{names[0]}..{last[-1]}"
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def name_steps_of(run: SampledSteps) -> str:
    """Returns how many training steps were looked at: `48 training steps, 2 to 49`."""
    steps = run.numbers
    between = f", {steps[0]} to {steps[-1]}" if len(steps) > 1 else f", {first_few(steps.tolist())}"
    return f"{count_of(len(steps), 'training step')}{between if len(steps) else ''}"


def format_size(size: float) -> str:
    """Returns a number of bytes: `1.23 GB`, `45.6 MB`, `789 kB`, `12 B`."""
    return (
        f"{size / 1e9:,.2f} GB"
        if size >= 1e9
        else f"{size / 1e6:,.1f} MB"
        if size >= 1e5
        else f"{size / 1e3:,.0f} kB"
        if size >= 1e3
        else f"{size:.0f} B"
    )
