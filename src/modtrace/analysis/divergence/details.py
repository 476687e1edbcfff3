"""Tells single differences, and writes all of them as a table."""

from typing import Any

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import LEAF, OPTIMIZER_STATE, PARAMETER, UPDATE
from ...recording.suggestions import first_few
from ..tables.columns import ArrowTable, build_table, decode
from ..tables.measured import ComparedRows, read_measured
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .answer import FIRST, INHERITED, SECOND, SOURCE, Divergence
from .culprits import Culprit, Culprits
from .errors import METRICS, SAMPLES, SKETCH_FACTOR, SKETCHES, STATISTICS, find_errors
from .inherited import name_parameters
from .names import Names, label
from .operands import Operands
from .pairs import Compared
from .relations import Relation, find_relation

#: So many ops that one run has alone are named.
_LISTED = 3


class Details:
    """Tells pairs one by one."""

    def __init__(self, found: Compared) -> None:
        self._found = found
        self._names, self._others = Names(found.side), Names(found.other)
        self.culprits = Culprits(found)
        self._operands = Operands(found, self._names, self._others)

    @property
    def _pair(self) -> tuple[ComparedRows, ComparedRows]:
        """What is told as `a` and `b`: of a recompute first its forward."""
        found = self._found
        return (found.b, found.a) if found.recompute_of else (found.a, found.b)

    def tell(self, at: int, verdict: str, *, with_relation: bool = True) -> Divergence:
        """Returns what is known of one pair, of which the verdict is known, maybe with its kind of difference."""
        found = self._found
        row, row_b = int(found.a.rows[at]), int(found.b.rows[at])
        site = self._names.site(row)
        values, error = found.side.values, float(found.errors.error[at])
        given = float(found.inherited.error[at])
        low, high = self._bounds(at)
        tensors = found.errors.details.get(at)
        one, two = self._pair
        culprit = self.culprits.find(at)
        code = int(
            self.culprits.side_of(culprit).ops.phase[culprit.op] if culprit.is_alone else values.phase[row]
        )
        phase = PHASES[code] if code >= 0 else None
        if found.inherited.is_source[at] and phase == OPTIMIZER and not culprit.is_alone:
            phase = FORWARD  # a parameter that the optimizer finds has been used in forward
        mine, theirs = self._names.place_of_value(row), self._others.place_of_value(row_b)
        relation = self._relate(at, row, row_b) if with_relation else None
        is_own = not culprit.is_alone and verdict != INHERITED
        own = mine, site["op"], site["op_nth"], site["nth"]
        place, op, op_nth, call = self._name_culprit(culprit) if culprit.is_alone else own
        return Divergence(
            root=place.root if place else None,
            path=place.path if place else None,
            call=call,
            op=op,
            op_nth=op_nth,
            phase=phase,
            step=int(values.step[row]),
            role=site["role"],
            slot=site["slot"],
            kind=verdict,
            kind_of_difference=relation.kind if relation else None,
            relation=relation.text if relation else None,
            error=error,
            low=low,
            high=high,
            metric=METRICS[int(found.errors.metric[at])],
            noise=max(float(found.noise.local[at]), float(found.errors.floor[at])),
            input_error=given,
            amplification=error / given if given else np.inf,
            recompute_of=found.recompute_of,
            only_in=culprit.run if culprit.is_alone else None,
            through=self._name_instead(at, culprit) if culprit.is_alone else self._through(at),
            seen_at=self._names.label_value(row) if culprit.is_alone else None,
            other=None if label(mine) == label(theirs) else label(theirs),
            leads_to=None,
            source_line=self._source_line(culprit, row),
            **self._find_given(at, is_own),
            a=_describe(one, at),
            b=_describe(two, at),
            **{name: getattr(tensors, name) for name in _OF_TENSORS if tensors},
            **(self._find_update(at) if verdict == SOURCE or phase == OPTIMIZER else {}),
        )

    def _find_given(self, at: int, is_own: bool) -> dict[str, Any]:
        """Returns in what differs that was given to what made a difference.

        Args:
            at: the pair.
            is_own: it has made the difference itself; of others nothing is told.
        """
        if not is_own:
            return {"arguments": (), "operands": ()}
        arguments, operands = self._operands.find_arguments(at), self._operands.find_operands(at)
        is_unexplained = not (self._found.inherited.error[at] or arguments or operands or self._through(at))
        return {
            "arguments": arguments,
            "operands": operands,
            "turned": self._operands.find_turned(at) if is_unexplained else None,
            "states": self._find_states(at) if self._found.inherited.is_update[at] else (),
        }

    def label(self, at: int) -> str:
        """Returns the name of a pair, and how far it is apart: `output of Net, 9.5e-02 apart`."""
        name = self._names.label_value(int(self._found.a.rows[at]))
        return f"{name}, {float(self._found.errors.error[at]):.1e} apart"

    def _relate(self, at: int, row: int, row_b: int) -> Relation | None:
        """Returns how the second tensor comes from the first, or which of them is that of an earlier step."""
        found = self._found
        if found.recompute_of is not None:
            return None
        for side, other, mine, theirs, whose in (
            (found.side, found.other, row, row_b, "the first run's"),
            (found.other, found.side, row_b, row, "the second run's, which the first has now,"),
        ):
            earlier = _find_earlier(side, mine)
            if earlier >= 0:
                measured = (
                    read_measured(side.data, np.array([earlier])),
                    read_measured(other.data, np.array([theirs])),
                )
                errors = find_errors(*measured)
                stats = measured[0].stats
                if errors.are_equal()[0] and stats.min[0] < stats.max[0]:
                    return Relation("stale", f"{whose} of step {int(side.values.step[earlier])}")
        error, noise = float(found.errors.error[at]), float(found.noise.local[at])
        op = int(found.side.values.op[row])
        sizes = [] if op < 0 else self._operands.find_sizes(op)
        return find_relation(found.a, found.b, at, error, noise, sizes)

    def _find_update(self, at: int) -> dict[str, Any]:
        """Returns since when the optimizer has made a parameter differ, and how many of all parameters it has.

        Of an update it is how many updates of the step differ.
        """
        found, values, rows = self._found, self._found.side.values, self._found.a.rows
        is_alike = found.inherited.is_source & values.is_of(PARAMETER, rows=rows)
        if not is_alike[at]:
            is_alike = values.is_of(UPDATE, rows=rows)
        if not is_alike[at]:
            return {}
        alike = np.flatnonzero(is_alike)
        keys, step = name_parameters(found.side, rows[alike]), values.step[rows[alike]]
        is_over = found.ranking.is_over[alike]
        mine = alike == at
        now, earlier = step == step[mine], (keys == keys[mine]) & (step < step[mine])
        updated = {"updated": (int(is_over[now].sum()), int(now.sum()))}
        if found.inherited.is_update[at]:
            return updated
        if not earlier.any() or is_over[earlier].any():
            return {}
        return {"updated_since": int(step[earlier].max()), **updated}

    def _find_states(self, at: int) -> tuple[str, ...]:
        """Returns in what the optimizers differed before they made an update."""
        found, values, rows = self._found, self._found.side.values, self._found.a.rows
        step, key = values.step[rows[at]], name_parameters(found.side, rows[[at]])
        is_count = np.array([*(name.endswith(".step") for name in values.slots), False])
        counts = np.flatnonzero(values.is_of(OPTIMIZER_STATE, rows=rows) & is_count[values.slot[rows]])
        counts = counts[values.step[rows[counts]] == step]
        for count in counts[name_parameters(found.side, rows[counts]) == key].tolist():
            made = float(found.a.stats.max[count]), float(found.b.stats.max[count])
            if made[0] != made[1]:
                return (f"step {made[0]:g} against {made[1]:g}",)
        steps = int(step), int(found.other.values.step[found.b.rows[at]])
        had = [_has_state(side, now) for side, now in zip((found.side, found.other), steps, strict=True)]
        return (f"only the {FIRST if had[0] else SECOND} run's had a state",) if had[0] != had[1] else ()

    def _name_culprit(self, culprit: Culprit) -> tuple[ModuleName | None, str, int, int | None]:
        """Returns the module, by its name in the first recording if it is there, the op, its number and its call."""
        if culprit.run == FIRST:
            return self._names.place_of_op(culprit.op), *self._names.identify_op(culprit.op)
        place = self._others.place_of_op(culprit.op)
        translated = None if place is None else self._found.modules.get(place, place)
        return translated, *self._others.identify_op(culprit.op)

    def to_table(self) -> ArrowTable:
        """Returns all pairs, with names and numbers."""
        found, rows = self._found, self._found.a.rows
        values = found.side.values
        columns: dict[str, Any] = {
            "step": values.step[rows],
            "phase": decode(PHASES, values.phase[rows]),
            "path": decode([name.path for name in found.side.names], values.place[rows]),
            **{name: values.take_sites(of, rows) for name, of in _OF_SITE.items()},
            "error": found.errors.error,
            "noise": np.maximum(found.noise.local, found.errors.floor),
            "input_error": found.inherited.error,
            "inputs_known": found.inherited.is_known,
            "score": found.ranking.score,
            "metric": decode(METRICS, found.errors.metric),
            "recompute_of": decode([FIRST, SECOND], np.full(len(rows), _RUN_CODES[found.recompute_of])),
            "row_a": self._pair[0].rows,
            "row_b": self._pair[1].rows,
        }
        return build_table(columns)

    def _bounds(self, at: int) -> tuple[float, float]:
        error, metric = float(self._found.errors.error[at]), METRICS[int(self._found.errors.metric[at])]
        if metric == SKETCHES:
            return error / SKETCH_FACTOR, error * SKETCH_FACTOR
        if metric in (SAMPLES, STATISTICS):
            return 0.0, np.inf
        return error, error

    def _through(self, at: int) -> str | None:
        op, op_b = self.culprits.find_through(at), self.culprits.find_through(at, SECOND)
        if op >= 0:
            own = int(self._found.side.values.op[self._found.a.rows[at]])
            ops = self.culprits.find_nearest(FIRST, own) if own >= 0 else []
            named = first_few([*dict.fromkeys(self._names.label_op(each) for each in ops or [op])], _LISTED)
            return f"{named}, which the second run lacks"
        return (
            f"{self._others.label_op(op_b)} of the second run, which the first lacks" if op_b >= 0 else None
        )

    def _name_instead(self, at: int, culprit: Culprit) -> str | None:
        """Returns the op that the other recording alone has in the place of one; None if there is none."""
        op = self.culprits.find_through(at, SECOND if culprit.run == FIRST else FIRST)
        return None if op < 0 else (self._others if culprit.run == FIRST else self._names).label_op(op)

    def _source_line(self, culprit: Culprit, row: int) -> str | None:
        if culprit.op < 0:  # of a leaf, the op that has read it
            culprit = culprit._replace(op=int(self._found.side.values.op[row]))
        if culprit.op < 0:
            return None
        side, forward = self.culprits.side_of(culprit), self.culprits.find_forward(culprit)
        return side.ops.read_source(forward if forward >= 0 else culprit.op)


