"""What is copied, saved or sent while something of modtrace is on it has nothing of modtrace."""

import copy
import io
import json
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from helpers.copied_models import Part, describe, make_whole
from helpers.ranks import group_of_one
from modtrace import Capture, ModuleTracker, record, track

TESTS = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


def ignore(*given: Any) -> None:
    """A hook that does nothing."""


@contextmanager
def methods(model: nn.Module, *names: str) -> Iterator[None]:
    tracker = ModuleTracker(model, strict=True)
    for module in model.modules():
        if isinstance(module, Part):
            tracker.methods(module, *names)
    with tracker:
        yield


@contextmanager
def user_hooks(model: nn.Module) -> Iterator[None]:
    with ModuleTracker(model, strict=True) as tracker:
        tracker.register_user_hooks(ignore, ignore, ignore, ignore)
        with tracker.scope("all", model):
            yield


@contextmanager
def everything(model: nn.Module) -> Iterator[None]:
    """The parts end in the order in which they began."""
    with ExitStack() as stack:
        for each in (
            record(model, strict=True, compiled="inside", ops=True),
            track(model, compiled="inside"),
        ):
            stack.enter_context(each)
        stack.enter_context(MODES["compile_safe_hooks"](model))
        stack.enter_context(methods(model, "forward", "encode", "scale"))
        yield


MICRO_BATCHES = Capture(
    roles=["parameter_grad", "parameter", "update", "optimizer_state"], micro_batches=True
)
MODES: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "values": lambda model: record(
        model, strict=True, values=MICRO_BATCHES, backward_times=True, on_nonfinite="stop", keep_last=2
    ),
    "ops": lambda model: record(model, strict=True, ops=True),
    "inside": lambda model: record(model, strict=True, compiled="inside"),
    "track inside": lambda model: track(model, strict=True, compiled="inside"),
    "methods": lambda model: methods(model, "forward", "encode", "scale", "make"),
    "user hooks": user_hooks,
    "compile_safe_hooks": lambda model: ModuleTracker.compile_safe_hooks(
        model, ignore, ignore, ignore, ignore
    ),
    "everything": everything,
}

#: Copies in this process, of a model or of what holds it.
COPIES: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "copy": lambda model, optimizer: copy.copy(model),
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
    "deepcopy with its optimizer": lambda model, optimizer: copy.deepcopy((optimizer, model))[1],
    "AveragedModel": lambda model, optimizer: AveragedModel(model).module,
}


def save(model: nn.Module, optimizer: Any, file: Path) -> None:
    torch.save({"model": model, "optimizer": optimizer, "state": model.state_dict()}, file)


def save_by(dumps: Callable[[Any], Any]) -> Callable[[nn.Module, Any, Path], None]:
    """Saves bytes that unpickling rebuilds the model from."""

    def save_bytes(model: nn.Module, optimizer: Any, file: Path) -> None:
        torch.save({"model": Pickled(bytes(dumps(model)))}, file)

    return save_bytes


class Pickled:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self.data,)


def dump_for_a_child(model: nn.Module) -> bytes:
    """Returns what a child that is spawned gets, with the tensors in the bytes."""
    file = io.BytesIO()
    pickler = ForkingPickler(file)
    pickler.dispatch_table = {
        kind: how for kind, how in pickler.dispatch_table.items() if not kind.__module__.startswith("torch")
    }
    pickler.dump(model)
    return file.getvalue()


