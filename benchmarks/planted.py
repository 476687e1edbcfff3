"""Whom each tool names for a planted NaN or infinity, without a second run to compare with: `make bench`.

A tool that tells of less than module, op and phase is judged by what it tells: torch's anomaly mode by the node of
autograd, DebugUnderflowOverflow by the module. In the programs of the tests that mean NaN and infinities, each healthy
and with a fault, others than modtrace are asked only whether they say something.
"""

import argparse
import contextlib
import io
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint
from transformers.debug_utils import DebugUnderflowOverflow

import modtrace
from measure import machine, render_table

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from analysis.provenance.healthy_programs import PROGRAMS, names_of

WIDTH, TIME, TOKENS = 32, 8, 16

FUTURE = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)


def mask_future(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(FUTURE, -math.inf)


def mask_whole_row(scores: torch.Tensor) -> torch.Tensor:
    return mask_future(scores).masked_fill(torch.arange(TIME)[:, None] == 3, -math.inf)


def add_lowest(scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.zeros(TIME, TIME).masked_fill(FUTURE, torch.finfo(scores.dtype).min)


def add_lowest_twice(scores: torch.Tensor) -> torch.Tensor:
    lowest = torch.zeros(TIME, TIME).masked_fill(FUTURE, torch.finfo(scores.dtype).min)
    return scores + (lowest + lowest)


def add_written_mask(scores: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(TIME, TIME)
    mask[FUTURE] = -math.inf
    return scores + mask


def add_root(x: torch.Tensor) -> torch.Tensor:
    return x + 0 * (x - x).square().sum(-1, keepdim=True).sqrt()


def take_log_and_exp(x: torch.Tensor) -> torch.Tensor:
    return x.relu().log().exp()


def take_log_in_where(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x.relu().log(), 0.0)


def write_through_view(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[5:7].fill_(math.nan)
    return x


def copy_into_empty(x: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_like(x)
    copied.copy_(x)
    return copied


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = mask_future
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        shares: torch.Tensor = self.mask(q @ k.mT / math.sqrt(WIDTH)).softmax(-1)
        return self.proj(shares @ v)


class Planted(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.fc, self.act, self.out = nn.Linear(WIDTH, 64), Planted(F.gelu), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.out(self.act(self.fc(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.is_checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


class Named(NamedTuple):
    """What is at fault, or what a tool says that is; None: it does not tell that."""

    module: str | None = None
    op: str | None = None
    phase: str | None = None


class Case(NamedTuple):
    """A model with a mistake, or a healthy one if `truth` is None."""

    truth: Named | None
    plant: Callable[[GPT], object] = lambda model: None
    node: str | None = None  # of autograd; None: the mistake is not in backward
    labels: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens


def in_attention(mask: Callable[[torch.Tensor], torch.Tensor], *blocks: int) -> Callable[[GPT], None]:
    def plant(model: GPT) -> None:
        for block in blocks:
            model.blocks[block].attn.mask = mask

    return plant


def in_act(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[GPT], None]:
    def plant(model: GPT) -> None:
        model.blocks[1].act.function = function

    return plant


def overflow(model: GPT) -> None:
    with torch.no_grad():
        model.blocks[1].out.weight.fill_(6e4)
        model.blocks[1].fc.bias.fill_(1.0)
    model.half()


def spoil_weight(model: GPT) -> None:
    with torch.no_grad():
        model.blocks[1].out.weight[2, 3] = math.nan


def use_checkpoints(model: GPT) -> None:
    model.is_checkpointed = True


def fill_empty_memory(model: GPT) -> None:
    """Copies into empty memory, which deterministic torch fills with NaN first: it can hold anything."""
    in_act(lambda x: F.gelu(copy_into_empty(x)))(model)
    torch.use_deterministic_algorithms(True)


ACT = "blocks.1.act"
CASES: dict[str, Case] = {
    "fully masked row": Case(Named("blocks.1.attn", "_softmax", "forward"), in_attention(mask_whole_row, 1)),
    "float16 overflow": Case(Named("blocks.1.out", "addmm", "forward"), overflow),
    "root of 0, backward": Case(Named(ACT, "div", "backward"), in_act(add_root), "SqrtBackward0"),
    "log of 0, absorbed by exp": Case(Named(ACT, "log", "forward"), in_act(take_log_and_exp), "LogBackward0"),
    "log in where, backward": Case(Named(ACT, "div", "backward"), in_act(take_log_in_where), "LogBackward0"),
    "two masks of finite minima": Case(
        Named("blocks.0.attn", "add", "forward"), in_attention(add_lowest_twice, 0, 1, 2)
    ),
    "every label ignored": Case(
        Named(None, "nll_loss_forward"), labels=lambda tokens: torch.full_like(tokens, -100)
    ),
    "NaN in a weight": Case(Named("blocks.1.out", "blocks.1.out.weight", "forward"), spoil_weight),
    "NaN through a view": Case(Named(ACT, "fill_", "forward"), in_act(write_through_view)),
    "healthy": Case(None),
    "healthy, float16": Case(None, lambda model: model.half()),
    "healthy, finite minimum": Case(None, in_attention(add_lowest, 0, 1, 2)),
    "healthy, mask by index": Case(None, in_attention(add_written_mask, 0, 1, 2)),
    "healthy, checkpoints": Case(None, use_checkpoints),
    "healthy, empty memory": Case(None, fill_empty_memory),
}

Train = Callable[[GPT], object]


def ask_modtrace(model: GPT, train: Train) -> Named | None:
    with modtrace.record(model, ops=True) as rec:
        train(model)
    found = rec.first_nonfinite()
    if found is None:
        return None
    op = found.source if found.kind == "source" else (found.op or "").split(".")[1]
    return Named(found.path, op, found.phase)


def ask_anomaly_mode(model: GPT, train: Train) -> Named | None:
    """Returns the node of autograd that torch's error names."""
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            train(model)
    except RuntimeError as error:
        named = re.search(r"Function '(\w+)' returned nan", str(error))
        if named is None:
            raise
        return Named(op=named[1])
    return None


class _Watched(DebugUnderflowOverflow):
    """Remembers which module was looked at last, which the error does not tell."""

    def create_frame(self, module: nn.Module, input: object, output: object) -> None:
        self.looked_at = self.module_names[module]
        super().create_frame(module, input, output)


def ask_underflow_overflow(model: GPT, train: Train) -> Named | None:
    with contextlib.redirect_stdout(io.StringIO()):
        watched = _Watched(model)
        try:
            train(model)
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                raise
            return Named(watched.looked_at)
    return None


def ask_hashes(model: GPT, train: Train) -> Named | None:
    """Returns the first op whose L1 norm is not finite although those of its inputs are."""
    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes(hash_inputs=True):
        train(model)
    inside: list[tuple[int, str]] = []  # the modules that run, with their depths
    for call in mode.operators:
        inside = [each for each in inside if each[0] < call.call_depth]
        if getattr(call, "header", None) == "nn.Mod":
            inside.append((call.call_depth, call.tag.partition(".")[2]))
        elif call.log and is_bad(call.log["hash"]) and not is_bad(call.log.get("input_hash")):
            return Named(inside[-1][1] if inside else None, str(call.op).split(".")[1])
    return None


def is_bad(hashes: object) -> bool:
    if isinstance(hashes, Mapping):
        hashes = list(hashes.values())
    if isinstance(hashes, list | tuple):
        return any(map(is_bad, hashes))
    return isinstance(hashes, float) and not math.isfinite(hashes)


TOOLS: dict[str, Callable[[GPT, Train], Named | None]] = {
    "modtrace": ask_modtrace,
    "detect_anomaly": ask_anomaly_mode,
    "DebugUnderflowOverflow": ask_underflow_overflow,
    "DebugMode hashes": ask_hashes,
}


def ask(tool: str, case: Case) -> str:
    """Returns what a tool says of one training step, and whether that is right."""
    torch.manual_seed(0)
    model = GPT()
    case.plant(model)
    tokens = torch.randint(TOKENS, (4, TIME))

    def train(model: GPT) -> None:
        scores = model(tokens).float()
        F.cross_entropy(scores.flatten(0, 1), case.labels(tokens).flatten()).backward()

    try:
        return judge(tool, case, TOOLS[tool](model, train))
    finally:
        torch.use_deterministic_algorithms(False)


def judge(tool: str, case: Case, named: Named | None) -> str:
    if named is None:
        return "silent"
    told = " in ".join(each for each in (named.op, named.module) if each)
    if case.truth is None:
        return f"false alarm: {told}"
    if tool == "modtrace":
        is_right = named == case.truth
    elif tool == "detect_anomaly":
        is_right = named.op == case.node
    elif tool == "DebugUnderflowOverflow":
        is_right = named.module == case.truth.module
    else:
        is_right = named[:2] == case.truth[:2]
    return "exactly" if is_right else f"wrongly: {told}"


def planted_table(names: Sequence[str]) -> str:
    """Returns what every tool says of these cases, and how often it was right."""
    said = {name: [ask(tool, CASES[name]) for tool in TOOLS] for name in names}
    rows = [[name, *cells] for name, cells in said.items()]
    return render_table(["planted", *TOOLS], rows + totals(said))


def totals(said: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Returns one row for each kind of answer; silence about a healthy model is none of them."""
    kinds = {
        "named exactly": "exactly",
        "named wrongly": "wrongly",
        "silent": "silent",
        "false alarms": "false alarm",
    }
    counts = [
        Counter(
            cells[column].partition(":")[0]
            for name, cells in said.items()
            if CASES[name].truth is not None or cells[column] != "silent"
        )
        for column in range(len(TOOLS))
    ]
    planted = sum(CASES[name].truth is not None for name in said)
    of = {"false alarms": len(said) - planted}
    return [
        [f"{title}, of {of.get(title, planted)}", *(str(count[kind]) for count in counts)]
        for title, kind in kinds.items()
    ]


def ask_program(tool: str, name: str, *, has_fault: bool) -> str:
    """Returns what a tool says of a program that means NaN or infinities."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.make()

    def train(model: nn.Module) -> None:
        program.train(program, model, has_fault)

    if tool != "modtrace":
        return "silent" if TOOLS[tool](model, train) is None else "told"
    with modtrace.record(model, ops=True) as rec:
        train(model)
    found = rec.first_nonfinite()
    if found is None:
        return "silent"
    is_right = found.step == program.step and names_of(found) & set(program.culprits)
    return "named" if has_fault and is_right else "told"


def program_table(names: Sequence[str]) -> str:
    """Returns how often each tool tells of the faults in these programs, and how often of the healthy ones."""
    rows = []
    for tool in (each for each in TOOLS if each != "DebugMode hashes"):  # it ends some of them by an error
        of_faults = Counter(ask_program(tool, name, has_fault=True) for name in names)
        of_healthy = Counter(ask_program(tool, name, has_fault=False) for name in names)
        named = str(of_faults["named"]) if tool == "modtrace" else "-"
        rows.append([tool, named, str(of_faults["named"] + of_faults["told"]), str(of_healthy["told"])])
    return render_table([f"of {len(names)} programs", "faults named", "faults told of", "false alarms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one mistake and one healthy model: does it run?"
    )
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine())
    print(planted_table(["fully masked row", "healthy"] if is_quick else list(CASES)))
    print(program_table(list(PROGRAMS)[:1] if is_quick else list(PROGRAMS)))


if __name__ == "__main__":
    main()
