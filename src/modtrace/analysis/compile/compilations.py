"""Finds what torch.compile did in a recording: its regions, why it compiled again, and where graphs broke."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ...recording.phase import BACKWARD
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, OUTPUT
from ..tables.columns import column_of
from ..tables.placement import Module
from .texts import CodeLine, CompileText, plain_name, read_break, read_guard


@dataclass(frozen=True, kw_only=True)
class CompiledRegion:
    """A function of a module that torch.compile compiled, or tried to compile."""

    module: str  # the path of the module, or a root's name; "" if not known
    function: str  # the name and line in the code; a part behind a graph break begins at another line
    line: CodeLine | None
    compilations: int  # how many led to code, without those of its backward
    ops: tuple[int, ...]  # the number of ops in each of its graphs that has any
    guards: int | None  # the number of guards of its last graph
    backwards: int  # the number of compilations of its backward
    took_ns: int
    steps: tuple[int, ...]  # the steps in which it was compiled
    error: str | None  # why the last compilation failed


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason why a function was compiled again or not compiled, or why its graph ends early."""

    kind: Literal["guard", "break", "error"]
    module: str
    reason: str
    values: tuple[str, ...]  # the values of what changed, in order
    line: CodeLine | None  # the line of the user's code
    compiled: CodeLine | None  # the first line of the function that was compiled or not
    advice: str  # "" if torch gives no advice
    times: int
    others: int  # how many other functions have the same reason
    steps: tuple[int, ...]
    text: str  # the full text of torch


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Modules that ran only inside the compiled regions of a module, or never, so they have no calls."""

    region: str
    modules: tuple[str, ...]  # only the outermost ones
    measured: bool = False  # whether outputs of these modules, or inside them, were measured


@dataclass(frozen=True, kw_only=True)
class Compilations:
    """What torch.compile did in all steps of a recording."""

    count: int = 0
    took_ns: int = 0
    regions: tuple[CompiledRegion, ...] = ()
    recompilations: tuple[Reason, ...] = ()
    graph_breaks: tuple[Reason, ...] = ()
    errors: tuple[Reason, ...] = ()
    inside: tuple[Inside, ...] = ()
    shared: tuple[str, ...] = ()  # modules that ran code compiled for others of their class
    anew: tuple[str, ...] = ()  # modules that could run neither such code nor earlier code
    before: tuple[str, ...] = ()  # modules whose code was compiled before the recording began


class _Compiled(NamedTuple):
    """A row of `compilations` with the modules that it concerns."""

    row: Mapping[str, Any]
    of: Module | None
    is_first: bool  # whether no earlier call of the module is known

    @property
    def module(self) -> str:
        return "" if self.of is None else name_module(self.of)

    @property
    def is_backward(self) -> bool:
        return bool(self.row["phase"] == BACKWARD)

    @property
    def took_ns(self) -> int:
        end_ns = self.row["end_ns"]
        return 0 if end_ns is None else max(end_ns - self.row["start_ns"], 0)

    @property
    def line(self) -> CodeLine | None:
        """The first line of the function that was compiled."""
        name, _, place = (self.row["function"] or "").partition(" ")
        return CodeLine.parse(place, name)


def name_module(module: Module) -> str:
    """Returns the path of a module, or a root's name."""
    return module.path or module.name or module.type