#: Ways to a file.
FILES: dict[str, Callable[[nn.Module, Any, Path], None]] = {
    "torch.save": save,
    "pickle": save_by(pickle.dumps),
    "pickle in its oldest protocol": save_by(lambda model: pickle.dumps(model, 0)),
    "as the argument of a child": save_by(dump_for_a_child),
}


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[Path], Any]]:
    """Describes the model in a file, as a process without modtrace finds it."""
    code = "from helpers.copied_models import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=TESTS,
        env={"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(file: Path) -> Any:
            print(file, file=stdin, flush=True)
            return json.loads(stdout.readline())

        yield ask
        stdin.close()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_whole()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes two steps, and leaves gradients of a part of the next."""
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


def traces_in(made: Any, *, deep: bool = True) -> list[str]:
    """Returns where a copy refers to something of modtrace, not `deep` without the modules that it shares.

    Storages, which are not searched, have an attribute of ours until a recording of ops ends.
    """
    found, seen, pending = [], set(), [("", made)]
    while pending:
        path, each = pending.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType)):
            continue
        seen.add(id(each))
        of = [type(each).__module__, getattr(each, "__module__", None)]
        if any(isinstance(name, str) and name.startswith("modtrace") for name in of):
            found.append(path)
        if isinstance(each, types.MethodType):
            pending += [(f"{path}.__func__", each.__func__)]
            pending += [(f"{path}.__self__", each.__self__)] if deep else []
        elif isinstance(each, types.FunctionType):
            pending += [(f"{path}.<cell>", cell.cell_contents) for cell in each.__closure__ or ()]
        elif isinstance(each, dict):
            pending += [
                (f"{path}[{key!r}]", value) for key, value in each.items() if deep or key != "_modules"
            ]
        elif isinstance(each, (list, tuple)):
            pending += [(f"{path}[{at}]", value) for at, value in enumerate(each)]
        elif isinstance(each, torch.Tensor):
            pending.append((f"{path}._backward_hooks", each._backward_hooks))
        if isinstance(getattr(each, "__dict__", None), dict):
            pending.append((path, vars(each)))
    return found


@pytest.fixture(scope="module")
def plain(load: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What there is of each copy of a model that nothing of modtrace was ever on."""
    model, optimizer = trained()
    train(model, optimizer)
    folder = tmp_path_factory.mktemp("plain")
    found: dict[str, Any] = {}
    for way, copied in COPIES.items():
        found[way] = copied(model, optimizer)
    for way, saved in FILES.items():
        saved(model, optimizer, folder / "model.pt")
        found[way] = load(folder / "model.pt")
    return {way: describe(made) if isinstance(made, nn.Module) else made for way, made in found.items()}


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_files_made_inside_are_those_of_a_plain_model(
    mode: str, load: Callable[[Path], Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = trained()
    before = {path: vars(module).copy() for path, module in model.named_modules()}
    with MODES[mode](model), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        train(model, optimizer)
        made = {way: copied(model, optimizer) for way, copied in COPIES.items()}
        for way, saved in FILES.items():
            saved(model, optimizer, tmp_path / way)
        traces = {way: traces_in(copied, deep=way != "copy") for way, copied in made.items()}
        assert {way: found for way, found in traces.items() if found} == {}
    for way in FILES:
        assert b"modtrace" not in (tmp_path / way).read_bytes(), way
        assert load(tmp_path / way) == plain[way], way
    for way in ("deepcopy", "deepcopy with its optimizer", "AveragedModel", "copy"):
        assert describe(made[way]) == plain[way], way
        assert traces_in(made[way]) == [], way
    assert traces_in(model) == []
    assert {path: vars(module).keys() for path, module in model.named_modules()} == {
        path: attributes.keys() for path, attributes in before.items()
    }
    assert "__reduce_ex__" not in vars(nn.Module)


@pytest.mark.parametrize("mode", ["inside", "everything"])
def test_replica_of_data_parallel_runs_its_own_forward(mode: str) -> None:
    model, _ = trained()
    with MODES[mode](model):
        replica = model._replicate_for_data_parallel()
        bound = {name for name, each in vars(replica).items() if getattr(each, "__self__", None) is model}
        assert "forward" not in vars(replica) or mode == "everything"
        assert bound == set()
        assert replica._forward_hooks is model._forward_hooks


def weight_normed() -> nn.Module:
    torch.manual_seed(0)
    return parametrizations.weight_norm(nn.Linear(4, 4))


def distributed() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Part())


@pytest.mark.parametrize("make", [weight_normed, distributed])
def test_wrapped_models_are_copied_as_plain_ones(make: Callable[[], nn.Module]) -> None:
    with group_of_one():
        expected = describe(copy.deepcopy(make()))
        model = make()
        with MODES["everything"](model):
            made = copy.deepcopy(model)
        assert describe(made) == expected
        assert traces_in(made) == []
        del made, model


# Programs made of a model.


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def exported(model: nn.Module, *, strict: bool = False) -> tuple[str, bytes]:
    program = torch.export.export(model, (torch.ones(2, 4),), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    return program.graph_module.code, file.getvalue()


def scripted(model: nn.Module) -> tuple[str, bytes]:
    made = torch.jit.script(model)
    file = io.BytesIO()
    torch.jit.save(made, file)
    return made.code + made.a.code, file.getvalue()


def traced(model: nn.Module) -> tuple[str, bytes]:
    made = torch.jit.trace(model, torch.ones(2, 4))
    file = io.BytesIO()
    torch.jit.save(made, file)
    return made.code + made.a.code, file.getvalue()


@pytest.mark.parametrize("mode", ["values", "inside", "methods", "everything"])
def test_programs_made_inside_are_those_of_a_plain_model(mode: str) -> None:
    for make in (exported, scripted, traced):
        code, _ = make(Small())
        model = Small()
        with MODES[mode](model):
            made, data = make(model)
        assert made == code, make
        assert b"modtrace" not in data, make


def test_strict_export_has_no_op_of_compile_safe_hooks() -> None:
    model = Small()
    code, _ = exported(model, strict=True)
    with MODES["compile_safe_hooks"](model):
        made, data = exported(model, strict=True)
    assert made == code
    assert b"modtrace" not in data


# The original.


def test_original_is_tapped_on_and_nothing_is_compiled_again(fresh_dynamo: None) -> None:
    def run(between: Callable[[nn.Module], Any]) -> tuple[int, list[Any]]:
        torch.manual_seed(0)
        model = Small()
        counter = CompileCounterWithBackend("aot_eager")
        called = torch.compile(model, backend=counter, fullgraph=True)
        with record(model, strict=True, compiled="inside") as rec:
            for _ in range(2):
                called(torch.ones(2, 4)).sum().backward()
                made = between(model)
        if made is not None:
            assert torch.equal(made(torch.ones(2, 4)), model(torch.ones(2, 4)))
        rows = rec.table("values").select(["step", "site_id", "min", "max", "sum"]).to_pylist()
        return counter.frame_count, rows

    def copies(model: nn.Module) -> nn.Module:
        torch.jit.script(model)
        pickle.dumps(model)
        return copy.deepcopy(model)

    frames, rows = run(lambda model: None)
    assert frames == 1
    assert len(rows) > 8
    assert run(copies) == (frames, rows)


class Settings(dict[str, int]):
    pass


class Settled(nn.Module):
    """Is made anew from its settings, which other modules share."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def __reduce__(self) -> Any:
        return type(self), (self.settings,)


class Handled(nn.Module):
    """Is replaced by something else in a copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        return None


def test_what_is_the_users_own_is_copied_as_it_is() -> None:
    settings = Settings(width=1)
    model = nn.Sequential(Settled(settings), Settled(settings), Handled())
    with record(model, strict=True, compiled="inside"):
        for made in (copy.deepcopy(model[:2]), pickle.loads(pickle.dumps(model[:2]))):
            assert type(made[0].settings) is Settings
            assert made[0].settings is made[1].settings
        assert copy.deepcopy({"part": model[2]}) == {"part": None}


def test_copier_that_other_code_has_replaced_meanwhile_stays() -> None:
    model = Part()
    recording = record(model, strict=True, compiled="inside")
    recording.start()
    theirs = lambda self, protocol: object.__reduce_ex__(self, protocol)  # noqa: E731
    nn.Module.__reduce_ex__ = theirs  # type: ignore[method-assign]
    try:
        recording.stop()
        assert nn.Module.__reduce_ex__ is theirs
    finally:
        del nn.Module.__reduce_ex__
