"""Checks on a CUDA device what the tests check on simulated ones, and what recording costs there: `make gpu-check`.

It prints one line for each check, with pass, fail or not tried, and the table of `benchmarks/gpu.py`. It needs torch,
numpy and pyarrow alone, and takes some minutes. Without a GPU it runs what it can on the simulated device of
`tests/device`, which needs a compiler of C++; each line says so.
"""

import itertools
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.measure.cuda.cuda_kernels import find_kernels, why_no_kernels
from modtrace.measure.measurers.measurer import Measurer
from modtrace.torch_internals.modes import DisableTorchFunction

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "backward times": {"backward_times": True},
    "device times": {"backward_times": True, "device_times": True},
    "ops": {"ops": True},
    "tier 2, hash, sketch, ops": {"values": modtrace.Capture(stats=2, hash=True, sketch=True), "ops": True},
}


#: The type of device that is checked; "sim" where there is no GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "sim"


class Failed(Exception):
    """What a check has found."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Failed(what)


# Numbers.


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of many dtypes, sizes, layouts and contents, in main memory."""
    torch.manual_seed(0)
    for dtype, size in itertools.product(DTYPES, (0, 1, 7, 1000, 65_537, 3_000_001)):
        if dtype.is_floating_point or dtype.is_complex:
            tensor = (
                torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32)
                .mul(3)
                .to(dtype)
            )
            if size > 10 and dtype.itemsize > 1:
                tensor[size // 2] = torch.inf
                tensor[size - 2] = torch.nan
        else:
            tensor = torch.randint(0, 100, (size,)).to(dtype)
        yield f"{dtype} {size}", tensor
    x = torch.randn(64, 33, 5)
    yield "transposed", x.transpose(0, 2)
    yield "every second", x[:, ::2]
    yield "expanded", x[:1].expand(9, 33, 5)
    yield "unaligned", torch.randn(100_001)[1:]
    yield "squares beyond float32", torch.full((100_000,), 2e19)
    yield "tiny", torch.full((100_000,), 1e-45)


def check_statistics() -> str:
    """Compares the statistics of tensors on the device with those of the CPU's kernels."""
    on_device, on_cpu, count = Measurer(), Measurer(), 0
    for name, tensor in tensors():
        with DisableTorchFunction():
            for _ in range(2):  # the first tensor takes another way
                found = _row(on_device, tensor.to(DEVICE) if tensor.is_contiguous() else _moved(tensor))
            expected = _row(on_cpu, tensor)
        exact = [0, 1, 2, 5, 6]
        require(
            np.array_equal(found[exact], expected[exact], equal_nan=True),
            f"{name}: {found} is not {expected}",
        )
        if expected[5] + expected[6]:
            require(found[7] == expected[7], f"{name}: the first is {found[7]}, not {expected[7]}")
        magnitudes = np.sqrt(expected[4] * expected[0]) if np.isfinite(expected[4]) else 0
        near = np.isclose(found[3:5], expected[3:5], rtol=2e-6, atol=1e-6 * magnitudes, equal_nan=True)
        require(bool(near.all()), f"{name}: sums {found[3:5]} are not {expected[3:5]}")
        count += 1
    return f"{count} tensors"


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the device with the same strides."""
    storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)
    storage.set_(tensor.untyped_storage())
    return storage.to(DEVICE).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _row(measurer: Measurer, tensor: torch.Tensor) -> np.ndarray:
    measured = measurer.measure(tensor)
    require(measured.rows is not None, f"{measured.note}")
    row = measured.rows.read([measured.row])[0]
    measured.rows.free([measured.row])
    return row


# Training.


class Small(nn.Module):
    """A GPT of two blocks with dropout, whose blocks may be checkpointed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        size = gpu.SIZES["21M"]._replace(width=64, layers=2, heads=4, tokens=16, batch=2)
        self.net, self.drop, self.kind = gpu.GPT(size), nn.Dropout(0.1), kind

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.net.emb(ids))
        for block in self.net.blocks:
            x = (
                block(x)
                if self.kind == "plain"
                else checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            )
        return self.net.head(self.net.ln(x))


def train(kind: str, precision: str, fused: bool, options: "dict[str, Any] | None") -> list[Any]:
    """Returns losses, parameters and the generator of three steps."""
    torch.manual_seed(0)
    model = Small(kind).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision == "fp16")
    ids = torch.randint(0, gpu.VOCABULARY, (2, 16)).to(DEVICE)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    losses = []
    with nullcontext() if options is None else modtrace.record(model, strict=True, **options):
        for _ in range(3):
            optimizer.zero_grad()
            with nullcontext() if dtype is None else torch.autocast(DEVICE, dtype):
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    return [
        *losses,
        *(p.detach() for p in model.parameters()),
        torch.get_device_module(DEVICE).get_rng_state(),
    ]


