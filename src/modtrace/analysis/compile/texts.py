"""Reads what torch.compile reports of a guard that failed, a graph break or an error: the reason, the line, and advice.

The texts are those of torch 2.13. A text that is not recognised is passed on as torch wrote it.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ...recording.module_path import join

#: The heading above the stack of the user's code.
_STACK = "User stack trace:"
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$')
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_(\d+)$")
#: Files of torch and the standard library, whose lines are left out of the user's stack.
_NOT_OF_USERS = re.compile(
    r"[\\/]torch[\\/](?:_\w+|nn|utils|optim|fx|distributed|functional\.py)"
    r"|[\\/]lib[\\/]python\d[^\\/]*[\\/](?!site-packages|dist-packages)"
)
_OF_DYNAMO = re.compile(r"[\\/]torch[\\/]_dynamo[\\/]")

_COMPILE_ID = re.compile(r"^\d+/\d+: ")
_GLOBAL = re.compile(r"\bG\['([a-zA-Z]\w*)'\]")
_MODULES = re.compile(r"\b\w+((?:\._modules\['[^']+'\])+)")
_PART = re.compile(r"\['([^']+)'\]")
_HELD = re.compile(r"\._(?:parameters|buffers)\['([^']+)'\]")
_KEPT = re.compile(r"___stack\d+")  # Dynamo's name for a value that is alive across a graph break
_HINT = re.compile(r"\(HINT: (.+)\)$")
_LIMIT = re.compile(r"the (\w+) cache size limit \(currently set to (\d+)\)")

_ONCE = "nothing, if it comes once: a graph is kept for "
_GRAD_MODE, _MODE = f"{_ONCE}each grad mode", f"{_ONCE}each mode"
_GRAD = "call it in one grad mode, with tensors that require a gradient each time or never"
_VALUE = "keep in a tensor what changes, or set it before the first call and leave it"

_TENSOR = re.compile(
    r"tensor '(?P<tensor>.+)' (?P<kind>\w+) mismatch(?: at index (?P<index>\d+))?\. "
    r"expected (?:requires_grad=)?(?P<old>[^\s.,]+)(?:, actual (?P<new>\S+))?"
)
#: What changed in a tensor, by Dynamo's words for it, and what to do about it.
_OF_TENSORS = {
    "size": (
        "the size",
        "torch.compile(..., dynamic=True), torch._dynamo.mark_dynamic(tensor, {index}), or pad to few sizes",
    ),
    "stride": ("the stride", "give it in one layout each time: call .contiguous() on it before"),
    "dtype": ("the dtype", f"{_ONCE}each dtype"),
    "rank": ("the number of dimensions", f"{_ONCE}each number of dimensions"),
    "requires_grad": ("requires_grad", _GRAD),
}
_AT_LEAST = re.compile(r"2 <= (?P<tensor>.+)\.size\(\)\[(?P<index>\d+)\]$")
_EQUAL = re.compile(r"(.+?) == (.+)$")
#: Other guards, as a pattern with the name of what changed, the reason and the advice.
_GUARDS = (
    (r"(.+) is None$", "{} is no longer None", f"{_ONCE}None and one for the rest"),
    (r"___check_type_id\((.+?), \d+\)", "{} is of another class", f"{_ONCE}each class"),
    (r"___check_obj_id\((.+?), \d+\)", "{} is another object", "set it before the first call and leave it"),
    (
        "GLOBAL_STATE changed: (grad_mode)",
        "the grad mode changed, as between training and evaluation",
        _GRAD_MODE,
    ),
    (r"GLOBAL_STATE changed: (\S+)", "a setting of torch changed: {}", f"{_ONCE}each setting"),
    (
        "(BACKEND_MATCH)",
        "torch.compile was called anew with another backend function",
        "call torch.compile once, before the loop, or give it the same function each time",
    ),
)

#: Explanations of the single words by which Dynamo describes breaks.
_BREAKS = {
    "step_unsupported": "a graph break below this line from which Dynamo cannot go on: the rest of the function runs "
    "uncompiled",
    "comprehension_graph_break": "a graph break inside of a comprehension",
}
#: Hints of Dynamo that give no advice.
_NO_ADVICE = (
    "Please report an issue",
    "This graph break is fundamental",
    "This graph break may have been caused",
)


#: Subjects that are the same in all modules, as tensors of several modules change in the same way.
_OF_ANY_TENSOR = re.compile(r"(size|stride) (\d+$|of )")


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's code."""

    file: str
    number: int
    function: str
    code: str = ""

    @classmethod
    def parse(cls, place: str, function: str) -> "CodeLine | None":
        """Returns the line that `file:number` denotes; None if it denotes none."""
        file, _, number = place.rpartition(":")
        return cls(file, int(number), plain_name(function)) if file and number.isdecimal() else None

    @property
    def place(self) -> tuple[str, int]:
        """The file and the number of the line."""
        return self.file, self.number


