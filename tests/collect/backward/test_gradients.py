"""No thread reads a gradient that another may free."""

import threading

import torch

from modtrace.torch_internals.gradients import backward_begins, read_gradients

TIMEOUT_S = 30


def read_from_a_new_thread(parameter: torch.Tensor) -> list[torch.Tensor | None] | None:
    found = []
    thread = threading.Thread(target=lambda: found.append(read_gradients([parameter, None])))
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0]


def test_gradients_are_read_unless_another_living_thread_called_a_backward():
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    backward_begins()
    assert read_from_a_new_thread(weight) is None
    begun, ended = threading.Event(), threading.Event()

    def train() -> None:
        backward_begins()
        begun.set()
        assert ended.wait(TIMEOUT_S)

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(TIMEOUT_S)
    assert read_gradients([weight]) is None
    ended.set()
    thread.join(TIMEOUT_S)
    assert read_gradients([weight, None]) == [weight.grad, None]
