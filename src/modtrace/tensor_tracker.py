"""Provides the names of tensor_tracker with their meanings, as `import modtrace.tensor_tracker as tensor_tracker`."""

from .collect.stash.stash import Event as Event
from .collect.stash.stash import Stash as Stash
from .collect.stash.stash import StashFn as StashFn
from .collect.stash.stash import StashValueFn as StashValueFn
from .collect.stash.stash import default_stash as default_stash
from .collect.stash.stash import default_stash_value as default_stash_value
from .collect.stash.stash import get_stash_fn as get_stash_fn
from .collect.stash.tracker import Tracker as Tracker
from .collect.stash.tracker import track as track
from .collect.structures.rebuild import rmap_tensor as rmap_tensor

__all__ = [
    "Event",
    "Stash",
    "StashFn",
    "StashValueFn",
    "Tracker",
    "default_stash",
    "default_stash_value",
    "get_stash_fn",
    "rmap_tensor",
    "track",
]
