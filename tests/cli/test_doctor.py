"""`modtrace doctor`."""

import importlib
import json
import subprocess
import sys

import pytest

from helpers.command_line import run_command
from modtrace.cli.doctor import Diagnosis, Finding, diagnose, render_diagnosis


def test_diagnosis_is_three_tables() -> None:
    diagnosis = Diagnosis(
        versions={"python": "3.11.7", "torch": "2.13.0", "pandas": None},
        cuda="not available",
        torch_names=(
            Finding("torch._C._one", True, "everything"),
            Finding("torch._two", False, "telling recompute from forward"),
        ),
        torch_problem=None,
        kernel="compiled",
        tensor_ids="Python: slower",
        programs=(Finding("dot", False, "graphs as pictures (Graphviz)"),),
    )
    assert render_diagnosis(diagnosis) == (
        "python      3.11.7\n"
        "torch       2.13.0\n"
        "pandas      not installed\n"
        "CUDA        not available\n"
        "kernel      compiled\n"
        "tensor ids  Python: slower\n"
        "\n"
        "name of torch           what is lost without it\n"
        "torch._C._one  found    everything\n"
        "torch._two     missing  telling recompute from forward\n"
        "\n"
        "program           what it is for\n"
        "dot      missing  graphs as pictures (Graphviz)\n"
    )


def test_missing_torch_is_told() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from modtrace.cli.doctor import diagnose, render_diagnosis\n"
        "diagnosis = diagnose()\n"
        "print(diagnosis.torch_names, diagnosis.torch_problem, sep='\\n')\n"
        "print(render_diagnosis(diagnosis))"
    )
    # in a process of its own: what is imported without torch stays half imported
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    names, problem, *report = done.stdout.splitlines()
    assert names == "()"
    assert problem.startswith("ModuleNotFoundError: ") and "torch" in problem
    for told in ("CUDA", "kernel", "tensor ids"):
        assert any(line.startswith(told) and " unknown (ModuleNotFoundError: " in line for line in report), (
            told
        )
    assert any(
        line.startswith("names of torch: not looked for, because ModuleNotFoundError: ") for line in report
    )


def test_every_name_of_torch_is_looked_for() -> None:
    from modtrace.torch_internals.doctor_checks import PRIVATE_NAMES

    assert len(diagnose().torch_names) == len(PRIVATE_NAMES)


def test_doctor_gives_json_and_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "versions",
        "cuda",
        "kernel",
        "tensor_ids",
        "torch_names",
        "torch_problem",
        "programs",
    ]
    assert found["versions"]["modtrace"] == "0.1.0"


@pytest.mark.parametrize(
    ("part", "module", "name"),
    [
        ("kernel", "modtrace.measure.native_moments", "measure_into"),
        ("tensor_ids", "modtrace.collect.tensor_ids.tensor_ids", "compiled"),
    ],
)
def test_part_that_is_compiled_is_told(part: str, module: str, name: str) -> None:
    is_compiled = getattr(importlib.import_module(module), name) is not None
    said = getattr(diagnose(), part)
    assert (said == "compiled") is is_compiled
    assert not said.startswith("unknown")


@pytest.mark.parametrize("part", ["kernel", "tensor_ids"])
def test_part_that_is_not_compiled_is_told_with_what_that_costs(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modtrace.measure.native_moments.measure_into", None)
    monkeypatch.setattr("modtrace.collect.tensor_ids.tensor_ids.compiled", None)
    said = getattr(diagnose(), part)
    assert ": no C compiler was there at installation, so " in said
