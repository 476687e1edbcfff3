"""A recording makes torch warn of nothing that it does not warn of anyway."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.ranks import group_of_one

GLOBAL_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"


@pytest.fixture(autouse=True)
def always_warned() -> Iterator[None]:
    """Nothing compiled before is known, and torch does not keep silent of what it has warned of before."""
    torch._dynamo.reset()
    was = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(was)
    torch._dynamo.reset()


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def train(model: Callable[[torch.Tensor], torch.Tensor], *parameters: nn.Parameter) -> None:
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def compile_parts(model: nn.Sequential) -> nn.Sequential:
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compile_in_place(model: nn.Sequential) -> nn.Sequential:
    model.compile(backend="eager")
    return model


def shard(model: nn.Sequential) -> nn.Sequential:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def checkpointed(model: nn.Sequential, **how: bool) -> None:
    checkpoint(model, torch.ones(4, 8, requires_grad=True), **how).sum().backward()


def differentiate_by_functions(model: nn.Sequential) -> None:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x,)).sum()

    vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), torch.ones(4, 8))


def adapt(model: nn.Sequential) -> None:
    """Puts what one step of an inner loop has made of the parameters in their place, as MAML does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = copy.deepcopy(model)
    loss = model(torch.ones(4, 8)).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        layer, _, name = name.rpartition(".")
        inner.get_submodule(layer)._parameters[name] = parameter - gradient
    inner(torch.ones(4, 8)).sum().backward()
    optimizer.step()


def find_anomalies(model: nn.Sequential) -> None:
    with torch.autograd.detect_anomaly():
        train(model)


def be_deterministic(model: nn.Sequential) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(model)
    finally:
        torch.use_deterministic_algorithms(False)


def step_too_early(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()


class ReturnsSparse(nn.Linear):
    """Its output is a tensor whose kind torch calls a prototype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach().to_sparse_csr()


RUNS: dict[str, Callable[[nn.Sequential], object]] = {
    "plain": train,
    "compiled": lambda model: train(torch.compile(model, backend="eager")),
    "compiled by aot": lambda model: train(torch.compile(model, backend="aot_eager")),
    "compiled part": lambda model: train(compile_parts(model)),
    "compiled in place": lambda model: train(compile_in_place(model)),
    "compiled function": lambda model: train(
        torch.compile(lambda x: model(x), backend="eager"), *model.parameters()
    ),
    "traced": lambda model: train(torch.jit.trace(model, torch.ones(4, 8))),
    "scripted": lambda model: train(torch.jit.script(model)),
    "exported": lambda model: train(torch.export.export(model, (torch.ones(4, 8),)).module()),
    "fx": lambda model: train(torch.fx.symbolic_trace(model)),
    "DDP": lambda model: train(DistributedDataParallel(model)),
    "compiled DDP": lambda model: train(torch.compile(DistributedDataParallel(model), backend="eager")),
    "FSDP": lambda model: train(shard(model)),
    "checkpoint": lambda model: checkpointed(model, use_reentrant=False),
    "reentrant checkpoint": lambda model: checkpointed(model, use_reentrant=True),
    "checkpoint that does not say which": checkpointed,
    "functions": differentiate_by_functions,
    "create_graph": lambda model: model(torch.ones(4, 8)).sum().backward(create_graph=True),
    "inner loop": adapt,
    "anomalies": find_anomalies,
    "deterministic": be_deterministic,
    "scheduler": step_too_early,
    "sparse": lambda model: ReturnsSparse(8, 8)(torch.ones(4, 8)),
    "copied": lambda model: train(copy.deepcopy(model)),
}


#: A dispatch mode is in the way of compilers, which are looked at without ops.
WITHOUT_OPS = [
    name for name in RUNS if name.split()[0] in ("compiled", "traced", "scripted", "exported", "plain")
]
OPTIONS = {"values": {}, "ops": {"ops": True, "backward_times": True}}


@pytest.mark.parametrize(
    ("run", "options"),
    [
        pytest.param(RUNS[name], OPTIONS[kind], id=f"{name}-{kind}")
        for kind, names in (
            ("values", WITHOUT_OPS),
            ("ops", [name for name in RUNS if name not in WITHOUT_OPS[1:]]),
        )
        for name in names
    ],
)
def test_run_gives_the_warnings_that_it_gives_unrecorded(
    run: Callable[[nn.Sequential], object], options: dict[str, bool]
) -> None:
    with group_of_one():
        unrecorded = warnings_of(run)
        with modtrace.record(strict=True, **options):
            recorded = warnings_of(run)

    assert recorded == unrecorded


def warnings_of(run: Callable[[nn.Sequential], object]) -> set[tuple[type[Warning], str]]:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run(make())
    return {(each.category, str(each.message)) for each in given}


def test_torch_warns_of_global_hooks_of_the_user_inside_a_recording() -> None:
    compiled = torch.compile(make(), backend="eager")
    with modtrace.record(strict=True):
        handle = hooks.register_module_forward_hook(lambda *_: None)
        try:
            with pytest.warns(UserWarning, match=GLOBAL_HOOKS):
                compiled(torch.ones(4, 8))
        finally:
            handle.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(torch.ones(4, 8))


def test_hooks_of_the_user_that_are_older_than_the_recording_are_warned_of_inside_and_afterwards() -> None:
    compiled = torch.compile(make(), backend="eager")
    handle = hooks.register_module_full_backward_hook(lambda *_: None)
    try:
        with modtrace.record(strict=True), pytest.warns(UserWarning, match=GLOBAL_HOOKS):
            compiled(torch.ones(4, 8))
        with pytest.warns(UserWarning, match=GLOBAL_HOOKS):
            compiled(torch.ones(4, 8))
    finally:
        handle.remove()


def test_function_that_somebody_wraps_inside_a_recording_stays_and_tells_of_hooks_afterwards() -> None:
    original = hooks._has_any_global_hook
    try:
        with modtrace.record(strict=True):
            inner = hooks._has_any_global_hook
            hooks._has_any_global_hook = lambda: inner()
            wrapped = hooks._has_any_global_hook
            assert not wrapped()
        assert hooks._has_any_global_hook is wrapped
        assert not wrapped()
        handle = hooks.register_module_forward_pre_hook(lambda *_: None)
        assert wrapped()
        handle.remove()
    finally:
        hooks._has_any_global_hook = original


def test_torch_without_the_function_is_recorded_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hooks, "_has_any_global_hook")
    with modtrace.record(strict=True) as rec:
        make()(torch.ones(4, 8))

    assert rec.table("calls").num_rows == 4
    assert not hasattr(hooks, "_has_any_global_hook")


def test_strict_export_fails_inside_a_recording_as_beside_any_global_hook() -> None:
    handle = hooks.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(Exception, match="ModuleToTrace"):
            torch.export.export(make(), (torch.ones(4, 8),), strict=True)
    finally:
        handle.remove()
    with modtrace.record(strict=True), pytest.raises(Exception, match="ModuleToTrace"):
        torch.export.export(make(), (torch.ones(4, 8),), strict=True)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_of_a_batch_norm_fails_in_a_recording_of_ops_as_beside_any_dispatch_mode() -> None:
    class Untouched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    for mode in (Untouched(), modtrace.record(ops=True, strict=True)):
        with mode, pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
            torch.jit.trace(nn.BatchNorm1d(8), torch.ones(4, 8))
    with modtrace.record(strict=True):
        torch.jit.trace(nn.BatchNorm1d(8), torch.ones(4, 8))
