"""The function that makes a graph: of one call of a model, or of a step of a recording."""

from collections.abc import Sequence
from typing import Any

from ..analysis.graph.build import build_graph
from ..analysis.tables.missing_rows import require_ops
from ..optional import require
from ..recording.protocols import RecordingData
from ..store.reader import read_given
from .model_graph import Choice, ModelGraph

#: The number of characters that an error shows of a wrong argument.
_SHOWN_OF_SUBJECT = 60


def graph_of(data: RecordingData, step: int | None = None) -> ModelGraph:
    """Returns the graph of one step of a recording.

    Raises:
        ValueError: there is no such step.
        NothingRecordedError: ops were to be recorded, and those of the step are missing.
    """
    graph = build_graph(data, step=step)
    if graph.step is not None and data.meta.marks and data.meta.options.get("ops"):
        require_ops(data, graph.step.step)
    # The number of the step is kept, because the last step of a live recording soon changes.
    return ModelGraph(data, Choice(step=graph.step.step if graph.step else step), graph)


def graph(
    subject: Any, /, *args: Any, input_shapes: Sequence[Any] | None = None, **kwargs: Any
) -> ModelGraph:
    """Returns the execution graph of one call of a model, or of a step of a recording.

        modtrace.graph(model, images).collapse(depth=2).write_svg("model.svg")
        modtrace.graph(model, input_shapes=[(1, 3, 224, 224)])
        modtrace.graph("run.modtrace", step=3)

    The model is left unchanged: its parameters, buffers, gradients, mode, device and hooks, the random generators, and
    the arguments. Other objects that it holds may change, such as a cache in an attribute. It runs in the caller's grad
    mode, and a recording that is running sees the call too.

    Args:
        subject: a `torch.nn.Module`, a `Recording`, or the path of one.
        args: the positional arguments of the model.
        input_shapes: in place of `args`, a shape, or `(shape, dtype)`, for each argument, which is filled with random
            numbers.
        kwargs: the keyword arguments of the model; for a recording `step=`.

    Raises:
        TypeError: `subject` is something else, or both arguments and `input_shapes` are given.
        ValueError: a shape cannot be read, or the recording has no such step.
        MissingLibraryError: torch is not installed, and `subject` is a model.
    """
    if not callable(subject):
        if (data := read_given(subject)) is not None:
            return _graph_of_recording(data, args, input_shapes, kwargs)
        raise TypeError(f"graph({shorten(subject)}): give a torch.nn.Module, a recording, or the path of one")
    require("torch", "modtrace.graph() of a model")
    from ..replay.one_call import record_call
    from ..replay.random_inputs import make_inputs

    if input_shapes is not None:
        if args:
            raise TypeError("graph(): give the arguments of the model or input_shapes, not both")
        args = make_inputs(subject, input_shapes)
    return graph_of(record_call(subject, args, kwargs))


def _graph_of_recording(
    data: RecordingData, args: Sequence[Any], input_shapes: object, options: dict[str, Any]
) -> ModelGraph:
    step = options.pop("step", None)
    if args or options or input_shapes is not None:
        raise TypeError("graph(): a recording is not called; only step= can be given with it")
    return graph_of(data, step)


def shorten(subject: object) -> str:
    """Returns the text that an error shows for an argument that is neither a model nor a recording."""
    text = repr(subject)
    return text if len(text) <= _SHOWN_OF_SUBJECT else f"{text[:_SHOWN_OF_SUBJECT]}..."
