"""A recording of every kind of model proves itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers.more_architectures import TWENTY
from helpers.proved import SMALL, Calls

NAMES = [
    "determinism",
    "op count",
    "replay in order",
    "replay in random order",
    "perturbation",
    "undeclared writes",
    "paths",
    "outputs",
    "gradients",
    "nothing left behind",
]

SPARSE = "it works with a tensor of layout sparse_coo, which has no storage"


@pytest.mark.parametrize("name", SMALL)
def test_recording_of_a_model_with_a_difficulty_is_proved(seeded, name):
    model, args, kwargs = SMALL[name]()
    found = modtrace.verify(model, args, kwargs)
    assert found, f"\n{found}"
    assert [each.name for each in found.checks] == NAMES
    allowed = {"backward"} if name == "None" else set()
    assert {what for what, _ in found.unchecked} == allowed


@pytest.mark.parametrize("name", ["GPT-2", "Mamba-2"])
def test_recordings_of_some_architectures_are_proved(seeded, name):
    prove_architecture(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", TWENTY)
def test_recording_of_every_architecture_is_proved(seeded, name):
    prove_architecture(name)


def prove_architecture(name):
    model, inputs = TWENTY[name]()
    found = modtrace.verify(model, (), inputs)
    assert found, f"\n{found}"
    assert [each.name for each in found.checks] == NAMES
    assert found.unchecked == ()


def test_checks_say_how_much_they_have_looked_at(seeded):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = modtrace.verify(model, (torch.randn(2, 4),))
    said = {each.name: each.why for each in found.checks}
    count = int(said["op count"].split()[0])
    assert count > 10
    assert said == {
        "determinism": "two unrecorded runs of the model gave the same bits",
        "op count": f"{count} ops, as another counter has seen them",
        "replay in order": f"{count} ops gave the same bits again",
        "replay in random order": f"{count} ops gave the same bits again",
        "perturbation": said["perturbation"],
        "undeclared writes": "no op has changed what it is recorded to read only",
        "outputs": "1 tensors are bit by bit those of an unrecorded run",
        "gradients": "2 tensors are bit by bit those of an unrecorded run",
        "paths": "3 modules are where their paths lead",
        "nothing left behind": "hooks, modes, generators and the model are as before",
    }
    assert dict(found.exempt) == {"only its shape is used": 1}  # the root gradient: ones_like(output)


OPS = {
    "an op whose memory is partly unwritten": lambda x: F.ctc_loss(
        x.unsqueeze(1).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
    ),
    "in-place ops that change the view": lambda x: x.clone().squeeze_().t_().unsqueeze_(0) * 2,
    "a tensor that grows": lambda x: x.detach().clone().resize_(40)[:24] * x.flatten(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float() * x,
    "one element with a stride of 0": lambda x: x.quantile(0.5),
    "more of a storage than the view shows": lambda x: x.clone()[1:].as_strided((2, 2), (1, 1), 0) * 2,
    "a sort and a mask": lambda x: x.sort(0).values[x > 0].cumsum(0),
    "numbers that Python reads": lambda x: x * x.detach().sum().item() if (x > -99).all() else x,
}


@pytest.mark.parametrize("name", OPS)
def test_recording_of_an_op_with_a_difficulty_is_proved(seeded, name):
    found = modtrace.verify(Calls(lambda model, x: OPS[name](x)), (torch.randn(6, 4, requires_grad=True),))
    assert found, f"\n{found}"
    assert found.unchecked == ()


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: modtrace.record(ops=True),
    ],
    ids=["autocast", "inference mode", "default device", "another recording"],
)
def test_recording_is_proved_inside_of_what_the_user_has_entered(seeded, around):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with around():
        found = modtrace.verify(model, (x,))
    assert found, f"\n{found}"


def test_memory_that_is_taken_away_and_given_back_is_not_touched_meanwhile(seeded):
    class Freeing(nn.Module):
        def forward(self, x):
            h = x * 2
            size = h.untyped_storage().nbytes()
            view = h.view(-1)
            h.untyped_storage().resize_(0)
            view.shape  # noqa: B018
            view.detach()
            h.untyped_storage().resize_(size)
            return h.copy_(x) + 1

    with torch.no_grad():
        found = modtrace.verify(Freeing(), (torch.randn(64, 64),))
    assert found, f"\n{found}"


def test_op_that_cannot_run_again_is_listed_with_the_reason(seeded):
    model = nn.Embedding(8, 4, sparse=True)
    found = modtrace.verify(model, (torch.tensor([1, 2, 2]),))
    assert found, f"\n{found}"
    assert ("replay of 1 aten.clone.default", SPARSE) in found.unchecked
    assert {why for _, why in found.unchecked} == {SPARSE}
    assert (
        found.check("replay in order").why == "7 ops gave the same bits again, 5 as recorded: see unchecked"
    )


def test_transformed_tensors_and_generators_of_the_users_are_replayed(seeded):
    class Draws(nn.Module):
        def forward(self, x):
            generator = torch.Generator().manual_seed(3)
            noise = torch.rand(x.shape, generator=generator)
            return torch.vmap(lambda row, other: row.sin() * other)(x, noise)

    found = modtrace.verify(Draws(), (torch.ones(3, 2),))
    assert found, f"\n{found}"
    assert [what for what, _ in found.unchecked] == ["backward"]


def test_module_that_the_forward_puts_in_the_place_of_another_is_at_its_path(seeded):
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            self.inner = nn.Tanh()
            return self.inner(x)

    found = modtrace.verify(Replacing(), (torch.randn(2, 4, requires_grad=True),))
    assert found, f"\n{found}"


def test_no_module_is_a_type_error():
    with pytest.raises(TypeError, match=r"^verify\(model=3\): give a torch.nn.Module, not a int$"):
        modtrace.verify(3)


def test_arguments_that_are_no_tuple_are_a_type_error():
    with pytest.raises(TypeError, match=r"give a tuple, \(x,\) for one argument, not a Tensor$"):
        modtrace.verify(nn.ReLU(), torch.ones(2))
    with pytest.raises(TypeError, match=r"give a dict of names and values, not a list$"):
        modtrace.verify(nn.ReLU(), (torch.ones(2),), [1])


def test_lazy_parameter_is_a_value_error():
    with pytest.raises(
        ValueError, match=r"^0.weight: this parameter has no shape yet, and could not be put back. "
    ):
        modtrace.verify(nn.Sequential(nn.LazyLinear(4)), (torch.ones(2, 3),))


def test_compiled_calls_are_listed_as_unchecked(seeded):
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))
    with torch.no_grad():
        found = modtrace.verify(model, (torch.randn(3, 4),))
    assert ("ops inside of 1 compiled calls", "compiled code runs past the dispatcher") in found.unchecked