def plain_name(function: str) -> str:
    """Returns the name of the user's function, even for a part that torch compiles behind a graph break."""
    resumed = _RESUMED.match(function)
    return resumed[1] if resumed else function


@dataclass(frozen=True, kw_only=True)
class CompileText:
    """A text of torch.compile, and what was read from it."""

    text: str
    reason: str
    advice: str  # "" if there is none
    subject: str  # equal in texts about the same thing, whatever its values are
    values: tuple[str, ...] = ()  # the values of the subject, old ones first
    module: str | None = None  # the path of the module that the text names
    stack: tuple[CodeLine, ...] = ()  # the stack of the user's code, outermost first

    @property
    def line(self) -> CodeLine | None:
        """The innermost line of the user's code."""
        return self.stack[-1] if self.stack else None

    @property
    def is_of_mode(self) -> bool:
        """True if a mode changed, as from training to evaluation, where code is expected not to fit."""
        return self.advice in (_GRAD_MODE, _MODE)


def read_guard(text: str, base: str | None, paths: Collection[str], function: str = "") -> CompileText:
    """Reads why compiled code could not be used, from a text about a failed guard.

    Args:
        text: the text that Dynamo reports.
        base: the path of the module whose function was compiled; None if it is not known.
        paths: the paths of all modules.
        function: Dynamo's name of the function.
    """
    report, stack = _split(text)
    first = _COMPILE_ID.sub("", report.partition("\n")[0])
    hint = _HINT.search(first)
    guard, module = _name_modules(first.partition(" # ")[0].strip(), base, paths)
    guard = _GLOBAL.sub(r"the global variable \1", guard)
    reason, advice, subject, values = _explain(guard, hint[1] if hint else "", function)
    if reason == guard and _COMPILE_ID.match(report):  # without a compile id, no guard is named
        reason = f"no longer true: {guard}"
    return CompileText(
        text=text,
        reason=reason,
        advice=advice,
        subject=subject,
        values=values,
        module=None if _OF_ANY_TENSOR.match(subject) else module,
        stack=stack,
    )


def _explain(guard: str, hint: str, function: str) -> tuple[str, str, str, tuple[str, ...]]:
    """Returns reason, advice, subject and values of a guard; an unknown guard is itself the reason."""
    if tensor := _TENSOR.match(guard) or _AT_LEAST.match(guard):
        return _explain_tensor(**tensor.groupdict())
    if equal := _EQUAL.match(guard):
        named, value = equal.groups()
        name = _KEPT.sub(_describe_kept(function), named)
        advice = _VALUE
        if name != named:
            advice = "mend that graph break, or keep in a tensor what changes"
        elif name.endswith(".training"):
            advice = _MODE
        elif "allow_unspec_int_on_nn_module" in hint and not name.endswith("]"):
            advice += "; for integers there is torch._dynamo.config.allow_unspec_int_on_nn_module"
        return f"{name} changed", advice, name, (value,)
    for pattern, reason, advice in _GUARDS:
        if match := re.match(pattern, guard):
            return reason.format(match[1]), advice, match[1], ()
    return guard, hint or (_GRAD if "grad" in guard.lower() else ""), guard, ()


