"""A program that frees deep autograd graphs under tools of ours.

Arguments: main or thread, the size of its stack in bytes, the number of nodes, of module calls, the tools.
"""

import contextlib
import resource
import sys
import threading
from typing import Any

import torch
from torch import nn

import modtrace

#: What has walked deep graphs, or hooked their tensors, and how to start it.
TOOLS = {
    "calls": lambda model: modtrace.record(model, values=None),
    "values": lambda model: modtrace.record(model),
    "inputs": lambda model: modtrace.record(model, values=modtrace.Capture(roles=["input", "grad_input"])),
    "ops": lambda model: modtrace.record(model, ops=True, values=None),
    "backward_times": lambda model: modtrace.record(model, backward_times=True),
    "track": lambda model: modtrace.track(model, include="part"),
    "hooks": lambda model: hooked_tracker(),
}

#: Some 1,500 nodes that are freed inside of each other overflow it.
SMALL_STACK = 256 * 1024


class Chain(nn.Module):
    """Calls a part again and again, so that each call's output has one node, and then adds to it for as long."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.part = nn.Identity()
        self.part.forward = lambda x: x + 1  # type: ignore[method-assign]

    def forward(self, calls: int, additions: int) -> torch.Tensor:
        x = self.weight * 1
        for _ in range(calls):
            x = self.part(x)
        for _ in range(additions):
            x = x + 1
        return x


@contextlib.contextmanager
def hooked_tracker() -> Any:
    with modtrace.ModuleTracker() as tracker:
        tracker.register_user_hooks(*[lambda *_: None] * 4)
        yield tracker


def run(tool: str, nodes: int, calls: int) -> None:
    """Frees a graph that ran backward within the tool, and one that goes on after it."""
    model = Chain()
    with TOOLS[tool](model):
        kept = model(calls, nodes - calls)
        kept.sum().backward(retain_graph=True)
        model(calls, nodes - calls).sum().backward()
    kept.sum().backward()


def run_oddly(tool: str, nodes: int, calls: int) -> None:
    """Frees graphs of which nothing ran, of which a part ran, and whose lower half outlives the upper one."""
    model = Chain()
    with TOOLS[tool](model):
        model(calls, nodes - calls)
        broken = model(calls, nodes - calls)
        broken.register_hook(lambda _: 1 / 0)
        end = broken
        for _ in range(nodes):
            end = end + 1
        with contextlib.suppress(ZeroDivisionError):
            end.sum().backward()
        del end, broken
        middle = end = model(calls, nodes - calls)
        for _ in range(nodes):
            end = end + 1
        end.sum().backward(retain_graph=True)
        del end
    del middle


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, *numbers = sys.argv[1:5]
    stack, nodes, calls = map(int, numbers)
    for name in sys.argv[5:]:
        if where == "thread":
            threading.stack_size(stack)
            thread = threading.Thread(target=run_oddly, args=(name, nodes, calls))
            thread.start()
            thread.join()
        else:
            resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))
            run(name, nodes, calls)
        print(name, "freed", flush=True)
