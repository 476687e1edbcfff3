"""A new trigger is known wherever triggers are listed."""

from pathlib import Path

import pytest

import modtrace
from modtrace.recording.triggers.trigger_kinds import TRIGGERS

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "flight_recorder.md"


@pytest.mark.parametrize("kind", TRIGGERS, ids=lambda kind: kind.__name__)
def test_each_trigger_is_public_and_explained(kind: type) -> None:
    assert getattr(modtrace, kind.__name__) is kind
    assert f"{kind.__name__}(" in PAGE.read_text()
