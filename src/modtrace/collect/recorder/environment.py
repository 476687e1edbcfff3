"""Describes the process that is being recorded."""

import os
import platform
import sys
import time
import uuid
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...recording.meta import RunMeta
from ...recording.process import name_process
from .flags import read_flags
from .launch import Launch, find_launch

#: Libraries whose versions are stored if the run has imported them.
_LIBRARIES = ("torch", "numpy", "pyarrow", "transformers", "lightning", "accelerate", "deepspeed")

#: The scripts that a notebook's cells run in: of Jupyter, and of Google Colab.
_KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")


def describe_run(options: dict[str, Any], launch: Launch | None = None) -> RunMeta:
    """Returns the meta data of a recording that starts now in this process.

    Args:
        options: the arguments of `record()`, as JSON values.
        launch: the place of this process in its run; None finds it.
    """
    launch = launch or find_launch()
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
        clock_time_ns=time.time_ns(),
        clock_perf_counter_ns=time.perf_counter_ns(),
    )


def _command() -> tuple[str, ...]:
    """Returns what was run; in a notebook its path where Jupyter says it, and not the command line of the kernel."""
    if os.path.basename("".join(sys.argv[:1])) in _KERNELS:
        notebook = os.environ.get("JPY_SESSION_NAME")  # of jupyter_server 2
        return (notebook,) if notebook else ()
    return tuple(sys.argv)


def _own_version() -> str:
    try:
        return metadata.version("modtrace")
    except metadata.PackageNotFoundError:  # run from its sources
        return ""


def _device() -> str:
    """Returns the name of the accelerator. CUDA is not initialized if the process has not used it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def _git_commit() -> str | None:
    """Returns the commit that is checked out around the working directory.

    It reads files; running git would take 4 ms.
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
    """Returns the folder of git's data. In a linked worktree a file names it."""
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
