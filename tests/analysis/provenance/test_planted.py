"""The op that made the first NaN or infinity is named, wherever it is planted."""

import math
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers.nonfinite_models import BY_OP, Applied, record_planted, record_training
from modtrace.analysis.provenance.search import find_absorbed
from modtrace.analysis.values.nonfinite import Aftermath

Function = Callable[[torch.Tensor], torch.Tensor]


def first_in(rec: modtrace.Recording) -> modtrace.NonFinite:
    found = rec.first_nonfinite()
    assert found is not None
    return found


def write_through_view(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = math.nan
    return x


def write_by_index(x: torch.Tensor) -> torch.Tensor:
    return x.clone().index_put_((torch.tensor([1]),), torch.tensor(math.nan))


def masked_softmax(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(4, 8)
    mask[:, 2:] = -math.inf
    mask[3] = -math.inf
    return (x + mask).softmax(-1)


FORWARD: list[tuple[str, Function, str, str]] = [
    ("fully masked row", masked_softmax, "aten._softmax.default", "fully masked row"),
    ("exp of what is large", lambda x: (x * 200).exp(), "aten.exp.default", "exp overflow"),
    ("log of 0, absorbed by exp", lambda x: (x * (x > 0)).log().exp(), "aten.log.default", "log of 0"),
    ("log of a negative number", lambda x: x.log(), "aten.log.default", "log of a negative number"),
    ("root of a negative number", lambda x: x.sqrt(), "aten.sqrt.default", "root of a negative number"),
    (
        "division by a norm of 0",
        lambda x: x / (x * 0).norm(dim=-1, keepdim=True),
        "aten.div.Tensor",
        "division by 0",
    ),
    ("division by the number 0", lambda x: x.abs() / 0, "aten.div.Tensor", "division by 0"),
    (
        "product with infinity",
        lambda x: x + torch.ones(4, 8).triu(1) * -math.inf,
        "aten.mul.Tensor",
        "arithmetic with infinity",
    ),
    (
        "difference of two masks",
        lambda x: x + (torch.full((4, 8), -math.inf) - torch.full((4, 8), -math.inf)),
        "aten.sub.Tensor",
        "arithmetic with infinity",
    ),
    (
        "standard deviation of one element",
        lambda x: x / x[:, :1].std(dim=-1, keepdim=True),
        "aten.std.correction",
        "variance of one element",
    ),
    ("outside of the domain", lambda x: (x * 0 + 2).acos(), "aten.acos.default", "acos at 2"),
    ("at the end of the domain", lambda x: (x * 0 - 1).log1p(), "aten.log1p.default", "log1p at -1"),
    ("pole", lambda x: (x * 0).lgamma(), "aten.lgamma.default", "lgamma of 0"),
    (
        "norm of equal numbers without eps",
        lambda x: F.layer_norm(x * 0, (8,), eps=0),
        "aten.native_layer_norm.default",
        "division by 0",
    ),
    (
        "negative running variance",
        lambda x: F.batch_norm(x, torch.zeros(8), torch.full((8,), -1.0)),
        "aten.native_batch_norm.default",
        "root of a negative number",
    ),
    (
        "sums of both signs that overflow",
        lambda x: x + torch.tensor([3e38, -3e38] * 8).mean(),
        "aten.mean.default",
        "overflow",
    ),
    ("write through a view", write_through_view, "aten.copy_.default", "constant NaN"),
    ("write by index", write_by_index, "aten.index_put_.default", "constant NaN"),
]


@pytest.mark.parametrize(
    ("function", "op", "cause"), [each[1:] for each in FORWARD], ids=[each[0] for each in FORWARD]
)
def test_op_in_forward_is_named_with_its_cause(function: Function, op: str, cause: str) -> None:
    found = first_in(record_planted(function))
    assert (found.step, found.phase, found.path, found.call, found.op) == (0, "forward", "1", 0, op)
    assert (found.kind, found.cause, found.source, found.forward_op) == ("producer", cause, None, None)


@pytest.mark.parametrize(
    ("function", "forward_op", "cause"),
    [
        (
            lambda x: x + (x * 0).pow(2).sum(-1, keepdim=True).sqrt(),
            "aten.sqrt.default",
            "derivative of a root at 0",
        ),
        (lambda x: (x * (x > 0)).sqrt(), "aten.sqrt.default", "derivative of a root at 0"),
        (
            lambda x: torch.where(x > 0, (x * (x > 0)).log(), 0.0),
            "aten.log.default",
            "derivative of log at 0",
        ),
    ],
    ids=[
        "norm written out",
        "root of a product with 0",
        "where around log",
    ],
)
def test_op_in_backward_is_named_with_the_op_whose_derivative_it_is(
    function: Function, forward_op: str, cause: str
) -> None:
    found = first_in(record_planted(function))
    assert (found.step, found.phase, found.path, found.op) == (0, "backward", "1", "aten.div.Tensor")
    assert (found.forward_op, found.cause, found.kind) == (forward_op, cause, "producer")


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda x: (x * 200).exp() / (x * 200).exp().sum(), "subtract the maximum first"),
        (lambda x: (big := (x * 200).exp()) / big.sum(), "subtract the maximum first"),
        (lambda x: x + (x * 200).exp().sum().log(), "subtract the maximum first"),
        (lambda x: x + (x * 200).exp().sum(), "clamp its input"),
    ],
    ids=["softmax with two exponentials", "softmax", "logsumexp", "sum"],
)
def test_maximum_is_to_be_subtracted_where_a_softmax_is_computed_by_hand(
    function: Function, remedy: str
) -> None:
    found = first_in(record_planted(function))
    assert found.cause == "exp overflow" and (found.remedy or "").startswith(remedy)


