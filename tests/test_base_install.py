"""A plain install, without torch and pandas, reads a recording as a full one does: on each Python that is found.

`make test-base` runs this. Environments lie in build/base and are made anew when what they were made of has changed.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from datetime import date
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

import modtrace
from helpers import base_reading

pytestmark = pytest.mark.base

PROJECT = Path(__file__).parent.parent
ENVIRONMENTS = PROJECT / "build" / "base"

_BUILT = PROJECT / "build"
OLD_FILES = [
    _BUILT / folder / "modtrace" / "old_version.py"
    for folder in (
        "lib",
        f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}",
        f"bdist.{sysconfig.get_platform()}/wheel",  # of a build that was killed
    )
]

RECORD = """
import torch, modtrace
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
optimizer = torch.optim.AdamW(model.parameters())
values = ["stats", modtrace.Capture(roles="output", stats=2, hash=True, sketch=True, sample=4, tensors=True)]
with modtrace.record(model, to="run.modtrace", ops=modtrace.Ops(saved=True), values=values, backward_times=True) as rec:
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(3, 4)
        if step == 2:
            x[0, 0] = float("nan")
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        rec.log(loss=loss)
"""

#: What a plain install lacks for an answer.
NEEDS = {
    "frame": "pandas",
    "to_polars": "polars",
    "plot": "matplotlib",
    "write_plot": "matplotlib",
    "plot run.modtrace -o plot.png": "matplotlib",
    "compare run.modtrace run.modtrace --step 0:1 -o growth.png": "matplotlib",
    "query run.parquet missing-steps": "duckdb",
    "record --quiet --to recorded.modtrace script.py": "torch",
    "verify factory:make": "torch",
}

#: What each installation answers in its own way.
DIFFERENT = {*NEEDS, "doctor --json", "written"}


def found_pythons() -> dict[str, list[str]]:
    """The interpreters of each version that modtrace runs on: this one, of PATH, and of pyenv."""
    folders = [Path(each) for each in os.environ.get("PATH", "").split(os.pathsep)]
    folders += (Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions").glob("*/bin")
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": [sys.executable]}
    for path in (each for folder in folders for each in sorted(folder.glob("python3.*"))):
        version = path.name.removeprefix("python")
        if re.fullmatch(r"3\.\d\d", version):
            found.setdefault(version, []).append(str(path))
    return dict(sorted(found.items(), key=lambda each: int(each[0][2:])))


def _runs(path: str) -> bool:
    """A shim of pyenv may stand for an interpreter that is not chosen."""
    with contextlib.suppress(OSError):
        return subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    return False


def requirements() -> list[str]:
    return [each for each in requires("modtrace") or () if "extra ==" not in each]


def run_uv(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "uv", "-q", "--no-config", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 0, done.stderr


def environment_of(version: str, python: str, resolution: str) -> Path:
    """The folder of an environment with what modtrace requires: the `lowest` or the `highest` releases."""
    folder = ENVIRONMENTS / f"{version}-{resolution}"
    made_of = json.dumps(
        [python, requirements(), date.today().isoformat() if resolution == "highest" else ""]
    )
    stamp = folder / "made-of.json"
    if not stamp.exists() or stamp.read_text() != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        run_uv("venv", "--python", python, folder)
        # A release that has no wheel for this Python would be compiled.
        options = [
            "--only-binary",
            ":all:",
            "--resolution",
            f"{resolution}-direct".replace("highest-direct", "highest"),
        ]
        run_uv("pip", "install", "--python", folder, *options, *requirements())
        stamp.write_text(made_of)
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all versions, built where an older version has left a file."""
    folder = tmp_path_factory.mktemp("wheel")
    for left in OLD_FILES:
        left.parent.mkdir(parents=True, exist_ok=True)
        left.touch()
    run_uv("build", "--wheel", "--out-dir", folder, PROJECT)
    [path] = folder.glob("*.whl")
    assert re.fullmatch(r"modtrace-[\d.]+-cp310-abi3-\w+\.whl", path.name)
    return path


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    subprocess.run([sys.executable, "-c", RECORD], cwd=folder, check=True)
    return folder / "run.modtrace"


def ask(python: Path | str, recording: Path, folder: Path) -> dict[str, Any]:
    """What an installation answers; where `modtrace` comes from is told too."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, base_reading.__file__, recording],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="session")
def full_answers(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The answers of this installation, which has everything."""
    answers: dict[str, str] = ask(sys.executable, recording, tmp_path_factory.mktemp("full"))["answers"]
    return answers


def test_what_lies_in_the_build_folder_is_not_installed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("modtrace/old_")] == []
    assert len([name for name in names if name.endswith(".so")]) == 10
    sources = {
        f"modtrace/measure/{name}"
        for name in (
            "cuda/numbers.cuh",
            "fingerprints/fingerprint.cu",
            "moments/moments.cu",
            "tier2/sample.cu",
            "tier2/tier2.cu",
        )
    }
    assert sources <= set(names)  # are compiled where they run


def test_setuptools_that_cannot_build_is_refused_with_the_reason() -> None:
    code = "import setuptools; setuptools.__version__ = '65.5.0'; exec(open('setup.py').read())"
    command = [sys.executable, "-c", code, "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "setup.py: modtrace needs setuptools 77 or newer, and this is 65.5.0. Install it: "
        "pip install --upgrade setuptools (pip install . brings its own)\n",
    )


def test_every_public_name_of_a_recording_is_asked() -> None:
    names = {name for name in vars(modtrace.Recording) if not name.startswith("_")}
    assert names - set(base_reading.QUESTIONS) == set()


def test_full_install_answers_every_question(full_answers: dict[str, str]) -> None:
    failed = {name: told for name, told in full_answers.items() if re.match(r"(\w*Error: |[^01]\n)", told)}
    assert failed == {}


@pytest.mark.parametrize("resolution", ["lowest", "highest"])
@pytest.mark.parametrize(("version", "pythons"), found_pythons().items(), ids=found_pythons())
def test_plain_install_answers_as_a_full_one(
    version: str,
    pythons: list[str],
    resolution: str,
    wheel: Path,
    recording: Path,
    full_answers: dict[str, str],
    tmp_path: Path,
) -> None:
    python = next(filter(_runs, pythons), None)
    if python is None:
        pytest.skip(f"no interpreter of Python {version} runs here")
    folder = environment_of(version, python, resolution)
    run_uv("pip", "install", "--python", folder, "--no-deps", "--reinstall", wheel)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    told = ask(programs / "python", recording, tmp_path)
    assert Path(told["where"]).is_relative_to(folder)
    answers = told["answers"]
    for name, text in full_answers.items():
        if name not in DIFFERENT:
            assert _without_sizes(answers[name]) == _without_sizes(text), name
    for name, library in NEEDS.items():
        assert re.match(r"MissingLibraryError: |2\nmodtrace: error: ", answers[name])
        assert f" needs {library}, which is not installed here. " in answers[name]
    written = set(full_answers["written"].split()) - {
        "plot.png",
        "growth.png",
        "recorded.modtrace",
        "__pycache__",
    }
    assert set(answers["written"].split()) == written
    for command in ([programs / "modtrace"], [programs / "python", "-m", "modtrace"]):
        shown = subprocess.run([*command, "show", recording], capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "LayerNorm" in shown.stdout


def _without_sizes(text: str) -> str:
    """Each release of pyarrow compresses Parquet in its own way."""
    return re.sub(r"(files, )[\d.]+\w?B", r"\1", text)
