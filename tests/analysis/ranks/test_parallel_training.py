"""What several processes train together is told as one run, and which of them is unlike the others."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import modtrace
from helpers.command_line import Command
from helpers.parallel_training import Run, record_runs
from helpers.report_pages import read_payload
from modtrace.analysis.divergence.answer import Comparison
from modtrace.analysis.divergence.compare import compare_recordings
from modtrace.analysis.ranks.first_nonfinite import find_first_of_ranks
from modtrace.analysis.ranks.replicas import check_replicas
from modtrace.analysis.tables.ranks import RanksData, as_one
from modtrace.recording.protocols import LAST, RecordingData
from modtrace.store.reader import open_last_attempts
from modtrace.views.text.divergence import name_divergence

RUNS = {
    "single": Run(),
    "single with ops": Run(ops=True),
    "ddp": Run("ddp"),
    "fsdp2": Run("fsdp2"),
    "tp": Run("tp"),
    "ddp with ops": Run("ddp", ops=True),
    "fsdp2 with ops": Run("fsdp2", ops=True),
    "tp with ops": Run("tp", ops=True),
    "ddp with another eps": Run("ddp", "eps", ops=True),
    "fsdp2 with another eps": Run("fsdp2", "eps", ops=True),
    "tp with another eps": Run("tp", "eps", ops=True),
    "ddp whose rank 1 has another eps": Run("ddp", "own eps", ops=True),
    "tp whose rank 1 has another eps": Run("tp", "own eps", ops=True),
    "ddp with other weights": Run("ddp", "weights"),
    "ddp with another gradient": Run("ddp", "gradient"),
    "ddp with an all-reduce left out": Run("ddp", "unreduced"),
    "ddp with an inf": Run("ddp", "inf"),
    "ddp with an inf and ops": Run("ddp", "inf", ops=True),
    "ddp whose rank 0 evaluates": Run("ddp", "evaluates"),
    "fsdp1": Run("fsdp1"),
}
FOUR = {
    "single": Run(),
    "ddp": Run("ddp"),
    "hsdp": Run("hsdp"),
    "fsdp2 x tp": Run("fsdp2 x tp"),
    "ddp with other weights": Run("ddp", "weights"),
    "ddp with another gradient": Run("ddp", "gradient"),
}


NORM = "native_layer_norm in blocks.1.norm, step 0, forward"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return record_runs(tmp_path_factory.mktemp("two"), RUNS, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return record_runs(tmp_path_factory.mktemp("four"), FOUR, 4)


def ranks_of(path: str) -> list[tuple[int, RecordingData]]:
    return [*open_last_attempts(path)]


def together(path: str) -> RecordingData:
    return as_one(ranks_of(path))


def compare(recordings: Mapping[str, str], a: str, b: str) -> Comparison:
    return compare_recordings(together(recordings[a]), together(recordings[b]))


@pytest.mark.parametrize(
    ("a", "b"), [("single", "ddp"), ("single", "fsdp2"), ("single", "tp"), ("ddp", "fsdp2"), ("tp", "fsdp2")]
)
def test_training_on_two_ranks_is_that_on_one_and_on_another_mesh(
    two: Mapping[str, str], a: str, b: str
) -> None:
    found = compare(two, a, b)
    assert found.first is None
    assert found.beyond == 0
    assert found.ok
    assert found.compared >= 270


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("single", "ddp"),
        ("single", "fsdp2"),
        ("single", "tp"),
        ("ddp", "tp"),
        ("ddp", "fsdp2"),
        ("fsdp2", "tp"),
    ],
)
def test_ops_of_ranks_and_of_another_mesh_are_no_difference(two: Mapping[str, str], a: str, b: str) -> None:
    found = compare(two, f"{a} with ops", f"{b} with ops")
    assert (found.first, found.beyond, found.absorbed, found.ok) == (None, 0, 0, True)


def test_factor_of_a_gradient_is_not_divided_with_it(two: Mapping[str, str]) -> None:
    """The backward of a square computes `x ** 1`, in which there is no gradient of a mean over a rank's part."""
    found = compare(two, "ddp with ops", "tp with another eps")
    assert [(place.path, place.phase) for place in found.divergences] == [("blocks.1.norm", "forward")]


