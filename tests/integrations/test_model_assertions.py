"""The assertions of the fixture `modtrace`: three models, golden recordings of them, and changes planted in them."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.golden_models import MAKERS, find_unnamed, make, make_amplifying, make_assertions, planted
from modtrace.errors import DamagedRecordingError, ModtraceWarning, NewerSchemaError, RecordingError

OTHER_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}

#: The most bytes of a golden recording for 100 modules, without and with ops.
MOST_BYTES = {False: 30_000, True: 400_000}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each model has golden recordings, without ops and in `with-ops` with them."""
    folder = tmp_path_factory.mktemp("recorded")
    for name in MAKERS:
        model, args, kwargs, _ = make(name)
        make_assertions(folder, update=True).assert_same(model, args, kwargs, golden=name)
        make_assertions(folder / "with-ops", update=True).assert_same(
            model, args, kwargs, golden=name, ops=True
        )
    model, args, kwargs, _ = make_amplifying()
    make_assertions(folder, update=True).assert_same(model, args, kwargs, golden="amplifying")
    return folder


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        yield nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.mark.parametrize("ops", [False, True], ids=["modules", "ops"])
@pytest.mark.parametrize("name", MAKERS)
def test_golden_recording_is_small(recorded: Path, name: str, ops: bool) -> None:
    file = (recorded / "with-ops" if ops else recorded) / "golden" / f"{name}.golden"
    hundreds = max(len([*make(name).model.modules()]) / 100, 1)
    assert file.stat().st_size <= MOST_BYTES[ops] * hundreds


@pytest.mark.parametrize("name", MAKERS)
def test_equal_run_passes_and_the_module_of_a_planted_change_is_named(recorded: Path, name: str) -> None:
    given = make(name)
    make_assertions(recorded).assert_same(given.model, given.args, given.kwargs, golden=name)
    assert find_unnamed(make_assertions(recorded), name, 1e-6) == {}


@pytest.mark.parametrize("name", MAKERS)
def test_op_of_a_planted_change_is_named(recorded: Path, name: str) -> None:
    given, assertions = make(name), make_assertions(recorded / "with-ops")
    assertions.assert_same(given.model, given.args, given.kwargs, golden=name, ops=True)
    assert find_unnamed(assertions, name, 1e-6, ops=True) == {}


