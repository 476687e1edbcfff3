"""How many files a reader passes who follows `compare` of two recordings in order of execution: `make size` prints it.

A stop is a call from one file of modtrace into another one; each caller's file, called file and function count once.
The recordings may be any two: `python benchmarks/call_path.py A B`. Without them it records a small GPT twice, with
another epsilon in the second run. Another checkout is measured with its `src` in PYTHONPATH.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import modtrace

ROOT = Path(modtrace.__file__).parent


class Stop(NamedTuple):
    """A call from one file into another one."""

    caller: str
    file: str
    function: str


def follow(call: Callable[[], Any]) -> list[Stop]:
    """Returns the stops of a call in order of execution."""
    stops: dict[Stop, None] = {}
    prefix = f"{ROOT}/"

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(prefix):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(prefix):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            names = (path.removeprefix(prefix) for path in (caller.f_code.co_filename, file))
            stops.setdefault(Stop(*names, frame.f_code.co_qualname), None)

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(stops)


def record_pair(folder: Path) -> tuple[str, str]:
    """Records a small GPT for two steps, and again with another epsilon in one norm."""
    import torch
    from torch import nn

    paths = []
    for name, eps in (("a", 1e-5), ("b", 1e-3)):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))
        model[1].layers[0].norm1.eps = eps
        optimizer = torch.optim.AdamW(model.parameters())
        paths.append(str(folder / f"{name}.modtrace"))
        with modtrace.record(model, to=paths[-1], ops=True):
            for _ in range(2):
                tokens = torch.randint(0, 50, (2, 12))
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    return paths[0], paths[1]


def summarize(stops: Sequence[Stop]) -> str:
    """Returns how many stops there are in how many files, and how long the longest of these is."""
    files = sorted({stop.file for stop in stops} | {stop.caller for stop in stops})
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    longest = max(lines, key=lines.__getitem__)
    return (
        f"compare of two recordings: {len(stops)} stops in {len(files)} files of {sum(lines.values()):,} lines; "
        f"the longest is {longest} ({lines[longest]})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", nargs="*", metavar="RECORDING", help="two recordings")
    parser.add_argument("--all", action="store_true", help="print each stop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        a, b = options.recordings or record_pair(Path(folder))
        modtrace.compare(a, b)  # what is imported or made ready once is not followed
        stops = follow(lambda: modtrace.compare(a, b))
    if options.all:
        for stop in stops:
            print(f"{stop.caller} -> {stop.file}:{stop.function}")
    print(summarize(stops))


if __name__ == "__main__":
    main()
