"""Describes single pairs as `Divergence`, and all pairs as a table."""

from typing import Any

import numpy as np

from ...recording.arrow.arrays import from_strings
from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import LEAF, OPTIMIZER_STATE, PARAMETER, UPDATE
from ...recording.suggestions import first_few
from ..tables.columns import ArrowTable, build_table, decode
from ..tables.measured import ComparedRows, read_measured
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .answer import FIRST, INHERITED, SECOND, SOURCE, Divergence
from .culprits import Culprit, Culprits, find_unpaired_read
from .errors import METRICS, SAMPLES, SKETCH_FACTOR, SKETCHES, STATISTICS, find_errors
from .names import label
from .operands import Operands
from .pair_inputs import number_parameters
from .pairs import ComparedPairs
from .relations import Relation, find_relation
from .unpaired_modules import find_unpaired_modules

#: The largest number of unpaired ops that are named for one pair.
_LISTED = 3

_OF_TENSORS = ("largest", "where", "pair", "cosine", "close_share", "ulps")
_OF_SITE = {"call": "nth", "role": "role", "slot": "slot", "op": "op", "op_nth": "op_nth"}


class Details:
    """Describes pairs as the answer shows them."""

    def __init__(self, pairs: ComparedPairs) -> None:
        self._pairs, self._a, self._b = pairs, pairs.a, pairs.b
        self._names, self._names_b = pairs.a.names, pairs.b.names
        self.culprits = Culprits(pairs)
        self._operands = Operands(pairs)

    def has_other_arguments(self, pair: int) -> bool:
        """Returns whether arguments of the ops of a pair that are no tensors differ."""
        return not self.culprits.find(pair).is_unpaired and bool(self._operands.find_arguments(pair))

    def describe(self, pair: int, verdict: str, *, with_relation: bool = True) -> Divergence:
        """Returns the description of one pair, with the relation of its tensors if that is wanted."""
        pairs, row = self._pairs, int(self._a.rows[pair])
        site, values = self._names.site(row), self._a.tables.values
        error, input_error = float(pairs.errors.error[pair]), float(pairs.inputs.error[pair])
        culprit, step = self.culprits.find(pair), int(values.step[row])
        run = pairs.run(culprit.run)
        tables, seen_at = run.tables, self._names.label_value(row) if culprit.is_unpaired else None
        code = int(tables.ops.phase[culprit.op] if culprit.is_unpaired else values.phase[row])
        phase = PHASES[code] if code >= 0 else None
        if pairs.inputs.is_source[pair] and phase == OPTIMIZER and not culprit.is_unpaired:
            phase = FORWARD  # the optimizer reads the parameter that forward has used
        place = self._names.place_of_value(row)
        label_b = label(self._names_b.place_of_value(int(self._b.rows[pair])))
        relation = self._find_relation(pair) if with_relation else None
        module, op, op_nth, call = place, site["op"], site["op_nth"], site["nth"]
        if culprit.is_unpaired:
            module, op, op_nth, call = self._name_unpaired(culprit)
            if steps_before := int(tables.values.step[run.rows[pair]] - tables.ops.step[culprit.op]):
                step, seen_at = step - steps_before, f"{seen_at}, step {step}"
        metric = METRICS[int(pairs.errors.metric[pair])]
        low, high = _bound_error(error, metric)
        of_tensors = pairs.errors.details.get(pair)
        measured, measured_b = self._measured
        return Divergence(
            root=module.root if module else None,
            path=module.path if module else None,
            call=call,
            op=op,
            op_nth=op_nth,
            phase=phase,
            step=step,
            role=site["role"],
            slot=site["slot"],
            kind=verdict,
            kind_of_difference=relation.kind if relation else None,
            relation=relation.text if relation else None,
            error=error,
            low=low,
            high=high,
            metric=metric,
            noise=float(pairs.ranking.noise[pair]),
            input_error=input_error,
            amplification=error / input_error if input_error else np.inf,
            recompute_of=pairs.recompute_of,
            only_in=culprit.run if culprit.is_unpaired else None,
            through=self._name_instead(pair, culprit) if culprit.is_unpaired else self._name_through(pair),
            seen_at=seen_at,
            other=None if label(place) == label_b else label_b,
            leads_to=None,
            source_line=self._find_source_line(culprit, row),
            **self._compare_operands(pair, culprit, verdict),
            a=_describe_row(measured, pair),
            b=_describe_row(measured_b, pair),
            **{name: getattr(of_tensors, name) for name in _OF_TENSORS if of_tensors},
            **(self._find_update(pair) if verdict == SOURCE or phase == OPTIMIZER else {}),
        )

    def label(self, pair: int) -> str:
        """Returns the name of a pair, and how far its tensors are apart: `output of Net, 9.5e-02 apart`."""
        name = self._names.label_value(int(self._a.rows[pair]))
        return f"{name}, {float(self._pairs.errors.error[pair]):.1e} apart"

    def to_table(self) -> ArrowTable:
        """Returns all pairs as a table of names and numbers."""
        pairs, rows, values = self._pairs, self._a.rows, self._a.tables.values
        measured, measured_b = self._measured
        columns: dict[str, Any] = {
            "step": values.step[rows],
            "phase": decode(PHASES, values.phase[rows]),
            "path": decode([name.path for name in self._a.tables.names], values.place[rows]),
            **{name: values.take_sites(of, rows) for name, of in _OF_SITE.items()},
            "error": pairs.errors.error,
            "noise": pairs.ranking.noise,
            "input_error": pairs.inputs.error,
            "inputs_known": pairs.inputs.is_known,
            "score": pairs.ranking.score,
            "metric": decode(METRICS, pairs.errors.metric),
            "recompute_of": from_strings([pairs.recompute_of] * len(rows)),
            "row_a": measured.rows,
            "row_b": measured_b.rows,
        }
        return build_table(columns)

    @property
    def _measured(self) -> tuple[ComparedRows, ComparedRows]:
        """The measurements shown as `a` and `b`: for a recompute, those of its forward come first."""
        run, run_b = (self._b, self._a) if self._pairs.recompute_of else (self._a, self._b)
        return run.measured, run_b.measured

    def _compare_operands(self, pair: int, culprit: Culprit, verdict: str) -> dict[str, Any]:
        """Returns the unequal arguments and operands of an op that made a difference itself; nothing for others."""
        if culprit.is_unpaired or verdict == INHERITED:
            is_own = culprit.is_unpaired and verdict != INHERITED
            return {
                "arguments": (),
                "operands": (),
                "behind": find_unpaired_modules(self._pairs, pair, culprit) if is_own else (),
            }
        arguments, operands = self._operands.find_arguments(pair), self._operands.find_operands(pair)
        inputs = self._pairs.inputs
        through = self._name_through(pair)
        is_explained = inputs.error[pair] or arguments or operands or through
        may_be_behind = verdict != SOURCE and (operands or through or culprit.op < 0)
        return {
            "behind": find_unpaired_modules(self._pairs, pair, culprit) if may_be_behind else (),
            "arguments": arguments,
            "operands": operands,
            "turned": None if is_explained else self._operands.find_turned(pair),
            "states": self._compare_states(pair) if inputs.is_update[pair] else (),
        }

    def _find_relation(self, pair: int) -> Relation | None:
        """Returns how the second tensor follows from the first, or which of the two is that of an earlier step."""
        pairs, a, b = self._pairs, self._a, self._b
        if pairs.recompute_of is not None:
            return None
        for run, other, text in (
            (a, b, "the first run's of step {}"),
            (b, a, "new: the first has what the second had in step {}"),
        ):
            earlier = _find_earlier(run.tables, int(run.rows[pair]))
            now = read_measured(other.tables.data, other.rows[[pair]])
            # What has been the same for longer, such as the mean of a one-hot target, shows no step.
            if _equals(run.tables, earlier, now) and not _equals(
                run.tables, _find_earlier(run.tables, earlier), now
            ):
                return Relation("stale", text.format(int(run.tables.values.step[earlier])))
        op = int(a.tables.values.op[a.rows[pair]])
        sizes = [] if op < 0 else self._operands.find_sizes(op)
        error, noise = float(pairs.errors.error[pair]), float(pairs.noise.local[pair])
        return find_relation(a.measured, b.measured, pair, error, noise, sizes)

    def _find_update(self, pair: int) -> dict[str, Any]:
        """Returns since when the optimizer has made a parameter differ, and how many of all parameters differ.

        For an update, the result counts how many updates of the step differ.
        """
        inputs, rows, tables = self._pairs.inputs, self._a.rows, self._a.tables
        values = tables.values
        is_alike = inputs.is_source & values.is_of(PARAMETER, rows=rows)
        if not is_alike[pair]:
            is_alike = values.is_of(UPDATE, rows=rows)
        if not is_alike[pair]:
            return {}
        alike = np.flatnonzero(is_alike)
        keys, step = number_parameters(tables, rows[alike]), values.step[rows[alike]]
        differs, own = self._pairs.ranking.is_over_noise[alike], alike == pair
        now, earlier = step == step[own], (keys == keys[own]) & (step < step[own])
        updated = {"updated": (int(differs[now].sum()), int(now.sum()))}
        if inputs.is_update[pair]:
            return updated
        if not earlier.any() or differs[earlier].any():
            return {}
        return {"updated_since": int(step[earlier].max()), **updated}

    def _compare_states(self, pair: int) -> tuple[str, ...]:
        """Returns how the optimizers' states differed before an update."""
        a, b, tables, rows = self._a, self._b, self._a.tables, self._a.rows
        values, step = tables.values, tables.values.step[rows[pair]]
        is_count = np.array([*(name.endswith(".step") for name in values.slots), False])
        counts = np.flatnonzero(values.is_of(OPTIMIZER_STATE, rows=rows) & is_count[values.slot[rows]])
        counts = counts[values.step[rows[counts]] == step]
        is_same = number_parameters(tables, rows[counts]) == number_parameters(tables, rows[[pair]])
        for count in counts[is_same].tolist():
            largest, largest_b = float(a.measured.stats.max[count]), float(b.measured.stats.max[count])
            if largest != largest_b:
                return (f"step {largest:g} against {largest_b:g}",)
        has_state = _has_state(tables, int(step))
        if has_state == _has_state(b.tables, int(b.tables.values.step[b.rows[pair]])):
            return ()
        return (f"only the {FIRST if has_state else SECOND} run's had a state",)

    def _name_unpaired(self, culprit: Culprit) -> tuple[ModuleName | None, str, int, int | None]:
        """Returns module, name, number and call of an unpaired op; the module is named as in the first recording."""
        names = self._pairs.run(culprit.run).names
        place = names.place_of_op(culprit.op)
        if culprit.run == SECOND and place is not None:
            place = self._pairs.modules.get(place, place)
        return place, *names.identify_op(culprit.op)

    def _name_through(self, pair: int) -> str | None:
        """Returns the names of the unpaired ops through which a pair's difference comes; None if there are none."""
        through, through_b = int(self._pairs.inputs.through[pair]), int(self._pairs.inputs.through_b[pair])
        if through >= 0:
            own = int(self._a.tables.values.op[self._a.rows[pair]])
            ops = find_unpaired_read(self._a, own) if own >= 0 else []
            named = first_few([*dict.fromkeys(map(self._names.label_op, ops or [through]))], _LISTED)
            return f"{named}, which the second run lacks"
        if through_b >= 0:
            return f"{self._names_b.label_op(through_b)} of the second run, which the first lacks"
        return None

    def _name_instead(self, pair: int, culprit: Culprit) -> str | None:
        """Returns the name of the unpaired op that the other recording has in place of the culprit; None for none."""
        inputs = self._pairs.inputs
        op, names = (
            (inputs.through_b, self._names_b) if culprit.run == FIRST else (inputs.through, self._names)
        )
        return names.label_op(int(op[pair])) if op[pair] >= 0 else None

    def _find_source_line(self, culprit: Culprit, row: int) -> str | None:
        if culprit.op < 0:  # a leaf has no culprit op, so the op that reads it counts
            culprit = culprit._replace(op=int(self._a.tables.values.op[row]))
        if culprit.op < 0:
            return None
        forward = self.culprits.find_forward(culprit)
        return self._pairs.run(culprit.run).tables.ops.read_source(forward if forward >= 0 else culprit.op)


