"""The Python of docs/tensors.md runs as it stands, one block behind the other."""

import re
from pathlib import Path

from helpers.command_ends import end_of_modtrace

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"


def test_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    done = end_of_modtrace(tmp_path, before="\n".join([*blocks, "raise SystemExit"]))
    assert (done.status, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tensor([[")
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert any(line.endswith("torch.float32 (3, 4)") for line in lines)
