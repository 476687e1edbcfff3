"""Every command and every answer that a recording is asked for; only `graft` imports torch."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modtrace
from modtrace.api.recording import Recording, open_recording
from modtrace.cli.main import main
from modtrace.recording.role import ROLES
from modtrace.recording.schema import schemas

Ask = Callable[[Path], object]


def _of_recording(ask: Callable[[Recording], Any]) -> Ask:
    return lambda path: ask(open_recording(path))


def _tensors(rec: Recording) -> None:
    """Every whole tensor, as its bytes."""
    for blob in sorted(set(rec.table("values")["blob"].drop_null().to_pylist()))[:50]:
        rec.data.tensor(blob).to_numpy()


def _last_step(rec: Recording) -> int:
    return max(rec.table("steps")["step"].to_pylist(), default=0)


def _copy(path: Path) -> None:
    open_recording(path).write(path.parent / "copy")


#: The answers of the API.
ANSWERS: dict[str, Ask] = {
    "print": _of_recording(str),
    "tree": _of_recording(lambda rec: rec.module_tree(step=_last_step(rec))),
    "frame": _of_recording(lambda rec: [rec._named_table(name) for name in schemas()]),
    "nonfinite": _of_recording(lambda rec: rec.first_nonfinite()),
    "recompute": _of_recording(lambda rec: rec.recompute_check()),
    "triggers": _of_recording(lambda rec: rec.triggers),
    **{f"history {role}": _of_recording(lambda rec, role=role: rec.history(role=role)) for role in ROLES},
    **{
        f"history {stat}": _of_recording(lambda rec, stat=stat: rec.history(stat=stat))
        for stat in (
            "kurtosis",
            "quantile:0.5",
            "underflow:fp16",
            "zero_fraction",
            "argmax",
            "dynamic_range",
        )
    },
    "history user": _of_recording(lambda rec: rec.history("dropout", stat="user:mean", call=0)),
    "history update": _of_recording(lambda rec: rec.history(role="update", stat="relative")),
    "stack": _of_recording(lambda rec: rec.stack("blocks.*", step=_last_step(rec), call=0)),
    "op table": _of_recording(lambda rec: [rec.op_table(by=by) for by in ("module", "call", "op")]),
    "memory table": _of_recording(lambda rec: rec.memory_table(ops=True)),
    "paths": _of_recording(lambda rec: rec.paths(phase="backward").modules()),
    "graph": _of_recording(lambda rec: str(rec.graph())),
    "folded graph": _of_recording(lambda rec: str(rec.graph().without_views().fold().collapse(depth=1))),
    "graph with tensors": _of_recording(lambda rec: str(rec.graph(step=_last_step(rec)).with_tensors())),
    "tensors": _of_recording(_tensors),
    "write": _copy,
}


def _command(*arguments: str) -> Ask:
    def ask(path: Path) -> int:
        healthy = path.parent.parent / path.parent.name.partition("-")[0]
        paths = {"RUN": path, "HEALTHY": healthy}
        texts = (re.sub("RUN|HEALTHY", lambda found: str(paths[found[0]]), text) for text in arguments)
        return run_command(*texts)

    return ask


def run_command(*arguments: str) -> int:
    """The exit code of a command.

    Raises:
        AssertionError: it is none of ours, or an error is told in more than a line.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["modtrace", *arguments], out, err
    try:
        main()
    except SystemExit as exited:
        code = exited.code
    finally:
        sys.argv, sys.stdout, sys.stderr = before
    err.seek(0)
    out.flush()
    told, answer = err.read(), out.buffer.tell()
    assert code in (0, 1, 2), (code, told)
    assert "Traceback" not in told, told
    # what may precede it
    error = re.sub(r"^((Rank \d+ of \d+ is shown\.|Rank \d+ is left out, because).*\n)+", "", told)
    is_answered = answer and not error  # 2 also says that there was nothing to compare
    assert code != 2 or is_answered or error.startswith("modtrace: error: "), told
    # an error of another kind that is told as one of it; `view --against` may name what `compare` can do
    assert {"--step", "compare"} & {*arguments} or "--step" not in told.replace("compare --step", ""), told
    return int(code)