def _has_state(tables: RunTables, step: int) -> bool:
    """Returns whether ops of an optimizer read a state in a step that was there before."""
    flow = tables.flow
    is_of_optimizer = (tables.ops.phase == PHASES.index(OPTIMIZER)) & (tables.ops.step == step)
    read = flow.tensors.site_id[flow.read[is_of_optimizer[flow.reader]]]
    leaves = [site["site_id"] for site in tables.sites if site["role"] == LEAF]
    return bool(np.isin(leaves, read).any())


def _find_earlier(tables: RunTables, row: int) -> int:
    """Returns the row of the same tensor in the previous step; -1 if there is none, as behind row -1."""
    values = tables.values
    step = values.step[row]
    rows = np.flatnonzero(
        (values.site == values.site[row]) & (values.step < step) & (values.step >= step - 1)
    )
    return int(rows[-1]) if row >= 0 and len(rows) else -1


def _equals(tables: RunTables, row: int, measured: ComparedRows) -> bool:
    """Returns whether a row, if there is one, is as a measured tensor of more than one number."""
    if row < 0:
        return False
    found = read_measured(tables.data, np.array([row]))
    return bool(find_errors(found, measured).are_equal()[0] and found.stats.min[0] < found.stats.max[0])


def _bound_error(error: float, metric: str) -> tuple[float, float]:
    """Returns the least and the largest error that there may be, if one was estimated by a metric."""
    if metric == SKETCHES:
        return error / SKETCH_FACTOR, error * SKETCH_FACTOR
    return (0.0, np.inf) if metric in (SAMPLES, STATISTICS) else (error, error)


def _describe_row(measured: ComparedRows, pair: int) -> str:
    text = f"{measured.dtypes[measured.dtype[pair]]}[{', '.join(map(str, measured.shape(pair)))}]"
    stats = measured.stats.take(np.array([pair]))
    if measured.is_measured[pair] and stats.count[0]:
        text += f", {float(stats.min[0]):.4g} .. {float(stats.max[0]):.4g}, rms {float(stats.rms[0]):.6g}"
        bad = int(stats.nonfinite[0])
        text += f", {bad} NaN or infinite" if bad else ""
    return text
