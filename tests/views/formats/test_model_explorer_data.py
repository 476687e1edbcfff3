"""Node data for Model Explorer: which number of which node, and how it is coloured."""

import pytest

from helpers.explorer_json import NET, NODES, load_node_data
from modtrace.views.formats.model_explorer_data import NODE_DATA


@pytest.mark.parametrize(
    ("name", "title", "expected"),
    [
        (
            "time_us",
            "time (us)",
            {NODES[1].key: 1500.0, NODES[2].key: 0.0, NODES[3].key: 0.0},
        ),
        ("flops", "flops", {NODES[1].key: 1200, NODES[2].key: 0}),
        ("bytes", "bytes read and written", {NODES[1].key: 120, NODES[2].key: 0, NODES[3].key: 0}),
        ("saved_bytes", "bytes saved for backward", {NODES[1].key: 64, NODES[2].key: 0}),
        ("rms", "root mean square", {NODES[2].key: 0.5}),
        ("nonfinite", "NaN and infinite elements", {NODES[1].key: 3}),
    ],
)
def test_node_data_has_what_is_known_of_each_node(name: str, title: str, expected: dict[str, float]) -> None:
    data = load_node_data(NET, name)
    assert data.name == title
    assert {key: each.value for key, each in data.results.items()} == expected


def test_node_data_is_coloured_from_white_to_a_colour_of_its_own() -> None:
    data = load_node_data(NET, "flops")
    assert [(each.stop, each.bgColor) for each in data.gradient] == [(0, "#ffffff"), (1, "#1a73e8")]
    assert len({each.color for each in NODE_DATA.values()}) == len(NODE_DATA)


def test_one_element_that_is_not_finite_is_red() -> None:
    data = load_node_data(NET, "nonfinite")
    assert data.gradient == []
    assert [(each.value, each.bgColor) for each in data.thresholds] == [(0, "#ffffff"), (2**63, "#d93025")]


def test_numbers_that_do_not_add_up_are_not_summed() -> None:
    hidden = {name: load_node_data(NET, name).hideAggregatedStats for name in NODE_DATA}
    assert {name: each for name, each in hidden.items() if each} == {"rms": ["sum"]}