_TO = "RUN.out"
#: The commands, `RUN` standing for the recording, `HEALTHY` for what it was before the damage. Pictures are left out:
#: other programs draw them.
COMMANDS: dict[str, Ask] = {
    " ".join(each): _command(*each)
    for each in [
        ("show", "RUN"),
        ("show", "RUN", "--json"),
        ("show", "RUN", "--slots", "--no-fold", "--sort", "total"),
        ("ops", "RUN"),
        ("ops", "RUN", "--by", "call", "--json"),
        ("memory", "RUN", "--ops"),
        ("memory", "RUN", "--json"),
        ("paths", "RUN"),
        ("paths", "RUN", "--json", "--phase", "recompute"),
        ("graph", "RUN"),
        ("graph", "RUN", "--json"),
        ("graph", "RUN", "-o", _TO + ".dot", "--color", "nonfinite", "--tensors", "--views"),
        ("view", "RUN", "-o", _TO + ".html"),
        ("timeline", "RUN", "-o", _TO + ".json", "--op-flows"),
        ("nonfinite", "RUN"),
        ("nonfinite", "RUN", "--json"),
        ("recompute", "RUN"),
        ("recompute", "RUN", "--json"),
        ("recompute", "RUN", "--rank", "1"),
        ("check", "RUN"),
        ("check", "RUN", "--json"),
        ("check", "RUN", "--rank", "all"),
        ("compare", "RUN", "HEALTHY"),
        ("compare", "HEALTHY", "RUN", "--json"),
        ("view", "RUN", "--against", "HEALTHY", "-o", _TO + ".html"),
        ("view", "HEALTHY", "--against", "RUN", "-o", _TO + ".html"),
        ("view", "RUN", "--against", "HEALTHY", "--map", "auto", "-o", _TO + ".html"),
        ("compare", "RUN", "HEALTHY", "--rank", "0:1"),
        ("compare", "RUN", "HEALTHY", "--noise", "RUN"),
        ("compare", "HEALTHY", "RUN", "--map", "auto", "--allow-missing", "--top", "3"),
        ("compare", "RUN", "HEALTHY", "--rank", "0"),
        ("nonfinite", "RUN", "--rank", "all"),
        ("ranks", "RUN"),
        ("ranks", "RUN", "--json"),
        ("plot", "RUN", "--json"),
        ("plot", "RUN", "--json", "--role", "parameter_grad", "--stat", "std"),
        ("plot", "RUN", "--json", "--kind", "histogram", "--step", "1"),
        ("export", "RUN", "--format", "csv", "-o", _TO),
        ("export", "RUN", "--format", "parquet", "-o", _TO),
        ("export", "RUN", "--format", "model-explorer", "-o", _TO + ".json"),
        ("export", "RUN", "--format", "trace", "-o", _TO),
        ("export", "RUN", "--format", "tensorboard", "-o", _TO),
        ("export", "RUN", "--format", "dot", "-o", _TO + ".dot"),
        ("export", "RUN", "--format", "dot", "-o", _TO + ".dot", "--step", "1", "--phase", "backward"),
    ]
}


def _query(path: Path) -> int:
    """Exports the recording, and asks a question of the dataset."""
    dataset = f"{path}.parquet"
    if run_command("export", str(path), "--format", "parquet", "-o", dataset) == 2:
        return 2
    return run_command("query", dataset, "slowest-modules")


def _graft(path: Path) -> None:
    """Runs a step of the recorded model, whose modules return what they returned in the recording."""
    import torch

    from helpers.fuzz_recordings import Net

    torch.set_num_threads(1)  # a fork has no other threads
    model = Net()
    with torch.no_grad(), modtrace.graft(model, path, ["blocks.0", "dropout"], step=0):
        for _ in range(2):
            model(torch.zeros(2, 4))


QUESTIONS = {**ANSWERS, **COMMANDS, "query": _query, "graft": _graft}