def test_kernels_that_round_otherwise_pass_and_a_larger_planted_change_is_named(recorded: Path) -> None:
    script = "import sys; from pathlib import Path; from helpers.golden_models import check_here\n"
    script += "check_here(Path(sys.argv[1]), 1e-5)"
    environment = {**os.environ, **OTHER_KERNELS, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(recorded)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{name}: {{}}" for name in MAKERS], done.stderr
    assert "cpu_capability: " in done.stderr and "5e-06 is tolerated" in done.stderr
    assert json.loads((recorded / "golden" / "amplifying.json").read_text())["rounding"] > 5e-6


def test_failure_names_the_module_with_numbers_and_the_command_that_shows_more(
    model: nn.Module, tmp_path: Path
) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    with planted(model, "1", 0.5), pytest.raises(AssertionError) as raised:
        make_assertions(tmp_path).assert_same(model, (X,), golden="net")
    lines = str(raised.value).splitlines()
    assert lines[:2] == [
        "Sequential differs from the golden recording 'net', which is the first run here:",
        "the runs part at output of 1, step 0, forward",
    ]
    assert "  relative error 3.3e-01 (2.8e-01 to 4.0e-01), noise is 5.0e-07" in lines
    assert lines[-2:] == [
        f"More: modtrace compare {tmp_path}/kept/0/golden.modtrace {tmp_path}/kept/0/run.modtrace --tolerance=5e-07",
        "If it should: pytest --modtrace-update the-test",
    ]
    found = modtrace.compare(*(tmp_path / "kept" / "0" / f"{run}.modtrace" for run in ("golden", "run")))
    assert found.first is not None and (found.first.path, found.environment) == ("1", ())


def test_module_that_is_new_fails(model: nn.Module, tmp_path: Path) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    with pytest.raises(AssertionError, match="only in the second run: 1 module"):
        make_assertions(tmp_path).assert_same(nn.Sequential(*model, nn.Identity()), (X,), golden="net")


def test_golden_recording_without_ops_is_compared_with_a_run_that_has_some(
    model: nn.Module, tmp_path: Path
) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    with (
        planted(model, "1", 0.5),
        pytest.raises(AssertionError, match="the runs part at mul in 1, step 0"),
    ):
        make_assertions(tmp_path).assert_same(model, (X,), golden="net", ops=True)


def test_tolerance_is_that_which_is_given(model: nn.Module, tmp_path: Path) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    with planted(model, "3", 1e-3):
        make_assertions(tmp_path).assert_same(model, (X,), golden="net", tolerance=1e-2)


def test_model_and_generators_are_as_before(model: nn.Module, tmp_path: Path) -> None:
    before = [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    make_assertions(tmp_path).assert_same(model, (X,), golden="net")
    assert all(map(torch.equal, before[0], model.state_dict().values()))
    assert torch.equal(before[1], torch.get_rng_state())


def test_values_that_are_not_finite_agree_with_themselves(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Identity())
    for update in (True, False):
        make_assertions(tmp_path, update=update).assert_same(
            model, (torch.tensor([1.0, float("nan"), float("inf")]),), golden="odd"
        )


def test_model_whose_copy_in_float64_does_not_run_has_no_rounding(tmp_path: Path) -> None:
    class Single(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    make_assertions(tmp_path, update=True).assert_same(nn.Linear(8, 8), (X,), golden="any")
    make_assertions(tmp_path, update=True).assert_same(Single(8, 8), (X,), golden="single")
    rounding = [
        json.loads((tmp_path / "golden" / f"{name}.json").read_text())["rounding"]
        for name in ("any", "single")
    ]
    assert 1e-8 < rounding[0] < 1e-6 and rounding[1] == 0


@pytest.mark.usefixtures("seeded")  # with one seed of twenty, the bit is rounded away in all outputs
def test_half_precision_passes_in_its_environment_and_a_flipped_bit_does_not(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).bfloat16(), X.bfloat16()
    make_assertions(tmp_path, update=True).assert_same(model, (x,), golden="half")
    make_assertions(tmp_path).assert_same(model, (x,), golden="half")
    with torch.no_grad():
        model[0].bias.view(torch.int16)[3] ^= 1
    with pytest.raises(AssertionError, match="the runs part at output of 0, step 0"):
        make_assertions(tmp_path).assert_same(model, (x,), golden="half")


def _state(folder: Path) -> dict[str, Any]:
    return {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_mode & 0o111)
        for file in (folder / "golden").iterdir()
    }


@pytest.mark.parametrize("ops", [False, True], ids=["modules", "ops"])
def test_update_writes_two_plain_files_and_leaves_them_if_nothing_has_changed(
    model: nn.Module, tmp_path: Path, ops: bool
) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net", ops=ops)
    written = _state(tmp_path)
    assert {name: mode for name, (_, _, mode) in written.items()} == {"net.golden": 0, "net.json": 0}
    nn.Linear(8, 8)(X).sum().backward()  # what other tests do in the process
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net", ops=ops)
    assert _state(tmp_path) == written
    (tmp_path / "golden" / "net.golden").unlink()
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net", ops=ops)
    assert {name: content for name, (content, *_) in _state(tmp_path).items()} == {
        name: content for name, (content, *_) in written.items()
    }
    with planted(model, "0", 1e-6):
        make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net", ops=ops)
        make_assertions(tmp_path).assert_same(model, (X,), golden="net", ops=ops)
    assert _state(tmp_path)["net.golden"] != written["net.golden"]


def test_golden_recording_that_is_missing_fails(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        make_assertions(tmp_path).assert_same(model, (X,), golden="parts/net")
    assert str(raised.value).splitlines() == [
        f"there is no golden recording {tmp_path}/golden/parts/net.golden",
        "To record it: pytest --modtrace-update the-test",
    ]


@pytest.mark.parametrize("name", ["", "../net", "/net"])
def test_name_that_leaves_the_folder_is_refused(model: nn.Module, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"golden={name!r}: give a name")):
        make_assertions(tmp_path).assert_same(model, (X,), golden=name)


@pytest.mark.parametrize("is_missing", [False, True], ids=["other", "missing"])
def test_other_environment_warns_and_tolerates_rounding(
    model: nn.Module, tmp_path: Path, is_missing: bool
) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    file = tmp_path / "golden" / "net.json"
    environment = json.loads(file.read_text())
    file.unlink() if is_missing else file.write_text(json.dumps(environment | {"device": "cpu of old"}))
    said = "device: " + ("none / cpu" if is_missing else "cpu of old / cpu")
    for relative, passes in ((1e-6, True), (1e-5, False)):
        with planted(model, "0", relative), pytest.warns(ModtraceWarning, match=said):
            if passes:
                make_assertions(tmp_path).assert_same(model, (X,), golden="net")
            else:
                with pytest.raises(AssertionError, match="the runs part at output of 0, step 0"):
                    make_assertions(tmp_path).assert_same(model, (X,), golden="net")


def test_seed_of_the_test_is_not_part_of_the_environment(model: nn.Module, tmp_path: Path) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        make_assertions(tmp_path).assert_same(model, (X,), golden="net")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"<<<<<<< HEAD\n"], ids=["empty", "cut", "merge"])
def test_damaged_golden_recording_is_named_and_replaced_by_an_update(
    model: nn.Module, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "golden" / "net.golden"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(
        DamagedRecordingError, match=r"net\.golden: this is no golden recording, or a damaged"
    ):
        make_assertions(tmp_path).assert_same(model, (X,), golden="net")
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    make_assertions(tmp_path).assert_same(model, (X,), golden="net")


def test_every_byte_that_is_lost_is_noticed(model: nn.Module, tmp_path: Path) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    file = tmp_path / "golden" / "net.golden"
    whole = file.read_bytes()
    for at in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with suppress(RecordingError):
            make_assertions(tmp_path).assert_same(model, (X,), golden="net")


def test_damaged_environment_is_named(model: nn.Module, tmp_path: Path) -> None:
    make_assertions(tmp_path, update=True).assert_same(model, (X,), golden="net")
    (tmp_path / "golden" / "net.json").write_text("[]")
    with pytest.raises(RecordingError, match=r"net\.json: this is no environment of a golden recording"):
        make_assertions(tmp_path).assert_same(model, (X,), golden="net")


def test_golden_recording_of_a_newer_version_is_refused(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "golden" / "net.golden"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("golden.json", json.dumps({"schema_version": 10**6}))
    with pytest.raises(NewerSchemaError, match="with schema 1000000; this modtrace reads up to"):
        make_assertions(tmp_path).assert_same(model, (X,), golden="net")


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean()) / x.std(unbiased=False)


def test_op_that_makes_a_nan_is_named_and_its_recording_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Centred())
    make_assertions(tmp_path).assert_finite(model, (X,), gradients=True)
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.fill_(1.0)
    with pytest.raises(AssertionError) as raised:
        make_assertions(tmp_path).assert_finite(model, (X,))
    lines = str(raised.value).splitlines()
    assert lines[0] == "Sequential is not finite:" and "div in 1" in "\n".join(lines)
    assert lines[-1] == f"More: modtrace nonfinite {tmp_path}/kept/0/run.modtrace --all"
    assert modtrace.open_recording(tmp_path / "kept" / "0" / "run.modtrace").first_nonfinite() is not None


def test_gradient_that_is_not_finite_is_found(tmp_path: Path) -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sqrt()

    model = nn.Sequential(nn.Linear(8, 8, bias=False), Root())
    nn.init.zeros_(model[0].weight)
    make_assertions(tmp_path).assert_finite(model, (X,))
    with pytest.raises(AssertionError, match="is not finite"):
        make_assertions(tmp_path).assert_finite(model, (X,), gradients=True)


def test_exception_of_the_model_is_the_tests(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        make_assertions(tmp_path, update=True).assert_same(nn.Linear(3, 3), (X,), golden="net")
    assert not (tmp_path / "golden").exists()