def check_bits() -> str:
    count = 0
    is_simulated = DEVICE == "sim"
    kinds = itertools.product(
        ("plain", "reentrant", "non-reentrant"),
        ("float32", "bf16") if is_simulated else ("float32", "bf16", "fp16"),
        (False,) if is_simulated else (False, True),
    )
    for kind, precision, fused in kinds:
        plain = train(kind, precision, fused, None)
        for name, options in OPTIONS.items():
            found = train(kind, precision, fused, options)
            same = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
            require(same, f"{kind}, {precision}, fused={fused}, {name}: other bits")
            count += 1
    return f"{count} of {count} runs have the bits of the plain run"


def check_calls_and_values() -> str:
    """Compares a recording with that of the same run on the CPU."""
    frames = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = Small("plain").to(device)
        model.eval()
        ids = torch.arange(32, device=device).reshape(2, 16)
        with modtrace.record(model, strict=True) as rec:
            for _ in range(2):
                model(ids).float().logsumexp(-1).mean().backward()
                rec.step()
        frames.append(rec.frame("values"))
    cpu, device = frames
    keys = ["step", "site_id", "count", "nan_count", "inf_count"]
    require(len(cpu) > 50 and cpu[keys].equals(device[keys]), "other rows than on the CPU")
    for name in ("min", "max"):
        require(np.allclose(cpu[name], device[name], rtol=2e-3, atol=2e-3), f"{name} differs")
    return f"{len(cpu)} values"


# Waiting.


def check_waits() -> str:
    """Lets every wait for the device raise, in steps that are recorded."""
    work = gpu.Work(gpu.SIZES["21M"])
    with modtrace.record(work.model, strict=True) as rec:
        for _ in range(3):
            work.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(30):
                work.step()
                time.sleep(0.05)  # rows are written meanwhile
        finally:
            torch.cuda.set_sync_debug_mode("default")
    rows = rec.table("values").num_rows
    require(not rec.meta.marks if hasattr(rec, "meta") else True, "the recording has marks")
    return f"{rows} values in 33 steps"


def check_launches() -> str:
    from torch.profiler import ProfilerActivity, profile

    work = gpu.Work(gpu.SIZES["21M"])
    counts = []
    for options in (None, {}):
        with nullcontext() if options is None else modtrace.record(work.model, **options):
            for _ in range(2):
                work.step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                work.step()
                torch.cuda.synchronize()
            found = {event.key: event.count for event in profiled.key_averages()}
            counts.append(found)
    plain, recorded = counts
    one, many = recorded.get("measure_one", 0), recorded.get("measure_many", 0)
    other = sum(recorded.values()) - one - many - sum(plain.values())
    require(many == 1, f"{many} launches for parameters and gradients")
    return (
        f"{one} for outputs and gradients, {many} for parameters and theirs, {other} other device activities"
    )


@contextmanager
def _stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def check_streams_and_threads() -> str:
    """Trains models on streams and threads of their own, all recorded, and compares sums with torch's."""
    models = [nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).cuda() for _ in range(4)]
    outputs: dict[int, list[float]] = {}

    def run(at: int) -> None:
        sums = []
        with _stream():
            for number in range(20):
                x = torch.full((64, 256), float(number + at), device="cuda")
                sums.append(models[at](x).sum(dtype=torch.float64))
        torch.cuda.synchronize()
        outputs[at] = [each.item() for each in sums]

    with modtrace.record(models, values=modtrace.Capture(roles=["output"])) as rec:
        threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    frame = rec.frame("values")
    whole = sorted(frame[frame["count"] == 64 * 256]["sum"])
    require(len(whole) == 4 * 20 * 9, f"{len(whole)} values, not {4 * 20 * 9}")
    for expected in itertools.chain.from_iterable(outputs.values()):
        at = np.searchsorted(whole, expected)
        near = min(abs(whole[i] - expected) for i in (at - 1, at) if 0 <= i < len(whole))
        require(near <= 1e-5 * max(1, abs(expected)), f"no value has the sum {expected}")
    return f"{len(whole)} values on 4 streams"


def check_captures() -> str:
    """Captures CUDA graphs of whole steps in recordings that write to a folder meanwhile."""
    held = 0
    for options in OPTIONS.values():
        for _ in range(6):
            work = gpu.Work(gpu.SIZES["21M"]._replace(width=64, layers=2))
            work.optimizer = torch.optim.AdamW(work.model.parameters(), fused=True, capturable=True)
            with (
                tempfile.TemporaryDirectory() as folder,
                modtrace.record(work.model, to=f"{folder}/run.modtrace", strict=True, **options),
            ):
                for _ in range(5):
                    work.step()
                with _stream():
                    work.step()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    work.step()
                    time.sleep(0.3)
                graph.replay()
                torch.cuda.synchronize()
                work.step()
            held += 1
    return f"{held} of {6 * len(OPTIONS)} captures held"


