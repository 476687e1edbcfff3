"""What holds for every test: nothing of modtrace is left behind in torch or in the process."""

import gc
import os
import sys
import warnings
from pathlib import Path

import pytest

import golden

# On a busy machine the threads of OpenMP wait for each other: tests took up to ten times as long with two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytest imports readline, which sets COLUMNS for all processes that are started later, those of `-n` among them.
os.environ.pop("COLUMNS", None)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew; read them then"
    )
    parser.addoption("--on-sim", action="store_true", help="run on the simulated accelerator of tests/device")


def pytest_configure(config):
    # pytest rewrites the asserts of all that is installed with a plugin, such as modtrace: it takes ten seconds.
    getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("modtrace")
    if config.getoption("--update-golden"):
        golden.is_updating = True
    if config.getoption("--on-sim"):
        from device import everywhere

        config.pluginmanager.register(everywhere)


#: Folders of tests that take minutes, which are marked `long`, and the file of each that runs as usual.
LONG = {
    "cli/processes": "test_record.py",
    "collect/compile": "test_compiled.py",
    "integrations": "test_callbacks.py",
    "pages": "test_readme.py",
    "pairs": "test_pairs.py",
}


def _is_long(path):
    folder = path.parent.relative_to(Path(__file__).parent).as_posix()
    return LONG.get(folder, path.name) != path.name


def pytest_ignore_collect(collection_path, config):
    """Files that are left out are not read."""
    is_left_out = collection_path.suffix == ".py" and _is_long(collection_path)
    return True if is_left_out and "not long" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if _is_long(item.path):
            item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing is garbage yet, and with torch and transformers each look for some takes a second."""
    gc.disable()
    result = yield
    gc.enable()
    return result


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected():
    """Collections look at what a file's tests have made alone: at all of torch and transformers they take a second."""
    global _files_run
    _files_run += 1
    if _files_run % 60 == 0:  # what earlier files have left in circles; it takes a second
        gc.unfreeze()
        gc.collect()
    gc.freeze()


_files_run = 0


def _state():
    """The global state of torch that a recording must give back as it was."""
    import torch
    import torch.autograd.graph
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

    return {
        "module pre-hooks": list(module._global_forward_pre_hooks),
        "module hooks": list(module._global_forward_hooks),
        "always-called hooks": list(module._global_forward_hooks_always_called),
        "teller of hooks": module._has_any_global_hook,
        "hooks with kwargs": list(module._global_forward_hooks_with_kwargs),
        "backward hooks": [*module._global_backward_hooks, *module._global_backward_pre_hooks],
        "optimizer hooks": [*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks],
        "engine door": (torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward),
        "loaders": (_BaseDataLoaderIter.__next__, DataLoader.__iter__),
        "graphs": (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end),
        "resizing of storages": torch.UntypedStorage.resize_,  # MemTracker of torch leaves it in the class
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "formatwarning": warnings.formatwarning,
        "excepthook": sys.excepthook,
    }


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """No global hook, mode, grad-mode or RNG change survives a test; no tracker keeps running."""
    if "torch" not in sys.modules and not _needs_torch(request):
        yield
        return
    import torch

    before = _state()
    generator = torch.get_rng_state()
    yield
    from modtrace.collect.scopes import process

    assert process.current() is None, "the process's tracker is still running"
    after = _state()
    assert after == before
    torch.set_rng_state(generator)


def _needs_torch(request) -> bool:
    return "torch" in getattr(request.module, "__dict__", {})


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before is known, nor stays known."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def seeded():
    """A fixed seed; the generator's state is put back by `nothing_is_left_behind`."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def opened_cuda_driver():
    from helpers.cuda_on_cpu import FakeCuda

    with FakeCuda() as driver:
        yield driver


@pytest.fixture
def cuda_driver(opened_cuda_driver):
    """A driver of CUDA that runs kernels on the CPU, and refuses what a real one would."""
    opened_cuda_driver.reset()
    yield opened_cuda_driver
    assert opened_cuda_driver.refused == 0


@pytest.fixture
def cuda_device(cuda_driver, monkeypatch):
    """The same, with main memory as the memory of its device."""
    from helpers.cuda_on_cpu import as_device

    as_device(cuda_driver, monkeypatch)
    return cuda_driver


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command of modtrace, as a `Command`; returns what it has printed."""
    from helpers.command_line import Printed, run_command

    def run(*arguments, code=0):
        capsys.readouterr()  # what came before
        assert run_command(monkeypatch, *arguments) == code
        return Printed(*capsys.readouterr())

    return run