@pytest.mark.parametrize(
    ("a", "b", "ranks", "place"),
    [
        ("ddp with ops", "ddp with another eps", (0, 1), NORM),
        ("fsdp2 with ops", "fsdp2 with another eps", (0, 1), NORM),
        ("tp with ops", "tp with another eps", (0, 1), NORM),
        ("ddp with ops", "ddp whose rank 1 has another eps", (1,), NORM),
        ("tp with ops", "tp whose rank 1 has another eps", (1,), NORM),
        ("ddp", "ddp with other weights", (1,), "parameter blocks.1.up.weight, step 0, forward"),
        ("ddp", "ddp with another gradient", (1,), "gradient of the parameter blocks.0.down.weight, step 1, optimizer"),
        ("ddp", "ddp with an inf", (1,), "output of blocks.0.norm, step 1, forward"),
    ],
)  # fmt: skip
def test_fault_of_some_ranks_is_named_as_that_of_one_process(
    two: Mapping[str, str], a: str, b: str, ranks: tuple[int, ...], place: str
) -> None:
    first = compare(two, a, b).first
    assert first is not None
    assert first.ranks == ranks
    assert name_divergence(replace(first, ranks=())) == place
    if "eps" in b:
        assert first.arguments == ("eps 1e-05 against 0.001",)


@pytest.mark.parametrize("kind", ["ddp with ops", "fsdp2 with ops", "tp with ops", "fsdp1"])
def test_every_tensor_of_each_rank_is_compared_where_the_mesh_is_one(
    two: Mapping[str, str], kind: str
) -> None:
    found = compare(two, kind, kind)
    assert (found.ok, found.ranks, found.equal) == (True, (0, 1), found.compared)
    alone = [compare_recordings(data, data) for _, data in ranks_of(two[kind])]
    assert found.compared == sum(answer.compared for answer in alone)
    assert found.to_frame().groupby("rank").size().tolist() == [len(answer.to_frame()) for answer in alone]
    assert {why for why, _ in found.unmeasured_why} <= {"not measured: nothing has been written to it yet"}


def test_ranks_that_part_later_or_agree_are_told(two: Mapping[str, str], command: Command) -> None:
    told = command("compare", two["ddp"], two["ddp with other weights"], code=1).out.splitlines()
    assert told[0] == "the runs part at parameter blocks.1.up.weight, step 0, forward, on rank 1"
    assert told[1].startswith("  rank 0 parts later: at ")
    assert " of 3 steps on 2 ranks: " in "\n".join(told)


def test_page_of_ranks_shows_that_of_the_fault(
    two: Mapping[str, str], command: Command, tmp_path: Path
) -> None:
    a, b = two["ddp with ops"], two["ddp whose rank 1 has another eps"]
    command("view", a, "--against", b, "-o", str(tmp_path / "page.html"))
    payload = read_payload((tmp_path / "page.html").read_text())
    titles = [finding["title"] for finding in payload["findings"]]
    assert (
        "native_layer_norm in blocks.1.norm, step 0, forward, on rank 1: eps 1e-05 against 0.001" in titles[0]
    )
    assert {"name": "rank", "values": ["1"]} in payload["dimensions"]


