"""What tier 2 costs, as a multiple of `x.sum()` and of tier 1 on the same tensor, on one thread: `make bench`."""

from collections.abc import Callable, Sequence

import torch
from values import _best_us as best_us

from measure import begin, machine, render_table
from modtrace.measure.dtypes import format_of
from modtrace.measure.measurers.measurer import Measurer
from modtrace.measure.memory import logical_array
from modtrace.measure.tier2 import tier2
from modtrace.measure.tier2.tier2 import channel_max_array, sample_array, tier2_array
from modtrace.torch_internals.modes import DisableTorchFunction

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Channels of the tensors, which are matrices.
CHANNELS = 1000


def tier2_table(sizes: Sequence[int], *, repeats: int) -> str:
    """Times tier 2, tier 1 and `x.sum()` in turn; the best of several, for all are disturbed by other processes."""
    rows = []
    for dtype in DTYPES:
        for size in sizes:
            tensor = torch.randn(size // CHANNELS, CHANNELS).to(dtype)
            with DisableTorchFunction():
                tier2, channels, sample, usual, total = best_us(runs(tensor), size, repeats)
            kind = str(dtype).removeprefix("torch.")
            times = [f"{each:.1f}" for each in (tier2, channels, sample)]
            ratios = [f"{tier2 / total:.1f}", f"{tier2 / usual:.1f}", f"{tier2 / size * 1e3:.2f}"]
            rows.append([kind, f"{size:,}", *times, *ratios])
    header = [
        "tier 2",
        "elements",
        "tier 2 us",
        "channels us",
        "sample us",
        "/ sum()",
        "/ tier 1",
        "ns an element",
    ]
    return render_table(header, rows)


def runs(tensor: torch.Tensor) -> list[Callable[[], object]]:
    """What is timed, in the order of the columns."""
    measurer, form = Measurer(), format_of(tensor.dtype)
    assert form is not None

    def measure_usual() -> None:
        found = measurer.measure(tensor)
        assert found.rows is not None
        found.rows.free([found.row])

    return [
        lambda: tier2_array(logical_array(tensor), form),
        lambda: channel_max_array(logical_array(tensor), form, -1),
        lambda: sample_array(logical_array(tensor), form, 64),
        measure_usual,
        tensor.sum,
    ]


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    kernel = "compiled kernel" if tier2.tier2_into is not None else "numpy kernel"
    print(f"{machine()}, {kernel}")
    sizes = [1000] if quick else [10_000, 1_000_000, 20_000_000]
    print(tier2_table(sizes, repeats=2 if quick else 9))


if __name__ == "__main__":
    main()
