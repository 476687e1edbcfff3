"""Each kind of parallel training is told as the training that one process does."""

from collections.abc import Mapping
from typing import Any

import pytest

from helpers.command_line import Command
from helpers.parallel_kinds import Recorded, Run, record_runs
from modtrace.analysis.divergence.answer import Comparison
from modtrace.analysis.divergence.compare import compare_recordings
from modtrace.analysis.ranks.replicas import check_replicas
from modtrace.analysis.tables.ranks import as_one
from modtrace.recording.protocols import RecordingData
from modtrace.store.reader import open_last_attempts

DDP = ("ddp", "static graph", "no_sync", "join", "fp16 hook", "powersgd", "zero")
ANY_MODEL = (*DDP, "fsdp2", "fsdp2 bf16", "tp")
PIPELINES = ("1f1b", "gpipe")
LOOPED = ("interleaved", "zero bubble")  # pipelines with two stages on each rank

#: Kinds that train otherwise: the step and the phase in which they first do.
LOSSY = {"fp16 hook": (0, "optimizer"), "powersgd": (2, "optimizer")}

#: By how many processes there are, and whether they are in `make test`, which has those that are seldom like others.
KINDS: dict[str, list[tuple[str, str]]] = {
    "few": [("no_sync", "gpt"), ("zero", "gpt"), ("tp + sp", "gpt"), ("moe", "moe"), ("interleaved", "gpt"),
            ("1f1b", "chain")],
    "two": [*((kind, model) for model in ("gpt", "llama") for kind in ANY_MODEL),
            *((kind, model) for model in ("gpt", "chain", "llama") for kind in PIPELINES),
            *((kind, model) for model in ("gpt", "deep llama") for kind in LOOPED),
            ("tp + sp", "gpt"), ("moe", "moe")],
    "four": [*((kind, model) for model in ("gpt", "llama") for kind in (*ANY_MODEL, "hsdp", "fsdp2 x tp")),
             *((kind, model) for model in ("gpt", "chain", "deep llama") for kind in PIPELINES),
             *((kind, model) for model in ("deep gpt", "deep llama") for kind in LOOPED),
             ("tp + sp", "gpt"), ("moe", "moe"), ("fsdp2 x 1f1b", "gpt")],
}  # fmt: skip
EPS = {
    "few": [("1f1b", "gpt"), ("ddp", "rms")],
    "two": [*(("ddp", model) for model in ("gpt", "llama")), *((kind, "gpt") for kind in ("fsdp2", "tp", "zero")),
            *((kind, "gpt") for kind in ("tp + sp", *PIPELINES, *LOOPED)), ("1f1b", "llama")],
    "four": [("hsdp", "gpt"), ("fsdp2 x tp", "gpt"), ("1f1b", "gpt"), ("tp", "llama")],
}  # fmt: skip
PAIRS = {
    "few": [("zero gpt", "interleaved gpt")],
    "two": [
        ("tp gpt", "fsdp2 gpt"),
        ("1f1b gpt", "tp gpt"),
        ("gpipe gpt", "zero gpt"),
        ("tp llama", "ddp llama"),
        ("1f1b llama", "tp llama"),
    ],
    "four": [
        ("fsdp2 x tp gpt", "1f1b gpt"),
        ("hsdp gpt", "tp + sp gpt"),
        ("fsdp2 x tp llama", "zero llama"),
        ("interleaved deep llama", "gpipe deep llama"),
    ],
}
DROPOUT = {
    "few": ["tp"],
    "two": ["tp", "tp + sp", "ddp", "fsdp2"],
    "four": ["tp", "fsdp2 x tp"],
}
WORLD = {"few": 2, "two": 2, "four": 4}