def check_nonfinite() -> str:
    """Plants the logarithm of a negative number in the second block."""

    class Overshoots(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - 1e3).log()

    work = gpu.Work(gpu.SIZES["21M"]._replace(width=64, layers=2))
    work.model.blocks[1].act = Overshoots()
    with modtrace.record(work.model, ops=True) as rec:
        work.step()
    found = str(rec.first_nonfinite())
    require("log" in found and "blocks.1.act" in found, found)
    return "the planted op is named"


class WithLoss(nn.Module):
    """A model whose step works on nothing outside of its calls and the optimizer's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(ids).flatten(0, 1), ids.flatten())


def check_device_times() -> str:
    """Compares the times of a device with the wall time of steps that the device is too slow for."""
    work, steps = gpu.Work(gpu.SIZES["1.34B"]), 10
    model = WithLoss(work.model)

    def step() -> None:
        work.optimizer.zero_grad()
        model(work.ids).backward()
        work.optimizer.step()

    with modtrace.record(model, values=None, backward_times=True, device_times=True, strict=True) as rec:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall_ns = (time.perf_counter_ns() - start) / steps
    rows = {row["call_id"]: row for row in rec.table("calls").to_pylist()}
    unknown = sum(row["device_end_ns"] is None for row in rows.values())
    require(not unknown, f"{unknown} of {len(rows)} calls have no times")
    for row in rows.values():
        path, outer = (row["module_id"], row["phase"]), rows.get(row["parent_call_id"], row)
        require(row["device_start_ns"] <= row["device_end_ns"], f"{path} ends before it begins")
        require(row["device_start_ns"] >= row["start_ns"] - 1_000_000, f"{path} begins before it is issued")
        is_inside = outer["device_start_ns"] <= row["device_start_ns"] <= outer["device_end_ns"]
        is_inside = is_inside and row["device_end_ns"] <= outer["device_end_ns"]
        require(is_inside, f"{path} is not inside the call around it")
    outermost = [row for row in rows.values() if row["parent_call_id"] is None and row["step"] >= 3]
    sum_ns = sum(row["device_end_ns"] - row["device_start_ns"] for row in outermost) / steps
    require(0.9 <= sum_ns / wall_ns <= 1.1, f"{sum_ns / 1e6:.1f} of {wall_ns / 1e6:.1f} ms a step")
    late_ms = max(row["device_start_ns"] - row["start_ns"] for row in rows.values()) / 1e6
    return f"{sum_ns / 1e6:.1f} of {wall_ns / 1e6:.1f} ms a step, up to {late_ms:.1f} ms behind the host"


CHECKS: dict[str, Callable[[], str]] = {
    "statistics equal the CPU's": check_statistics,
    "bits of training": check_bits,
    "calls and values equal the CPU's": check_calls_and_values,
    "no wait for the device": check_waits,
    "launches of a default step": check_launches,
    "streams and threads": check_streams_and_threads,
    "captures of CUDA graphs": check_captures,
    "first non-finite value": check_nonfinite,
    "times of the device": check_device_times,
}

#: What the simulated device cannot show: it has no CUDA graphs, no profiler and no models of `benchmarks/gpu.py`.
NEEDS_GPU = {
    "no wait for the device",
    "launches of a default step",
    "streams and threads",
    "captures of CUDA graphs",
    "first non-finite value",
    "times of the device",
}

NOT_TRIED = ["several devices", "ROCm", "other accelerators"]


def main() -> None:
    where = "" if DEVICE == "cuda" else " on the simulated device"
    print(_describe_device(), flush=True)
    failed = 0
    for name, check in CHECKS.items():
        if DEVICE == "sim" and name in NEEDS_GPU:
            print(f"not tried  {name}: no GPU", flush=True)
            continue
        start = time.perf_counter()
        try:
            line = f"pass  {name}{where}: {check()}"
        except Exception as error:
            failed += 1
            line = f"FAIL  {name}{where}: {type(error).__name__}: {error}"
            if not isinstance(error, Failed):
                traceback.print_exc()
        print(f"{line} ({time.perf_counter() - start:.0f} s)", flush=True)
    if DEVICE == "cuda":
        kernels = find_kernels(torch.device("cuda", 0))
        print(f"kernels: {'none' if kernels is None else kernels.problem or 'compiled by NVRTC'}")
    for name in NOT_TRIED:
        print(f"not tried  {name}")
    sys.exit(bool(failed))


def _describe_device() -> str:
    """Returns what is checked. Without a GPU it makes the simulated device; where that is impossible it exits."""
    if DEVICE == "cuda":
        kernels = why_no_kernels() or "own"
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {kernels}"
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from device.simulated import WHY_MISSING, simulated

    if WHY_MISSING is not None:
        print(f"no CUDA device, and no simulated one ({WHY_MISSING}): nothing was tried")
        sys.exit(0)
    simulated()
    gpu.VOCABULARY = 100  # its kernels are those of the CPU
    return f"no CUDA device: what can be is tried on a simulated one, torch {torch.__version__}, kernels: torch's"


if __name__ == "__main__":
    main()
