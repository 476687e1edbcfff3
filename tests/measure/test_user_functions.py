"""A user's function is called with a tensor, and neither the run nor the tensor notices."""

import gc
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.measure.measurers.user_functions import UserFunctions
from modtrace.measure.measurers.want import Extra, ExtraNote
from modtrace.torch_internals.modes import DisableTorchFunction


def call(tensor, *functions, raised=None, extra=None):
    extra = Extra() if extra is None else extra
    UserFunctions(raised or _unexpected).call(tensor, functions, extra)
    return extra


def _unexpected(what, error):
    raise AssertionError(what) from error


def mean(tensor):
    return tensor.mean()


def fails(tensor):
    raise ValueError("bad\nnews")


def test_what_functions_return_is_kept_with_them_in_their_order():
    extra = call(torch.tensor([1.0, 3.0]), mean, len)
    assert extra.user == [(mean, 2.0), (len, 2)]
    assert extra.notes == ()


def test_a_function_is_given_a_detached_tensor_of_the_same_memory():
    given = []
    tensor = nn.Parameter(torch.tensor([1.0, 2.0])) * 1
    call(tensor, lambda each: given.append((each, torch.is_grad_enabled())))
    ((found, has_gradients),) = given
    assert found is not tensor
    assert (found.requires_grad, found.grad_fn, has_gradients) == (False, None, False)
    assert found.data_ptr() == tensor.data_ptr()


def test_it_runs_outside_of_modes_and_autocast():
    def product(tensor):
        return [str((tensor @ tensor).dtype), str(torch.ones(1).device)]

    tensor = torch.ones(2, 2)
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        SeesOps() as ops,
        SeesFunctions() as names,
    ):
        with DisableTorchFunction():
            extra = call(tensor, product)
        seen = list(ops.seen), list(names.seen)
        assert torch.is_autocast_enabled("cpu")
    assert extra.user == [(product, ["torch.float32", "cpu"])]
    assert seen == ([], [])


def test_inference_tensors_are_given_too():
    with torch.inference_mode():
        tensor = torch.tensor([2.0])
        assert call(tensor, mean).user == [(mean, 2.0)]
    assert call(tensor, mean).user == [(mean, 2.0)]


def test_a_transform_that_runs_has_no_say_in_it():
    extras = []

    def function(x):  # to draw inside of vmap is an error
        extras.append(call(torch.ones(2), lambda tensor: (torch.rand(2) + tensor).shape[0]))
        return x

    torch.func.vmap(function)(torch.ones(3))
    assert [value for _, value in extras[0].user] == [2]


def test_what_it_draws_is_put_back():
    def draws(tensor):
        return torch.rand(3)

    before = torch.get_rng_state()
    first = call(torch.ones(1), draws).user
    assert torch.equal(torch.get_rng_state(), before)
    assert call(torch.ones(1), draws).user == first

    def draws_and_fails(tensor):
        torch.rand(3)
        raise OSError

    call(torch.ones(1), draws_and_fails, raised=lambda what, error: None)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_raises_is_a_note_of_each_tensor_and_told_once():
    told = []
    functions = UserFunctions(lambda what, error: told.append((what, repr(error))))
    for _ in range(2):
        extra = Extra()
        functions.call(torch.ones(1), (fails, mean), extra)
        assert extra.notes == (ExtraNote("function fails raised ValueError: bad", "user", fails),)
        assert extra.user == [(mean, 1.0)]
    assert told == [("Capture: the function fails", "ValueError('bad\\nnews')")]


def test_a_warning_that_becomes_an_error_stops_nothing():
    def warns(what, error):
        warnings.warn(what, stacklevel=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extra = call(torch.ones(1), fails, mean, raised=warns)
    assert extra.user == [(mean, 1.0)]


def test_what_json_cannot_hold_is_a_note():
    told = []
    extra = call(torch.ones(1), lambda each: {1, 2}, raised=lambda what, error: told.append(what))
    (note,) = extra.notes
    assert note.text == "function <lambda> raised TypeError: JSON cannot hold a value of type set"
    assert told == ["Capture: the function <lambda>"]


def test_a_function_that_has_raised_is_not_called_again_with_the_same_tensor():
    calls = []

    def fails_each_time(tensor):
        calls.append(1)
        raise ValueError

    extra = call(torch.ones(1), fails_each_time, raised=lambda what, error: None)
    call(torch.ones(1), fails_each_time, extra=extra)
    assert calls == [1]


def test_whoever_keeps_an_error_keeps_no_tensor():
    def deep(tensor):
        inner = tensor * 2
        try:
            fails(inner)
        except ValueError as error:
            raise RuntimeError("outer") from error

    kept = []
    tensor = torch.ones(3)
    storage = weakref.ref(tensor.untyped_storage())
    call(tensor, deep, raised=lambda what, error: kept.append(error))
    del tensor
    gc.collect()
    assert storage() is None
    assert repr(kept[0].__cause__) == "ValueError('bad\\nnews')"


def test_an_error_that_cannot_say_what_it_is_is_named():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def raises_mute(tensor):
        raise Mute

    extra = call(torch.ones(1), raises_mute, raised=lambda what, error: None)
    assert extra.notes[0].text == "function raises_mute raised Mute"


def test_functions_need_be_neither_named_nor_hashable():
    class Counter(list):
        def __call__(self, tensor):
            self.append(1)
            return len(self)

    counter = Counter()
    assert call(torch.ones(1), counter).user == [(counter, 1)]
    failing = type("Failing", (list,), {"__call__": lambda self, tensor: 1 / 0})()
    extra = call(torch.ones(1), failing, raised=lambda what, error: None)
    assert extra.notes[0].text == "function Failing raised ZeroDivisionError: division by zero"


def test_a_function_whose_tensors_are_looked_at_is_not_called_inside_of_itself():
    functions, inner = UserFunctions(_unexpected), Extra()

    def runs_a_module(tensor):
        functions.call(tensor, (runs_a_module,), inner)
        return 1

    outer = Extra()
    functions.call(torch.ones(1), (runs_a_module,), outer)
    assert (outer.user, inner.user) == ([(runs_a_module, 1)], [])
    functions.call(torch.ones(1), (mean,), inner)
    assert inner.user == [(mean, 1.0)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupts_go_through_and_leave_all_as_it_was(stop):
    def stops(tensor):
        torch.rand(1)
        raise stop

    before, functions = torch.get_rng_state(), UserFunctions(_unexpected)
    with pytest.raises(stop):
        functions.call(torch.ones(1), (stops,), Extra())
    assert torch.equal(torch.get_rng_state(), before)
    extra = Extra()
    functions.call(torch.ones(1), (mean,), extra)
    assert extra.user == [(mean, 1.0)]


def test_neither_torchs_result_nor_numpys_view_keeps_the_tensor():
    tensor = torch.ones(3)
    storage, held = weakref.ref(tensor.untyped_storage()), sys.getrefcount(tensor)
    extra = call(tensor, lambda each: {"tensor": each, "view": each[1:].numpy(), "number": np.float32(1)})
    assert extra.user[0][1] == {"tensor": [1.0, 1.0, 1.0], "view": [1.0, 1.0], "number": 1.0}
    assert sys.getrefcount(tensor) == held
    del tensor
    gc.collect()
    assert storage() is None
