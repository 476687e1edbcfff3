"""Defines the checks of a recording, each of which returns a `Check` with its first fault."""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from torch import nn

from ..recording.protocols import RecordingData
from ..recording.verification import Check
from .kept_ops import OpKeep
from .model_run import Results, differences, modules_of
from .perturbing import Perturber
from .recorded_graph import RecordedGraph
from .replayer import Replayer, ReplayFault


def check_op_count(graph: RecordedGraph, counted: Sequence[str], marks: Sequence[str]) -> Check:
    """Checks that the recording holds the ops that an independent mode has counted, in the same order."""
    recorded = list(graph.ops.values())
    if marks:
        return _failed("op count", f"the recording is not complete: {marks[0]}")
    for at, (op, name) in enumerate(zip(recorded, counted, strict=False)):
        if op.name != name:
            return _failed("op count", f"the {at + 1}. op that ran is {name}, recorded there is {op}")
    if len(recorded) != len(counted):
        more = (
            f"; the first that is missing is {counted[len(recorded)]}" if len(recorded) < len(counted) else ""
        )
        return _failed("op count", f"{len(counted)} ops ran, {len(recorded)} are recorded{more}")
    return _passed("op count", f"{len(counted)} ops, as another counter has seen them")


def check_replay_in_order(graph: RecordedGraph, keep: OpKeep) -> Check:
    """Checks that all ops, run again in their original order, give the same bits."""
    return _replay("replay in order", graph, keep, list(graph.ops), copy_writes=False)


def check_replay_in_random_order(
    graph: RecordedGraph, keep: OpKeep, seed: int, perturber: Perturber
) -> Check:
    """Checks that all ops give the same bits in a random order that keeps only their data dependencies.

    Between the ops, `perturber` changes what each op reads and checks whether its results change.
    """
    order = random_order(graph.parents(), seed)
    name = "replay in random order"
    if len(order) < len(graph.ops):
        stuck = next(op for number, op in graph.ops.items() if number not in set(order))
        return _failed(name, f"{stuck} is recorded as its own ancestor")
    return _replay(name, graph, keep, order, copy_writes=True, perturber=perturber)


def _replay(
    name: str,
    graph: RecordedGraph,
    keep: OpKeep,
    order: Sequence[int],
    *,
    copy_writes: bool,
    perturber: Perturber | None = None,
) -> Check:
    replayer = Replayer(graph, keep, copy_writes=copy_writes)
    ran = 0
    try:
        for number in order:
            ran += _replay_one(replayer, graph, keep, number, perturber)
    except ReplayFault as fault:
        return _failed(name, str(fault))
    skipped = f", {len(order) - ran} as recorded: see unchecked" if ran < len(order) else ""
    return _passed(name, f"{ran} ops gave the same bits again{skipped}")


def _replay_one(
    replayer: Replayer, graph: RecordedGraph, keep: OpKeep, number: int, perturber: Perturber | None
) -> bool:
    """Runs one op again. Returns False if it cannot run again, so that its results are taken from the recording."""
    op, kept = graph.ops[number], keep.ops.get(number)
    if kept is None:
        raise ReplayFault(f"{op} is recorded, and no such op ran")
    if kept.obstacle is not None or not kept.has_returned:
        replayer.skip(op, kept)
        replayer.release(op)
        return False
    if len(op.reads) != len(kept.template.arguments):
        raise ReplayFault(
            f"{op} was given {len(kept.template.arguments)} tensors, recorded are {len(op.reads)}"
        )
    inputs = replayer.inputs(op)
    replayer.run(op, kept, inputs)
    if perturber is not None:
        perturber.check(op, kept, inputs)
    replayer.release(op)
    return True


def check_perturbation(perturber: Perturber, was_completed: bool) -> Check:
    """Checks that changing a tensor that an op reads changes the op's results, unless a rule exempts the tensor."""
    if perturber.fault is not None:
        return _failed("perturbation", perturber.fault)
    exempt = sum(perturber.exempt.values())
    why = f"{perturber.checked} tensors change what their op gives, {exempt} are exempt by rule"
    return _passed("perturbation", why if was_completed else f"{why}; the replay broke off")


def check_undeclared_writes(graph: RecordedGraph, keep: OpKeep) -> Check:
    """Checks that no op changed a tensor without the recorder listing the write."""
    for number, kept in keep.ops.items():
        op = graph.ops.get(number)
        if kept.undeclared and op is not None:
            slots = [op.reads[at].slot for at in kept.undeclared if at < len(op.reads)]
            return _failed(
                "undeclared writes", f"{op} has changed its {', '.join(slots)}, recorded as only read"
            )
    return _passed("undeclared writes", "no op has changed what it is recorded to read only")