def _has_state(side: RunTables, step: int) -> bool:
    """Returns whether ops of an optimizer have read in a step what was there before."""
    flow = side.flow
    is_asked = (side.ops.phase == PHASES.index(OPTIMIZER)) & (side.ops.step == step)
    read = flow.tensors.site_id[flow.read[is_asked[flow.reader]]]
    leaves = [site["site_id"] for site in side.sites if site["role"] == LEAF]
    return bool(np.isin(leaves, read).any())


def _find_earlier(side: RunTables, row: int) -> int:
    """Returns the row of the same tensor in the step before; -1 for none."""
    values = side.values
    is_same = (
        (values.site == values.site[row])
        & (values.step < values.step[row])
        & (values.step >= values.step[row] - 1)
    )
    rows = np.flatnonzero(is_same)
    return int(rows[-1]) if len(rows) else -1


_RUN_CODES = {None: -1, FIRST: 0, SECOND: 1}
_OF_TENSORS = ("largest", "where", "pair", "cosine", "close_share", "ulps")
_OF_SITE = {"call": "nth", "role": "role", "slot": "slot", "op": "op", "op_nth": "op_nth"}


def _describe(measured: ComparedRows, at: int) -> str:
    text = f"{measured.dtypes[measured.dtype[at]]}[{', '.join(map(str, measured.shape(at)))}]"
    stats = measured.stats.take(np.array([at]))
    if measured.is_measured[at] and stats.count[0]:
        text += f", {float(stats.min[0]):.4g} .. {float(stats.max[0]):.4g}, rms {float(stats.rms[0]):.6g}"
        bad = int(stats.nonfinite[0])
        text += f", {bad} NaN or infinite" if bad else ""
    return text
