"""What is known of the tensors of steps whose rows are dropped."""

from modtrace.analysis.provenance import earlier_steps
from modtrace.analysis.provenance.earlier_steps import EarlierSteps


def test_tensor_is_finite_only_where_all_is_measured_and_nothing_was_held() -> None:
    known = EarlierSteps(is_complete=True)
    known.add({3: "log in Net made it in step 0", 4: None})
    known.add_unsearched(10, 19)
    known.add_unsearched(20, 29)
    known.add_unsearched(40, 49)
    assert [known.is_finite(tensor) for tensor in (2, 3, 4, 9, 10, 29, 30, 45)] == [
        True, False, False, True, False, False, True, False,
    ]  # fmt: skip
    assert (known.describe(3), known.describe(4)) == ("log in Net made it in step 0", None)
    assert not EarlierSteps().is_finite(2)


def test_many_steps_that_nobody_searched_are_joined() -> None:
    known = EarlierSteps(is_complete=True)
    for step in range(1000):
        known.add_unsearched(100 * step, 100 * step + 49)
    known.add_unsearched(1_000_000, 1_000_049)
    assert not any(known.is_finite(100 * step + 20) for step in range(1000))
    assert known.is_finite(500_000)


def test_tensor_that_was_forgotten_is_not_taken_for_finite(monkeypatch) -> None:
    monkeypatch.setattr(earlier_steps, "_MOST_TENSORS", 2)
    known = EarlierSteps(is_complete=True)
    known.add({3: None, 5: None, 7: None})
    assert [known.is_finite(tensor) for tensor in (2, 3, 4, 5, 6)] == [False, False, True, False, True]
