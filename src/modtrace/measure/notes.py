"""The note of what is on a device during a capture, and the form of all notes; special.py has most reasons."""

from ..torch_internals.graph_captures import BEING_CAPTURED

_MOST_OF_A_NOTE = 120

#: The note if work on the tensor would end the capture of a CUDA graph, or become part of it.
NOT_MEASURED_IN_GRAPH = f"not measured: {BEING_CAPTURED}"


def shortened(note: str | None) -> str | None:
    """Returns the first line. Notes are dictionary-encoded, so there must not be many different ones."""
    return None if note is None else " ".join(note.split("\n", 1)[0].split())[:_MOST_OF_A_NOTE]
