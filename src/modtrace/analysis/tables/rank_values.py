"""Matches the rows of `values` that several ranks have of one tensor, and finds which shard of it each row is of."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from .columns import ArrowTable, Bools, Rows, count_before, dictionary_codes, mix_columns
from .placement import NOWHERE, Placer
from .stages import NamedStage
from .tensors import read_sizes
from .values import PlacedValues

#: The beginning of the note on the shard of a DTensor whose place is not known. Where it is the whole note, the
#: recording is an old one, and has the numbers of the shard beside the shape of the DTensor.
OLD_NOTE = "DTensor: the part on this rank"

#: The beginning of the text that torch prints for the placement of a partial sum.
PARTIAL = "P"

#: The kind of training steps, and the numbers of all kinds.
TRAIN = "train"
_KINDS = {TRAIN: 0, "eval": 1}

#: The position of each phase in a step. A recompute runs inside of the backward; None is before the forward.
PHASE_ORDER = {None: -1, FORWARD: 0, RECOMPUTE: 1, BACKWARD: 1, OPTIMIZER: 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class RankValues:
    """The rows of `values` of one rank, in the order of keys that are equal on all ranks."""

    rank: int
    placed: PlacedValues
    key: Rows  # of each row; rows of one step, phase, module, call, role and slot have the same on all ranks


class StepOrder:
    """Finds which steps of several ranks are one: the n-th of its kind, as a rank may evaluate alone."""

    def __init__(self, data: RecordingData) -> None:
        steps = data.table("steps").select(["step", "kind"]).to_pylist()
        self._numbers: dict[int, tuple[int, int]] = {}
        counts = Counter[str]()
        for row in sorted(steps, key=itemgetter("step")):
            kind = row["kind"]
            is_training = kind == TRAIN
            self._numbers[row["step"]] = counts[kind], 2 * counts[TRAIN] + is_training
            counts[kind] += 1
        self._kinds = {row["step"]: _KINDS.get(row["kind"], len(_KINDS)) for row in steps}
        #: The training steps that have ended.
        self.training = [row["step"] for row in steps if row["kind"] == TRAIN]

    def identify(self, step: int) -> int:
        """Returns a number that the step has on all ranks; a step that has not ended is paired by its own number."""
        if step not in self._kinds:
            return step * 4 + 3
        return self._numbers[step][0] * 4 + self._kinds[step]

    def place(self, step: int) -> int:
        """Returns where the step stands among the training steps, as on all ranks."""
        return self._numbers[step][1] if step in self._numbers else 2 * len(self.training) + 1


def read_rank_values(
    ranks: Sequence[tuple[int, RecordingData]], *, of_calls: bool = True
) -> list[RankValues]:
    """Returns the rows of `values` of each rank.

    Rows of different ranks have equal keys if they are of the same tensor of the model: its replicas or its shards.
    Without `of_calls` the tensors of all calls of a module in one step have one key.
    """
    known: dict[Any, int] = {}
    placed = [PlacedValues(data=data, table=data.table("values")) for _, data in ranks]
    names = [_name_sites(one, of_calls=of_calls) for one in placed]
    of_sites = [np.array([*(known.setdefault(name, len(known)) for name in of), -1]) for of in names]
    room = len(known) + 1
    keys = [
        (_identify_steps(values) * (len(PHASES) + 1) + values.phase + 1) * room + of_site[values.site] + 1
        for values, of_site in zip(placed, of_sites, strict=True)
    ]
    _, number = np.unique(np.concatenate(keys), return_inverse=True)
    of_rank = np.split(number.reshape(-1), np.cumsum([len(key) for key in keys])[:-1])
    return [
        # A module may return one tensor twice.
        RankValues(
            rank=rank,
            placed=values,
            key=key * _MOST_REPEATS + np.minimum(count_before(key), _MOST_REPEATS - 1) if of_calls else key,
        )
        for (rank, _), values, key in zip(ranks, placed, of_rank, strict=True)
    ]


_MOST_REPEATS = 2**20


def _identify_steps(values: PlacedValues) -> Rows:
    steps, which = np.unique(values.step, return_inverse=True)
    order = StepOrder(values.data)
    return np.array([order.identify(step) for step in steps.tolist()], np.int64)[which.reshape(-1)]


def _name_sites(values: PlacedValues, *, of_calls: bool) -> Iterator[tuple[Any, ...]]:
    """Yields what names each site on all ranks, and in other runs: an only root may be wrapped there."""
    placer = Placer(values.data)
    sites = values.data.table("sites").to_pylist()
    places = [
        NOWHERE if row["module_id"] is None else placer.place(row["module_id"], NOWHERE) for row in sites
    ]
    names = placer.name_modules()
    has_roots = len({name.root for name in names}) > 1
    stage = values.data.stage if isinstance(values.data, NamedStage) else None  # its root has ops of its own
    for row, place in zip(sites, places, strict=True):
        name = None if place == NOWHERE else (names[place].root if has_roots else "", names[place].path)
        of_op = None if row["op"] is None else stage
        yield name, *(row[column] for column in _OF_SITE), row["nth"] if of_calls else None, of_op


_OF_SITE = ("role", "slot", "op", "op_nth")


def number_blocks(table: ArrowTable) -> Rows:
    """Returns a number for the place and the shape of each row in its DTensor; 0 for what is none."""
    numbers = np.zeros(table.num_rows, np.int64)
    offsets = table["global_offset"]
    if offsets.null_count == len(offsets):
        return numbers
    rows = np.flatnonzero(to_numpy(offsets.is_valid()))
    found = table.select(["global_offset", "shape"]).take(from_numpy(rows))
    sizes = np.concatenate([read_sizes(found["global_offset"]), read_sizes(found["shape"])], axis=1)
    numbers[rows] = mix_columns(sizes) | 1
    return numbers


def find_incomparable(table: ArrowTable) -> Bools:
    """Returns which rows are of no tensor of the model: partial sums, and shards whose place is unknown."""
    placement, placements = dictionary_codes(table["placements"])
    note, notes = dictionary_codes(table["note"])
    is_partial = np.array([*(PARTIAL in text for text in placements), False])
    is_old = np.array([*(text.startswith(OLD_NOTE) for text in notes), False])
    return np.asarray(is_partial[placement] | is_old[note])