def test_page_of_two_meshes_says_what_the_comparison_of_all_ranks_says(
    two: Mapping[str, str], command: Command, tmp_path: Path
) -> None:
    for b, answer in (
        ("tp with ops", "equal, up to noise"),
        ("tp with another eps", "eps 1e-05 against 0.001"),
    ):
        shown = command("view", two["ddp with ops"], "--against", two[b], "-o", str(tmp_path / "page.html"))
        assert "is shown" not in shown.err
        [finding, *_] = read_payload((tmp_path / "page.html").read_text())["findings"]
        assert answer in finding["title"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_memory_that_a_collective_has_yet_to_write_is_no_nan(two: Mapping[str, str], kind: str) -> None:
    ranks = ranks_of(two[f"{kind} with ops"])
    assert find_first_of_ranks(ranks) == ([], [])
    for _, data in ranks:
        names = {row["op_id"]: row["name"] for row in data.table("ops").to_pylist()}
        measured = {names[op] for op in data.table("values")["op_id"].to_pylist() if op is not None}
        assert not any(name.startswith(("c10d.", "fsdp.all_gather_copy_in")) for name in measured)


def test_nan_that_a_collective_brings_is_no_op_of_this_rank(two: Mapping[str, str]) -> None:
    first, later = find_first_of_ranks(ranks_of(two["ddp with an inf and ops"])).answers
    assert (first.rank, first.found.step, later.rank, later.found.phase) == (1, 1, 0, "backward")
    assert later.found.kind == "first seen"
    assert later.found.hint is not None and "allreduce_ wrote it" in later.found.hint


def test_step_whose_gradients_are_not_reduced_is_named(two: Mapping[str, str]) -> None:
    check = check_replicas(ranks_of(two["ddp with an all-reduce left out"]))
    assert check.first
    assert {(one.step, one.role) for one in check.first} >= {(1, "parameter_grad")}
    assert {one.step for one in check.first} == {1}
    assert (check.first[0].role, check.may_be_own) == ("parameter_grad", False)


def test_groups_and_parameters_are_those_that_were_recorded(two: Mapping[str, str]) -> None:
    ddp = together(two["ddp"])
    assert isinstance(ddp, RanksData)
    assert ddp.groups == {"0-1"}
    whole = (None, None)
    of_up = {slot: found for (module, slot), found in ddp.parameters.items() if "blocks.1.up" in str(module)}
    assert of_up == {"weight": (whole, 64 * 16), "bias": (whole, 64)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_ranks_have_the_same_collectives_in_each_step(two: Mapping[str, str], kind: str) -> None:
    """All of them are in the table: none of DDP's buckets, of FSDP's or of a DTensor's is missing, and none twice."""
    columns = ["step", "name", "group", "seq_id", "ranks", "dtype", "bytes_read", "bytes_written", "phase"]
    rows = [data.table("collectives").select(columns).to_pylist() for _, data in ranks_of(two[kind])]
    tables = [[row for row in of_rank if row["name"] != LAST] for of_rank in rows]
    assert tables[0] == tables[1]
    numbers = [row["seq_id"] for row in tables[0]]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    assert {row["step"] for row in tables[0]} == {0, 1, 2}
    per_step = [[row["name"] for row in tables[0] if row["step"] == step] for step in range(3)]
    own = {"ddp": ["all_reduce"], "fsdp2": ["all_gather", "reduce_scatter"], "tp": ["all_reduce"]}[kind]
    assert {*per_step[2]} == {*own}
    assert per_step[0] == per_step[2]
    assert {row["phase"] for row in tables[0]} <= {"forward", "backward"}


def test_rank_that_evaluates_alone_makes_no_difference(two: Mapping[str, str]) -> None:
    """Nor do evaluations of one batch on all ranks, however many."""
    found = compare(two, "single", "ddp whose rank 0 evaluates")
    assert (found.first, found.beyond) == (None, 0)
    check = check_replicas(ranks_of(two["ddp whose rank 0 evaluates"]))
    assert (check.first, check.compared) == ((), 210)


def test_shards_that_do_not_say_so_accuse_nobody(two: Mapping[str, str], command: Command) -> None:
    check = check_replicas(ranks_of(two["fsdp1"]))
    assert (check.first, check.compared, check.measured) == ((), 0, 0)
    assert command("ranks", two["fsdp1"], code=2).out.startswith("no replicas were compared: ")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_op_that_is_called_otherwise_on_a_mesh_is_named(two: Mapping[str, str], kind: str) -> None:
    first = compare(two, "single with ops", f"{kind} with another eps").first
    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "forward", "blocks.1.norm")
    assert first.op is not None and "native_layer_norm" in first.op


def test_gradients_of_a_mean_over_ranks_are_divided_with_a_word(two: Mapping[str, str]) -> None:
    [text] = [line for line in compare(two, "single", "ddp").environment if line.startswith("gradients")]
    assert "2 x in the second run" in text
    [text] = [line for line in compare(two, "ddp", "single").environment if line.startswith("gradients")]
    assert "2 x in the first run" in text
    assert not any(line.startswith("gradients") for line in compare(two, "ddp", "fsdp2").environment)


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_parts_of_parameters_are_exactly_the_whole(two: Mapping[str, str], kind: str) -> None:
    table = compare(two, "single", kind).table.to_pandas()
    at_first = table[(table.step == 0) & (table.role == "parameter")]
    assert len(at_first) == 14
    assert (at_first.verdict == "equal").all()
    assert (at_first.metric == "hashes").all()


def test_rows_have_the_part_of_a_dtensor_and_its_place(two: Mapping[str, str]) -> None:
    sharded = []
    for _, data in ranks_of(two["fsdp2"]):
        rows = data.table("values").to_pylist()
        sharded.append(next(row for row in rows if row["global_shape"] == [64, 16]))
    assert [row["shape"] for row in sharded] == [[32, 16], [32, 16]]
    assert [row["numel"] for row in sharded] == [512, 512]
    assert [row["global_offset"] for row in sharded] == [[0, 0], [32, 0]]
    assert {(row["placements"], row["mesh"], row["note"]) for row in sharded} == {
        ("S(0)", "dp=2 on 0-1", None)
    }


def test_partial_sums_are_not_compared(two: Mapping[str, str]) -> None:
    values = together(two["tp"]).table("values").to_pylist()
    partial = [row for row in values if row["placements"] == "P(sum)"]
    assert len(partial) == 2 * 3  # of two blocks in each step
    assert {row["count"] for row in partial} == {None}
    assert {row["note"] for row in partial} == {
        "not comparable: a partial sum (P(sum)) that is not reduced yet"
    }


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp"])
def test_ranks_of_a_healthy_run_agree(two: Mapping[str, str], name: str) -> None:
    check = check_replicas(ranks_of(two[name]))
    assert check.first == ()
    assert check.compared == check.by_hash > 0


def test_first_copy_that_differs_is_named(two: Mapping[str, str]) -> None:
    check = check_replicas(ranks_of(two["ddp with other weights"]))
    first = check.first[0]
    assert (first.step, first.role, first.name) == (0, "parameter", "blocks.1.up.weight")
    assert first.groups == ((0,), (1,))
    assert first.alone is None  # one of two may be either
    check = check_replicas(ranks_of(two["ddp with another gradient"]))
    first = check.first[0]
    assert (first.step, first.role, first.name) == (1, "parameter_grad", "blocks.0.down.weight")
    assert first.factor == pytest.approx(1.01, rel=1e-5)


def test_rank_where_an_infinite_number_came_up_is_named(two: Mapping[str, str]) -> None:
    first, later = find_first_of_ranks(ranks_of(two["ddp with an inf"])).answers
    assert (first.rank, first.found.step, first.found.phase, first.found.path) == (
        1,
        1,
        "forward",
        "blocks.0.norm",
    )
    assert (later.rank, later.found.step, later.found.phase) == (0, 1, "optimizer")


def test_commands_tell_of_all_ranks_or_which_they_show(two: Mapping[str, str], command: Command) -> None:
    broken, healthy = two["ddp with an inf"], two["ddp"]
    assert command("nonfinite", broken, code=1).out.startswith("first on rank 1 of 2\n")
    assert command("nonfinite", broken, "--rank", "0", code=1).out.startswith(
        "first non-finite values: 16 NaN"
    )
    assert command("nonfinite", healthy).out.startswith("none on any of 2 ranks\n")
    assert command("compare", two["single"], healthy).out.startswith("equal, up to noise")
    assert command("ranks", healthy).out.startswith(
        "the ranks agree: 210 replicated tensors, 210 by hashes\n"
    )
    told = command("ranks", two["ddp with other weights"], code=1).out
    assert told.startswith("the ranks 0 and 1 have other numbers: parameter blocks.1.up.weight, step 0")
    assert command("ranks", two["single"]).out.startswith("the run has one rank: there are no replicas")
    shown = command("show", healthy)
    assert shown.err == "Rank 0 of 2 is shown. --rank N shows another; modtrace ranks compares all.\n"
    assert command("show", healthy, "--rank", "1").err == ""
    assert command("show", f"{healthy}/rank-00001").err == ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("2", " has the ranks 0-1"),
        ("", "'' names no rank"),
        ("1:0", "'1:0' names no rank: give a number, a range such as 0:8, or all"),
        ("all", "modtrace show shows one rank: give its number"),
    ],
)
def test_wrong_ranks_are_refused(two: Mapping[str, str], command: Command, given: str, told: str) -> None:
    assert told in command("show", two["ddp"], "--rank", given, code=2).err


