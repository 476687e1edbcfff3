"""The Python of each page of docs runs as it stands, one block behind the other, and prints what the page says.

A block in a fence without a language that follows Python directly is what that Python prints, up to small differences
of numbers.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_ends import end_of_modtrace
from helpers.programs import needs_program

DOCS = Path(__file__).parents[2] / "docs"

#: A fence with its language and, if nothing but an empty line stands between, the output behind it.
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")

#: Pages whose Python tests elsewhere run, parse or compare with what makes the page's pictures.
ELSEWHERE = {
    "export.md": "tests/store/test_parquet.py, tests/api/test_model_graph_pictures.py",
    "frameworks.md": "tests/integrations/test_frameworks_page.py",
    "how-it-works.md": "tests/test_docs.py",
    "notebooks.md": "tests/pages/test_notebook.py",
    "pytest.md": "tests/integrations/test_pytest_plugin.py",
    "ranks.md": "tests/integrations/test_debug_server.py",
    "tensors.md": "tests/pages/test_tensors_page.py",
    "track.md": "tests/collect/stash/test_stash.py",
    "vocabulary.md": "tests/test_docs.py",
}

PAGES = {
    page.name: blocks
    for page in sorted(DOCS.glob("*.md"))
    if page.name not in ELSEWHERE and (blocks := PYTHON.findall(page.read_text(encoding="utf-8")))
}

#: A reader's program, with a recording of it.
RECORDED = """
from collections import OrderedDict

import torch
from torch import nn

import modtrace



class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x):
        return self.mlp(x).relu()


def make_net():
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(Block(), Block()), head=nn.Linear(4, 1)))


model = make_net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = x = torch.ones(2, 4)


def train_step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


with modtrace.record(model, to="train.modtrace", ops=True) as rec:
    for _ in range(8):
        train_step(batch)
"""

#: One that looks at images instead.
ON_IMAGES = """
images = torch.ones(1, 3, 224, 224)
model = nn.Sequential(OrderedDict(blocks=nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())))


def train_step(batch):
    for _ in range(4):
        model(images).mean().backward()
        model.zero_grad()
"""

#: What readers of a page have already, as it shows parts of their programs.
GIVEN = {
    "check.md": RECORDED,
    "compare.md": RECORDED
    + """
class Port(nn.Module):
    def __init__(self, layers, attention):
        super().__init__()
        blocks = [nn.ModuleDict({attention: nn.Linear(4, 4)}) for _ in range(4)]
        self.add_module(layers, nn.ModuleList(blocks))

    def forward(self, x):
        for block in next(self.children()):
            x = next(block.children())(x)
        return x


reference, port, tokens = Port("blocks", "attn"), Port("layers", "self_attn"), batch
""",
    "compile.md": RECORDED
    + """
torch.compile(model, backend="eager")(x)
with modtrace.record(model) as rec:
    compiled = torch.compile(lambda x: (model(x), torch._dynamo.graph_break(), model(x))[0], backend="eager")
    for _ in range(3):
        compiled(x).mean().backward()
torch.compile = lambda model, compile=torch.compile, **how: compile(model, backend="aot_eager", **how)
""",
    "for-agents.md": RECORDED,
    "graph.md": RECORDED + ON_IMAGES,
    "module-paths.md": RECORDED + "Attention = nn.MultiheadAttention",
    "module-tree.md": RECORDED,
    "nonfinite.md": RECORDED + "with modtrace.record(model, ops=True) as rec: model(x / 0)",
    "pictures.md": RECORDED + ON_IMAGES,
    "query.md": RECORDED.replace("range(8)", "range(102)")
    + """
from pathlib import Path
from modtrace.store.parquet import write_parquet

write_parquet(modtrace.open_recording("train.modtrace").data, "runs.parquet")
for folder in [*Path("runs.parquet").rglob("run=*")]:
    folder.rename(folder.with_name("run=27f1702f"))
""",
    "verify.md": """
import torch
from torch import nn


class Model(nn.Linear):
    def forward(self, tokens, labels):
        return (super().forward(tokens) - labels).square().mean()


model, tokens, labels = Model(4, 4), torch.ones(2, 4), torch.zeros(2, 4)
""",
    "view.md": RECORDED + "rec.write('other.modtrace')",
}

#: A package that is not installed, of which modtrace has all names.
TENSOR_TRACKER = (
    "import sys, modtrace.tensor_tracker; sys.modules['tensor_tracker'] = modtrace.tensor_tracker"
)
GIVEN["coming-from-tensor-tracker.md"] = TENSOR_TRACKER


#: Pages of which each block is a program of its own.
OF_PROGRAMS = {"cookbook.md"}


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    code = ["import os; os.environ['COLUMNS'] = '80'", GIVEN.get(page, "")]
    if any("write_svg(" in block or "write_png(" in block for block, _ in PAGES[page]):
        needs_program("dot")
    for number, (block, _) in enumerate(PAGES[page]):
        program = f"exec({block!r}, {{'__name__': '__main__'}})" if page in OF_PROGRAMS else block
        code += [f"print('\\nblock {number}')", program]
    done = end_of_modtrace(tmp_path, before="\n".join([*code, "raise SystemExit"]))
    assert done.status == 0, done.stderr
    printed = re.split(r"^block \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    for (block, said), output in zip(PAGES[page], printed, strict=True):
        if said:
            assert NUMBER.sub("0", output.strip()) == NUMBER.sub("0", said.strip()), block
            found, expected = (list(map(float, NUMBER.findall(text))) for text in (output, said))
            assert found == pytest.approx(expected, rel=0.05, abs=1e-6)


def test_recipe_of_a_test_passes_once_its_golden_recording_is_written(tmp_path: Path) -> None:
    [recipe] = [block for block, _ in PAGES["cookbook.md"] if "def test_" in block]
    (tmp_path / "test_block.py").write_text(recipe)
    program = """
import pytest
options = ["-q", "-p", "no:cacheprovider", "."]
raise SystemExit(pytest.main([*options, "--modtrace-update"]) or pytest.main(options))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "golden" / "block.golden").exists()
