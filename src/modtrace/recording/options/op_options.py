"""What is recorded of ops beyond that they ran."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ops:
    """What `record(ops=...)` keeps of every op; `True` is `Ops()`.

    Args:
        saved: at each backward, how many bytes the graph keeps for it, by op and by module (7 us a node).
        source: the line of the user's code that ran the op, of forward ops (1 us an op).
        python_names: what was called in Python: `linear` over `aten.addmm` (1 us a call, forward only).
    """

    saved: bool = True
    source: bool = False
    python_names: bool = False


def to_ops(given: object) -> Ops | None:
    """Returns what `ops=` means; None: no ops are recorded.

    Raises:
        ValueError: it is neither a truth value nor `Ops`.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Ops()
    if isinstance(given, Ops):
        return given
    raise ValueError(f"ops={given!r}: give True, False or modtrace.Ops(...)")
