"""What comes again and again, each time a little different, fills no more memory from some time on."""

import numpy as np

from modtrace.collect.ops.arguments import ArgumentTexts
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.tensor_shards import TensorShards

MB = 2**20


def test_whole_tensors_without_end_leave_the_names_of_one_file_in_memory(tmp_path):
    shards = TensorShards(tmp_path, TensorOptions(max_bytes=MB))
    array, most = np.zeros(1, np.float32), 0
    for step in range(20_000):
        shards.put("blocks.0.attn.proj.output", array, "float32", (1,), step)
        most = max(most, len(shards._file._stored) if shards._file is not None else 0)
    shards.close()
    assert shards.failure is None
    assert 5_000 < most < 9_000


def test_numbers_that_are_others_in_each_step_are_forgotten():
    """As `_foreach_addcdiv_` is given them by AdamW: one for each parameter."""
    texts, most = ArgumentTexts(), 0
    for step in range(600):
        texts.add(None, (None, 1, tuple(1e-3 / (step + number) for number in range(1, 1_001))))
        most = max(most, len(texts.take()))
    assert most == 262  # with 1,003 parts each


def test_sets_of_arguments_are_forgotten_when_they_are_many():
    texts = ArgumentTexts()
    for step in range(20_000):
        texts.add(None, (None, 1, float(step)))
        assert len(texts.take()) <= 4_097
