"""Tells single differences, and writes all of them as a table."""

from typing import Any

import numpy as np
import pyarrow as pa

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ..alignment.contract import ModuleName
from ..step.calls import column_of
from .answer import AMPLIFIED, GROWN, MADE, SEEN, SOURCE, Divergence
from .errors import METRICS, SAMPLES, SKETCH_FACTOR, SKETCHES, STATISTICS
from .measured import ComparedRows
from .names import Names, label
from .pairs import Compared
from .ranking import STANDS_OUT


class Details:
    """Tells pairs one by one."""

    def __init__(self, found: Compared) -> None:
        self._found = found
        self._names, self._others = Names(found.side), Names(found.other)

    @property
    def _pair(self) -> tuple[ComparedRows, ComparedRows]:
        """What is told as `a` and `b`: of a recompute first its forward."""
        found = self._found
        return (found.b, found.a) if found.recompute_of else (found.a, found.b)

    def tell(self, at: int) -> Divergence:
        """Returns all that is known of one pair."""
        found = self._found
        row, row_b = int(found.a.rows[at]), int(found.b.rows[at])
        site = self._names.site(row)
        values, error = found.side.values, float(found.errors.error[at])
        given, phase = float(found.inherited.error[at]), int(values.phase[row])
        low, high = self._bounds(at)
        tensors = found.errors.details.get(at)
        one, two = self._pair
        culprit = self._find_culprit(at, row)
        own = self._names.place_of_value(row), site["op"], site["op_nth"], site["nth"]
        place, op, op_nth, call = culprit
        return Divergence(
            root=place.root if place else None,
            path=place.path if place else None,
            call=call,
            op=op,
            op_nth=op_nth,
            phase=self._phase(at, phase),
            step=int(values.step[row]),
            role=site["role"],
            slot=site["slot"],
            kind=self._kind(at),
            error=error,
            low=low,
            high=high,
            metric=METRICS[int(found.errors.metric[at])],
            noise=max(float(found.noise.local[at]), float(found.errors.floor[at])),
            input_error=given,
            amplification=error / given if given else np.inf,
            recompute_of=found.recompute_of,
            through=self._through(at),
            seen_at=None if culprit == own else self._names.label_value(row),
            other=self._other(row, row_b),
            source_line=self._source_line(row),
            a=_describe(one, at),
            b=_describe(two, at),
            largest=tensors.largest if tensors else None,
            where=tensors.where if tensors else None,
            pair=tensors.pair if tensors else None,
            cosine=tensors.cosine if tensors else None,
            close_share=tensors.close_share if tensors else None,
            ulps=tensors.ulps if tensors else None,
        )

    def _find_culprit(
        self, at: int, row: int
    ) -> tuple[ModuleName | None, str | None, int | None, int | None]:
        """Returns where a difference was made: the module, the op, which of its name it is, and the call.

        Where only one recording has an op between what was compared, that op has made it.
        """
        site, inherited = self._names.site(row), self._found.inherited
        mine = self._names.place_of_value(row)
        own = mine, site["op"], site["op_nth"], site["nth"]
        if self._found.ranking.is_beyond_inputs[at] or inherited.is_source[at]:
            return own
        maker, through = int(inherited.maker[at]), int(inherited.through[at])
        is_alone = maker >= 0 and self._found.alone[maker]
        culprit = maker if is_alone and site["op"] is None else through
        if culprit >= 0 and (site["op"] is None or self._names.place_of_op(culprit) != mine):
            return self._names.place_of_op(culprit), *self._names.identify_op(culprit)
        through_b = int(inherited.through_b[at])
        place = self._translate(self._others.place_of_op(through_b)) if through_b >= 0 else None
        return own if place is None or place == mine else (place, None, None, site["nth"])

    def _translate(self, place: ModuleName | None) -> ModuleName | None:
        """Returns the module of the first recording that a module of the second one is."""
        return None if place is None else self._found.modules.get(place)

    def _phase(self, at: int, phase: int) -> str | None:
        """Returns the phase of a pair; a parameter that the optimizer finds has been used in forward."""
        if self._found.inherited.is_source[at] and phase == PHASES.index(OPTIMIZER):
            return FORWARD
        return PHASES[phase] if phase >= 0 else None

    def to_table(self) -> pa.Table:
        """Returns all pairs, with names and numbers."""
        found, rows = self._found, self._found.a.rows
        values, sites = found.side.values, found.side.data.table("sites")
        site = pa.array(values.site[rows])
        place = values.place[rows]
        paths = pa.array([each.path for each in found.side.names], pa.string())
        columns: dict[str, Any] = {
            "step": values.step[rows],
            "phase": _take([*PHASES], values.phase[rows]),
            "path": paths.take(pa.array(place, mask=place < 0)).dictionary_encode(),
            **{name: sites[of].take(site) for name, of in _OF_SITE.items()},
            "error": found.errors.error,
            "noise": np.maximum(found.noise.local, found.errors.floor),
            "input_error": found.inherited.error,
            "inputs_known": found.inherited.is_known,
            "score": found.ranking.score,
            "beyond": found.ranking.is_beyond,
            "metric": _take([*METRICS], found.errors.metric),
            "recompute_of": pa.array([found.recompute_of], pa.string()).take(
                pa.array(np.zeros(len(rows), np.int8))
            ),
            "row_a": self._pair[0].rows,
            "row_b": self._pair[1].rows,
        }
        return pa.table(columns)

    def _bounds(self, at: int) -> tuple[float, float]:
        error, metric = float(self._found.errors.error[at]), METRICS[int(self._found.errors.metric[at])]
        if metric == SKETCHES:
            return error / SKETCH_FACTOR, error * SKETCH_FACTOR
        if metric in (SAMPLES, STATISTICS):
            return 0.0, np.inf
        return error, error

    def _kind(self, at: int) -> str:
        inherited, ranking = self._found.inherited, self._found.ranking
        if inherited.is_source[at] and not ranking.is_beyond_inputs[at]:
            return SOURCE
        if ranking.score[at] < STANDS_OUT and ranking.is_beyond_inputs[at]:
            return GROWN
        if ranking.is_beyond_inputs[at]:
            return AMPLIFIED
        return MADE if inherited.is_known[at] else SEEN

    def _through(self, at: int) -> str | None:
        op, op_b = int(self._found.inherited.through[at]), int(self._found.inherited.through_b[at])
        if op >= 0:
            return f"{self._names.label_op(op)}, which the second run lacks"
        return (
            f"{self._others.label_op(op_b)} of the second run, which the first lacks" if op_b >= 0 else None
        )

    def _other(self, row: int, row_b: int) -> str | None:
        mine, theirs = self._names.place_of_value(row), self._others.place_of_value(row_b)
        return None if label(mine) == label(theirs) else label(theirs)

    def _source_line(self, row: int) -> str | None:
        op = int(self._found.side.values.op[row])
        if op < 0:
            return None
        ops = self._found.side.data.table("ops")
        forward = int(column_of(ops.slice(op, 1), "forward_op_id")[0])
        if forward >= 0:
            rows = np.flatnonzero(column_of(ops, "op_id") == forward)
            op = int(rows[0]) if len(rows) else op
        line: str | None = ops["source"][op].as_py()
        return line


_OF_SITE = {"call": "nth", "role": "role", "slot": "slot", "op": "op", "op_nth": "op_nth"}


def _take(names: list[str], codes: "np.ndarray[Any, Any]") -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int8), mask=codes < 0), pa.array(names, pa.string())
    )


def _describe(measured: ComparedRows, at: int) -> str:
    text = f"{measured.dtypes[measured.dtype[at]]}[{', '.join(map(str, measured.shape(at)))}]"
    low, high = float(measured.stats.min[at]), float(measured.stats.max[at])
    if measured.is_measured[at] and measured.stats.count[at]:
        text += f", {low:.4g} .. {high:.4g}, rms {float(measured.stats.rms[at]):.6g}"
        bad = int(measured.stats.nan_count[at]) + int(measured.stats.inf_count[at])
        text += f", {bad} NaN or infinite" if bad else ""
    return text
