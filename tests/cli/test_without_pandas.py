"""Questions import no pandas: that takes half a second, and pyarrow does it wherever it is asked for numbers."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import modtrace

ASK = """
import contextlib, sys
from modtrace.cli.main import main

folders = sys.argv[1:]
for question in ("show", "nonfinite", "ops", "memory", "paths", "graph", "compare"):
    sys.argv = ["modtrace", question, *(folders if question == "compare" else folders[:1])]
    with contextlib.suppress(SystemExit):
        main()
    print(question, "pandas" in sys.modules, file=sys.stderr)
"""


def test_questions_import_no_pandas(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a.modtrace", "b.modtrace")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        with modtrace.record(model, ops=True, to=folder):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
    done = subprocess.run([sys.executable, "-c", ASK, *folders], capture_output=True, text=True)
    answers = dict(line.split() for line in done.stderr.splitlines())
    assert answers == dict.fromkeys(answers, "False")
    assert len(answers) == 7
