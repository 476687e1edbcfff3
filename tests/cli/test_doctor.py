"""`modtrace doctor`."""

import json
import sys

import pytest

from modtrace.cli.doctor import Diagnosis, Finding, diagnose, render_diagnosis
from modtrace.cli.main import main


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


def test_missing_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name
        for name in sys.modules
        if name.startswith(("modtrace.collect", "modtrace.measure", "modtrace.torch_internals"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)

    diagnosis = diagnose()

    assert diagnosis.torch_names == ()
    assert diagnosis.torch_problem is not None and "torch" in diagnosis.torch_problem
    assert diagnosis.cuda.startswith("unknown (ModuleNotFoundError: ")
    assert diagnosis.kernel.startswith("unknown (ModuleNotFoundError: ")
    assert diagnosis.tensor_ids.startswith("unknown (ModuleNotFoundError: ")
    assert "names of torch: not looked for, because ModuleNotFoundError: " in render_diagnosis(diagnosis)


def test_every_name_of_torch_is_looked_for() -> None:
    from modtrace.torch_internals import CHECKS

    assert len(diagnose().torch_names) == len(CHECKS)


def test_doctor_gives_json_and_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["modtrace", "doctor", "--json"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 0
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