def test_vectors_of_equal_eigenvalues_have_no_derivative() -> None:
    weight = torch.eye(4, requires_grad=True)
    with modtrace.record(ops=modtrace.Ops(source=True)) as rec:
        torch.linalg.eigh(weight)[1].sum().backward()
    found = first_in(rec)
    assert (found.phase, found.forward_op, found.cause) == (
        "backward", "aten._linalg_eigh.default", "equal eigenvalues",
    )  # fmt: skip


class Halving(torch.autograd.Function):
    """Divides the gradient by 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0


def divide_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 0


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(divide_gradient)
    return x


@pytest.mark.parametrize(
    ("function", "code"),
    [(Halving.apply, Halving.backward.__code__), (lambda x: hooked(x * 2), divide_gradient.__code__)],
    ids=["custom Function", "hook"],
)
def test_code_that_runs_in_backward_has_its_line(function: Function, code: CodeType) -> None:
    found = first_in(record_planted(function, ops=modtrace.Ops(source=True)))
    assert (found.phase, found.op) == ("backward", "aten.div.Tensor")
    last = max(line for _, _, line in code.co_lines() if line is not None)
    assert found.source_line == f"{__file__}:{last}"


def test_backward_of_a_micro_batch_is_named_and_one_with_two_losses_is_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, ops=True) as rec:
        for number in range(3):
            y = model(torch.randn(4, 8))
            torch.autograd.backward([y.sum(), (y * (number != 1)).square().sum().sqrt()])
        optimizer.step()
    found = first_in(rec)
    assert (found.phase, found.forward_op) == ("backward", "aten.sqrt.default")
    assert (found.micro_batch, found.micro_batches) == (1, 3)


def test_value_of_an_earlier_step_is_told_by_the_op_that_made_it_and_is_not_absorbed() -> None:
    torch.manual_seed(0)
    model, kept = nn.Linear(8, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, ops=True) as rec:
        for step in range(4):
            loss = model(torch.randn(4, 8)).square().mean()
            kept.append(loss.detach() / (0.0 if step == 1 else 1.0))
            unused = loss.detach() / 0.0  # nothing reads it
            (loss * kept[max(0, step - 1)]).backward()
            optimizer.step()
            optimizer.zero_grad()
    del unused
    found = first_in(rec)
    assert (found.step, found.kind, found.op) == (2, "source", "aten.mul.Tensor")
    assert found.hint == "div (outside of modules) made it in step 1"
    assert {(each.op, each.op_nth) for each in find_absorbed(rec, 20)} == {("aten.div.Tensor", 1)}


def test_first_argument_that_nothing_reads_is_told_by_what_reads_its_memory() -> None:
    class Second(nn.Module):
        def forward(self, part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.randn(4, 8)
    x[0, 3] = math.nan
    with modtrace.record(Second(), ops=True) as rec:
        Second()(x[:1], x)
    assert first_in(rec).role == "input"


def test_advice_on_data_stays_where_gradients_have_grown() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with modtrace.record(model, ops=True) as rec:
        for step in range(5):
            x = torch.randn(16, 8) * 10**step
            if step == 4:
                x[2, 3] = math.nan
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = first_in(rec)
    assert found.growth and found.remedy == "look at the data of this step"


@pytest.mark.parametrize("ops", [True, False])
def test_micro_batch_is_named(ops: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, ops=ops) as rec:
        for _ in range(2):
            for number in range(4):
                labels = torch.full((4,), -100 if number == 2 else 1)
                F.cross_entropy(model(torch.randn(4, 8)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = first_in(rec)
    assert (found.step, found.micro_batch, found.micro_batches) == (0, 2, 4)


def test_what_a_where_takes_away_in_forward_and_backward_is_nobodys_fault() -> None:
    rec = record_planted(lambda x: torch.where(x > 0, x.clamp(min=0).log(), torch.zeros(())))
    assert rec.first_nonfinite() is None
    assert (rec.table("values")["inf_count"].to_numpy() > 0).any()


def test_loss_over_no_label_is_named_outside_of_modules() -> None:
    torch.manual_seed(0)
    labels = torch.full((4,), -100)
    rec = record_training(
        nn.Linear(8, 4), lambda step: torch.randn(4, 8), loss=lambda y: F.cross_entropy(y, labels)
    )
    found = first_in(rec)
    assert (found.op, found.path, found.cause) == ("aten.nll_loss_forward.default", None, "mean of nothing")


def test_overflow_of_float16_is_named_with_how_near_its_inputs_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)).half()
    with torch.no_grad():
        model[1].weight.mul_(3e4)
    with modtrace.record(model, ops=True, values=BY_OP) as rec:
        model(torch.randn(4, 8).half() * 100).float().mean().backward()
    found = first_in(rec)
    assert (found.step, found.phase, found.path, found.op) == (0, "forward", "1", "aten.addmm.default")
    assert found.cause == "overflow"
    assert found.hint == "beyond 65504, the largest float16; its inputs reach 3750, 6% of it"


def test_weight_that_holds_nan_from_the_start_is_the_source() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].weight[2, 3] = math.nan
    found = first_in(record_training(model, lambda step: torch.randn(4, 8), loss=lambda y: y.square().mean()))
    assert (found.kind, found.source, found.step, found.role) == ("source", "1.weight", 0, "parameter")
    assert (found.path, found.nan_count, found.numel) == ("1", 1, 64)
    assert found.hint == "it held them before the recording, or an op wrote them that was not seen"


def test_parameter_that_holds_minus_infinity_is_no_mask() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[2, 3] = math.nan
        model[1].bias[1] = -math.inf
    with modtrace.record(model, ops=True) as rec, torch.no_grad():
        model(torch.randn(4, 8))
    assert [each.source for each in rec.nonfinite()] == ["0.weight", "1.bias"]


def test_optimizer_that_made_a_parameter_infinite_is_named_with_its_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf, foreach=True)
    with modtrace.record(model, ops=True, values=BY_OP) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    found = first_in(rec)
    assert (found.kind, found.source, found.step) == ("source", "weight", 1)
    assert found.hint == "_foreach_add_ wrote it in step 0, optimizer"


def test_optimizer_that_divides_by_0_is_named_with_its_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0, foreach=False)
    with modtrace.record(model, ops=True) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.eye(8)[:4]).sum().backward()  # four columns of the first weight have no gradient
            optimizer.step()
    found = first_in(rec)
    assert (found.step, found.phase, found.op) == (0, "optimizer", "aten.addcdiv_.default")
    assert (found.source, found.cause, found.nan_count) == ("0.weight", "division by 0", 32)
    assert "made by addcdiv_ in the optimizer, for 0.weight, 64 elements" in str(found)


def test_answer_says_what_was_read_and_where_the_values_went() -> None:
    found = first_in(record_planted(masked_softmax))
    assert found.inputs == ("float32[4, 8], -inf .. 0.1959, from add in 1",)
    assert found.chain == ("addmm in 2", "pow (outside of modules)")
    assert (found.nan_count, found.inf_count, found.numel, found.slot) == (8, 0, 32, "")


def test_infinity_that_the_program_writes_into_rows_is_no_overflow() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1] = math.inf
        return y

    model = nn.Sequential(nn.Linear(8, 8), Applied(write))
    found = first_in(record_training(model, lambda step: torch.randn(4, 8), loss=lambda y: y.mean()))
    assert (found.kind, found.op, found.cause) == ("producer", "aten.fill_.Tensor", "constant infinity")


def test_infinity_that_the_program_writes_into_one_element_is_told_as_a_constant() -> None:
    net = nn.Linear(4, 4)
    with modtrace.record(net, ops=True, strict=True) as rec:
        with torch.no_grad():
            net.bias[2] = -math.inf
        net(torch.ones(2, 4)).square().mean().backward()
    assert first_in(rec).cause == "constant infinity"


@pytest.mark.parametrize("absorb", [torch.tanh, torch.sigmoid], ids=["tanh", "sigmoid"])
def test_op_whose_infinities_were_absorbed_is_not_blamed_for_the_loss(absorb: Function) -> None:
    """The derivative of a power overflows by itself, and another op's NaN has reached the loss."""
    model = nn.Sequential(
        nn.Linear(8, 8), Applied(lambda x: absorb((x * 1e20).pow(3.0))), Applied(lambda x: torch.log(x - 10))
    )
    found = first_in(record_training(model, lambda step: torch.randn(4, 8), loss=lambda y: y.mean()))
    assert (found.path, found.op) == ("2", "aten.log.default")


