"""`modtrace doctor`."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from helpers.command_line import Command
from modtrace.cli.doctor import Diagnosis, Support, diagnose, render_diagnosis

DIAGNOSIS = Diagnosis(
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "pandas": None},
    cuda="not available",
    torch_names=(
        Support("torch._C._one", True, "everything"),
        Support("torch._two", True, "telling recompute"),
    ),
    torch_problem=None,
    kernel="compiled",
    tensor_ids="not compiled when modtrace was installed: ops cannot be recorded. Install a C compiler.",
    collectives="compiled",
    programs=(Support("dot", False, "graphs as pictures (Graphviz)"),),
)


def test_diagnosis_is_a_line_for_each_part_of_80_columns() -> None:
    assert render_diagnosis(DIAGNOSIS) == (
        "python       3.11.7\n"
        "torch        2.13.0+cpu\n"
        "pandas       not installed\n"
        "CUDA         not available\n"
        "CPU kernels  compiled\n"
        "tensor ids   not compiled when modtrace was installed: ops cannot be recorded.\n"
        "             Install a C compiler.\n"
        "collectives  compiled\n"
        "torch names  all 2 that modtrace needs are found (--all lists them)\n"
        "dot          missing: graphs as pictures (Graphviz)\n"
    )


def test_names_of_torch_that_are_missing_are_told() -> None:
    lost = "telling the recompute of a checkpoint from the forward that it repeats, and its time"
    diagnosis = replace(DIAGNOSIS, torch_names=(*DIAGNOSIS.torch_names, Support("torch._three", False, lost)))
    assert render_diagnosis(diagnosis).split("torch names  ")[1] == (
        "1 of the 3 that modtrace needs are missing\n"
        "dot          missing: graphs as pictures (Graphviz)\n"
        "\n"
        "missing: torch._three\n"
        "    without it is lost: telling the recompute of a checkpoint from the forward\n"
        "    that it repeats, and its time\n"
    )


def test_all_names_of_torch_are_a_table() -> None:
    names = (DIAGNOSIS.torch_names[0], Support("torch._two", False, "telling recompute from forward"))
    text = render_diagnosis(replace(DIAGNOSIS, torch_names=names), with_all=True)
    assert text.split("\n\n")[1] == (
        "name of torch           what is lost without it\n"
        "torch._C._one  found    everything\n"
        "torch._two     missing  telling recompute from forward\n"
    )


def test_doctor_of_this_installation_fits_80_columns(command: Command) -> None:
    lines = command("doctor").out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert f"torch         {torch.__version__}" in lines  # with the build, as +cpu
    assert "torch._C._current_autograd_node" in command("doctor", "--all").out


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
    assert any(line.startswith("CUDA          unknown (ModuleNotFoundError: ") for line in report)
    assert any(
        line.startswith("torch names   not looked for, because ModuleNotFoundError: ") for line in report
    )
    assert "CPU kernels   compiled" in report


def test_every_name_of_torch_is_looked_for() -> None:
    from modtrace.torch_internals.private_names import PRIVATE_NAMES

    assert len(diagnose().torch_names) == len(PRIVATE_NAMES)


def test_doctor_gives_json_and_exit_code_0(command: Command) -> None:
    found = json.loads(command("doctor", "--json").out)
    assert list(found) == [
        "versions",
        "cuda",
        "kernel",
        "tensor_ids",
        "collectives",
        "torch_names",
        "torch_problem",
        "programs",
    ]
    assert found["versions"]["modtrace"] == "0.1.0"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            "measure.moments._moments",
            {"kernel": "measuring values takes three times as long", "tensor_ids": None},
        ),
        (
            "measure.tier2._tier2",
            {"kernel": "counting exponents (stats=2) takes ten times as long", "tensor_ids": None},
        ),
        (
            "collect.tensor_ids._tensor_ids",
            {"kernel": None, "tensor_ids": "ops cannot be recorded"},
        ),
    ],
)
def test_part_that_is_not_compiled_is_told_with_what_that_costs(
    module: str, expected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"modtrace.{module}", None)
    diagnosis = diagnose()
    assert {"kernel": diagnosis.kernel, "tensor_ids": diagnosis.tensor_ids} == {
        part: "compiled"
        if cost is None
        else f"not compiled when modtrace was installed: {cost}. Install a C compiler, then modtrace again."
        for part, cost in expected.items()
    }
