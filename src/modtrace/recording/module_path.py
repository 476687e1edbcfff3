"""Rules about module paths: which parts belong to wrappers, and which alias is meant below a parent."""

from collections.abc import Iterable

#: Parts of raw paths that come from wrappers and are never in the paths of the wrapped model.
WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_export_root"})


def join(prefix: str, part: str) -> str:
    """Returns `prefix.part`, where either may be empty."""
    return f"{prefix}.{part}" if prefix and part else prefix or part


def is_below(path: str, ancestor: str) -> bool:
    """Returns whether `path` is `ancestor` or inside it; everything is inside the root `""`."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def path_below(parent: str, path: str, aliases: Iterable[str]) -> str:
    """Returns the one of a shared module's paths that lies below `parent`, the longest common start winning.

    A module registered as `x.l` and as `y.l` is `y.l` when `y` runs it.
    """
    best, best_shared = path, _shared_parts(parent, path)
    for alias in aliases:
        shared = _shared_parts(parent, alias)
        if shared > best_shared:
            best, best_shared = alias, shared
    return best


def _shared_parts(one: str, other: str) -> int:
    shared = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        shared += 1
    return shared