def cases(table: Mapping[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(group, *(case if isinstance(case, tuple) else (case,)), marks=_marks(group))
        for group, several in table.items()
        for case in several
    ]


def _marks(group: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if group == "few" else (pytest.mark.ranks,)


Runs = Mapping[str, Recorded]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The runs of a group; those of one model train when the first of them is asked for."""
    known: dict[str, _Group] = {}

    def of(group: str) -> Runs:
        if group not in known:
            known[group] = _Group(group, tmp_path_factory)
        return known[group]

    return of


class _Group(dict[str, Recorded]):
    """Runs by name, which train when they are missing."""

    def __init__(self, group: str, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._group, self._folders = group, folders
        runs = [Run(kind, model) for kind, model in KINDS[group]]
        runs += [Run(kind, model, "eps") for kind, model in EPS[group]]
        runs += [Run(kind, "dropout", fault) for kind in DROPOUT[group] for fault in ("", "seeds")]
        runs += [Run(model=model) for _, model in KINDS[group]]
        runs += [Run(model=model, fault="ops") for _, model in EPS[group]]
        self._runs = {run.name: run for run in runs}

    def __missing__(self, name: str) -> Recorded:
        model = self._runs[name].model
        chosen = [run for run in self._runs.values() if self._group == "few" or run.model == model]
        self.update(record_runs(self._folders.mktemp(self._group), chosen, WORLD[self._group]))
        return self[name]


def ranks_of(run: Recorded) -> list[tuple[int, RecordingData]]:
    return [*open_last_attempts(run.path)]


def together(run: Recorded) -> RecordingData:
    return as_one(ranks_of(run))


def compare(runs: Runs, a: str, b: str) -> Comparison:
    return compare_recordings(together(runs[a]), together(runs[b]))


@pytest.mark.parametrize(("group", "kind", "model"), cases(KINDS))
def test_recording_changes_no_bit_of_losses_and_parameters(
    recorded: Any, group: str, kind: str, model: str
) -> None:
    assert recorded(group)[f"{kind} {model}"].are_bits_equal


@pytest.mark.parametrize(("group", "kind", "model"), cases(KINDS))
def test_training_is_that_of_one_process(recorded: Any, group: str, kind: str, model: str) -> None:
    """A kind that rounds its gradients differs from then on, and a rank with a step more has this step more."""
    runs = recorded(group)
    found = compare(runs, f"single {model}", f"{kind} {model}")
    first = None if found.first is None else (found.first.step, found.first.phase)
    assert first == LOSSY.get(kind)
    assert found.ok == (kind not in LOSSY and kind != "join")
    assert (found.beyond == 0) == (kind not in LOSSY)
    table = found.table.to_pandas()
    at_first = table[(table.step == 0) & (table.role == "parameter")]
    one = together(runs[f"single {model}"])
    assert len(at_first) == number_of_parameters(one)
    assert {*at_first.verdict} == {"equal"}
    assert {*at_first.metric} == {"hashes"}
    assert kind not in ("zero", *PIPELINES, *LOOPED) or "optimizer_state" in {*table.role}
    assert {*paths_of(one)} <= {*paths_of(together(runs[f"{kind} {model}"]))}


def number_of_parameters(data: RecordingData) -> int:
    return sum(row["role"] == "parameter" for row in data.table("sites").to_pylist())


def paths_of(data: RecordingData) -> list[str]:
    paths: list[str] = data.table("modules")["path"].to_pylist()
    return paths


@pytest.mark.parametrize(("group", "kind", "model"), cases(KINDS))
def test_ranks_of_healthy_training_are_not_accused(
    recorded: Any, group: str, kind: str, model: str, command: Command
) -> None:
    run = recorded(group)[f"{kind} {model}"]
    check = check_replicas(ranks_of(run))
    assert (check.first, check.split_output) == ((), None)
    is_pipeline = kind in (*PIPELINES, *LOOPED)
    assert (check.compared == 0) == is_pipeline
    told = command("ranks", run.path).out
    assert told.startswith("no replicas were compared: each rank has" if is_pipeline else "the ranks agree: ")


@pytest.mark.parametrize(("group", "a", "b"), cases(PAIRS))
def test_training_on_one_mesh_is_that_on_another(recorded: Any, group: str, a: str, b: str) -> None:
    found = compare(recorded(group), a, b)
    assert (found.first, found.beyond, found.ok) == (None, 0, True)


@pytest.mark.parametrize(("group", "kind", "model"), cases(EPS))
def test_another_eps_is_named_at_its_op(recorded: Any, group: str, kind: str, model: str) -> None:
    runs = recorded(group)
    assert runs[f"{kind} {model} eps"].are_bits_equal
    first = compare(runs, f"single {model} ops", f"{kind} {model} eps").first
    assert first is not None
    place = "model.layers.1.post_attention_layernorm" if model == "llama" else "blocks.3.norm2"
    op = "aten.native_layer_norm.default" if model == "gpt" else "aten.add.Tensor"
    assert (first.step, first.phase, first.path, first.op) == (0, "forward", place, op)


@pytest.mark.parametrize(("group", "kind"), cases(DROPOUT))
def test_dropout_that_should_agree_is_named(recorded: Any, group: str, kind: str, command: Command) -> None:
    """One on sharded activations, or on other parts of the batch, is innocent."""
    runs = recorded(group)
    assert command("ranks", runs[f"{kind} dropout"].path).out.startswith("the ranks agree: ")
    run = runs[f"{kind} dropout seeds"]
    if kind not in ("tp", "fsdp2 x tp"):
        assert command("ranks", run.path).out.startswith("the ranks agree: ")
        return
    split = check_replicas(ranks_of(run)).split_output
    assert split is not None
    assert (split.step, split.name) == (0, "blocks.0.dropout")
    told = command("ranks", run.path, code=1).out
    who = "0 and 1" if kind != "tp" or WORLD[group] == 2 else "0-3"
    assert told.startswith(f"the ranks {who} part in the output of blocks.0.dropout, step 0: ")