def test_parameter_that_something_else_wrote_to_is_no_divergence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with modtrace.record(model, ops=True, values=BY_OP) as rec:
        for step in range(5):
            if step == 3:
                with torch.no_grad():
                    model[0].weight.mul_(-1e38)
            model(torch.randn(8, 4) * 10).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = first_in(rec)
    assert found.step == 3
    assert found.remedy is not None and found.remedy.startswith("a parameter jumped in step 3")


def test_module_is_named_where_only_modules_were_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Applied(lambda x: (x * 200).exp()), nn.Linear(8, 2))
    with modtrace.record(model) as rec:
        model(torch.randn(4, 8))
    found = first_in(rec)
    assert (found.path, found.op, found.kind, found.cause) == ("1", None, None, None)


def test_line_of_the_program_is_told_where_it_was_recorded() -> None:
    torch.manual_seed(0)
    model = Applied(lambda x: x.log())
    with modtrace.record(model, ops=modtrace.Ops(source=True), values=BY_OP) as rec:
        model(torch.randn(4, 8))
    found = first_in(rec)
    assert found.source_line is not None
    assert "test_planted.py:" in found.source_line
    assert found.op == "aten.log.default"


def test_first_bad_element_is_told() -> None:
    assert first_in(record_planted(write_by_index)).first_index == (1, 0)


