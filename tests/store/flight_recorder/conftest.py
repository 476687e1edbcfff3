"""Lets tests of held steps run twice: with rows that stay apart, and with joined ones."""

from collections.abc import Iterator

import pytest


@pytest.fixture(params=[64, 2], ids=["apart", "joined"], scope="module")
def joined_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Joins as many steps as usual, so that those of most tests stay apart, or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modtrace.store.flight_recorder.held_steps._JOINED_STEPS", request.param)
        yield
