"""Finds which rank of a distributed run this process is, from torch.distributed or the variables of its launcher."""

import multiprocessing
import os
import warnings
from typing import NamedTuple

import torch.distributed as dist

from ...errors import ModtraceError, ModtraceWarning, RecordingError, describe_error
from ...recording.failure_reporter import warn_of_error
from ...recording.process import name_process, process_start_ns


class Launch(NamedTuple):
    """The place of this process in the run that a launcher started."""

    rank: int = 0
    world_size: int = 1
    #: The launch's name, which its ranks share, and perhaps those of a later launch; "" for a single process.
    name: str = ""
    run_id: str = ""  # an id that the launcher uses only once; "" if it has none
    attempt: int = 0  # how often torchrun has restarted the ranks
    has_others: bool = False  # whether other ranks may wait for this one


class _Launcher(NamedTuple):
    """The variables in which a launcher tells a rank its number, the number of ranks, and the id of the job."""

    rank: str
    world_size: tuple[str, ...]  # names of variables, of which the first that is set counts
    job: tuple[str, ...]  # names of variables, of which all that are set count


#: The known launchers. mpirun precedes Slurm, because it passes on the variables of its batch script.
_LAUNCHERS = (
    _Launcher("RANK", ("WORLD_SIZE",), ()),
    _Launcher(
        "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    ),
    _Launcher("PMIX_RANK", ("PMIX_SIZE", "SLURM_NTASKS"), ("PMIX_NAMESPACE",)),
    _Launcher("PMI_RANK", ("PMI_SIZE",), ("PMI_JOBID",)),
    _Launcher("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), ("PMI_JOBID",)),
    _Launcher("SLURM_PROCID", ("SLURM_NTASKS",), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


def find_launch() -> Launch:
    """Returns the place of this process in its run.

    A process started by multiprocessing inherits the variables of its parent, so only `RANK` is read there. If that is
    missing, the process may still be a rank, and its launch is named after the parent.
    """
    is_child = multiprocessing.parent_process() is not None
    known = _LAUNCHERS[:1] if is_child else _LAUNCHERS
    launcher = next((candidate for candidate in known if _number(candidate.rank) is not None), None)
    if dist.is_available() and dist.is_initialized():
        return _named(launcher, dist.get_rank(), dist.get_world_size())
    launch = Launch()
    if launcher is not None:
        sizes = (_number(name) for name in launcher.world_size)
        launch = _named(launcher, _number(launcher.rank) or 0, next(filter(None, sizes), None))
    if is_child and not launch.name:
        return Launch(name=name_process(os.getppid()), has_others=True)
    return launch


def warn_of_no_start(error: Exception, launch: Launch | None) -> str | None:
    """Warns that a recording could not begin and the run continues without it, after an internal error or in a rank.

    A rank that ended would leave others waiting for it, so it continues even after an error that the user could fix.

    Args:
        launch: the place of this process in its run; None if it is not known.

    Returns:
        a mark; None, without a warning, if the error should be raised.
    """
    if not isinstance(error, ModtraceError):
        text = "modtrace met an internal error when it began to record; the run goes on, unrecorded"
        warn_of_error(text, error, strict="", stacklevel=5)
        return f"modtrace failed when it began to record: {describe_error(error)}"
    if launch is None or not launch.has_others or not isinstance(error, RecordingError):
        return None
    who, advice = f"rank {launch.rank} of {launch.world_size}", ""
    if launch.world_size == 1:
        who = "this process"
        advice = " If it is a rank, enter record() after init_process_group(), or set RANK and WORLD_SIZE."
    warnings.warn(
        f"{who} is not recorded, and the run goes on: {error}{advice}", ModtraceWarning, stacklevel=4
    )
    return f"{who} is not recorded: {error}".rstrip(".")


def agent_start_ns() -> int | None:
    """Returns when the torchrun agent that started this process was started itself; None without torchrun."""
    return process_start_ns(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else None


def _named(launcher: _Launcher | None, rank: int, world_size: int | None) -> Launch:
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if world_size == 1 and not elastic:
        return Launch()
    return Launch(
        rank,
        world_size or 1,
        _name(launcher, world_size),
        run_id="" if elastic in (None, _NO_ID) else elastic,
        attempt=_number("TORCHELASTIC_RESTART_COUNT") or 0,
        has_others=world_size != 1,
    )


#: The id that torchrun uses if none was given.
_NO_ID = "none"


def _name(launcher: _Launcher | None, world_size: int | None) -> str:
    """Returns the id of the launch, or else the address at which its ranks meet."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", _NO_ID)
    if elastic != _NO_ID:
        return f"torchrun {elastic}"
    job = [os.environ[name] for name in (launcher.job if launcher else ()) if os.environ.get(name)]
    if launcher is not None and job:
        return f"{launcher.job[0]} {'.'.join(job)}"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        return f"{address}:{port}"
    return f"{world_size or 'some'} ranks"


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None
