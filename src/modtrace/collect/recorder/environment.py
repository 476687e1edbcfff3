"""Describes the process that is being recorded, and the settings of torch that change numbers."""

import os
import platform
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...recording.meta import RunMeta
from ...recording.process import name_process, read_clocks
from .launch import Launch, find_launch

#: Libraries whose versions are stored if the run has imported them.
_LIBRARIES = ("torch", "numpy", "pyarrow", "transformers", "lightning", "accelerate", "deepspeed")

#: The scripts that run a notebook's cells, in Jupyter and in Google Colab.
_KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")


def describe_run(options: dict[str, Any], launch: Launch | None = None) -> RunMeta:
    """Returns the meta data of a recording that starts now in this process.

    Args:
        options: the arguments of `record()`, as JSON values.
        launch: the place of this process in its run; None to find it.
    """
    launch = launch or find_launch()
    wall_ns, counter_ns = read_clocks()
    versions = {"python": platform.python_version(), "modtrace": _own_version()}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return RunMeta(
        run_id=launch.run_id or uuid.uuid4().hex,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        modtrace_version=versions["modtrace"],
        argv=_command(),
        versions=versions,
        device=_device(),
        flags=read_flags(),
        git_commit=_git_commit(),
        options=options,
        rank=launch.rank,
        world_size=launch.world_size,
        launch=launch.name,
        attempt=launch.attempt,
        process=name_process(),
        clock_time_ns=wall_ns,
        clock_perf_counter_ns=counter_ns,
    )


def _command() -> tuple[str, ...]:
    """Returns the command line; in a notebook its path, if Jupyter tells it, rather than the command of the kernel."""
    if os.path.basename("".join(sys.argv[:1])) in _KERNELS:
        notebook = os.environ.get("JPY_SESSION_NAME")  # set by jupyter_server 2
        return (notebook,) if notebook else ()
    return tuple(sys.argv)


@cache  # reading it takes 2 ms
def _own_version() -> str:
    try:
        return metadata.version("modtrace")
    except metadata.PackageNotFoundError:  # modtrace runs from its sources
        return ""


def _device() -> str:
    """Returns the name of the accelerator; CUDA is not initialized for this."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    return describe_cpu()


def describe_cpu() -> str:
    """Returns the architecture of the CPU, and how many of its cores and threads torch may use."""
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def _git_commit() -> str | None:
    """Returns the commit that is checked out around the working directory.

    It reads git's files, because running git would take 4 ms.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / ".git").exists():
            try:
                return _head_of(_git_folder(folder / ".git"))
            except (OSError, UnicodeDecodeError, IndexError):
                return None
    return None


def _git_folder(place: Path) -> Path:
    """Returns the folder of git's data, to which a linked worktree only has a path."""
    return place if place.is_dir() else place.parent / place.read_text().split(":", 1)[1].strip()


def _head_of(folder: Path) -> str | None:
    head = (folder / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head or None
    name = head.removeprefix("ref: ")
    common = folder / "commondir"
    roots = [folder, folder / common.read_text().strip()] if common.exists() else [folder]
    for root in roots:
        if (root / name).is_file():
            return (root / name).read_text().strip()
        if (root / "packed-refs").is_file():
            for line in (root / "packed-refs").read_text().splitlines():
                if line.endswith(f" {name}"):
                    return line.split()[0]
    return None


#: The settings by the names under which a program sets them, each with a function that reads it.
_READERS: Mapping[str, Callable[[], Any]] = {
    "seed": torch.initial_seed,  # the seed of the last torch.manual_seed()
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "deterministic_debug_mode": lambda: ("default", "warn", "error")[torch.get_deterministic_debug_mode()],
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "flash_sdp": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math_sdp": torch.backends.cuda.math_sdp_enabled,
    "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "autocast cpu": lambda: _read_autocast("cpu"),
    "autocast cuda": lambda: _read_autocast("cuda"),
    "cpu": lambda: torch.cpu.get_capabilities()["cpu_name"],
    "cpu_capability": torch.backends.cpu.get_cpu_capability,
    "CUBLAS_WORKSPACE_CONFIG": lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    "MKL_CBWR": lambda: os.environ.get("MKL_CBWR", ""),
    "ONEDNN_MAX_CPU_ISA": lambda: os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
}


def read_flags() -> dict[str, Any]:
    """Returns each setting as a JSON value; None where this version of torch lacks it. No device is initialized."""
    return {name: _read(reader) for name, reader in _READERS.items()}


def _read(reader: Callable[[], Any]) -> Any:
    with suppress(AttributeError, KeyError, RuntimeError):  # torch is older, or tf32 was set in another way
        return reader()
    return None


def _read_autocast(device: str) -> str:
    """Returns the dtype that autocast gives ops on a device, or "off"."""
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
