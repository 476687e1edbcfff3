"""Paths that differ in numbers are one name where none between is missing."""

import pytest

from modtrace.analysis.findings.names import name_paths


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["head"], "head"),
        (["a", "b"], "a and b"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        (["blocks.0.fc", "blocks.1.fc", "blocks.2.fc"], "blocks.0..2.fc"),
        (["Sequential/0", "Sequential/1"], "Sequential/0..1"),
        (["blocks.0.fc", "blocks.2.fc"], "blocks.0.fc and blocks.2.fc"),
        (
            [f"layers.{layer}.experts.{expert}" for layer in (0, 1) for expert in (4, 5)],
            "layers.0..1.experts.4..5",
        ),
        (["layers.0.experts.4", "layers.1.experts.5"], "layers.0.experts.4 and layers.1.experts.5"),
        (["h.0.a", "h.1.a", "head"], "h.0..1.a and head"),
    ],
)
def test_paths_that_count_up_are_one_name(paths: list[str], name: str) -> None:
    assert name_paths(paths) == name
