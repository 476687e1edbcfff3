"""Rules about module paths: which parts belong to wrappers, and which alias is meant below a parent."""

from collections.abc import Iterable, Mapping

#: The part under which `torch.compile(model)` registers the model.
COMPILED_PART = "_orig_mod"

#: Parts of raw paths that come from wrappers and are never in the paths of the wrapped model, and the classes of the
#: wrappers; None: a part of that name always comes from a wrapper. A new one is a row here, and one in the test.
WRAPPERS: Mapping[str, frozenset[str] | None] = {
    COMPILED_PART: None,
    "_checkpoint_wrapped_module": None,  # checkpoint_wrapper of torch.distributed
    "_fsdp_wrapped_module": None,
    "_export_root": None,  # while torch.export traces
    "module": frozenset({"DistributedDataParallel", "DataParallel", "AveragedModel"}),
}


def is_wrapper_part(part: str, class_name: str) -> bool:
    """Tells whether what is registered as `part` in a module of a class is what this module wraps."""
    classes = WRAPPERS.get(part, frozenset())
    return classes is None or class_name in classes


def join(prefix: str, part: str) -> str:
    """Returns `prefix.part`, where either may be empty."""
    return f"{prefix}.{part}" if prefix and part else prefix or part


def is_below(path: str, ancestor: str) -> bool:
    """Returns whether `path` is `ancestor` or inside it; everything is inside the root `""`."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def path_below(parent: str, path: str, aliases: Iterable[str]) -> str:
    """Returns the path of a shared module that lies below `parent`: the one with the longest common start.

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
