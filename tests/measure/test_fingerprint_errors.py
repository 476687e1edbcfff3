"""How near the distance of two sketches is to that of their tensors: what docs/fingerprints.md promises, measured.

A fixed projection errs by the same factor each time it sees the same difference, so what counts is which differences it
sees. Here are those that training and porting make: `b - a` of each kind below, for tensors of many shapes.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from modtrace.measure.dtypes import Format
from modtrace.measure.fingerprints.fingerprints import fingerprint_array
from modtrace.recording.statistics.fingerprints import SKETCH_FLOOR, sketch_distance

Array = np.ndarray
FLOAT32 = Format(np.float32)
HEADS = 4

#: Rows and columns: powers of two and none, longer and shorter than a chunk, widths that are multiples of 64 and not.
SHAPES = [
    (64, 64),
    (100, 100),
    (7, 1000),
    (128, 256),
    (1024, 64),
    (384, 384),
    (50, 768),
    (1000, 37),
    (3, 50_257),
    (1024, 256),
    (512, 1024),
    (197, 768),
    (2048, 128),
    (4096, 96),
    (300, 3904),  # 61 * 64 columns
    (1000, 1000),
]
SEEDS = range(3)


def at(places: object, values: object) -> Callable[[Array], Array]:
    """`a` with values added at some places, broadcast."""

    def change(a: Array) -> Array:
        b = a.copy()
        b[places] += np.asarray(values, np.float32)
        return b

    return change


def heads_of(a: Array) -> list[Array]:
    return np.array_split(a, HEADS, axis=1)


def one_head(a: Array, rng: np.random.Generator) -> Array:
    first, second, *others = heads_of(a)
    return np.concatenate([first, second + rng.normal(size=second.shape), *others], axis=1)


def signs_of_a_board(a: Array) -> Array:
    rows, columns = np.indices(a.shape)
    return (rows + columns) % 2 * 2.0 - 1


def waves(a: Array) -> Array:
    rows, columns = np.indices(a.shape)
    return np.sin(rows / 10_000 ** (columns / a.shape[1]))


def sparse(a: Array, rng: np.random.Generator) -> Array:
    return np.where(rng.random(a.shape) < 0.01, rng.normal(size=a.shape), 0)


def to_bfloat16(a: Array) -> Array:
    return (a.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)


#: What `b` is, of `a`: 24 structured differences.
DIFFERENCES: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "random": lambda a, rng: a + 0.1 * rng.normal(size=a.shape),
    "heavy tail": lambda a, rng: a + 0.1 * rng.standard_t(2, a.shape),
    "1 % sparse": lambda a, rng: a + sparse(a, rng),
    "constant": lambda a, rng: a + 0.3,
    "one element": lambda a, rng: at((rng.integers(a.shape[0]), rng.integers(a.shape[1])), 5.0)(a),
    "one row": lambda a, rng: at(rng.integers(a.shape[0]), rng.normal(size=a.shape[1]))(a),
    "one column": lambda a, rng: at((slice(None), rng.integers(a.shape[1])), rng.normal(size=len(a)))(a),
    "a constant row": lambda a, rng: at(rng.integers(a.shape[0]), 1.0)(a),
    "row bias": lambda a, rng: a + rng.normal(size=(a.shape[0], 1)),
    "column bias": lambda a, rng: a + rng.normal(size=(1, a.shape[1])),
    "rank one": lambda a, rng: a + np.outer(rng.normal(size=a.shape[0]), rng.normal(size=a.shape[1])),
    "scaled copy": lambda a, rng: a * 1.1,
    "transposed": lambda a, rng: a.T.reshape(a.shape),
    "rows rolled": lambda a, rng: np.roll(a, 1, axis=0),
    "columns rolled": lambda a, rng: np.roll(a, 1, axis=1),
    "heads permuted": lambda a, rng: np.concatenate(heads_of(a)[::-1], axis=1),
    "one head": one_head,
    "checkerboard": lambda a, rng: a + signs_of_a_board(a),
    "even columns": lambda a, rng: at((slice(None), slice(0, None, 2)), 0.5)(a),
    "first half": lambda a, rng: at(slice(0, a.shape[0] // 2), 0.5)(a),
    "ramp": lambda a, rng: a + np.linspace(0, 1, a.size).reshape(a.shape),
    "lower triangle": lambda a, rng: a + np.tril(np.ones(a.shape)),
    "sinusoid": lambda a, rng: a + waves(a),
    "rounded to bfloat16": lambda a, rng: to_bfloat16(a),
}


class Case(NamedTuple):
    name: str
    plain: float  # estimated distance / true distance
    corrected: float  # with the means


def measure(name: str, a: Array, b: Array) -> Case:
    """Sketches as a recording holds them, in float32."""
    b = np.ascontiguousarray(b, np.float32)
    true = float(np.linalg.norm(b.astype(np.float64) - a))
    x, y = (fingerprint_array(array, FLOAT32, is_hashed=False).sketch.astype(np.float32) for array in (a, b))
    means = {"mean_a": float(a.mean(dtype=np.float64)), "mean_b": float(b.mean(dtype=np.float64))}
    plain, corrected = sketch_distance(x, y, count=a.size), sketch_distance(x, y, count=a.size, **means)
    return Case(name, plain / true, corrected / true)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = []
    for seed in SEEDS:
        for shape in SHAPES:
            rng = np.random.default_rng([seed, *shape])
            a = rng.normal(size=shape).astype(np.float32)
            found += [measure(name, a, change(a, rng)) for name, change in DIFFERENCES.items()]
    return found


class Spread(NamedTuple):
    median: float
    low: float  # 5 %
    high: float  # 95 %
    least: float
    most: float


def spread_of(ratios: list[float]) -> Spread:
    return Spread(*np.percentile(ratios, [50, 5, 95, 0, 100]).tolist())


def table_of(cases: list[Case]) -> str:
    """What is shown when a promise is broken: every kind of difference, and all of them."""
    lines = [f"{'estimated / true':<22}  {'median  5 %  95 %  worst':<32}  with the means"]
    for name in [*dict.fromkeys(case.name for case in cases), "all"]:
        some = [case for case in cases if name in (case.name, "all")]
        spreads = (spread_of([case.plain for case in some]), spread_of([case.corrected for case in some]))
        lines.append(f"{name:<22}  " + "  ".join(" ".join(f"{each:6.3f}" for each in one) for one in spreads))
    return "\n".join(lines)


def test_there_are_24_differences_and_16_shapes():
    assert (len(DIFFERENCES), len(set(SHAPES))) == (24, 16)


def test_distances_are_as_near_as_promised(cases):
    found = spread_of([case.plain for case in cases])
    assert 0.97 <= found.median <= 1.01, table_of(cases)
    assert found.low >= 0.83 and found.high <= 1.14, table_of(cases)
    assert found.least >= 0.61 and found.most <= 1.28, table_of(cases)


def test_distances_with_means_are_as_near_as_promised(cases):
    found = spread_of([case.corrected for case in cases])
    assert 0.99 <= found.median <= 1.01, table_of(cases)
    assert found.low >= 0.86 and found.high <= 1.14, table_of(cases)
    assert found.least >= 0.71 and found.most <= 1.27, table_of(cases)


def test_the_distance_of_one_element_is_exact(cases):
    ratios = [case.plain for case in cases if case.name == "one element"]
    assert ratios == pytest.approx([1] * len(ratios), abs=1e-3), table_of(cases)


def test_the_distance_of_a_constant_is_exact_with_means(cases):
    ratios = [case.corrected for case in cases if case.name == "constant"]
    assert ratios == pytest.approx([1] * len(ratios), abs=1e-3), table_of(cases)
    plain = [case.plain for case in cases if case.name == "constant"]
    assert min(plain) >= 0.83 and max(plain) <= 1.09, table_of(cases)


#: Steps along the flat tensor, as columns of wide matrices have them.
STEPS = [64, 65, 96, 128, 192, 256, 320, 512, 768, 1000, 1024, 2048, 3904, 4096, 8192, 2**14, 2**15, 2**16]


def columns() -> Iterator[Case]:
    size = 2**20
    zeros = np.zeros((1, size), np.float32)
    for step in STEPS:
        for seed in range(16):
            rng = np.random.default_rng([step, seed])
            b = zeros.copy()
            places = slice(int(rng.integers(step)), None, step)
            b[0, places] = 1 if seed % 2 else rng.normal(size=b[0, places].shape)
            yield measure(f"every {step}", zeros, b)


def test_distances_of_columns_are_as_near_as_promised():
    cases = list(columns())
    found = spread_of([case.plain for case in cases])
    assert found.low >= 0.82 and found.high <= 1.17, table_of(cases)
    assert found.least >= 0.65 and found.most <= 1.43, table_of(cases)


@pytest.mark.parametrize(("relative", "low", "high"), [(1e-6, 0.8, 1.25), (3e-7, 0.9, 1.5), (1e-7, 1.4, 2.4)])
def test_small_distances_are_overestimated_below_the_floor(relative, low, high):
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(1, 300_000)).astype(np.float32)
        noise = rng.normal(size=a.shape)
        b = a + relative * noise * np.linalg.norm(a) / np.linalg.norm(noise)
        ratios.append(measure("", a, b).plain)
    text = f"at {relative}: {min(ratios):.2f} to {max(ratios):.2f}"
    assert low <= min(ratios) and max(ratios) <= high, text


def test_equal_numbers_in_another_order_of_adding_are_below_the_floor():
    a = np.random.default_rng(0).normal(size=700_001).astype(np.float32)
    whole = fingerprint_array(a, FLOAT32, is_hashed=False).sketch
    parts = sum(
        fingerprint_array(a[start : start + 999], FLOAT32, start, is_hashed=False).sketch
        for start in range(0, len(a), 999)
    )
    distance = sketch_distance(whole.astype(np.float32), parts.astype(np.float32), count=len(a))
    assert distance < SKETCH_FLOOR * math.sqrt(float(np.square(a, dtype=np.float64).sum()))
