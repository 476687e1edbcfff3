"""Finds what torch.compile did in a recording: its regions, why it compiled again, and where graphs broke."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...recording.phase import BACKWARD
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, OUTPUT
from ..tables.placement import Module
from .compile_texts import CodeLine, Told, plain_name, read_break, read_guard


@dataclass(frozen=True, kw_only=True)
class CompiledRegion:
    """A function of a module that torch.compile has compiled, or has tried to."""

    module: str  # the path of the module; the name of a root; "" where it is not known
    function: str  # as in the code; what lies behind a graph break begins at another line
    line: CodeLine | None
    compilations: int  # those that have led to code; not those of its backward
    ops: tuple[int, ...]  # in each of its graphs that has any
    guards: int | None  # of its last graph
    backwards: int  # compilations of its backward
    took_ns: int
    steps: tuple[int, ...]  # in which it was compiled
    error: str | None  # why it was not compiled the last time


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a function was compiled again, why its graph ends early, or why it was not compiled."""

    kind: Literal["guard", "break", "error"]
    module: str
    reason: str
    values: tuple[str, ...]  # of what changed, in the order in which they came
    line: CodeLine | None  # of the user's code
    compiled: CodeLine | None  # the first line of what was compiled, or was not
    advice: str  # "" where torch gives none
    times: int
    others: int  # further functions with the same reason
    steps: tuple[int, ...]
    text: str  # all that torch says of it


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Modules that ran inside the regions of a module only, or never: they had no call of their own."""

    region: str
    modules: tuple[str, ...]  # the outermost
    measured: bool = False  # what they returned, or what is inside of them


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
    shared: tuple[str, ...] = ()  # modules that ran code which was compiled for others of their class
    anew: tuple[str, ...] = ()  # modules that could run neither such code nor code from before the recording
    before: tuple[str, ...] = ()  # modules whose code was compiled before the recording began


class _Compiled(NamedTuple):
    """A row of `compilations`, with its module."""

    row: Mapping[str, Any]
    of: Module | None
    is_first: bool  # no earlier call of the module is known

    @property
    def module(self) -> str:
        return "" if self.of is None else _name_of(self.of)

    @property
    def is_backward(self) -> bool:
        return bool(self.row["phase"] == BACKWARD)

    @property
    def took_ns(self) -> int:
        end_ns = self.row["end_ns"]
        return 0 if end_ns is None else max(end_ns - self.row["start_ns"], 0)

    @property
    def line(self) -> CodeLine | None:
        """The first line of what was compiled."""
        name, _, place = (self.row["function"] or "").partition(" ")
        return CodeLine.parse(place, name)


def read_compilations(data: RecordingData, modules: Mapping[int, Module]) -> Compilations | None:
    """Returns what torch.compile did in a recording; None if nothing was compiled and no region ran.

    Args:
        data: the recording.
        modules: its modules by id, where wrappers and what they wrap are one.
    """
    rows = data.table("compilations").to_pylist()
    calls = data.table("calls")
    as_regions = _ids_of(pc.unique(calls["module_id"].filter(calls["compiled"])).to_pylist(), modules)
    if not rows and not as_regions:
        return None
    called = _ids_of(pc.unique(calls["module_id"]).to_pylist(), modules)
    with_rows = _ids_of((row["module_id"] for row in rows), modules)
    names = {module_id: _name_of(module) for module_id, module in modules.items()}
    compiled = list(_find_compiled(rows, calls, modules))
    guards, anew = _explain_guards(compiled, {module.path for module in modules.values()})
    errors = list(_find_errors(compiled))
    told = {each.key for each in errors}
    breaks = [each for each in _find_breaks(compiled) if (each.told.subject, each.key) not in told]
    measured = _ids_of(
        (row["module_id"] for row in data.table("sites").to_pylist() if row["role"] in (OUTPUT, GRAD_OUTPUT)),
        modules,
    )
    types = {modules[each].type for each in with_rows}
    others = sorted(as_regions - _above(with_rows, modules))
    return Compilations(
        count=len(rows),
        took_ns=sum(each.took_ns for each in compiled),
        regions=tuple(_find_regions(compiled)),
        recompilations=tuple(_group("guard", guards)),
        graph_breaks=tuple(_group("break", breaks)),
        errors=tuple(_group("error", errors)),
        inside=tuple(_find_inside(modules, names, called, as_regions | with_rows, measured)),
        shared=tuple(names[each] for each in others if modules[each].type in types),
        before=tuple(names[each] for each in others if modules[each].type not in types),
        anew=anew,
    )


def _name_of(module: Module) -> str:
    return module.path or module.name or module.type


def _ids_of(module_ids: Iterable[int | None], modules: Mapping[int, Module]) -> set[int]:
    """Returns the ids of the merged modules with these ids."""
    return {modules[each].module_id for each in module_ids if each is not None and each in modules}


def _above(ids: Iterable[int], modules: Mapping[int, Module]) -> set[int]:
    """Returns these modules and all in which they are registered."""
    return {above for each in ids if each in modules for above in _chain(modules[each], modules)}


def _find_compiled(
    rows: Iterable[Mapping[str, Any]], calls: pa.Table, modules: Mapping[int, Module]
) -> Iterator[_Compiled]:
    first = calls.group_by("module_id").aggregate([("call_id", "min")]).to_pylist()
    first_calls = {each["module_id"]: each["call_id_min"] for each in first}
    for row in rows:
        is_first = row["call_id"] in (None, first_calls.get(row["module_id"]))
        yield _Compiled(row, modules.get(row["module_id"]), is_first)


def _find_regions(compiled: Sequence[_Compiled]) -> Iterator[CompiledRegion]:
    """Yields one region for each function of each module, in the order in which they were first compiled."""
    of: dict[tuple[str, str], list[_Compiled]] = defaultdict(list)
    for each in compiled:
        of[each.module, each.row["function"] or ""].append(each)
    for (module, function), rows in of.items():
        forwards = [each.row for each in rows if not each.is_backward]
        made = [row for row in forwards if row["error"] is None]
        yield CompiledRegion(
            module=module,
            function=plain_name(function.partition(" ")[0]),
            line=rows[0].line,
            compilations=len(made),
            ops=tuple(row["ops"] for row in made if row["ops"] is not None),
            guards=next((row["guards"] for row in reversed(made)), None),
            backwards=len(rows) - len(forwards),
            took_ns=sum(each.took_ns for each in rows),
            steps=tuple(sorted({each.row["step"] for each in rows})),
            error=forwards[-1]["error"] if forwards else None,
        )


#: Stands for what code was compiled for before the recording began.
_BEFORE = Module(module_id=-1, root_id=-1, path="")


# Reasons. What is one to the user is several to Dynamo: one tensor's size is checked by each function behind a break,
# and a break is found in a function and in those that call it.


class _Found(NamedTuple):
    """One reason of one compilation."""

    key: Any  # those with one key are one reason
    told: Told
    compiled: _Compiled

    @property
    def line(self) -> CodeLine | None:
        return self.told.line or self.compiled.line

    @property
    def function(self) -> tuple[str, str | None]:
        return self.compiled.module, self.compiled.row["function"]


def _explain_guards(
    compiled: Sequence[_Compiled], paths: Collection[str]
) -> tuple[list[_Found], tuple[str, ...]]:
    """Returns why functions were compiled again, and the modules that could run no code of others or from before.

    Dynamo says of each code of a function why it could not be used. Code of another instance is expected not to fit.
    """
    found: list[_Found] = []
    anew: dict[str, None] = {}
    codes: dict[str, Module | None] = {}  # by compile id: what it was compiled for
    for each in compiled:
        if each.is_backward or each.row["error"] is not None:  # then it was not compiled again
            continue
        texts = each.row["failed_guards"] or ()
        own = [text for text in texts if codes.get(text.partition(": ")[0], _BEFORE) in (each.of, None)]
        # Texts have ids without a mark for resets: Dynamo has forgotten codes from before.
        codes[each.row["compile_id"].rpartition(":")[2]] = each.of
        if texts and not own and each.of is not None and each.is_first:
            anew[each.module] = None
        elif texts:
            base = None if each.of is None else each.of.path
            function = (each.row["function"] or "").partition(" ")[0]
            told = [read_guard(text, base, paths, function) for text in own or texts]
            says_most = next((one for one in told if not one.is_of_mode), told[0])
            found.append(_Found(says_most.subject, says_most, each))
    return found, tuple(anew)


def _find_breaks(compiled: Sequence[_Compiled]) -> Iterator[_Found]:
    for each in compiled:
        for text in each.row["graph_breaks"] or ():
            told = read_break(text)
            yield _Found(told.line and told.line.place, told, each)


def _find_errors(compiled: Sequence[_Compiled]) -> Iterator[_Found]:
    for each in compiled:
        if (text := each.row["error"]) is not None:
            told = read_break(text)
            place = told.line.place if told.line else (each.module, each.row["function"])
            yield _Found((told.subject, place), told, each)


def _group(kind: Literal["guard", "break", "error"], found: Iterable[_Found]) -> Iterator[Reason]:
    """Yields one reason for each key: at the innermost place, in the words that say most."""
    groups: dict[Any, list[_Found]] = defaultdict(list)
    for each in found:
        groups[each.key].append(each)
    for group in (part for with_one_key in groups.values() for part in _divide(with_one_key)):
        at = min(group, key=lambda each: len(each.told.stack))
        says_most = max((each.told for each in group), key=lambda told: len(told.reason) + len(told.advice))
        yield Reason(
            kind=kind,
            module=at.told.module or at.compiled.module,
            reason=says_most.reason,
            values=tuple(dict.fromkeys(value for each in group for value in each.told.values)),
            line=at.line,
            compiled=at.compiled.line,
            advice=says_most.advice,
            times=len(group),
            others=len({each.function for each in group}) - 1,
            steps=tuple(sorted({each.compiled.row["step"] for each in group})),
            text=says_most.text,
        )


def _divide(group: Sequence[_Found]) -> list[list[_Found]]:
    """Divides a group with one key: two tensors of one function that changed at different times are two reasons.

    Tensors of different functions are put together where none of these functions has another reason there: a larger
    batch has other names behind a graph break.
    """
    parts: list[list[_Found]] = []
    for each in group:
        # The best part has this reason of this function, then comes one with the same values, then any that fits.
        of_function = [
            {other.told.reason for other in part if other.function == each.function} for part in parts
        ]
        fits = [
            part for part, reasons in zip(parts, of_function, strict=True) if reasons <= {each.told.reason}
        ]
        same = [
            part for part, reasons in zip(parts, of_function, strict=True) if reasons == {each.told.reason}
        ]
        alike = [part for part in fits if each.told.values in (other.told.values for other in part)]
        if not fits:
            parts.append([])
        next(iter((*same, *alike, *fits)), parts[-1]).append(each)
    return parts


def _find_inside(
    modules: Mapping[int, Module],
    names: Mapping[int, str],
    called: set[int],
    compiled: set[int],
    measured: set[int],
) -> Iterator[Inside]:
    """Yields the outermost modules without calls inside each module that is compiled or lies in a compiled one."""
    holds_called = _above(called, modules)
    holds_measured = _above(measured, modules)
    inside: dict[tuple[int, bool], list[str]] = defaultdict(list)
    for module in {module.module_id: module for module in modules.values()}.values():
        chain = list(_chain(module, modules))
        if module.module_id in holds_called or len(chain) < 2 or chain[1] not in holds_called:
            continue
        region = next((each for each in chain if each in called), None)
        if region is not None and not compiled.isdisjoint(chain):
            inside[region, module.module_id in holds_measured].append(names[module.module_id])
    for (region, is_measured), paths in inside.items():
        yield Inside(region=names[region], modules=tuple(paths), measured=is_measured)


def _chain(module: Module, modules: Mapping[int, Module]) -> Iterator[int]:
    """Yields the ids of a module and of those in which it is registered, innermost first."""
    at: Module | None = module
    seen: set[int] = set()
    while at is not None and at.module_id not in seen:
        seen.add(at.module_id)
        yield at.module_id
        at = None if at.parent_id is None else modules.get(at.parent_id)