def _explain_tensor(
    tensor: str, index: str | None, kind: str = "", old: str | None = None, new: str | None = None
) -> tuple[str, str, str, tuple[str, ...]]:
    named = "a tensor" if tensor.startswith("___") else f"the tensor {tensor!r}"  # Dynamo's own name
    if not kind:
        reason = f"the size of {named} in dimension {index} became 0 or 1, and those are compiled apart"
        return reason, f"{_ONCE}each of them", f"size {index}", ()
    what, advice = _OF_TENSORS.get(kind, (f"the {kind}", ""))
    if kind == "requires_grad":
        old = {"0": "False", "1": "True"}.get(old or "", old)
    reason = f"{what} of {named} changed" + (f" in dimension {index}" if index else "")
    subject = f"{kind} {index}" if index else f"{kind} of {tensor}"
    return reason, advice.format(index=index), subject, tuple(filter(None, (old, new)))


def _describe_kept(function: str) -> str:
    """Returns a description of a value that is kept where the graph of a function breaks."""
    broken = _RESUMED.match(function)
    return f"the value alive across {f'the graph break at line {broken[2]}' if broken else 'a graph break'}"


def _name_modules(guard: str, base: str | None, paths: Collection[str]) -> tuple[str, str | None]:
    """Replaces chains of `_modules[...]` and `_parameters[...]` by paths, and returns the first module's path, too."""
    named: list[str] = []

    def shorten(match: re.Match[str]) -> str:
        path = join(base or "", ".".join(_PART.findall(match[1])))
        if base is None or path not in paths:
            return match[0]
        named.append(path)
        return path

    guard = _HELD.sub(r".\1", _MODULES.sub(shorten, guard))
    return guard, named[0] if named else None


def read_break(text: str) -> CompileText:
    """Reads why a graph ends before its function does, or why a function was not compiled."""
    report, stack = _split(text)
    first, _, rest = report.removeprefix("Unsupported: ").partition("\n")
    if first.endswith(":"):  # the error was raised from another one
        first = " ".join((first, rest.strip().partition("\n")[0]))
    hints = (hint for hint in _lines_after("Hint:", rest) if not hint.startswith(_NO_ADVICE))
    explanation, advice = next(_lines_after("Explanation:", rest), ""), next(hints, "")
    reason = _BREAKS.get(first, ": ".join(filter(None, (first, explanation))))
    if "generic_jump" in first or "Data-dependent branching" in first:
        reason = "which branch is taken depends on the numbers in a tensor (data-dependent branching)"
        advice = "torch.where computes both branches; torch.cond keeps the choice in the graph"
    elif "Dynamo recompile limit exceeded" in first:
        limit = _LIMIT.search(rest)
        name = limit[1] if limit else "recompile_limit"
        value = f"={limit[2]}" if limit else ""
        reason = f"the limit of compilations, {name}{value}, is reached: calls that fit no graph so far run uncompiled"
        advice = f"remove what makes it compile again, or raise torch._dynamo.config.{name}"
    return CompileText(text=text, reason=reason, advice=advice, subject=first, stack=stack)


def _lines_after(heading: str, text: str) -> Iterator[str]:
    """Yields the rest of each line that begins with the heading."""
    lines = (line.strip() for line in text.splitlines())
    return (line.removeprefix(heading).strip() for line in lines if line.startswith(heading))


def _split(text: str) -> tuple[str, tuple[CodeLine, ...]]:
    """Returns the report in a text, and the lines of the user's code in the stack below it, outermost first."""
    report, _, below = text.partition(_STACK)
    frames: list[CodeLine] = []
    for line in below.splitlines():
        if match := _FRAME.match(line):
            frames.append(CodeLine(match[1], int(match[2]), plain_name(match[3])))
        elif frames and not frames[-1].code:
            frames[-1] = replace(frames[-1], code=line.strip())
    users = [frame for frame in frames if not _NOT_OF_USERS.search(frame.file)]
    return report.strip(), tuple(users or (frame for frame in frames if not _OF_DYNAMO.search(frame.file)))
