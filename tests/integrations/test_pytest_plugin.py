"""The plugin of pytest, in processes of their own: what it imports, its option, and that it hides no coverage."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent.parent

TESTS = """
import os
import sys

from conftest import trace
from net import make_net

def test_first(modtrace):
    model, x = make_net()
    sys.settrace(trace)
    modtrace.assert_same(model, (x,), golden="first")
    assert sys.gettrace() is trace
    sys.settrace(None)
    modtrace.assert_finite(model, (x,))

def test_second(modtrace):
    model, x = make_net()
    model[1].factor = 1 + 1e-6 * int(os.environ.get("PLANTED", 0))
    modtrace.assert_same(model, (x,), golden="parts/second", ops=True)
"""

NET = """
def make_net():
    import torch
    from torch import nn

    class Scale(nn.Module):
        factor = 1.0
        def forward(self, x):
            y = x * self.factor
            return y

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 2)), torch.randn(4, 8)
"""

CONFTEST = """
import sys

def trace(frame, event, argument):
    if not frame.f_code.co_filename.endswith("net.py"):
        return None
    if event == "line":
        print("RAN", frame.f_lineno)
    return trace

def pytest_collection_finish():
    heavy = {"torch", "numpy", "pyarrow", "click"} & set(sys.modules)
    ours = [name for name in sys.modules if name.startswith("modtrace")]
    print("IMPORTED", *sorted([*heavy, *ours]))
"""

[PAGE] = re.findall(
    r"^```python\n(.*?)^```$", (PROJECT / "docs" / "pytest.md").read_text(), re.DOTALL | re.MULTILINE
)

FILES = {
    "test_net.py": TESTS,
    "test_page.py": PAGE,
    "net.py": NET,
    "conftest.py": CONFTEST,
    "pytest.ini": "[pytest]\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two tests, in which the plugin is found by the entry point that pyproject.toml has."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    declared = (PROJECT / "pyproject.toml").read_text().partition("[project.entry-points.pytest11]\n")[2]
    [plugin] = re.findall(r'^modtrace = "(.*)"$', declared.partition("\n[")[0], re.MULTILINE)
    installed = folder / "site" / "declared-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\nmodtrace = {plugin}\n")
    return folder


def _run(project: Path, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(project / "site"), str(PROJECT / "src")]), **variables}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def test_collection_imports_no_library(project: Path) -> None:
    done = _run(project, "--collect-only", "-s", "test_net.py")
    [imported] = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    assert imported == "IMPORTED modtrace modtrace.integrations modtrace.integrations.pytest", done.stdout


def test_plugin_can_be_left_out(project: Path) -> None:
    done = _run(project, "-p", "no:modtrace", "test_net.py")
    assert "fixture 'modtrace' not found" in done.stdout and "2 errors" in done.stdout, done.stdout
    assert (
        "unrecognized arguments: --modtrace-update"
        in _run(project, "-p", "no:modtrace", "--modtrace-update").stderr
    )


def test_workers_write_golden_recordings_and_a_failure_keeps_both_runs(project: Path) -> None:
    done = _run(project, "-n", "2", "--modtrace-update")
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
    written = sorted(str(file.relative_to(project)) for file in project.glob("golden/**/*") if file.is_file())
    assert written == [
        "golden/first.golden", "golden/first.json", "golden/mlp.golden", "golden/mlp.json",
        "golden/parts/second.golden", "golden/parts/second.json",
    ]  # fmt: skip
    planted = _run(project, "-s", PLANTED="1")
    assert "1 failed, 3 passed" in planted.stdout, planted.stdout
    assert "the runs part at mul in 1, step 0, forward" in planted.stdout
    assert "If it should: pytest --modtrace-update test_net.py::test_second" in planted.stdout
    # With CI=true pytest's summary has it once more.
    [kept] = {*re.findall(r"More: modtrace compare (\S+) (\S+) --tolerance=5e-07", planted.stdout)}
    assert all((Path(path) / "recording.json").exists() for path in kept)
    ran = [NET.splitlines()[int(line) - 1].strip() for line in re.findall(r"RAN (\d+)", planted.stdout)]
    assert ran == ["y = x * self.factor", "return y"]
