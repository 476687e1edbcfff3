"""Tests that need a program are skipped without it, and fail without it where CI is "true"."""

import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import programs
from helpers.programs import load_model_explorer, needs_program

PROJECT = Path(__file__).parent.parent

#: What CI makes, in this order.
MAKES = [
    "make test",
    "make test-long",
    "make test-device",
    "make viewer",
    "make tools",
    "make -j2 -Otarget test-browser test-compile test-spark test-base",
]


def test_program_that_is_there_is_found() -> None:
    assert needs_program("sh") == shutil.which("sh")


def test_without_its_program_a_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception) as raised:
        needs_program("no-such-program")
    assert str(raised.value) == "the program 'no-such-program' is not installed (.ci/run installs it)"


def test_without_its_program_a_test_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception) as raised:
        needs_program("no-such-program")
    assert str(raised.value) == (
        "the program 'no-such-program' is not installed (.ci/run installs it), and CI is 'true': all tests must run"
    )


def test_model_explorer_is_loaded_without_its_server() -> None:
    builder = load_model_explorer("graph_builder")
    node = builder.GraphNode(id="a", label="addmm", namespace="blocks/0")
    assert (node.id, node.label, node.namespace) == ("a", "addmm", "blocks/0")
    data = load_model_explorer("node_data_builder")
    assert data.NodeDataResult(value=3).value == 3


def test_without_model_explorer_a_test_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(programs, "_MODEL_EXPLORER", tmp_path)
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(pytest.skip.Exception, match="ai-edge-model-explorer is not installed"):
        load_model_explorer("graph_builder")


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """A copy of `.ci/run` on a machine that has few programs, none of them `dot`; they write down what they do."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    _add_program(programs, "make", 'echo "make $*"')
    _add_program(programs, "chromium", "exit 0")
    _add_program(programs, "java", "exit 0")
    _add_program(programs, "git", "exit 0")
    (tmp_path / ".ci").mkdir()
    shutil.copy(PROJECT / ".ci" / "run", tmp_path / ".ci" / "run")
    return tmp_path


def _add_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
    (folder / name).chmod(0o755)


def run_ci(machine: Path) -> list[str]:
    done = subprocess.run(
        [machine / ".ci" / "run"],
        env={"PATH": str(machine / "bin")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_ci_installs_nothing_where_the_program_is_there(bare_machine: Path) -> None:
    _add_program(bare_machine / "bin", "dot", "exit 0")
    _add_program(bare_machine / "bin", "apt-get", 'echo "apt-get $*"')
    assert run_ci(bare_machine) == MAKES


def test_ci_installs_the_missing_programs_as_root(bare_machine: Path) -> None:
    for name in ("chromium", "java"):
        (bare_machine / "bin" / name).unlink()
    _add_program(bare_machine / "bin", "id", "echo 0")
    _add_program(bare_machine / "bin", "apt-get", 'echo "apt-get $*"')
    assert run_ci(bare_machine) == [
        ".ci/run: dot is missing; installing graphviz with apt-get",
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends graphviz",
        ".ci/run: chromium is missing; installing chromium with apt-get",
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends chromium",
        ".ci/run: java is missing; installing default-jre-headless with apt-get",
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends default-jre-headless",
        *MAKES,
    ]


def test_ci_installs_the_missing_program_with_sudo_where_it_asks_for_no_password(bare_machine: Path) -> None:
    _add_program(bare_machine / "bin", "id", "echo 1000")
    _add_program(bare_machine / "bin", "sudo", '[ "$2" = true ] || echo "sudo $*"')
    _add_program(bare_machine / "bin", "apt-get", "exit 1")
    assert run_ci(bare_machine) == [
        ".ci/run: dot is missing; installing graphviz with apt-get",
        "sudo -n apt-get update -qq",
        "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends graphviz",
        *MAKES,
    ]


def test_ci_goes_on_where_it_may_not_install(bare_machine: Path) -> None:
    _add_program(bare_machine / "bin", "id", "echo 1000")
    _add_program(bare_machine / "bin", "sudo", "exit 1")
    _add_program(bare_machine / "bin", "apt-get", "exit 1")
    assert run_ci(bare_machine) == [
        ".ci/run: dot is missing; install it with: sudo apt-get install graphviz",
        *MAKES,
    ]


def test_ci_goes_on_where_the_package_cannot_be_had(bare_machine: Path) -> None:
    _add_program(bare_machine / "bin", "id", "echo 0")
    _add_program(bare_machine / "bin", "apt-get", "exit 100")
    assert run_ci(bare_machine) == [
        ".ci/run: dot is missing; installing graphviz with apt-get",
        ".ci/run: apt-get could not install graphviz",
        *MAKES,
    ]


def test_ci_goes_on_without_apt(bare_machine: Path) -> None:
    assert run_ci(bare_machine) == [
        ".ci/run: dot is missing, and there is no apt-get to install graphviz with",
        *MAKES,
    ]