def read_compilations(data: RecordingData, modules: Mapping[int, Module]) -> Compilations | None:
    """Returns what torch.compile did in a recording; None if nothing was compiled and no region ran.

    Args:
        data: the recording.
        modules: the modules by id, where a wrapper and its wrapped module are one.
    """
    rows = data.table("compilations").to_pylist()
    calls = data.table("calls")
    module_id = column_of(calls, "module_id")

    def ids_of(module_ids: Iterable[int | None]) -> set[int]:
        return {
            modules[number].module_id for number in module_ids if number is not None and number in modules
        }

    regions = ids_of(np.unique(module_id[column_of(calls, "compiled") == 1]).tolist())
    if not rows and not regions:
        return None
    call_id = column_of(calls, "call_id")
    order = np.argsort(call_id)
    called, first = np.unique(module_id[order], return_index=True)
    first_calls = dict(zip(called.tolist(), call_id[order][first].tolist(), strict=True))
    compiled = [
        _Compiled(
            row,
            modules.get(row["module_id"]),
            row["call_id"] in (None, first_calls.get(row["module_id"])),
        )
        for row in rows
    ]
    with_rows = ids_of(row["module_id"] for row in rows)
    guards, anew = _explain_guards(compiled, {module.path for module in modules.values()})
    errors = list(_find_errors(compiled))
    refused = {error.key for error in errors}
    breaks = [found for found in _find_breaks(compiled) if (found.text.subject, found.key) not in refused]
    sites = data.table("sites").to_pylist()
    measured = ids_of(site["module_id"] for site in sites if site["role"] in (OUTPUT, GRAD_OUTPUT))
    inside = _find_inside(modules, ids_of(first_calls), regions | with_rows, measured)
    types = {modules[number].type for number in with_rows}
    others = [modules[number] for number in sorted(regions - _above(with_rows, modules))]
    return Compilations(
        count=len(rows),
        took_ns=sum(row.took_ns for row in compiled),
        regions=tuple(_find_regions(compiled)),
        recompilations=tuple(_group("guard", guards)),
        graph_breaks=tuple(_group("break", breaks)),
        errors=tuple(_group("error", errors)),
        inside=tuple(inside),
        shared=tuple(name_module(module) for module in others if module.type in types),
        before=tuple(name_module(module) for module in others if module.type not in types),
        anew=anew,
    )


def _above(ids: Iterable[int], modules: Mapping[int, Module]) -> set[int]:
    """Returns the ids of modules and of all modules in which they are registered."""
    return {above for number in ids if number in modules for above in _chain(modules[number], modules)}


def _find_regions(compiled: Sequence[_Compiled]) -> Iterator[CompiledRegion]:
    """Yields one region for each function of each module, in the order in which they were first compiled."""
    by_function: dict[tuple[str, str], list[_Compiled]] = defaultdict(list)
    for compilation in compiled:
        by_function[compilation.module, compilation.row["function"] or ""].append(compilation)
    for (module, function), compilations in by_function.items():
        forwards = [one.row for one in compilations if not one.is_backward]
        made = [row for row in forwards if row["error"] is None]
        yield CompiledRegion(
            module=module,
            function=plain_name(function.partition(" ")[0]),
            line=compilations[0].line,
            compilations=len(made),
            ops=tuple(row["ops"] for row in made if row["ops"] is not None),
            guards=made[-1]["guards"] if made else None,
            backwards=len(compilations) - len(forwards),
            took_ns=sum(one.took_ns for one in compilations),
            steps=tuple(sorted({one.row["step"] for one in compilations})),
            error=forwards[-1]["error"] if forwards else None,
        )


# Dynamo reports one reason of the user several times: each function behind a graph break checks the size of one tensor,
# and a break is found in a function and in its callers.


class _Occurrence(NamedTuple):
    """One reason that Dynamo gave for one compilation."""

    key: Any  # occurrences with equal keys are one reason
    text: CompileText
    compiled: _Compiled

    @property
    def function(self) -> tuple[str, str | None]:
        return self.compiled.module, self.compiled.row["function"]


def _explain_guards(
    compiled: Sequence[_Compiled], paths: Collection[str]
) -> tuple[list[_Occurrence], tuple[str, ...]]:
    """Returns why functions were compiled again, and the modules that could run no code of others or from before.

    Dynamo reports for each code of a function why it could not be used; code of another instance is expected not to
    fit.
    """
    guards: list[_Occurrence] = []
    anew: dict[str, None] = {}
    codes: dict[str, int | None] = {}  # by compile id, the module for which the code was compiled
    for compilation in compiled:
        row, module = compilation.row, compilation.of
        if compilation.is_backward or row["error"] is not None:  # neither compiles a forward again
            continue
        module_id = None if module is None else module.module_id
        texts = row["failed_guards"] or ()
        # -1 stands for code that was compiled before the recording began.
        own = [text for text in texts if codes.get(text.partition(": ")[0], -1) in (module_id, None)]
        # Compile ids do not show resets, after which Dynamo has forgotten earlier code.
        codes[row["compile_id"].rpartition(":")[2]] = module_id
        if texts and not own and module is not None and compilation.is_first:
            anew[compilation.module] = None
        elif texts:
            function = (row["function"] or "").partition(" ")[0]
            base = None if module is None else module.path
            read = [read_guard(text, base, paths, function) for text in own or texts]
            fullest = next((text for text in read if not text.is_of_mode), read[0])
            guards.append(_Occurrence(fullest.subject, fullest, compilation))
    return guards, tuple(anew)


