"""Two runs that should be equal are so within the noise, and with one planted fault this fault stands first."""

import pytest

import modtrace
from helpers.all_pairs import HEALTHY, PORTS, TABLE, USUAL, compare, first_of, second_of
from modtrace.analysis.alignment.align import align_tables, read_both
from modtrace.recording.role import PARAMETER

pytest.importorskip("transformers")


#: Ports whose models are written anew alike in all that healthy runs show, beside one of each kind.
SELDOM = ("BERT in another order", "Llama in another order", "ViT in another order", "Gemma")


#: The port of each way of writing a model anew that stands for the others in `make test`.
FIRST = ("GPT-2", "ResNet in another order", "training script")


def marks_of(name: str, is_seldom: bool) -> list[pytest.MarkDecorator]:
    port = name.partition(",")[0]
    is_long = port in PORTS and port not in FIRST
    return [*([pytest.mark.soak] if is_seldom else []), *([pytest.mark.long] if is_long else [])]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name, name in SELDOM)) for name in HEALTHY]
)
def test_nothing_is_above_the_noise_without_a_fault(name: str) -> None:
    found = compare(HEALTHY[name], is_planted=False)
    assert found.first is None, str(found)
    assert found.divergences == ()
    assert found.ok, str(found)
    pair = TABLE[HEALTHY[name]]
    if not pair.noise and not isinstance(pair.options.get("map"), list):  # those are of the first run alone
        swapped = modtrace.compare(
            second_of(HEALTHY[name], is_planted=False), first_of(HEALTHY[name]), **pair.options
        )
        assert swapped.ok, str(swapped)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name, name not in USUAL)) for name in TABLE]
)
def test_planted_fault_stands_first(name: str) -> None:
    found, truth = compare(name, is_planted=True), TABLE[name].truth
    assert not found.ok
    assert found.first is not None, str(found)
    assert found.first.path in (truth.path, *truth.also) and found.first.phase == truth.phase, str(found)
    assert truth.says in str(found)
    assert not truth.ops or found.first.op in truth.ops, str(found)
    assert found.first.error > found.first.noise


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name, name in SELDOM)) for name in HEALTHY]
)
def test_automatic_rules_pair_no_parameters_of_other_shapes(name: str) -> None:
    one, other, steps = read_both(first_of(HEALTHY[name]), second_of(HEALTHY[name], is_planted=False))
    found = align_tables(one, other, steps, rules=["auto"])
    rows, partners = found.values[one.values.is_of(PARAMETER, rows=found.values[:, 0])].T
    assert len(rows)
    for row, partner in zip(rows.tolist(), partners.tolist(), strict=True):
        shape, other_shape = (
            [size for size in sizes.tolist() if size > 1]
            for sizes in (one.values.sizes[row], other.values.sizes[partner])
        )
        types = {one.names[one.values.home[row]].type, other.names[other.values.home[partner]].type}
        assert shape == other_shape or (shape == other_shape[::-1] and types == {"Conv1D", "Linear"}), types
