"""A graph of any depth is freed without overflowing the stack, as soon as it would be without us."""

import contextlib
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from helpers import deep_graphs
from helpers.command_ends import end_of_program
from helpers.deep_graphs import SMALL_STACK, TOOLS
from modtrace.torch_internals.deep_graphs import ReleasedInTurn

#: Loads the module again as where this part is missing: what has imported its functions goes by what it then finds.
WITHOUT = """
import importlib, sys
from modtrace.torch_internals import deep_graphs
sys.modules["modtrace.torch_internals._released_in_turn"] = None
importlib.reload(deep_graphs)
assert deep_graphs.ReleasedInTurn is tuple
"""


def free(
    folder: Path, where: str, stack: int, nodes: int, calls: int, *tools: str, is_compiled: bool = True
) -> list[str]:
    """Runs the helper in a process of its own; returns the tools whose graphs it has freed."""
    script = f"import runpy, sys; runpy.run_path({deep_graphs.__file__!r}, run_name='__main__')"
    if not is_compiled:
        script = f"{WITHOUT}\n{script}"
    arguments = (where, *map(str, (stack, nodes, calls)), *tools)
    stdout = end_of_program(folder, script, *arguments).stdout
    return [line.removesuffix(" freed") for line in stdout.splitlines()]


def test_chain_is_freed_on_the_main_thread(tmp_path):
    assert free(tmp_path, "main", 4 * SMALL_STACK, 8_000, 500, "backward_times") == ["backward_times"]


def test_chain_is_freed_on_a_thread_with_a_small_stack(tmp_path):
    assert free(tmp_path, "thread", SMALL_STACK, 4_000, 1_000, *TOOLS) == [*TOOLS]


@pytest.mark.skipif(sys.version_info[:2] == (3, 13), reason="CPython 3.13 frees tuples 10,000 deep")
def test_chain_is_freed_without_the_compiled_part(tmp_path):
    assert free(tmp_path, "thread", SMALL_STACK, 4_000, 1_000, "backward_times", is_compiled=False) == [
        "backward_times"
    ]


@pytest.mark.soak
@pytest.mark.parametrize("tool", TOOLS)
def test_chain_of_1_000_000_nodes_is_freed(tmp_path, tool):
    assert free(tmp_path, "main", 8 * 2**20, 1_000_000, 20_000, tool) == [tool]


class Token:
    pass


@pytest.mark.parametrize("options", [{}, {"ops": True}, {"backward_times": True}])
def test_nodes_live_no_longer(options):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)])
    with modtrace.record(model, **options):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        tokens, pending = [], [loss.grad_fn]
        while pending:
            node = pending.pop()
            if "token" not in node.metadata:
                node.metadata["token"] = token = Token()
                tokens.append(weakref.ref(token))
                pending += [
                    below for below, _ in node.next_functions if below is not None and below.next_functions
                ]
        del node, token, pending
        assert len(tokens) > 400
        assert all(token() is not None for token in tokens)
        del loss
        assert not any(token() is not None for token in tokens)


# The type alone, where it is compiled.

needs_compiled = pytest.mark.skipif(ReleasedInTurn is tuple, reason="not compiled")


def nested(depth, innermost):
    held = innermost
    for _ in range(depth):
        held = ReleasedInTurn(held)
    return held


@needs_compiled
def test_holders_in_each_other_are_all_released_when_the_outermost_is():
    token = Token()
    seen = weakref.ref(token)
    held = nested(1_000_000, token)
    del token
    assert seen() is not None
    del held
    assert seen() is None


@needs_compiled
def test_threads_release_what_is_theirs():
    released = []

    def release():
        for _ in range(50):
            token = Token()
            seen = weakref.ref(token)
            held = nested(1_000, token)
            del token, held
            released.append(seen() is None)

    threads = [threading.Thread(target=release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert released == [True] * 200


@needs_compiled
def test_exception_that_is_set_stays():
    class Raises:
        def __del__(self):
            with contextlib.suppress(KeyError):
                {}["missing"]

    def fail():
        held = nested(3, Raises())
        raise ValueError("the user's", held)

    with pytest.raises(ValueError, match="the user's"):
        fail()


@needs_compiled
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((), {"held": 1})])
def test_other_arguments_are_refused(args, kwargs):
    with pytest.raises(TypeError):
        ReleasedInTurn(*args, **kwargs)
