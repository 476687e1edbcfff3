"""Renders the numbers of a plot as JSON."""

import json
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from ...analysis.values.exponents import Exponents
from ...analysis.values.history import History
from ..common.numbers import to_json


def render_plotted_json(found: History | Exponents, *, marks: Sequence[str] = ()) -> str:
    """Returns the fields of what was found, with arrays as nested lists; numbers are as in `modtrace show --json`.

    What was not measured is null; `marks` say what is missing from the recording.
    """
    told = {field.name: getattr(found, field.name) for field in fields(found)}
    if isinstance(found, History):
        told["values"] = np.where(found.measured, told["values"], None)
    told = {name: to_json(each.tolist()) if hasattr(each, "tolist") else each for name, each in told.items()}
    return json.dumps(told | {"marks": list(marks)}) + "\n"
