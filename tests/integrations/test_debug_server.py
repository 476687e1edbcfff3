"""The page of torch's debug server says what runs on each rank, also while the program hangs."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.debug import _debug_handlers
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers import debug_server_ranks
from helpers.command_ends import end_of_modtrace
from modtrace.integrations.debug_server import add_handler, describe_running, remove_handler

PATIENCE_S = 120


@pytest.fixture(autouse=True)
def page_is_removed() -> Iterator[None]:
    yield
    remove_handler()


class WaitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.wait()
        return grad, None


class Waits(nn.Module):
    """Waits in forward, in backward or in its recompute until it is told to go on."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.phase, self.calls = phase, 0
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.is_there.set()
        assert self.may_go_on.wait(PATIENCE_S)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == {"forward": 1, "recompute": 2}.get(self.phase):
            self.wait()
        x = self.linear(x)
        return WaitInBackward.apply(x, self.wait) if self.phase == "backward" else x


class Net(nn.Module):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self.first, self.waits = nn.Linear(4, 4), Waits(phase)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.waits.phase == "recompute":
            return checkpoint(self.waits, x, use_reentrant=False)
        return self.waits(x)


def while_it_waits(phase: str, **options: Any) -> list[str]:
    """The lines of the page while another thread waits, without times."""
    net = Net(phase)
    with modtrace.record(net, **options):
        thread = threading.Thread(target=lambda: net(torch.ones(2, 4)).sum().backward())
        thread.start()
        assert net.waits.is_there.wait(PATIENCE_S)
        text = describe_running()
        net.waits.may_go_on.set()
        thread.join()
    return re.sub(r"for [\d.]+ ?[a-zµ]+", "for a while", text).splitlines()


def test_forward_that_hangs_is_shown() -> None:
    assert while_it_waits("forward") == [
        "recording in memory: step 0",
        "thread 0: no call has begun or ended for a while",
        "  forward  Net  for a while",
        "  forward  waits  for a while",
    ]


def test_backward_that_hangs_has_its_modules_with_their_times() -> None:
    shown = while_it_waits("backward", backward_times=True)
    assert shown[2:] == [
        "  backward  (backward)  for a while",
        "  backward  Net  for a while",
        "  backward  waits  for a while",
    ]


def test_every_backward_that_runs_is_shown_with_its_modules() -> None:
    """One that a hook of another one runs is inside of that."""
    inner, outer = nn.Sequential(nn.Linear(4, 4)), Net("forward")
    shown: list[str] = []

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    class Hang(Copied):
        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            shown.append(describe_running())
            return gradient

    class Nested(Copied):
        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with torch.enable_grad():
                Hang.apply(inner(torch.ones(2, 4))).sum().backward()
            return gradient

    outer.waits.may_go_on.set()
    with modtrace.record([inner, outer], backward_times=True):
        Nested.apply(outer(torch.ones(2, 4))).sum().backward()
    lines = [line.split("  for ")[0] for line in shown[0].splitlines()]
    assert [line for line in lines if "backward)" in line] == ["  backward  (backward)"] * 2


def test_backward_without_times_says_how_its_modules_get_known() -> None:
    assert while_it_waits("backward")[2:] == [
        "  backward  (backward)  for a while",
        "  the modules in a backward are known with backward_times=True (--backward-times) or ops=True (--ops)",
    ]


def test_recompute_that_hangs_is_shown_in_its_backward() -> None:
    assert while_it_waits("recompute")[2:] == [
        "  backward  (backward)  for a while",
        "  recompute  waits  for a while",
    ]


def test_optimizer_that_hangs_is_shown() -> None:
    class Slow(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            shown.append(describe_running())

    shown: list[str] = []
    model = nn.Linear(4, 4)
    with modtrace.record(model):
        model(torch.ones(2, 4)).sum().backward()
        Slow(model.parameters(), lr=0.1).step()
    assert "an optimizer steps\n  optimizer  (optimizer)  for " in shown[0]


def test_without_a_recording_the_page_says_so() -> None:
    assert describe_running().startswith("nothing is recorded in this process")


def test_between_calls_nothing_runs() -> None:
    with modtrace.record(nn.Linear(1, 1)):
        assert describe_running() == "recording in memory: step 0\nno module, backward or optimizer runs\n"


def test_handler_is_appended_once_and_removed() -> None:
    before = _debug_handlers.default_handlers
    assert add_handler() and add_handler()
    names = [type(handler).__name__ for handler in _debug_handlers.default_handlers()]
    assert names == [*(type(handler).__name__ for handler in before()), "RunningModules"]
    remove_handler()
    assert _debug_handlers.default_handlers is before


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("tabulate", "the debug server needs tabulate, which is not installed here"),
        ("jinja2", "the debug server needs jinja2, which is not installed here"),
        ("aiohttp requests", "the debug server needs aiohttp, which is not installed here"),
        ("torch.distributed.debug._debug_handlers", "this version of torch has no debug server"),
    ],
)
def test_page_is_left_out_with_a_reason(lacks: str, reason: str, tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys({lacks.split()!r}))
from modtrace.integrations.debug_server import add_handler
print(add_handler())
raise SystemExit
"""
    done = end_of_modtrace(tmp_path, before=program)
    assert (done.status, done.stdout) == (0, "False\n")
    assert (
        f"torch's debug server gets no page of modtrace: {reason}. The run goes on without it." in done.stderr
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The server's port, and the folder of two ranks that hang."""
    folder = tmp_path_factory.mktemp("ranks")
    ports = [free_port() for _ in range(2)]
    program = [sys.executable, debug_server_ranks.__file__, str(folder), *map(str, ports)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            assert running.stdout is not None
            for _ in range(2):
                assert running.stdout.readline() == "hangs\n"
            yield ports[1], folder
        finally:
            os.killpg(running.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def wait_for(look: Callable[[], str | None]) -> str:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = look()
        if found is not None:
            return found
        time.sleep(0.5)
    raise AssertionError("it did not come")


def read_page(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/modtrace", timeout=PATIENCE_S) as page:
            return str(page.read().decode())
    except OSError:  # the server starts
        return None


def test_page_shows_both_ranks_while_they_hang(ranks: tuple[int, Path]) -> None:
    port, folder = ranks
    page = wait_for(lambda: read_page(port))
    first, second = page.split("<h2>Rank ")[1:]
    assert f"{folder}/run.modtrace: step 2" in first and "step 2" in second
    assert re.search(r"forward  Sequential  for .+\n  forward  1  for .+\n", first)
    assert re.search(r"forward  Sequential  for .+\n  forward  1  for .+\n", second)
    assert re.search(
        r"last collective: all_reduce 3 of .+\(step 2, 1, forward\) began .+, and was not seen to end", first
    )
    assert re.search(
        r"last collective: all_reduce 2 of .+\(step 1, 1, forward\) began .+, and ended .+ ago", second
    )


def test_server_writes_the_page_to_files(ranks: tuple[int, Path]) -> None:
    _, folder = ranks

    def first_dump() -> str | None:
        texts = [path.read_text() for path in (folder / "dumps").glob("modtrace_*.txt")]
        return next((text for text in texts if text.count("=== Rank ") == 2), None)

    assert "forward  Sequential" in wait_for(first_dump)
