"""Recordings and questions import no pandas: that takes half a second, and pyarrow does it wherever it makes arrays."""

from pathlib import Path

from helpers.command_ends import end_of_modtrace

TRAIN = """
import sys, torch
from torch import nn

torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""

ASK = """
import contextlib, sys
assert "pandas" not in sys.modules
from modtrace.cli.main import main

records = [["record", "--ops", "--to", f"{seed}.modtrace", "train.py", seed] for seed in ("0", "1")]
questions = [[name, "0.modtrace"] for name in ("show", "nonfinite", "ops", "memory", "paths", "graph")]
for words in (*records, *questions, ["compare", "0.modtrace", "1.modtrace"]):
    sys.argv = ["modtrace", *words]
    with contextlib.suppress(SystemExit):
        main()
    print(words[0], "pandas" in sys.modules)
"""


def test_recordings_and_questions_import_no_pandas(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = end_of_modtrace(tmp_path, before=f"{ASK}\nraise SystemExit")
    answers = [line.split() for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert [name for name, _ in answers][:2] == ["record", "record"], done.stderr
    assert len(answers) == 9
    assert [name for name, imported in answers if imported == "True"] == []
