"""Names modules and steps in the sentences of findings."""

from collections import defaultdict
from collections.abc import Sequence

from ...recording.module_path import fold_numbers, number_free
from ...recording.protocols import RecordingData
from ...recording.suggestions import count_of, first_few
from ..tables.columns import Column
from ..tables.placement import Module, name_module
from ..tables.sampled_steps import SampledSteps

#: The largest number of modules that are named one by one.
_NAMED = 3


def name_alike(data: RecordingData, modules: Sequence[Module]) -> str:
    """Returns the names of modules: `head`, `blocks.0..31.attn`, `a and b`, or `a, b, c and 4 more`.

    Paths that differ in numbers, of which all between the least and the largest are there, are one name.
    """
    return name_paths([name_module(data, module) for module in modules])


def name_paths(paths: Sequence[str]) -> str:
    """Returns paths of modules as `name_alike` names modules."""
    alike: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        alike[number_free(path)].append(path)
    names = []
    for group in alike.values():
        folded = fold_numbers(group)
        names += group if folded is None else [folded]
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def list_others(names: Sequence[str], most: int = 4) -> tuple[str, ...]:
    """Returns the names behind the first one, which the sentence of the finding has, as a line of evidence."""
    return (f"the others: {first_few(names[1:], most)}",) if len(names) > 1 else ()


def name_steps_of(run: SampledSteps, steps: Column | None = None) -> str:
    """Returns how many training steps were looked at, the chosen ones or others: `48 training steps, 2 to 49`."""
    steps = run.numbers if steps is None else steps
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
