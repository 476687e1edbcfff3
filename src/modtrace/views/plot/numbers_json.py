"""Renders the numbers of a plot as JSON."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ...analysis.values.exponents import Exponents
from ...analysis.values.history import History
from ..common.numbers import to_json


def render_plotted_json(found: History | Exponents, *, marks: Sequence[str] = ()) -> str:
    """Returns the fields of what was found, with arrays as nested lists; numbers are as in `modtrace show --json`.

    What was not measured is null; `marks` say what is missing from the recording.
    """
    told = {each.name: _to_json(found, each.name) for each in fields(found)}
    return json.dumps(told | {"marks": list(marks)}) + "\n"


def _to_json(found: History | Exponents, name: str) -> Any:
    value = getattr(found, name)
    if isinstance(value, (str, tuple)):
        return value
    if name == "values" and isinstance(found, History):
        value = np.where(found.measured, value, None)
    return to_json(value.tolist())
