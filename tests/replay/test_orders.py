"""Orders drawn at random keep parents before their children."""

from hypothesis import given
from hypothesis import strategies as st

from modtrace.replay.checks import random_order

GRAPHS = st.integers(0, 30).flatmap(
    lambda size: st.tuples(*(st.sets(st.integers(0, at - 1)) if at else st.just(set()) for at in range(size)))
)


@given(GRAPHS, st.integers(0, 100))
def test_everything_comes_once_behind_its_parents(parents, seed):
    order = random_order(dict(enumerate(parents)), seed)
    assert sorted(order) == list(range(len(parents)))
    place = {each: at for at, each in enumerate(order)}
    assert all(place[parent] < place[each] for each, above in enumerate(parents) for parent in above)


def test_two_seeds_give_two_orders():
    free = {at: set() for at in range(20)}
    assert random_order(free, 0) != random_order(free, 1)
    assert random_order(free, 0) == random_order(free, 0)


def test_what_depends_on_itself_is_left_out():
    assert random_order({0: set(), 1: {2}, 2: {1}}, 0) == [0]


def test_parent_that_is_not_there_is_left_out_of_account():
    assert random_order({1: {0}}, 0) == [1]
