"""modtrace shows what runs inside a PyTorch model: which module, in forward, backward and recompute."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import tensor_tracker as tensor_tracker
    from .collect.fx.tracer import ModulePathTracer
    from .collect.module_tracker.tracker import ModTracker, ModuleTracker
    from .collect.stash.tracker import track
    from .compare_runs import compare
    from .errors import ModtraceError, ModtraceWarning, NonFiniteError
    from .face import Recording, open_recording
    from .live import LiveRecording, record
    from .make_graph import graph
    from .model_graph import ModelGraph
    from .recording.options.capture import Capture
    from .recording.options.op_options import Ops
    from .recording.options.tensor_options import TensorOptions
    from .recording.triggers.trigger_kinds import Above, NonFinite, OnSignal, OutOfBand
    from .replay.verify import verify
    from .views.dot.style import GraphStyle

__version__ = "0.1.0"

#: Public names and where they live. They are loaded when first asked for: `import modtrace` stays light.
_HOMES = {
    "Above": "recording.triggers.trigger_kinds",
    "Capture": "recording.options.capture",
    "GraphStyle": "views.dot.style",
    "LiveRecording": "live",
    "ModTracker": "collect.module_tracker.tracker",
    "ModelGraph": "model_graph",
    "ModulePathTracer": "collect.fx.tracer",
    "ModuleTracker": "collect.module_tracker.tracker",
    "ModtraceError": "errors",
    "ModtraceWarning": "errors",
    "NonFinite": "recording.triggers.trigger_kinds",
    "NonFiniteError": "errors",
    "OnSignal": "recording.triggers.trigger_kinds",
    "Ops": "recording.options.op_options",
    "OutOfBand": "recording.triggers.trigger_kinds",
    "Recording": "face",
    "TensorOptions": "recording.options.tensor_options",
    "compare": "compare_runs",
    "graph": "make_graph",
    "open_recording": "face",
    "record": "live",
    "track": "collect.stash.tracker",
    "verify": "replay.verify",
}

__all__ = [
    "Above",
    "Capture",
    "GraphStyle",
    "LiveRecording",
    "ModTracker",
    "ModelGraph",
    "ModtraceError",
    "ModtraceWarning",
    "ModulePathTracer",
    "ModuleTracker",
    "NonFinite",
    "NonFiniteError",
    "OnSignal",
    "Ops",
    "OutOfBand",
    "Recording",
    "TensorOptions",
    "__version__",
    "compare",
    "graph",
    "open_recording",
    "record",
    "track",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "tensor_tracker":
        import_module(".optional", __name__).require("torch", "modtrace.tensor_tracker")
        return import_module(".tensor_tracker", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'modtrace' has no attribute {name!r}")
    if _HOMES[name].startswith(("collect.", "replay.")):
        import_module(".optional", __name__).require("torch", f"modtrace.{name}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
