"""The public list of stashes: outputs of modules and their gradients, in the order in which they arrive."""

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from ...optional import require
from ...recording.options.capture import BOUNDARY, COMPILED, INSIDE
from ...torch_internals.graph_captures import graph_captures
from ..names.walk import named_modules
from .collector import StashCollector
from .names import NamePattern, name_filter, warn_of_unmatched
from .stash import Stash, StashFn, StashValueFn, get_stash_fn

if TYPE_CHECKING:
    import pandas


class Tracker:
    """Stashes the outputs of registered modules and their gradients: a context manager, and a sequence of stashes.

        tracker = Tracker()
        tracker.register(model.head, "head")
        model(x).sum().backward()
        tracker.unregister()
        [(stash.name, stash.grad) for stash in tracker]  # [("head", False), ("head", True)]

    Outputs are stashed when calls end, gradients when backward reaches them: those of a module before those of its
    parts. A call has one stash of gradients in each backward that brings any, at the position where the first of them
    arrived. The gradient of an output is that of the tensor: if a module returns its input unchanged, it is the sum
    over all uses of the tensor.

    Stashes belong to the user and stay after `unregister()`. Of modules inside compiled code (`torch.compile`) nothing
    is stashed without `compiled="inside"`; the compiled module itself always is. Exceptions of a stash function
    propagate to the caller of the module or of `backward()`.
    """

    def __init__(
        self, stash: StashFn | None = None, *, strict: bool = False, compiled: str = BOUNDARY
    ) -> None:
        """Creates an empty tracker.

        Args:
            stash: makes a stash of an event. None: copies every tensor.
            strict: raises internal errors instead of warning.
            compiled: `"inside"` also stashes what modules inside of `torch.compile` return; see `track`.

        Raises:
            ValueError: `compiled` is another word.
        """
        if compiled not in COMPILED:
            raise ValueError(f"compiled={compiled!r}: give {' or '.join(COMPILED)}")
        #: All stashes so far, in order.
        self.stashes: list[Stash] = []
        # The collector gets a function, because users may assign another list to `stashes`.
        self._collector = StashCollector(
            stash or get_stash_fn(), lambda: self.stashes, strict=strict, inside=compiled == INSIDE
        )

    # Registering modules.

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *error: object) -> None:
        self.unregister()

    def register(self, module: nn.Module, name: str = "", grad: bool = True) -> None:
        """Stashes what a module returns from now on.

        A module may have several names, and then has one stash under each.

        Args:
            module: the module, which is not kept alive.
            name: the name of its stashes.
            grad: stashes the gradients too.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"register(module={module!r}): give a torch.nn.Module")
        self._collector.register(module, name, grad)

    def register_all(
        self,
        module: nn.Module,
        grad: bool = True,
        include: NamePattern = None,
        exclude: NamePattern = None,
        *,
        match: str = "search",
    ) -> None:
        """Registers a module and all modules in it by their names in `named_modules()`.

        A shared module has its first name.

        Args:
            module: the root, whose own name is `""`.
            grad: stashes the gradients too.
            include: selects modules: a text, a compiled regular expression, or a list of those. None: all modules.
            exclude: leaves out modules, likewise. None: none.
            match: how texts are read. `search`: a regular expression that is searched in the name, so `blocks.1` also
                matches `blocks.10`. `exact`: the whole name. `glob`: as for `modtrace.record()`, `blocks.*.attn`.
                A compiled expression is always searched.

        Raises:
            TypeError: `module` is not a module.
            TypeError, ValueError, re.error: a pattern cannot be read.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"register_all(module={module!r}): give a torch.nn.Module")
        chosen = name_filter(include, exclude, match)
        names = dict(named_modules(module))
        warn_of_unmatched(chosen, names, type(module).__name__)
        for name, inner in names.items():
            if chosen.selects(name):
                self.register(inner, name, grad)

    def unregister(self) -> None:
        """Stops stashing. All hooks are removed, and the numbers of steps are final."""
        self._collector.stop()

    # Access to the stashes.

    def clear(self) -> None:
        """Removes all stashes."""
        self.stashes.clear()

    def __len__(self) -> int:
        return len(self.stashes)

    def __iter__(self) -> Iterator[Stash]:
        return iter(self.stashes)

    @overload
    def __getitem__(self, index: int) -> Stash: ...
    @overload
    def __getitem__(self, index: slice) -> list[Stash]: ...
    def __getitem__(self, index: int | slice) -> Stash | list[Stash]:
        return self.stashes[index]

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles of a tracker contain only its stashes, without tracking anything."""
        return _with_stashes, (self.stashes,)

    def __repr__(self) -> str:
        tracking = sum(2 if registered.grad else 1 for registered in self._collector.registered)
        return f"Tracker(stashes={len(self)}, tracking={tracking})"

    def to_frame(
        self,
        stat: Callable[[torch.Tensor], Any] = torch.std,
        stat_name: str | None = None,
        *,
        where: bool = False,
    ) -> "pandas.DataFrame":
        """Returns a pandas frame with one row for each stash.

        Its columns are `name`, `type`, `grad`, what a stash function has added, and the statistic of the stash's first
        value, which is None if that is not a tensor.

        Args:
            stat: returns a number, or a tensor with one element, for a tensor. The standard deviation of fewer than two
                elements is NaN; integers and booleans are converted.
            stat_name: the name of its column; None: the name of the function.
            where: adds the columns `step`, `phase` and `call`.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        pandas = require("pandas", "Tracker.to_frame()")
        column = getattr(stat, "__name__", "value") if stat_name is None else stat_name
        measure = _std if stat is torch.std else stat
        rows = [_row(stash, column, measure, where) for stash in self]
        return pandas.DataFrame(
            rows, columns=None if rows else ["name", "type", "grad", column, *_WHERE[: 3 * where]]
        )


