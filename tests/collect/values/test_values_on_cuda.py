"""A recording on CUDA, on a cuda_device driver: what it launches, and that a training thread waits for nothing."""

import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from helpers.cuda_on_cpu import needs_compiler
from modtrace.measure.moments import rows

pytestmark = needs_compiler

EXTRAS = {"stats": 2, "hash": True, "sketch": True}


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.ones(3, 4)).sum().backward()
        self.optimizer.step()


def recorded(training: Training, steps: int, **options) -> "tuple[modtrace.Recording, list[torch.Tensor]]":
    with modtrace.record(training.model, strict=True, **options) as rec:
        for _ in range(steps):
            training.step()
    return rec, [parameter.detach() for parameter in training.model.parameters()]


@pytest.mark.parametrize(
    ("roles", "together"),
    [
        (["parameter", "parameter_grad"], 1),
        (["parameter", "parameter_grad", "update"], 1),  # an update is measured when it has been computed
        (["buffer"], 2),  # float32, and the count of batches
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_what_is_there_together_takes_a_launch_for_each_dtype(cuda_device, roles, together):
    training = Training()
    recorded(training, 1)  # programs are loaded
    cuda_device.reset()
    rec, _ = recorded(training, 3, values=modtrace.Capture(roles=roles))
    alone = 3 * 6 if "update" in roles else 0  # one for each parameter
    assert (cuda_device.copies, cuda_device.launches) == (3 * together, 3 * together + alone)
    assert rec.table("values").num_rows >= 3 * 3


def test_default_takes_one_launch_for_each_tensor_and_one_for_all_parameters(cuda_device):
    training = Training()
    recorded(training, 1)
    cuda_device.reset()
    recorded(training, 3)
    outputs, loss = 4, 1  # that of the model is that of its last layer
    assert (cuda_device.copies, cuda_device.launches) == (3, 3 * (2 * outputs + loss + 1))


def test_every_op_with_statistics_takes_one_launch_for_each_tensor(cuda_device):
    training = Training()
    recorded(training, 1, ops=True)
    cuda_device.reset()
    rec, _ = recorded(training, 3, ops=True)
    values = rec.table("values").to_pylist()
    measured = {(row["step"], row["order"]) for row in values if row["count"] is not None}
    together = 3 * 2 * 6  # the parameters and their gradients, once a step
    assert (cuda_device.copies, cuda_device.launches) == (3, len(measured) - together + 3)


@pytest.mark.parametrize("options", [{}, {"backward_times": True}], ids=["default", "backward times"])
def test_values_and_bits_are_those_of_main_memory(cuda_device, monkeypatch, options):
    on_device, weights = recorded(Training(), 4, **options)
    assert cuda_device.launches > 30
    monkeypatch.undo()
    in_memory, expected = recorded(Training(), 4, **options)
    assert all(map(torch.equal, weights, expected))
    names = [
        "step",
        "phase",
        "site_id",
        "shape",
        "dtype",
        "count",
        "nan_count",
        "inf_count",
        "note",
    ]
    found, known = on_device.table("values"), in_memory.table("values")
    assert found.select(names).to_pylist() == known.select(names).to_pylist()
    for name in ("min", "max", "sum", "sumsq"):
        np.testing.assert_allclose(
            found.column(name).to_pylist(), known.column(name).to_pylist(), rtol=1e-5, atol=1e-5
        )


def test_tier_2_takes_one_launch_more_hash_and_sketch_another_and_nothing_is_copied_back(
    cuda_device, monkeypatch
):
    training, capture = Training(), modtrace.Capture(**EXTRAS)
    recorded(training, 1, values=capture)
    cuda_device.reset()
    monkeypatch.setattr(
        torch.Tensor, "cpu", None, raising=False
    )  # whoever calls it gets an error, and no value
    rec, _ = recorded(training, 3, values=capture)
    outputs, loss = 4, 1
    assert (cuda_device.copies, cuda_device.launches) == (3 * 3, 3 * 3 * (2 * outputs + loss + 1))
    columns = ("sumabs", "zero_count", "sum4", "argmax", "channel_max", "histogram", "hash", "sketch")
    values = rec.table("values")
    without = {"channel_max": 3}  # a loss has no channels
    assert [values.column(name).null_count for name in columns] == [without.get(name, 0) for name in columns]


def test_tier_2_hash_and_sketch_are_those_of_main_memory(cuda_device, monkeypatch):
    capture = modtrace.Capture(
        **EXTRAS, channel_dim=0, roles=["output", "grad_output", "parameter", "buffer"]
    )
    on_device, weights = recorded(Training(), 3, values=capture)
    assert cuda_device.launches > 30
    monkeypatch.undo()
    in_memory, expected = recorded(Training(), 3, values=capture)
    assert all(map(torch.equal, weights, expected))
    found, known = on_device.table("values"), in_memory.table("values")
    exact = ["site_id", "zero_count", "argmax", "channel_max", "histogram", "hash", "note"]
    assert found.select(exact).to_pylist() == known.select(exact).to_pylist()
    for name, tolerance in (("sumabs", 1e-12), ("sum4", 1e-12), ("sketch", 1e-6)):
        columns = (np.array(table.column(name).to_pylist()) for table in (found, known))
        np.testing.assert_allclose(*columns, rtol=tolerance, atol=1e-6 if name == "sketch" else 0)


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["statistics", "extras"])
def test_thread_that_trains_does_not_wait_for_the_device(cuda_device, tmp_path, extras):
    """The device runs nothing before the last step; a thread that waited for its rows would never get there."""
    training = Training()
    only_parameters = modtrace.Capture(roles=["parameter"], **extras)
    recorded(training, 1, values=only_parameters)
    with modtrace.record(
        training.model, strict=True, values=only_parameters, to=tmp_path / "run.modtrace"
    ) as rec:
        training.step()
        cuda_device.defer()  # parameters live on: memory that is freed is used again at once here
        for _ in range(5):
            training.step()
            time.sleep(0.12)  # so that the step's rows are to be written
        cuda_device.run()
        cuda_device.defer(False)
    assert rec.table("values").num_rows == 6 * 6
    assert rec.meta.marks == ()


def test_number_of_a_device_is_read_when_its_step_is_written(cuda_device, tmp_path):
    training, logged = Training(), [torch.tensor(value) for value in (1.5, -0.25, float("nan"), float("inf"))]
    recorded(training, 1)
    logged += [torch.tensor([7]), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(True)]
    with modtrace.record(training.model, strict=True, values=None, to=tmp_path / "run.modtrace") as rec:
        rec.log(early=logged[0])
        training.step()
        cuda_device.defer()
        launches = cuda_device.launches
        for value in logged:
            rec.log(loss=value, twice=2.0)
            rec.step()
            training.step()
            time.sleep(0.02)
        assert cuda_device.launches == launches + len(logged), "a number is a row, too"
        cuda_device.run()
        cuda_device.defer(False)
        with pytest.raises(TypeError, match="a scalar is a number or a tensor with one element"):
            rec.log(loss=torch.ones(2))
    found = rec.table("scalars").to_pylist()
    losses = [row["value"] for row in found if row["name"] == "loss"]
    np.testing.assert_equal(losses, [float(value) for value in logged])
    assert [row["value"] for row in found if row["name"] == "early"] == [1.5]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "log_odd",
    [
        lambda log: log(torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (1,))),
        lambda log: log(torch.zeros(1).to_sparse()),
        lambda log: log(torch.eye(1).to_sparse_csr()),
        lambda log: log(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)),
        lambda log: log(torch.tensor(1 + 2j).conj().imag),
        lambda log: log(torch.tensor(2.0).expand(1, 1)),
        lambda log: log(torch.tensor(2**63 + 5, dtype=torch.uint64)),
        lambda log: log(torch.tensor(2.0, requires_grad=True).square()),
        lambda log: torch.vmap(log)(torch.tensor([1.0, 2.0])),
    ],
)
def test_number_of_an_odd_tensor_is_that_of_main_memory(cuda_device, monkeypatch, log_odd):
    def logged():
        with modtrace.record(strict=True) as rec, suppress(TypeError):
            log_odd(lambda value: rec.log(loss=value))
        return [row["value"] for row in rec.table("scalars").to_pylist()]

    on_device = logged()
    monkeypatch.undo()
    assert on_device == logged()


def test_numbers_that_are_refused_leave_no_rows(cuda_device):
    with modtrace.record(strict=True) as rec:
        for _ in range(1100):
            with pytest.raises(TypeError):
                rec.log(loss=torch.ones(()), name="first")
    assert len(rows.arriving_rows(torch.device("cpu")).blocks) == 1


def test_numbers_of_steps_that_are_not_recorded_leave_no_rows(cuda_device):
    model = nn.Identity()
    with modtrace.record(model, strict=True, values=None, steps="::1000") as rec:
        for _ in range(1100):
            model(torch.ones(1))
            rec.log(loss=torch.ones(()))
            rec.step()
    assert rec.table("scalars").num_rows == 2
    assert len(rows.arriving_rows(torch.device("cpu")).blocks) == 1