def check_outputs(plain: Results, other: Results) -> Check:
    """Checks that another run computed the same outputs as the plain one, and left the same buffers."""
    return _check_equal("outputs", plain.outputs, other.outputs)


def check_gradients(plain: Results, other: Results) -> Check:
    """Checks that another run computed the same gradients as the plain one."""
    return _check_equal("gradients", plain.gradients, other.gradients)


def _check_equal(name: str, expected: Mapping[str, bytes], found: Mapping[str, bytes]) -> Check:
    for result in {**expected, **found}:
        if result not in found or result not in expected:
            return _failed(name, f"only one of the runs has {result}")
        if expected[result] != found[result]:
            return _failed(name, f"{result} has other bits than in an unrecorded run")
    return _passed(name, f"{len(found)} tensors are bit by bit those of an unrecorded run")


def check_paths(model: nn.Module, data: RecordingData, left: set[tuple[str, str]]) -> Check:
    """Checks that each recorded path leads to a module of the recorded class, and each op to a recorded call.

    Args:
        left: the paths and classes of the modules after the recorded run; a model may replace its own modules.
    """
    modules = {row["module_id"]: row for row in data.table("modules").to_pylist()}
    calls = {row["call_id"]: row["module_id"] for row in data.table("calls").to_pylist()}
    own: dict[str, list[str]] = {}
    for path, kind in sorted(modules_of(model)) + sorted(left - modules_of(model)):
        own.setdefault(path, []).append(kind)
    ours = {row["module_id"] for row in modules.values() if row["type"] in own[""] and not row["raw_path"]}
    for row in modules.values():
        fault = _path_fault(row["raw_path"], row["type"], own) if row["root_id"] in ours else None
        if fault is not None:
            return _failed("paths", fault)
    for op in data.table("ops").select(["op_id", "name", "call_id"]).to_pylist():
        if op["call_id"] is not None and op["call_id"] not in calls:
            return _failed(
                "paths", f"op {op['op_id']} ({op['name']}) is of call {op['call_id']}, which is not recorded"
            )
    missing = next(
        (module for module in calls.values() if module is not None and module not in modules), None
    )
    if missing is not None:
        return _failed("paths", f"a call is of module {missing}, which is not recorded")
    return _passed("paths", f"{len(modules)} modules are where their paths lead")


def _path_fault(path: str, kind: str, own: Mapping[str, Sequence[str]]) -> str | None:
    if "(" in path:  # an unregistered module can only be searched for below its caller
        parent = path.partition("(")[0].rstrip(".")
        return None if parent in own else f"{path!r} is recorded in {parent!r}, which the model does not have"
    if path not in own:
        return f"the model has no module {path!r}, which is recorded as a {kind}"
    return None if kind in own[path] else f"the module {path!r} is a {own[path][0]}, recorded as a {kind}"


def check_nothing_left(plain: Results, other: Results) -> Check:
    """Checks that another run left torch, the model and the generators in the same state as the plain run."""
    changed = [*differences(plain.surroundings, other.surroundings), *other.changes]
    if plain.generators is not None and other.generators is not None:
        changed += [f"the generator of {name}" for name in other.generators.differing(plain.generators)]
    if changed:
        return _failed("nothing left behind", f"{changed[0]} is not what an unrecorded run leaves")
    return _passed("nothing left behind", "hooks, modes, generators and the model are as before")


def _passed(name: str, why: str) -> Check:
    return Check(name=name, passed=True, why=why)


def _failed(name: str, why: str) -> Check:
    return Check(name=name, passed=False, why=why)


def random_order(parents: Mapping[int, set[int]], seed: int) -> list[int]:
    """Returns the keys in a random order, each after its parents. Every key that may come next is equally likely.

    Parents that are not keys are ignored. Keys that depend on themselves are left out.
    """
    drawn = random.Random(seed)
    sorter = TopologicalSorter({key: above & parents.keys() for key, above in parents.items()})
    with suppress(CycleError):  # it still yields all other keys
        sorter.prepare()
    free: list[int] = []
    order: list[int] = []
    while sorter.is_active():
        free += sorter.get_ready()
        at = drawn.randrange(len(free))
        free[at], free[-1] = free[-1], free[at]
        order.append(free.pop())
        sorter.done(order[-1])
    return order
