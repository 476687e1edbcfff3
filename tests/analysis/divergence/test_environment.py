"""What is said of two runs before their values."""

from modtrace.analysis.divergence.environment import compare_environments
from modtrace.recording.meta import RunMeta

FLAGS = {"seed": 0, "float32_matmul_precision": "highest", "cudnn.benchmark": False, "autocast cpu": "off"}


def test_each_flag_that_is_set_otherwise_has_a_line() -> None:
    a = RunMeta(flags=FLAGS)
    b = RunMeta(flags=FLAGS | {"float32_matmul_precision": "high", "cudnn.benchmark": True})
    assert compare_environments(a, b, differ=True) == (
        "float32_matmul_precision: highest / high",
        "cudnn.benchmark: off / on",
    )


def test_at_most_five_lines_are_shown() -> None:
    a, b = ({f"flag {number}": value for number in range(6)} for value in (0, 1))
    first_five = dict.fromkeys([*b][:5], 1)
    five = tuple(f"flag {number}: 0 / 1" for number in range(5))
    assert compare_environments(RunMeta(flags=a), RunMeta(flags=a | first_five), differ=True) == five
    six = compare_environments(RunMeta(flags=a), RunMeta(flags=b), differ=True)
    assert six == (*five[:4], "and 2 more: flag 4, flag 5")


def test_unequal_seeds_are_told_where_the_runs_differ() -> None:
    a, b = RunMeta(flags=FLAGS), RunMeta(flags=FLAGS | {"seed": 1})
    assert compare_environments(a, b, differ=True) == (
        "seed: 0 / 1; torch.manual_seed() gives both the same",
    )
    assert compare_environments(a, b, differ=False) == ()


def test_flag_that_one_recording_does_not_know_is_left_out() -> None:
    unknown = RunMeta(flags=FLAGS | {"float32_matmul_precision": None, "a new one": 1})
    assert compare_environments(RunMeta(flags=FLAGS), unknown, differ=True) == ()
    assert compare_environments(RunMeta(), unknown, differ=True) == ()


def test_options_are_told_as_text() -> None:
    a, b = RunMeta(options={"ops": None}), RunMeta(options={"ops": {"saved": True, "source": False}})
    assert compare_environments(a, b, differ=True) == ("recorded with ops: none / saved on, source off",)
