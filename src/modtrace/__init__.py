"""modtrace shows what runs inside a PyTorch model: which module, in forward, backward and recompute."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import tensor_tracker as tensor_tracker
    from .analysis.findings.check import check
    from .analysis.findings.finding import CannotCheck, Finding
    from .api.compare import compare
    from .api.graph import graph
    from .api.live import LiveRecording
    from .api.model_graph import ModelGraph
    from .api.record import record
    from .api.recording import Recording, open_recording
    from .collect.fx.tracer import ModulePathTracer
    from .collect.module_tracker.tracker import ModTracker, ModuleTracker
    from .collect.stash.tracker import track
    from .errors import ModtraceError, ModtraceWarning, NonFiniteError
    from .query.dataset import Dataset, open_dataset
    from .recording.options.capture import Capture
    from .recording.options.op_options import Ops
    from .recording.options.tensor_options import TensorOptions
    from .recording.triggers.trigger_kinds import Above, NonFinite, OnSignal, OutOfBand
    from .replay.graft import graft
    from .replay.verify import verify
    from .views.dot.style import GraphStyle

__version__ = "0.1.0"

#: The public names with the modules that define them, which are loaded on first use to keep `import modtrace` light.
_NAMES = {
    "analysis.findings.check": ("check",),
    "analysis.findings.finding": ("CannotCheck", "Finding"),
    "collect.fx.tracer": ("ModulePathTracer",),
    "collect.module_tracker.tracker": ("ModTracker", "ModuleTracker"),
    "collect.stash.tracker": ("track",),
    "api.compare": ("compare",),
    "errors": ("ModtraceError", "ModtraceWarning", "NonFiniteError"),
    "api.recording": ("Recording", "open_recording"),
    "api.live": ("LiveRecording",),
    "api.record": ("record",),
    "api.graph": ("graph",),
    "api.model_graph": ("ModelGraph",),
    "query.dataset": ("Dataset", "open_dataset"),
    "recording.options.capture": ("Capture",),
    "recording.options.op_options": ("Ops",),
    "recording.options.tensor_options": ("TensorOptions",),
    "recording.triggers.trigger_kinds": ("Above", "NonFinite", "OnSignal", "OutOfBand"),
    "replay.graft": ("graft",),
    "replay.verify": ("verify",),
    "views.dot.style": ("GraphStyle",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "Above",
    "CannotCheck",
    "Capture",
    "Dataset",
    "Finding",
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
    "check",
    "compare",
    "graft",
    "graph",
    "open_dataset",
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