def test_api_compares_all_ranks_and_opens_one(two: Mapping[str, str]) -> None:
    assert modtrace.compare(two["single"], two["fsdp2"])
    assert modtrace.open_recording(two["ddp"], rank=1).meta.rank == 1
    with pytest.raises(ValueError, match="rank=2: the recording has the ranks 0-1"):
        modtrace.open_recording(two["ddp"], rank=2)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "hsdp", "fsdp2 x tp"])
def test_training_on_four_ranks_is_that_on_one(four: Mapping[str, str], kind: str) -> None:
    found = compare(four, "single", kind)
    assert (found.first, found.beyond, found.ok) == (None, 0, True)
    assert check_replicas(ranks_of(four[kind])).first == ()


@pytest.mark.ranks
def test_rank_that_is_alone_is_named(four: Mapping[str, str]) -> None:
    first = check_replicas(ranks_of(four["ddp with other weights"])).first[0]
    assert (first.alone, first.groups) == (1, ((0, 2, 3), (1,)))
    first = check_replicas(ranks_of(four["ddp with another gradient"])).first[0]
    assert (first.alone, first.step, first.name) == (1, 1, "blocks.0.down.weight")


def test_recording_with_a_rank_missing_says_so(
    two: Mapping[str, str], tmp_path: Path, command: Command
) -> None:
    copy = tmp_path / "copy.modtrace"
    shutil.copytree(two["ddp"], copy)
    shutil.rmtree(copy / "rank-00001")
    assert "1 rank of 2 missing: 1\n" in command("ranks", str(copy), code=2).out
    told = command("compare", two["single"], str(copy), code=1)
    assert told.err == f"Ranks of {copy} are missing: 1. What they had is not compared.\n"


