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
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    if isinstance(found, History):
        values["values"] = np.where(found.measured, values["values"], None)
    plain = {
        name: to_json(value.tolist()) if hasattr(value, "tolist") else value for name, value in values.items()
    }
    return json.dumps(plain | {"marks": list(marks)}) + "\n"
