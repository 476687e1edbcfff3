"""What lived when the CPU had no memory for an op is summed up; what the program catches is one line."""

from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from helpers.command_ends import end_of_modtrace
from helpers.findings import check_run
from helpers.health_models import FAMILIES, Stack, train
from modtrace.recording.out_of_memory import is_out_of_memory, requested_bytes

#: No machine has so much.
_TOO_MUCH = 2**60


class _Greedy(nn.Module):
    """Asks for too much in its n-th call."""

    def __init__(self, inner: nn.Module, nth: int = 0) -> None:
        super().__init__()
        self.inner, self.left = inner, nth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            torch.empty(_TOO_MUCH, dtype=torch.uint8)
        return self.inner(x)


def _stack(family: str, nth: int = 0) -> Stack:
    model = Stack(FAMILIES[family])
    model.blocks[1] = _Greedy(model.blocks[1], nth)
    return model


def _find(rec: modtrace.Recording) -> tuple[modtrace.Finding, ...]:
    return check_run(rec, "out-of-memory")


@pytest.mark.parametrize("family", FAMILIES)
def test_op_and_what_lived_are_named(family: str) -> None:
    model, tokens = _stack(family), torch.randint(30, (2, 6))
    with (
        pytest.raises(RuntimeError),
        modtrace.record(model, ops=modtrace.Ops(source=True), strict=True) as rec,
    ):
        model(tokens)
    [found] = _find(rec)
    assert (found.severity, found.path, found.step) == ("error", "blocks.1", 0)
    assert found.op == "aten.empty.memory_format"
    assert found.text.startswith("blocks.1 is out of memory in step 0: one op asks for 1,152,921,504.61 GB, ")
    assert f"size: [{_TOO_MUCH}]" in found.evidence[0]
    line = _Greedy.forward.__code__.co_firstlineno + 3
    assert f"{Path(__file__).name}:{line}; it asked for 1,152,921,504.61 GB" in found.evidence[0]
    [by_line] = [line for line in found.evidence if line.startswith("by line: ")]
    assert "health_models.py:" in by_line
    assert not rec.findings(only=["failed"]).findings
    alive = rec.frame("alive")
    parameters = alive[alive.role == "parameter"]
    assert parameters.bytes.sum() == sum(one.nbytes for one in model.parameters())
    assert set(parameters[parameters.storage.isna()].slot) >= {"weight", "bias"}  # blocks.2 has not run
    of_embedding = tokens.numel() * 16 * 4
    assert of_embedding in alive[alive.role.isna()].bytes.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_ops_the_call_is_named(family: str) -> None:
    model = _stack(family, nth=3)
    with pytest.raises(RuntimeError), modtrace.record(model, strict=True) as rec:
        for _ in range(5):
            model(torch.randint(30, (2, 6))).sum().backward()
            model.zero_grad()
    [found] = _find(rec)
    assert (found.severity, found.path, found.step) == ("error", "blocks.1", 3)
    assert found.text == "blocks.1 is out of memory in step 3: it asked for 1,152,921,504.61 GB"
    assert found.evidence[0].startswith("when step 2 had ended: the process ")
    assert "--ops (ops=True)" in found.remedy


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_program_catches_is_a_note(family: str) -> None:
    model, tokens = _stack(family, nth=1), torch.randint(30, (2, 6))
    with modtrace.record(model, ops=True, strict=True) as rec:
        for _ in range(4):
            try:
                model(tokens).sum().backward()
            except RuntimeError:
                model.blocks[1].left = 1
            model.zero_grad()
    [found] = _find(rec)
    assert found.severity == "note"
    assert found.text == (
        "step 1: blocks.1 asked for 1,152,921,504.61 GB, more than there was; the program went on (as in 1 more step)"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_found_in_a_healthy_run_and_after_another_error(family: str) -> None:
    model = Stack(FAMILIES[family])
    assert not _find(train(model, ops=True))
    with pytest.raises(IndexError), modtrace.record(model, ops=True, strict=True) as rec:
        model(torch.full((2, 6), 99))
    assert not _find(rec)
    assert not rec.table("alive").num_rows


def test_other_error_after_one_that_was_caught_is_not_taken_for_it() -> None:
    model = _Greedy(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes"), modtrace.record(model, ops=True, strict=True) as rec:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 4))
        model.left = 1
        model(torch.randn(3, 5))
    [note] = _find(rec)
    assert note.severity == "note"
    assert rec.findings(only=["failed"]).findings


@pytest.mark.parametrize("ops", [["--ops"], []])
def test_record_prints_it_at_its_end(ops: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "class Big(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        return x + torch.empty({_TOO_MUCH}, dtype=torch.uint8)\n"
        "torch.nn.Sequential(torch.nn.Linear(2, 2), Big())(torch.ones(1, 2))\n"
    )
    done = end_of_modtrace(tmp_path, "record", *ops, "program.py")
    assert done.status == 1
    assert "modtrace: Sequential/1 is out of memory in step 0: " in done.stderr
    assert ("modtrace:   largest: " in done.stderr) == bool(ops)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total", 5 * 2**29),
        ("RuntimeError: MPS backend out of memory (max allowed: 9 GB). Tried to allocate 12 MiB", 12 * 2**20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 77 bytes. Error code 12", 77),
        (
            "RuntimeError: [enforce] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
            8,
        ),
        ("OutOfMemoryError: something else", None),
    ],
)
def test_messages_of_torch_are_read(text: str, size: int | None) -> None:
    assert is_out_of_memory(text)
    assert requested_bytes(text) == size


@pytest.mark.parametrize("text", ["RuntimeError: mat1 and mat2 shapes", "KeyError: 'memory'"])
def test_other_messages_are_left_alone(text: str) -> None:
    assert not is_out_of_memory(text)
