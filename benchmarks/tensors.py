"""What whole tensors cost: on the training's thread, and on the way to the disk.

    python benchmarks/tensors.py [--quick] [--folder DIR]

* the copy that `put_tensor` makes while the thread that writes is at rest and while it writes, beside numpy's own copy.
* MB/s to the disk, until the files are closed, beside `os.write` of the same bytes; the ratio within each round.
* memory beyond that of the process before, at its peak, and the bound that it was given.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from measure import Estimate, estimate, machine, render_table
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.writer import FolderWriter

MIB = 2**20
RING_MIB = 64


def main() -> None:
    options = _parse_arguments()
    tensors, rounds = (32, 3) if options.quick else (512, 9)
    array = np.random.default_rng(0).standard_normal(MIB // 4, np.float32)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(machine())
        print(
            render_table(
                ["the training's thread, us a MiB", "median", "95 %"], thread_rows(Path(folder), array)
            )
        )
        print(
            render_table(
                ["to the disk, MB/s", "median", "95 %"], disk_rows(Path(folder), array, tensors, rounds)
            )
        )
        print(
            render_table(["memory, MiB", "at its peak", "bound"], [memory_row(Path(folder), array, tensors)])
        )


def thread_rows(folder: Path, array: np.ndarray) -> list[list[str]]:
    """The median of single calls; a ring that has been filled once, for the system gives memory at first use."""
    target = np.empty_like(array)
    copies = [_seconds(lambda: np.copyto(target, array)) for _ in range(2 * RING_MIB)]
    with _writer(folder) as writer:
        for _ in range(RING_MIB):
            _put(writer, array)
        at_rest, writing = [], []
        for _ in range(2 * RING_MIB):
            writer.wait_for_tensors()
            at_rest.append(_seconds(lambda: _put(writer, array)))
        for _ in range(8):
            writer.wait_for_tensors()
            writing += [_seconds(lambda: _put(writer, array)) for _ in range(RING_MIB // 2)]
    rows = {
        "numpy's copy": copies,
        "put_tensor, alone": at_rest,
        "put_tensor, while others are written": writing,
    }
    return [[name, *_cells(estimate(np.array(each) * 1e6))] for name, each in rows.items()]


def disk_rows(folder: Path, array: np.ndarray, tensors: int, rounds: int) -> list[list[str]]:
    """Both in each round, for what the disk does for others changes from second to second."""
    raw, ours = [], []
    for _ in range(rounds):
        raw.append(tensors * array.nbytes / 1e6 / _seconds(lambda: _write_raw(folder, array, tensors)))
        ours.append(tensors * array.nbytes / 1e6 / _seconds(lambda: _write_tensors(folder, array, tensors)))
    ratio = estimate(np.array(ours) / np.array(raw))
    return [
        ["os.write", *_cells(estimate(np.array(raw)))],
        ["whole tensors", *_cells(estimate(np.array(ours)))],
        ["ratio", f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"],
    ]


def memory_row(folder: Path, array: np.ndarray, tensors: int) -> list[str]:
    before = peak = _anonymous_mib()
    with _writer(folder) as writer:
        for _ in range(tensors):
            _put(writer, array)
            peak = max(peak, _anonymous_mib())
    return [f"{tensors} tensors of 1 MiB", f"{peak - before:.0f}", f"{RING_MIB}"]


def _write_raw(folder: Path, array: np.ndarray, tensors: int) -> None:
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(tensors):
        os.write(fd, array)
    os.close(fd)
    (folder / "raw").unlink()


def _write_tensors(folder: Path, array: np.ndarray, tensors: int) -> None:
    with _writer(folder) as writer:
        for _ in range(tensors):
            _put(writer, array)


@contextmanager
def _writer(folder: Path) -> Iterator[FolderWriter]:
    """A recording that is closed and deleted."""
    options = TensorOptions(max_bytes=RING_MIB * MIB)
    writer = FolderWriter(folder / "run.modtrace", RunMeta(), tensors=options)
    yield writer
    writer.close()
    shutil.rmtree(writer.path)


def _put(writer: FolderWriter, array: np.ndarray) -> None:
    if writer.put_tensor("blocks.0.attn.output", array, "float32", array.shape) is None:
        raise RuntimeError("the tensor was dropped: the benchmark times something else")


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _anonymous_mib() -> float:
    """What this process holds beyond mapped files."""
    with open("/proc/self/status") as file:
        [line] = [each for each in file if each.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def _cells(found: Estimate) -> list[str]:
    return [f"{found.median:.0f}", f"{found.low:.0f}-{found.high:.0f}"]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few small rounds, to see that it runs")
    parser.add_argument("--folder", type=Path, help="where to write while it is measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
