"""What the package shows: its names, and that it works, as far as it can, where nothing but itself is installed."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import modtrace
from builders import RecordingBuilder
from modtrace.store.copy import write_recording

PUBLIC = [
    "Above",
    "CannotCheck",
    "Capture",
    "Dataset",
    "Finding",
    "GraphStyle",
    "LiveRecording",
    "ModTracker",
    "ModelGraph",
    "ModtraceError",
    "ModtraceWarning",
    "ModulePathTracer",
    "ModuleTracker",
    "NonFinite",
    "NonFiniteError",
    "OnSignal",
    "Ops",
    "OutOfBand",
    "Recording",
    "TensorOptions",
    "__version__",
    "check",
    "compare",
    "graft",
    "graph",
    "open_dataset",
    "open_recording",
    "record",
    "track",
    "verify",
]

# Put before a program: importing torch fails as where it is not installed, and a trace of the attempt is left.
WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""

HOW_TO_GET_TORCH = (
    "needs torch, which is not installed here. Recording runs inside PyTorch. Install the build for your "
    "machine (https://pytorch.org), or any build with `pip install 'modtrace[torch]'`."
)


def run_python(code: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)


def run_without_torch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line where there is no torch."""
    return run_python(WITHOUT_TORCH + "from modtrace.cli.main import main\nmain()", *arguments, cwd=cwd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recording in it that nobody needed torch for."""
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net", parameters=12)
    linear = build.module("fc", "Linear", parent=net, parameters=12)
    build.step(0, 0, 10_000)
    outer = build.call(net, 0, 6_000)
    build.call(linear, 1_000, 5_000, parent=outer)
    write_recording(build.data(), tmp_path / "run.modtrace")
    return tmp_path


def test_public_names_are_these() -> None:
    assert modtrace.__all__ == PUBLIC


def test_dir_shows_the_public_names() -> None:
    assert dir(modtrace) == sorted(PUBLIC)


def test_interface_of_tensor_tracker_is_there_without_an_import_of_its_own() -> None:
    program = "import modtrace; print(modtrace.tensor_tracker.track is modtrace.track)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_mod_tracker_is_module_tracker() -> None:
    assert modtrace.ModTracker is modtrace.ModuleTracker


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("__version__", "ModTracker")])
def test_every_public_name_says_what_it_is(name: str) -> None:
    value = getattr(modtrace, name)
    assert value.__name__ == name
    documentation = inspect.getdoc(value)
    assert documentation is not None and documentation.split("\n")[0].endswith(".")


@pytest.mark.parametrize("kind", ["Recording", "LiveRecording", "ModuleTracker"])
def test_every_public_method_says_what_it_does(kind: str) -> None:
    methods = [name for name in dir(getattr(modtrace, kind)) if not name.startswith("_")]
    assert len(methods) >= 6
    silent = [name for name in methods if not inspect.getdoc(getattr(getattr(modtrace, kind), name))]
    assert silent == []


def test_star_import_brings_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from modtrace import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == sorted(PUBLIC)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'modtrace' has no attribute 'recrd'$"):
        modtrace.recrd  # noqa: B018


def test_version_is_that_of_the_project() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{modtrace.__version__}"' in project


def test_opening_a_recording_loads_no_torch(folder: Path) -> None:
    code = "import modtrace, sys; print(modtrace.open_recording('run.modtrace')); print(*sys.modules)"
    done = run_python(code, cwd=folder)
    assert "Net     Net" in done.stdout
    assert "torch" not in done.stdout.split()  # pandas may be: pyarrow loads it where it is installed


def test_recording_opens_where_there_is_no_torch(folder: Path) -> None:
    code = """
import modtrace
recording = modtrace.open_recording("run.modtrace")
print(recording.table("calls").num_rows, recording.meta.complete)
print(recording.frame("modules")["path"].tolist())
recording.write("copy.modtrace")
print(recording)
"""
    done = run_python(WITHOUT_TORCH + code, cwd=folder)
    assert done.stderr == ""
    assert done.stdout.splitlines()[:4] == [
        "2 True",
        "['', 'fc']",
        "train.py",
        "step 0 (train), 10.0us; 1 step recorded",
    ]
    assert (folder / "copy.modtrace" / "recording.json").exists()


def test_recording_is_shown_where_there_is_no_torch(folder: Path) -> None:
    done = run_without_torch("show", "run.modtrace", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "└─ fc   Linear" in done.stdout


def test_recording_and_tracking_where_there_is_no_torch_say_how_to_get_it(tmp_path: Path) -> None:
    code = """
import modtrace
try:
    modtrace.record()
except ImportError as error:
    print(type(error).__name__, isinstance(error, modtrace.ModtraceError), error.name, error)
try:
    modtrace.ModuleTracker
except modtrace.ModtraceError as error:
    print(error)
"""
    done = run_python(WITHOUT_TORCH + code, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        f"MissingLibraryError True torch modtrace.record() (modtrace record) {HOW_TO_GET_TORCH}",
        f"modtrace.ModuleTracker {HOW_TO_GET_TORCH}",
    ], done.stderr


def test_recording_a_script_where_there_is_no_torch_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print('ran')")
    done = run_without_torch("record", "x.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"modtrace: error: modtrace.record() (modtrace record) {HOW_TO_GET_TORCH}\n"
    assert [each.name for each in tmp_path.iterdir()] == ["x.py"]


def test_frame_where_there_is_no_pandas_says_how_to_get_it(folder: Path) -> None:
    code = """
import modtrace
try:
    modtrace.open_recording("run.modtrace").frame("calls")
except modtrace.ModtraceError as error:
    print(error)
"""
    done = run_python(WITHOUT_TORCH.replace('"torch"', '"pandas"') + code, cwd=folder)
    assert done.stdout == (
        "Recording.frame() needs pandas, which is not installed here. "
        "Install it with `pip install 'modtrace[frame]'`, or use .table(...), which needs no pandas.\n"
    )