def _find_breaks(compiled: Sequence[_Compiled]) -> Iterator[_Occurrence]:
    for compilation in compiled:
        for text in map(read_break, compilation.row["graph_breaks"] or ()):
            yield _Occurrence(text.line and text.line.place, text, compilation)


def _find_errors(compiled: Sequence[_Compiled]) -> Iterator[_Occurrence]:
    for compilation in compiled:
        if compilation.row["error"] is not None:
            text = read_break(compilation.row["error"])
            place = text.line.place if text.line else (compilation.module, compilation.row["function"])
            yield _Occurrence((text.subject, place), text, compilation)


def _group(kind: Literal["guard", "break", "error"], found: Iterable[_Occurrence]) -> Iterator[Reason]:
    """Yields one reason for each key, placed at the innermost function, in the most explicit words."""
    by_key: dict[Any, list[_Occurrence]] = defaultdict(list)
    for occurrence in found:
        by_key[occurrence.key].append(occurrence)
    for group in (part for occurrences in by_key.values() for part in _divide(occurrences)):
        innermost = min(group, key=lambda one: len(one.text.stack))
        fullest = max((one.text for one in group), key=lambda text: len(text.reason) + len(text.advice))
        yield Reason(
            kind=kind,
            module=innermost.text.module or innermost.compiled.module,
            reason=fullest.reason,
            values=tuple(dict.fromkeys(value for one in group for value in one.text.values)),
            line=innermost.text.line or innermost.compiled.line,
            compiled=innermost.compiled.line,
            advice=fullest.advice,
            times=len(group),
            others=len({one.function for one in group}) - 1,
            steps=tuple(sorted({one.compiled.row["step"] for one in group})),
            text=fullest.text,
        )


def _divide(group: Sequence[_Occurrence]) -> list[list[_Occurrence]]:
    """Divides occurrences with one key into reasons: two tensors of a function that change at different times are two.

    Occurrences of different functions are one reason if none of these functions has another reason in it, because one
    tensor, such as a larger batch, has other names behind a graph break.
    """
    parts: list[list[_Occurrence]] = []
    for new in group:
        # The best part has this reason of the same function, the second best equal values, the third no contradiction.
        best, rank = None, 0
        for part in parts:
            reasons = {one.text.reason for one in part if one.function == new.function}
            if reasons <= {new.text.reason}:
                fits = 3 if reasons else 2 if new.text.values in [one.text.values for one in part] else 1
                best, rank = (part, fits) if fits > rank else (best, rank)
        if best is None:
            parts.append([new])
        else:
            best.append(new)
    return parts


def _find_inside(
    modules: Mapping[int, Module], called: set[int], compiled: set[int], measured: set[int]
) -> Iterator[Inside]:
    """Yields for each module that has calls, and that is compiled or inside of a compiled one, what ran unseen in it.

    These are the outermost of the modules registered below it of which no call was recorded.
    """
    holds_called = _above(called, modules)
    holds_measured = _above(measured, modules)
    inside: dict[tuple[int, bool], list[str]] = defaultdict(list)
    for module in {module.module_id: module for module in modules.values()}.values():
        chain = list(_chain(module, modules))
        if module.module_id in holds_called or len(chain) < 2 or chain[1] not in holds_called:
            continue
        region = next((above for above in chain if above in called), None)
        if region is not None and not compiled.isdisjoint(chain):
            inside[region, module.module_id in holds_measured].append(name_module(module))
    for (region, is_measured), paths in inside.items():
        yield Inside(region=name_module(modules[region]), modules=tuple(paths), measured=is_measured)


def _chain(module: Module | None, modules: Mapping[int, Module]) -> Iterator[int]:
    """Yields the id of a module and of all modules in which it is registered, the innermost first."""
    seen: set[int] = set()
    while module is not None and module.module_id not in seen:
        seen.add(module.module_id)
        yield module.module_id
        module = None if module.parent_id is None else modules.get(module.parent_id)