def test_what_ran_after_a_restart_is_read(two: Mapping[str, str], tmp_path: Path, command: Command) -> None:
    copy = tmp_path / "copy.modtrace"
    shutil.copytree(two["ddp"], copy)
    shutil.copytree(Path(two["ddp with other weights"]) / "rank-00000", copy / "rank-00000.attempt-1")
    assert [(rank, data.folder.name) for rank, data in open_last_attempts(copy)] == [
        (0, "rank-00000.attempt-1")
    ]
    told = command("ranks", str(copy), code=2).out
    assert told.startswith("rank 0 alone is read: there are no replicas to compare\n1 rank of 2 missing: 1\n")
    assert command("show", str(copy)).err == ""


def test_damaged_rank_is_left_out_with_a_word(
    two: Mapping[str, str], tmp_path: Path, command: Command
) -> None:
    copy = tmp_path / "copy.modtrace"
    shutil.copytree(two["ddp with an inf"], copy)
    (copy / "rank-00000" / "values.arrow").write_bytes(b"no Arrow")
    told = command("nonfinite", str(copy), code=1)
    assert told.err.startswith("Rank 0 is left out, because it cannot be read: ")
    assert told.out.startswith("first non-finite values: 16 NaN in step 1, forward\n")


def test_noise_is_measured_of_gradients_that_are_scaled_alike(two: Mapping[str, str]) -> None:
    one, other = together(two["ddp"]), together(two["single"])
    found = compare_recordings(one, other, noise=[together(two["fsdp2"])])
    assert found.noise == "measured"
    assert found.table.to_pandas().noise.max() < 1e-3  # not 1/2, of gradients that are twice as large
