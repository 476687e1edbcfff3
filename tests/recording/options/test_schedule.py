"""Which steps are meant by what a user gives."""

import pytest

from modtrace.recording.options.schedule import StepPredicate, StepRange, to_schedule


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, [0, 1, 2, 3, 4, 5]),
        ("2:5", [2, 3, 4]),
        ("::2", [0, 2, 4]),
        (range(1, 6, 3), [1, 4]),
        (slice(4, None), [4, 5]),
        (StepRange(2, 5), [2, 3, 4]),
        ([5, 0], [0, 5]),
        ({3}, [3]),
        (lambda step: step % 3 == 1, [1, 4]),
    ],
)
def test_steps_are_those_that_were_meant(given: object, expected: list[int]) -> None:
    schedule = to_schedule(given)
    assert [number for number in range(6) if number in schedule] == expected


def test_a_schedule_says_what_it_is() -> None:
    assert str(to_schedule("2:9:3")) == "2:9:3"
    assert str(to_schedule([7, 2])) == "2,7"
    assert str(to_schedule(str.isdigit)) == "function str.isdigit"


def test_a_function_is_asked_once_for_each_step() -> None:
    asked: list[int] = []
    schedule = to_schedule(lambda step: bool(asked.append(step)))
    for number in (3, 3, 4, 3):
        assert number not in schedule
    assert asked == [3, 4]


def test_the_last_four_thousand_answers_of_a_function_are_remembered_and_no_more() -> None:
    asked: list[int] = []
    schedule = to_schedule(lambda step: bool(asked.append(step)))
    for number in (*range(4097), 4096, 1, 0):
        assert number not in schedule
    assert asked == [*range(4097), 0]


def test_where_a_function_raises_the_step_is_not_meant_and_the_first_error_is_kept() -> None:
    schedule = to_schedule(lambda step: 1 // (step % 2))
    assert isinstance(schedule, StepPredicate)
    assert schedule.error is None
    assert [number for number in range(3) if number in schedule] == [1]
    assert isinstance(schedule.error, ZeroDivisionError)
    assert schedule.raised_at == 0


@pytest.mark.parametrize(
    "given, error, text",
    [
        ([], ValueError, "steps=[] holds no step. Give at least one, or None for all."),
        ([1, -2], ValueError, "steps: -2 is no number of a step; they count from 0"),
        ([True], ValueError, "steps: True is no number of a step; they count from 0"),
        ("5", ValueError, "steps='5' is not START:STOP[:EVERY], such as 100:200 or 0::50"),
        (3.5, TypeError, "steps=3.5: give 'START:STOP[:EVERY]', a range, a slice, a list of numbers,"),
    ],
)
def test_what_is_no_schedule_is_refused(given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        to_schedule(given)
    assert str(raised.value).startswith(text)