def track(
    module: nn.Module,
    grad: bool = True,
    include: NamePattern = None,
    exclude: NamePattern = None,
    stash_value: StashValueFn | None = None,
    stash: StashFn | None = None,
    *,
    match: str = "search",
    strict: bool = False,
    compiled: str = BOUNDARY,
) -> Tracker:
    """Stashes the outputs and gradients of a module and of all modules in it, until `unregister()` or the block's end.

        with modtrace.track(model, include="attn", stash_value=lambda t: t.std()) as tracker:
            model(x).sum().backward()
        tracker.to_frame()

    Args:
        module: the root, whose own name is `""`.
        grad: stashes the gradients too.
        include: selects modules by a regular expression that is searched in the name; see `match`. None: all.
        exclude: leaves out modules, likewise. None: none.
        stash_value: makes what is kept of each tensor; None: a copy in CPU memory. Copies of everything take much
            memory; it may return a single number.
        stash: makes what is kept of a whole event, in place of `stash_value`.
        match: how texts are read: `search`, `exact` or `glob`; see `Tracker.register_all`.
        strict: raises internal errors instead of warning.
        compiled: `"inside"` also stashes what modules inside of `torch.compile` return, and the gradients of that,
            which compiles once more for that. Such an event has no `args`, what is no tensor in its value is None,
            and its tensors have no graph. `"boundary"`: only what a compiled module as a whole returns.

    Raises:
        TypeError: `module` is not a module.
        TypeError, ValueError, re.error: a pattern cannot be read.
        ValueError: `stash_value` and `stash` are both given, or `compiled` is another word.
    """
    tracker = Tracker(get_stash_fn(stash_value=stash_value, stash=stash), strict=strict, compiled=compiled)
    tracker.register_all(module, grad=grad, include=include, exclude=exclude, match=match)
    return tracker


def _with_stashes(stashes: list[Stash]) -> Tracker:
    tracker = Tracker()
    tracker.stashes = stashes
    return tracker


_WHERE = ("step", "phase", "call")


def _row(stash: Stash, column: str, stat: Callable[[torch.Tensor], Any], where: bool) -> dict[str, Any]:
    row = {name: value for name, value in vars(stash).items() if name not in ("value", *_WHERE)}
    row["type"] = f"{stash.type.__module__}.{stash.type.__name__}"
    first = stash.first_value
    found = stat(first) if isinstance(first, torch.Tensor) else None
    row[column] = _to_number(found) if isinstance(found, torch.Tensor) else found
    return {**row, **({name: getattr(stash, name) for name in _WHERE} if where else {})}


def _to_number(found: torch.Tensor) -> Any:
    """Returns the element of a tensor; None if it is on a GPU and a CUDA graph's capture does not end."""
    with graph_captures.device_work(found, waits=True) as is_allowed:
        return found.item() if is_allowed else None


def _std(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the standard deviation, even for dtypes that torch.std does not support."""
    tensor = tensor.detach()
    if tensor.dtype not in _WITH_STD:
        tensor = tensor.to(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns for fewer than two numbers, and returns NaN
        return torch.std(tensor)


_WITH_STD = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
