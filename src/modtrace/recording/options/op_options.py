"""The options of `record(ops=...)`: what is recorded about ops, besides that they ran."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The options of `record(ops=...)`; `True` means `Ops()`.

    Args:
        saved: records at each backward how many bytes the graph keeps for it, by op and by module (7 us a node).
        source: records the line of the user's code that ran each forward op (1 us an op).
        python_names: records what was called in Python: `linear` above `aten.addmm` (1 us a call, forward only).
    """

    saved: bool = True
    source: bool = False
    python_names: bool = False


def to_ops(given: object) -> Ops | None:
    """Returns the options for the argument `ops=`; None if no ops are recorded.

    Raises:
        ValueError: `given` is neither a bool nor `Ops`.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Ops()
    if isinstance(given, Ops):
        return given
    raise ValueError(f"ops={given!r}: give True, False or modtrace.Ops(...)")
