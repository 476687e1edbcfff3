"""The code of docs/frameworks.md runs as it stands."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import modtrace

PAGE = Path(__file__).parent.parent.parent / "docs" / "frameworks.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
RECORDINGS = {"run.modtrace": (4, 2), "fit.modtrace": (4, 0), "loop.modtrace": (4, 0)}


@pytest.fixture(scope="module")
def accelerator_state() -> Any:
    """Imports the frameworks before what looks at `warnings.formatwarning`, which Lightning replaces."""
    import_module("lightning.pytorch")
    return import_module("accelerate.state").AcceleratorState


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block, recording", [*zip(BLOCKS, RECORDINGS, strict=True)], ids=RECORDINGS)
def test_code_of_the_page_records(
    accelerator_state: Any,
    block: str,
    recording: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator_state._reset_state(reset_partial_state=True)
    exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
    accelerator_state._reset_state(reset_partial_state=True)
    rec = modtrace.open_recording(recording)
    kinds = [row["kind"] for row in rec.table("steps").to_pylist()]
    assert (kinds.count("train"), kinds.count("eval")) == RECORDINGS[recording]
    assert "loss" in {row["name"] for row in rec.table("scalars").to_pylist()}
    assert "median of " in capsys.readouterr().out