def test_program_that_looks_for_nan_itself_does_not_hide_who_made_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Applied(lambda x: x.log()))
    with modtrace.record(model, ops=True) as rec:
        assert torch.isnan(model(torch.randn(4, 8))).any()
    assert (first_in(rec).op, first_in(rec).path) == ("aten.log.default", "1")


def test_gradient_of_a_square_that_overflows_is_an_overflow_and_no_root() -> None:
    model = Applied(lambda x: (x * 0 + 100).pow(2)).half()
    with modtrace.record(model, ops=True) as rec:
        (model(torch.ones(4, 8).half()).float() * 600).sum().backward()
    found = first_in(rec)
    assert (found.forward_op, found.cause) == ("aten.pow.Tensor_Scalar", "overflow")


def test_infinity_of_an_op_with_small_inputs_is_no_overflow() -> None:
    with modtrace.record(nn.Identity(), ops=True) as rec:
        torch.tensor([0.5, 1.0]).logit()
    assert (first_in(rec).op, first_in(rec).cause) == ("aten.logit.default", "logit at 1")


def test_model_with_sparse_gradients_is_answered_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8, sparse=True), Applied(lambda x: (x * 1000).exp()))
    with modtrace.record(model, ops=True) as rec:
        model(torch.tensor([1, 2])).sum().backward()
    assert first_in(rec).op == "aten.exp.default"


