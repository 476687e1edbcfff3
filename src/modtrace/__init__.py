"""modtrace shows what runs inside a PyTorch model: which module, in forward, backward and recompute."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collect.fx_paths import ModulePathTracer
    from .collect.module_tracker import ModTracker, ModuleTracker
    from .errors import ModtraceError, ModtraceWarning
    from .face import LiveRecording, Recording, open_recording, record
    from .model_graph import ModelGraph, graph
    from .recording.op_options import Ops
    from .replay.verify import verify
    from .views.dot_style import GraphStyle

__version__ = "0.1.0"

#: Public names and where they live. They are loaded when first asked for: `import modtrace` stays light.
_HOMES = {
    "GraphStyle": "views.dot_style",
    "LiveRecording": "face",
    "ModTracker": "collect.module_tracker",
    "ModelGraph": "model_graph",
    "ModulePathTracer": "collect.fx_paths",
    "ModuleTracker": "collect.module_tracker",
    "ModtraceError": "errors",
    "ModtraceWarning": "errors",
    "Ops": "recording.op_options",
    "Recording": "face",
    "graph": "model_graph",
    "open_recording": "face",
    "record": "face",
    "verify": "replay.verify",
}

__all__ = [
    "GraphStyle",
    "LiveRecording",
    "ModTracker",
    "ModelGraph",
    "ModtraceError",
    "ModtraceWarning",
    "ModulePathTracer",
    "ModuleTracker",
    "Ops",
    "Recording",
    "__version__",
    "graph",
    "open_recording",
    "record",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'modtrace' has no attribute {name!r}")
    if _HOMES[name].startswith(("collect.", "replay.")):
        import_module(".optional", __name__).require("torch", f"modtrace.{name}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
