"""What rounding explains of a difference."""

import numpy as np

from helpers.pairs import record
from helpers.training_scripts import run_first
from modtrace.analysis.divergence.noise import MOST_NOISE, assume_noise
from modtrace.analysis.tables.measured import read_measured


def test_rounding_to_another_dtype_is_at_most_so_much_as_noise_alone_leaves() -> None:
    recording = record(run_first())
    rows = np.arange(40)
    measured = read_measured(recording._data, rows)
    noise = assume_noise(measured, measured, np.full(40, 1e6), np.where(rows < 20, 1.0, MOST_NOISE))
    rounded = noise.add_rounding(np.full(40, 2.0**-7), np.ones(40))
    assert (rounded.local[:20] == 1.0).all() and (rounded.local[20:] == MOST_NOISE).all()
