"""Fixtures of the cases of trackers."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Nothing compiled before is known, nor stays known."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()