def test_input_whose_shape_alone_is_read_first_is_the_source() -> None:
    class Shaped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x) + x * 2

    with modtrace.record(Shaped(), ops=True) as rec:
        rec_model = Shaped()
        rec_model(torch.from_numpy(numpy.array([1.0, math.nan])))
    assert (first_in(rec).kind, first_in(rec).nan_count) == ("source", 1)


def test_diverging_run_is_told_with_its_figures_and_its_remedy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    with modtrace.record(model) as rec:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    found = first_in(rec)
    assert [each.of for each in found.growth] == ["parameter", "parameter_grad"]
    for each in found.growth:
        steps, numbers = zip(*each.figures, strict=True)
        assert steps[0] == 0 and steps[-1] in (found.step, found.step - 1) and len(steps) <= 5
        assert numbers[-1] > 1000 * numbers[0]
    assert found.remedy == (
        "training diverges: lower the learning rate, clip the gradients (torch.nn.utils.clip_grad_norm_), or warm it "
        "up over the first steps"
    )


def test_run_that_did_not_diverge_keeps_the_remedy_of_its_cause() -> None:
    found = first_in(record_planted(lambda x: x.relu().log(), steps=3))
    assert (found.growth, found.remedy) == ((), "add an epsilon to it, or clamp it")


def test_answer_says_how_far_the_values_came() -> None:
    after = first_in(record_planted(lambda x: x.relu().log())).after
    assert after == Aftermath(
        loss=True, gradients=6, measured_gradients=6, parameters_step=1, last_parameters_step=1
    )
    after = first_in(record_planted(lambda x: x + 0 * (x - x).sqrt())).after  # in backward alone
    assert after is not None
    assert (after.loss, after.gradients, after.parameters_step) == (False, 4, 1)


def test_ops_that_replace_the_values_and_other_makers_of_the_step_are_told() -> None:
    def log_and_divide(x: torch.Tensor) -> torch.Tensor:
        log = (x * (x > 0)).log()
        return log.exp() + 0 * log + x / (0 * x)

    found = first_in(record_planted(log_and_divide, steps=1))
    assert (found.op, found.replaced_by) == ("aten.log.default", ("exp in 1",))
    assert found.others >= 1


def test_op_outside_of_modules_is_said_to_run_after_the_phase_before_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    with modtrace.record(model, ops=True) as rec:
        (model(torch.ones(4, 8)) * 0).log().sum().backward()
    found = first_in(rec)
    assert (found.op, found.phase, found.follows) == ("aten.log.default", None, "forward")


def test_a_later_step_of_another_model_does_not_say_that_the_parameters_stayed_finite() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.is_bad = nn.Linear(4, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return (x * 0).log() if self.is_bad else x

    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    policy, value = Policy(), Value()
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1) for model in (policy, value)}
    with modtrace.record({"policy": policy, "value": value}) as rec:
        for policy.is_bad in (False, True):
            for model, optimizer in optimizers.items():
                optimizer.zero_grad()
                model(torch.randn(8, 4)).mean().backward()
                optimizer.step()
    found = first_in(rec)
    assert (found.step, found.root) == (2, "policy")
    assert found.after is not None and found.after.last_parameters_step == 2
