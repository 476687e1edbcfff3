"""Steps are found in ordinary loops without `rec.step()`: their number, their kinds, and what ran in each."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleZBVZeroBubble

import modtrace
from helpers.ranks import group_of_one


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)


class Generator(Net):
    pass


class Discriminator(Net):
    pass


class Criterion(nn.Module):
    def forward(self, y, target):
        return F.mse_loss(y, target)


def batch():
    return torch.randn(2, 4)


def net_and_optimizer():
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train_step(net, optimizer, x):
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def ran(recording):
    """For each step its kind and the forwards of root modules in it, in order: `("train", "Net Net")`."""
    modules = {row["module_id"]: row for row in recording.table("modules").to_pylist()}
    steps = sorted(recording.table("steps").to_pylist(), key=lambda step: step["step"])
    assert [step["step"] for step in steps] == list(range(len(steps)))
    found = []
    for step in steps:
        calls = [
            call
            for call in recording.table("calls").to_pylist()
            if call["step"] == step["step"] and call["phase"] == "forward" and call["parent_call_id"] is None
        ]
        calls.sort(key=lambda call: call["start_ns"])
        found.append((step["kind"], " ".join(modules[call["module_id"]]["type"] for call in calls)))
        assert all(step["start_ns"] <= call["start_ns"] for call in calls)
        assert all(call["end_ns"] <= step["end_ns"] for call in calls)
    return found


def phases(recording, step):
    """How many outermost calls of each phase a step has."""
    counts: dict[str, int] = {}
    for call in recording.table("calls").to_pylist():
        if call["step"] == step and call["parent_call_id"] is None:
            counts[call["phase"]] = counts.get(call["phase"], 0) + 1
    return counts


@pytest.fixture
def record(seeded):
    return lambda *arguments, **options: modtrace.record(*arguments, strict=True, **options)


@pytest.mark.parametrize("cleared", ["before forward", "before backward", "after step"])
def test_where_the_gradients_are_cleared_makes_no_difference(record, cleared):
    net, optimizer = net_and_optimizer()
    with record() as rec:
        for _ in range(3):
            if cleared == "before forward":
                optimizer.zero_grad()
            loss = net(batch()).sum()
            if cleared == "before backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if cleared == "after step":
                optimizer.zero_grad()
    assert ran(rec) == [("train", "Net")] * 3


def test_a_step_that_zero_grad_divides_ends_before_the_forward_that_moves_to_the_next(record):
    net = Net()
    with record(ops=True) as rec:
        for _ in range(3):
            loss = net(batch()).sum()
            net.zero_grad()
            loss.backward()
    assert ran(rec) == [("train", "Net")] * 3
    steps = rec.table("steps").to_pandas().sort_values("step")
    assert (steps.end_ns[:-1].to_numpy() <= steps.start_ns[1:].to_numpy()).all()


def test_micro_batches_are_one_step_while_another_thread_may_write_gradients(record):
    """A thread that has called a backward and lives keeps gradients from being read."""
    net, optimizer = net_and_optimizer()
    has_ended, may_end = threading.Event(), threading.Event()

    def train_once():
        Net()(batch()).sum().backward()
        has_ended.set()
        may_end.wait()

    thread = threading.Thread(target=train_once)
    with record() as rec:
        thread.start()
        has_ended.wait()
        train_step(net, optimizer, batch())
        for _ in range(2):
            for _ in range(3):
                net(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    may_end.set()
    thread.join()
    assert ran(rec)[-2:] == [("train", "Net Net Net")] * 2


def test_a_call_that_runs_while_its_step_is_divided_ends_in_the_next_step(record):
    """The forward of one thread is still running when the backward of another one divides the step."""

    class Waits(Net):
        def forward(self, x):
            y = self.layer(x)
            if threading.current_thread() is thread:
                has_begun.set()
                may_end.wait()
            return y

    net, has_begun, may_end = Waits(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: net(batch()))
    with record() as rec:
        net(batch()).sum().backward()
        loss = net(batch()).sum()
        thread.start()
        has_begun.wait()
        net.zero_grad()
        loss.backward()
        may_end.set()
        thread.join()
    assert ran(rec) == [("train", "Waits"), ("train", "Waits Waits")]
    steps = rec.table("steps").to_pylist()
    assert steps[0]["end_ns"] <= steps[1]["start_ns"]


@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_that_accumulate_gradients_are_one_step(record, to_none):
    net, optimizer = net_and_optimizer()
    with record(backward_times=True) as rec:
        for iteration in range(6):
            net(batch()).sum().backward()
            if iteration % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    assert ran(rec) == [("train", "Net Net Net")] * 2
    assert phases(rec, 0) == {"forward": 3, "backward": 3, "optimizer": 1}


@pytest.mark.parametrize("clear_late", [False, True])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_the_grad_scaler_skips_is_a_step(record, clear_late, to_none):
    net, optimizer = net_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with record() as rec:
        for iteration in range(4):
            if not clear_late:
                optimizer.zero_grad(set_to_none=to_none)
            loss = net(batch()).sum()
            if iteration in (1, 2):
                loss = loss * float("inf")
            if clear_late:
                optimizer.zero_grad(set_to_none=to_none)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ran(rec) == [("train", "Net")] * 4
    assert [phases(rec, step).get("optimizer", 0) for step in range(4)] == [1, 0, 0, 1]


def test_each_optimizer_step_of_a_gan_iteration_ends_a_step(record):
    generator, discriminator = Generator(), Discriminator()
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    with record() as rec:
        for _ in range(2):
            of_discriminator.zero_grad()
            discriminator(batch()).sum().backward()
            fake = generator(batch())
            discriminator(fake.detach()).sum().backward()
            of_discriminator.step()
            of_generator.zero_grad()
            discriminator(fake).sum().backward()
            of_generator.step()
    assert ran(rec) == [
        ("train", "Discriminator Generator Discriminator"),
        ("train", "Discriminator"),
        ("train", "Discriminator Generator Discriminator"),
        ("train", "Discriminator"),
    ]


def test_two_optimizers_after_one_backward_are_one_step(record):
    encoder, decoder = Generator(), Discriminator()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (encoder, decoder)]
    with record() as rec:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            decoder(encoder(batch())).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert ran(rec) == [("train", "Generator Discriminator")] * 3
    assert phases(rec, 2)["optimizer"] == 2


def test_all_evaluations_of_one_lbfgs_step_are_one_step(record):
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)
    inputs, target = batch(), batch()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(inputs), target)
        loss.backward()
        return loss

    with record() as rec:
        for _ in range(3):
            optimizer.step(closure)
    assert ran(rec) == [("train", "Net Net Net")] * 3
    assert phases(rec, 1)["optimizer"] == 1


def fit(net, optimizer):
    """One step of an optimizer that calls the model itself, twice."""

    def closure():
        optimizer.zero_grad()
        loss = net(batch()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_validation_between_lbfgs_steps_is_an_eval_step(record, mode):
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    with record() as rec:
        for _ in range(2):
            fit(net, optimizer)
            with mode():
                net(batch())
                net(batch())
    assert ran(rec) == [("train", "Net Net"), ("eval", "Net"), ("eval", "Net")] * 2
    assert [phases(rec, step)["forward"] for step in range(6)] == [2, 1, 1, 2, 1, 1]
    assert [phases(rec, step).get("optimizer", 0) for step in range(6)] == [1, 0, 0, 1, 0, 0]


def test_evaluations_of_a_closure_without_a_backward_are_one_step(record):
    net = Net()

    class LineSearch(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                losses = [closure(False).item() for _ in range(3)]
                closure(True)
            super().step()
            return losses

    optimizer = LineSearch(net.parameters(), lr=0.1)

    def closure(backward):
        loss = net(batch()).square().sum()
        if backward:
            optimizer.zero_grad()
            loss.backward()
        return loss

    with record() as rec:
        for _ in range(2):
            optimizer.step(closure)
            net(batch())
    assert ran(rec) == [("train", "Net Net Net Net"), ("eval", "Net")] * 2


def test_lbfgs_steps_between_two_marks_of_the_user_are_one_step(record):
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    with record() as rec:
        rec.step()
        for _ in range(2):
            fit(net, optimizer)
            fit(net, optimizer)
            rec.step()
    assert ran(rec) == [("train", "Net Net Net Net")] * 2


def test_all_moves_of_a_long_episode_are_one_step(record):
    net, optimizer = net_and_optimizer()
    with record(values=None) as rec:
        for _ in range(2):
            moves = [net(batch()).sum() for _ in range(300)]
            optimizer.zero_grad()
            torch.stack(moves).sum().backward()
            optimizer.step()
    assert [step["kind"] for step in rec.table("steps").to_pylist()] == ["train", "train"]
    assert [phases(rec, step) for step in range(2)] == [{"forward": 300, "optimizer": 1}] * 2


def test_each_optimizer_step_of_tensors_without_a_module_ends_a_step(record):
    tensor = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    criterion = Criterion()
    with record() as rec:
        for _ in range(3):
            optimizer.zero_grad()
            tensor.square().sum().backward()
            optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            criterion(tensor, torch.zeros(4)).backward()
            optimizer.step()
    assert ran(rec) == [("train", "")] * 3 + [("train", "Criterion")] * 2
    assert [phases(rec, step)["optimizer"] for step in range(5)] == [1] * 5


def test_both_calls_of_a_siamese_model_are_one_step(record):
    net, optimizer = net_and_optimizer()
    with record(backward_times=True) as rec:
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(net(batch()), net(batch())).backward()
            optimizer.step()
    assert ran(rec) == [("train", "Net Net")] * 3
    nth = [call["nth"] for call in rec.table("calls").to_pylist() if call["step"] == 1]
    assert sorted(each for each in nth if each is not None) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_validation_between_micro_batches_leaves_the_training_step_whole(record):
    net, optimizer = net_and_optimizer()
    with record() as rec:
        for _ in range(2):
            net(batch()).sum().backward()
            with torch.inference_mode():
                net(batch())
            net(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ran(rec) == [("train", "Net Net"), ("eval", "Net")] * 2


class Teacher(Net):
    pass


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_teacher_between_forward_and_optimizer_belongs_to_the_training_step(record, micro_batches):
    net, teacher = Net(), Teacher()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record(ops=True) as rec:
        for _ in range(3):
            for _ in range(micro_batches):
                predicted = net(batch())
                with torch.no_grad():
                    target = teacher(batch())
                F.mse_loss(predicted, target).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ran(rec) == [("train", " ".join(["Net Teacher"] * micro_batches))] * 3
    calls = {call["call_id"]: call["step"] for call in rec.table("calls").to_pylist()}
    ops = [op for op in rec.table("ops").to_pylist() if op["call_id"] is not None]
    assert all(op["step"] == calls[op["call_id"]] for op in ops)


def test_another_root_in_front_of_the_forward_or_behind_the_optimizer_is_an_eval_step(record):
    net, target = Net(), Teacher()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record() as rec:
        for _ in range(2):
            with torch.no_grad():
                wanted = target(batch())
            F.mse_loss(net(batch()), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            target(batch())
            target(batch())
    assert ran(rec) == [("eval", "Teacher"), ("train", "Net")] * 2 + [("eval", "Teacher")] * 2


def test_validation_of_another_model_after_a_skipped_optimizer_does_not_go_on_in_the_training_step(record):
    net, average = Net(), Teacher()
    with record() as rec:
        net(batch()).sum().backward()  # no optimizer steps, and nothing clears the gradients
        with torch.no_grad():
            for _ in range(3):
                average(batch())
    assert ran(rec) == [("train", "Net Teacher"), ("eval", "Teacher"), ("eval", "Teacher")]


def test_two_calls_of_a_teacher_before_the_backward_belong_to_the_training_step(record):
    net, teacher = Net(), Teacher()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record() as rec:
        for _ in range(3):
            predicted = net(batch())
            with torch.no_grad():
                wanted = teacher(batch()) + teacher(batch())
            F.mse_loss(predicted, wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Before the first backward nobody knows that this is training.
    assert ran(rec)[-2:] == [("train", "Net Teacher Teacher")] * 2


def test_model_around_what_is_trained_is_no_teacher(record):
    net = Net()
    with record() as rec:
        net.layer(batch()).sum().backward()
        with torch.no_grad():
            net(batch())
    assert ran(rec) == [("train", "Linear"), ("eval", "Net")]


def test_roots_with_and_without_gradients_that_are_never_trained_keep_steps_of_their_own(record):
    net, frozen = Net(), Teacher()
    with record() as rec:
        for _ in range(2):
            with torch.no_grad():
                features = frozen(batch())
            net(features)
    assert ran(rec) == [("eval", "Teacher"), ("eval", "Net")] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_each_batch_of_inference_is_an_eval_step(record, mode):
    net = Net()
    with record() as rec, mode():
        for _ in range(4):
            net(batch())
    assert ran(rec) == [("eval", "Net")] * 4


def test_several_roots_of_one_inference_are_one_step(record):
    encoder, decoder = Generator(), Discriminator()
    with record() as rec, torch.no_grad():
        for _ in range(3):
            decoder(encoder(batch()))
    assert ran(rec) == [("eval", "Generator Discriminator")] * 3


def test_a_criterion_that_is_a_module_starts_no_step(record):
    net, criterion = Net(), Criterion()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record() as rec:
        for _ in range(2):
            optimizer.zero_grad()
            criterion(net(batch()), batch()).backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                criterion(net(batch()), batch())
    assert ran(rec) == [("train", "Net Criterion")] * 2 + [("eval", "Net Criterion")] * 2


class Normalize(nn.Module):
    def forward(self, x):
        return (x - 0.5) / 2


class Samples(torch.utils.data.Dataset):
    """Six samples; modules prepare each."""

    def __init__(self, *modules):
        self.modules = modules

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = torch.randn(4)
        for module in self.modules:
            x = module(x)
        return x


def test_a_module_that_prepares_a_batch_belongs_to_the_step_that_uses_it(record):
    net, normalize, flip, accuracy = Net(), Normalize(), nn.Flatten(), Criterion()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record() as rec:
        for _ in range(3):
            x = flip(normalize(batch()))
            train_step(net, optimizer, x)
            accuracy(x, x)
    assert ran(rec) == [("train", "Normalize Flatten Net Criterion")] * 3


def test_modules_that_run_in_a_data_loader_belong_to_the_step_that_comes_next(record):
    net, optimizer = net_and_optimizer()
    loader = torch.utils.data.DataLoader(Samples(Normalize(), nn.ReLU()), batch_size=2)
    with record() as rec:
        for x in loader:
            train_step(net, optimizer, x)
        for x in loader:
            with torch.no_grad():
                net(x)
        for x in loader:
            train_step(net, optimizer, x)
            break
    prepared = "Normalize ReLU Normalize ReLU Net"
    assert ran(rec) == [("train", prepared)] * 3 + [("eval", prepared)] * 3 + [("train", prepared)]


def test_a_module_that_prepares_a_batch_of_inference_belongs_to_the_step_that_uses_it(record):
    net, normalize = Net(), Normalize()
    with record() as rec:
        for _ in range(3):
            x = normalize(batch())
            with torch.no_grad():
                net(x)
    assert ran(rec) == [("eval", "Normalize Net")] * 3


@pytest.mark.parametrize("ops", [False, True])
def test_a_module_that_prepares_the_first_batch_without_gradients_leaves_no_step_of_its_own(record, ops):
    net, normalize = Net(), Normalize()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record(ops=ops) as rec:
        for _ in range(3):
            with torch.no_grad():
                x = normalize(batch())
            rec.log(seen=1)
            train_step(net, optimizer, x)
    assert ran(rec) == [("train", "Normalize Net")] * 3
    assert rec.table("steps").column("step").to_pylist() == [0, 1, 2]
    assert sorted(set(rec.table("calls").column("step").to_pylist())) == [0, 1, 2]


def test_a_batch_that_is_prepared_before_the_backward_stays_in_the_step_that_is_open(record):
    net, normalize = Net(), Normalize()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record() as rec:
        x = normalize(batch())
        for _ in range(2):
            loss = net(x).sum()
            x = normalize(batch())
            loss.backward()
            optimizer.step()
    assert ran(rec) == [("train", "Normalize Net Normalize"), ("train", "Net Normalize")]


def test_the_ops_of_a_module_that_prepares_a_batch_move_with_it(record):
    net, normalize = Net(), Normalize()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record(ops=True) as rec:
        for _ in range(3):
            train_step(net, optimizer, normalize(batch()))
    ops, calls = (rec.table(name).to_pylist() for name in ("ops", "calls"))
    steps = {call["call_id"]: call["step"] for call in calls}
    assert [op["step"] for op in ops if op["name"] == "aten.div.Tensor"] == [0, 1, 2]
    assert all(steps[op["call_id"]] == op["step"] for op in ops if op["call_id"] is not None)


def test_a_metric_after_the_optimizer_belongs_to_the_step_that_it_measures(record):
    net, metric = Net(), Criterion()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record() as rec:
        for _ in range(3):
            y = net(batch())
            y.sum().backward()
            optimizer.step()
            metric(y.detach(), batch())
    assert ran(rec) == [("train", "Net Criterion")] * 3


def test_gradients_used_and_cleared_by_hand_end_a_step(record):
    net = Net()
    with record() as rec:
        for _ in range(3):
            net(batch()).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert ran(rec) == [("train", "Net")] * 3


def test_training_by_autograd_grad_has_a_step_for_each_call(record):
    net = Net()
    with record() as rec:
        for _ in range(3):
            torch.autograd.grad(net(batch()).sum(), list(net.parameters()))
    assert ran(rec) == [("train", "Net")] * 3


def test_a_gradient_penalty_belongs_to_the_step(record):
    net, optimizer = net_and_optimizer()
    with record() as rec:
        for _ in range(2):
            optimizer.zero_grad()
            inputs = batch().requires_grad_()
            [gradient] = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
            (net(batch()).sum() + gradient.norm()).backward()
            optimizer.step()
    assert ran(rec) == [("train", "Net Net")] * 2


def test_a_root_under_a_reentrant_checkpoint_is_training(record):
    net, optimizer = net_and_optimizer()
    with record() as rec:
        for _ in range(2):
            optimizer.zero_grad()
            inputs = batch().requires_grad_()
            torch.utils.checkpoint.checkpoint(net, inputs, use_reentrant=True).sum().backward()
            optimizer.step()
    assert ran(rec) == [("train", "Net")] * 2
    assert phases(rec, 1) == {"forward": 1, "recompute": 1, "optimizer": 1}


def test_after_rec_step_only_rec_step_ends_a_step(record):
    net, optimizer = net_and_optimizer()
    with record() as rec:
        for _ in range(2):
            for _ in range(2):
                train_step(net, optimizer, batch())
            rec.step()
        with torch.no_grad():
            net(batch())
            net(batch())
        rec.step()
    assert ran(rec) == [
        ("train", "Net"),  # found before the first rec.step() was heard
        ("train", "Net"),
        ("train", "Net Net"),
        ("eval", "Net Net"),
    ]


def test_scalars_belong_to_the_step_in_which_they_are_logged(record):
    net, optimizer = net_and_optimizer()
    with record() as rec:
        rec.log(before=1)
        for iteration in range(3):
            optimizer.zero_grad()
            loss = net(batch()).sum()
            loss.backward()
            optimizer.step()
            rec.log(loss=loss * 0 + iteration, lr=0.1)
    assert rec.table("scalars").to_pylist() == [
        {"step": 0, "name": "before", "value": 1.0},
        {"step": 0, "name": "loss", "value": 0.0},
        {"step": 0, "name": "lr", "value": 0.1},
        {"step": 1, "name": "loss", "value": 1.0},
        {"step": 1, "name": "lr", "value": 0.1},
        {"step": 2, "name": "loss", "value": 2.0},
        {"step": 2, "name": "lr", "value": 0.1},
    ]


def test_scalars_that_no_step_comes_for_get_one_of_their_own(record):
    with record() as rec:
        rec.log(answer=42)
    assert rec.table("scalars").to_pylist() == [{"step": 0, "name": "answer", "value": 42.0}]
    assert rec.table("steps").column("kind").to_pylist() == ["eval"]


def test_only_the_steps_asked_for_are_kept_with_their_own_numbers(record):
    net, optimizer = net_and_optimizer()
    with record(steps="2:8:3") as rec:
        for _ in range(10):
            train_step(net, optimizer, batch())
    assert rec.table("steps").column("step").to_pylist() == [2, 5]
    assert set(rec.table("calls").column("step").to_pylist()) == {2, 5}
    assert rec.progress.steps == 10


def test_an_optimizer_whose_step_raised_does_not_hold_the_steps_open(record):
    net, optimizer = net_and_optimizer()

    def failing():
        raise RuntimeError("closure")

    with record() as rec:
        for _ in range(3):
            optimizer.zero_grad()
            net(batch()).sum().backward()
            with pytest.raises(RuntimeError, match="closure"):
                optimizer.step(failing)
            optimizer.step()
    assert ran(rec) == [("train", "Net")] * 3


def test_a_tracker_says_anew_in_which_step_a_call_is_that_a_backward_has_joined():
    class Asks(nn.Linear):
        def forward(self, x):
            asked.append(tracker.where())
            return super().forward(x)

    asked = []
    model = Asks(2, 2)
    with modtrace.ModuleTracker(strict=True) as tracker:
        outputs = [model(torch.ones(1, 2)) for _ in range(2)]
        before = [where.call for where in asked]
        sum(output.sum() for output in outputs).backward()
        # The one that was asked for last is asked for again.
        after = [where.call for where in reversed(asked)]
    assert [(call.step, call.nth) for call in before] == [(0, 0), (1, 0)]
    assert [(call.step, call.nth) for call in after] == [(0, 1), (0, 0)]


def test_stage_of_a_pipeline_says_which_micro_batch_it_works_on() -> None:
    """What torch runs before, to learn the shapes, is no step and no call."""
    with group_of_one():
        net, optimizer = net_and_optimizer()
        stage = PipelineStage(net, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        with modtrace.record(ops=True, strict=True) as recording:
            for _ in range(2):
                optimizer.zero_grad()
                schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
                optimizer.step()
        del stage, schedule
    assert ran(recording) == [("train", "Net Net"), ("train", "Net Net")]
    ops = [row for row in recording.table("ops").to_pylist() if row["step"] == 0]
    assert sum(row["name"] == "aten.addmm.default" for row in ops) == 2
    assert not any(row["name"] == "aten.empty_strided.default" for row in ops)
    calls = [row for row in recording.table("calls").to_pylist() if row["module_id"] is not None]
    told = [(row["phase"], row["nth"], row["stage"], row["micro_batch"]) for row in calls]
    assert {*told} == {(phase, nth, 0, nth) for phase in ("forward", "backward") for nth in range(2)}
    net(batch())
    with modtrace.record() as recording:
        net(batch())
    assert {row["stage"] for row in recording.table("calls").to_pylist()} == {None}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 sends to itself, which gloo refuses")
def test_micro_batches_whose_backward_is_divided_are_one_step() -> None:
    """Zero-bubble schedules compute the gradients of inputs and of parameters apart, neither by a `backward()`."""
    with group_of_one():
        nets = (
            Generator().requires_grad_(False),
            Discriminator(),
        )  # only a first stage would get a `backward()`
        optimizer = torch.optim.SGD(nets[1].parameters(), lr=0.1)
        device = torch.get_default_device()
        stages = [PipelineStage(net, number, 2, device) for number, net in enumerate(nets)]
        schedule = ScheduleZBVZeroBubble(stages, 3, loss_fn=F.mse_loss)
        with modtrace.record(strict=True) as recording:
            for _ in range(2):
                optimizer.zero_grad()
                schedule.step(torch.ones(6, 4), target=torch.ones(6, 4))
                optimizer.step()
        del stages, schedule
    found = ran(recording)
    assert [kind for kind, _ in found] == ["train", "train"]
    assert [sorted(names.split()) for _, names in found] == [["Discriminator"] * 3 + ["Generator"] * 3] * 2


def test_micro_batches_of_an_evaluation_are_one_step_beside_an_open_one() -> None:
    with group_of_one():
        net = Net()
        stage = PipelineStage(net, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
        with modtrace.record(strict=True) as recording:
            schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
            for _ in range(2):
                with torch.no_grad():
                    schedule.eval(torch.ones(4, 4), target=torch.ones(4, 4))
        del stage, schedule
    assert ran(recording) == [("train", "Net Net"), ("eval", "Net Net"), ("eval", "Net Net")]
