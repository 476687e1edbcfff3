"""Recognises the errors that torch raises if a device has not the memory that is asked for."""

import re

#: What torch says: of devices, and of the CPU's allocators.
_SAID = ("OutOfMemoryError", "out of memory", "can't allocate memory", "not enough memory")

_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|B|[KMGT]iB)")


def is_out_of_memory(text: str) -> bool:
    """Returns whether the text of an error, with or without its class, says that memory could not be had."""
    return any(said in text for said in _SAID)


def requested_bytes(text: str) -> int | None:
    """Returns how much was asked for, as exactly as torch says it; None if it does not."""
    found = _REQUEST.search(text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2].lower()])
