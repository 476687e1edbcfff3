"""Reads what torch.compile says of a guard that failed, a graph break or an error: the reason, the line, and advice.

The texts are those of torch 2.13. What is not recognised is passed on as torch says it.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ...recording.module_path import join

#: Above the stack of the user's code.
_STACK = "User stack trace:"
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$')
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_(\d+)$")
#: Code that runs between the lines of the user, and below them: torch and the standard library.
_NOT_OF_USERS = re.compile(
    r"[\\/]torch[\\/](?:_\w+|nn|utils|optim|fx|distributed|functional\.py)"
    r"|[\\/]lib[\\/]python\d[^\\/]*[\\/](?!site-packages|dist-packages)"
)
_OF_DYNAMO = re.compile(r"[\\/]torch[\\/]_dynamo[\\/]")

_COMPILE_ID = re.compile(r"^\d+/\d+: ")
_SIZE = re.compile(r"^tensor '(.+)' (size|stride) mismatch at index (\d+)\. expected (\S+), actual (\S+)$")
_TENSOR = re.compile(
    r"^tensor '(.+)' (dtype|rank|requires_grad) mismatch\. expected (?:requires_grad=)?(\w+)(?:, actual (\S+))?"
)
_AT_LEAST = re.compile(r"^2 <= (.+)\.size\(\)\[(\d+)\]$")
_NONE = re.compile(r"^(.+) is None$")
_STATE = re.compile(r"^GLOBAL_STATE changed: (\S+)")
_GLOBAL = re.compile(r"\bG\['([a-zA-Z]\w*)'\]")
_EQUAL = re.compile(r"^(.+?) == (.+)$")
_MODULES = re.compile(r"\b\w+((?:\._modules\['[^']+'\])+)")
_PART = re.compile(r"\['([^']+)'\]")
_HELD = re.compile(r"\._(?:parameters|buffers)\['([^']+)'\]")
_TYPE = re.compile(r"^___check_type_id\((.+?), \d+\)")
_OBJECT = re.compile(r"^___check_obj_id\((.+?), \d+\)")
_KEPT = re.compile(r"___stack\d+")  # how Dynamo calls what a broken line needs further, behind the break
_HINT = re.compile(r"\(HINT: (.+)\)$")

#: Hints of Dynamo that do not say what to do.
_NO_ADVICE = (
    "Please report an issue",
    "This graph break is fundamental",
    "This graph break may have been caused",
)

_TO_DO_SIZE = (
    "torch.compile(..., dynamic=True), torch._dynamo.mark_dynamic(tensor, {index}), or pad to few sizes"
)
_TO_DO_STRIDE = "give it in one layout each time: call .contiguous() on it before"
_TO_DO_VALUE = "keep in a tensor what changes, or set it before the first call and leave it"
_TO_DO_KEPT = "mend that graph break, or keep in a tensor what changes"
_TO_DO_INTEGER = f"{_TO_DO_VALUE}; for integers there is torch._dynamo.config.allow_unspec_int_on_nn_module"
_TO_DO_GRAD = "call it in one grad mode, with tensors that require a gradient each time or never"

_TO_DO_ONCE = "nothing, if it comes once: a graph is kept for each {kind}"

#: What changes between training and evaluation, each of which has a graph of its own from then on.
_SAY_GRAD_MODE = "the grad mode changed, as between training and evaluation"
_TO_DO_GRAD_MODE = _TO_DO_ONCE.format(kind="grad mode")
_TO_DO_MODE = _TO_DO_ONCE.format(kind="mode")

#: Of what Dynamo says in one word of a tensor: how it is said, and what a graph is kept for.
_OF_TENSORS = {
    "dtype": ("the dtype of {named} changed", _TO_DO_ONCE.format(kind="dtype")),
    "rank": ("the number of dimensions of {named} changed", _TO_DO_ONCE.format(kind="number of dimensions")),
    "requires_grad": ("requires_grad of {named} changed", _TO_DO_GRAD),
}
_AS_BOOL = {"0": "False", "1": "True"}

#: Dynamo names the objects, which are others each time.
_BACKEND = "BACKEND_MATCH"
_SAY_BACKEND = "torch.compile was called anew with another backend function"
_TO_DO_BACKEND = "call torch.compile once, before the loop, or give it the same function each time"

_TO_DO_OBJECT = "set it before the first call and leave it"

_LIMIT = "Dynamo recompile limit exceeded"
_LIMIT_NAME = re.compile(r"the (\w+) cache size limit \(currently set to (\d+)\)")
_SAY_LIMIT = "the limit of compilations, {limit}, is reached: calls that fit no graph so far run uncompiled"
_TO_DO_LIMIT = "remove what makes it compile again, or raise torch._dynamo.config.{name}"

_BRANCHES = ("generic_jump", "Data-dependent branching")
_SAY_BRANCH = "which branch is taken depends on the numbers in a tensor (data-dependent branching)"
_TO_DO_BRANCH = "torch.where computes both branches; torch.cond keeps the choice in the graph"


#: What Dynamo says in one word of breaks.
_SAY_INSTEAD = {
    "step_unsupported": "a graph break below this line from which Dynamo cannot go on: the rest of the function runs "
    "uncompiled",
    "comprehension_graph_break": "a graph break inside of a comprehension",
}


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's code."""

    file: str
    number: int
    function: str
    code: str = ""

    @classmethod
    def parse(cls, place: str, function: str) -> "CodeLine | None":
        """Returns the line that `file:number` means; None if it means none."""
        file, _, number = place.rpartition(":")
        return cls(file, int(number), plain_name(function)) if file and number.isdecimal() else None

    @property
    def place(self) -> tuple[str, int]:
        """The file and the line."""
        return self.file, self.number


def plain_name(function: str) -> str:
    """Returns the name of the user's function, also of a part of it that torch compiles behind a graph break."""
    resumed = _RESUMED.match(function)
    return resumed[1] if resumed else function


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a text says."""

    text: str
    reason: str
    advice: str  # "" if there is none
    subject: str  # the same in texts about the same thing, whatever values they have
    values: tuple[str, ...] = ()  # of that thing, old ones first
    module: str | None = None  # the path of the module that it names
    stack: tuple[CodeLine, ...] = ()  # of the user's code, outermost first

    @property
    def line(self) -> CodeLine | None:
        """The innermost line of the user's code."""
        return self.stack[-1] if self.stack else None

    @property
    def is_of_mode(self) -> bool:
        """True if a mode changed, as between training and evaluation: code for the other one is expected not to fit."""
        return self.advice in (_TO_DO_GRAD_MODE, _TO_DO_MODE)


def read_guard(text: str, base: str | None, paths: Collection[str], function: str = "") -> Told:
    """Reads why compiled code could not be used.

    Args:
        text: what Dynamo says.
        base: the path of the module whose function was compiled; None if it is not known.
        paths: the paths of all modules.
        function: the name of the function, as Dynamo has it.
    """
    said, stack = _split(text)
    first = _COMPILE_ID.sub("", said.partition("\n")[0])
    hint = _HINT.search(first)
    guard, module = _name_modules(first.partition(" # ")[0].strip(), base, paths)
    guard = _GLOBAL.sub(r"the global variable \1", guard)
    reason = f"no longer true: {guard}" if _COMPILE_ID.match(said) else guard  # else torch found no guard
    advice = hint[1] if hint else _TO_DO_GRAD if "grad" in guard.lower() else ""
    subject, values = guard, list[str]()
    if of_tensor := _read_tensor_guard(guard):
        reason, advice, subject, values = of_tensor
        module = None if subject.startswith(("size", "stride")) else module
    elif none := _NONE.match(guard):
        subject, advice = none[1], "nothing, if it comes once: a graph is kept for None and one for the rest"
        reason = f"{subject} is no longer None"
    elif equal := _EQUAL.match(guard):
        named, *values = equal.groups()
        subject = _KEPT.sub(_say_kept(function), named)
        reason = f"{subject} changed"
        is_attribute = hint and "allow_unspec_int_on_nn_module" in hint[1] and not named.endswith("]")
        advice = _TO_DO_INTEGER if is_attribute else _TO_DO_VALUE
        if subject != named:
            advice = _TO_DO_KEPT
        elif subject.endswith(".training"):
            advice = _TO_DO_MODE
    elif type_of := _TYPE.match(guard):
        subject, advice = type_of[1], _TO_DO_ONCE.format(kind="class")
        reason = f"{subject} is of another class"
    elif object_of := _OBJECT.match(guard):
        subject, advice = object_of[1], _TO_DO_OBJECT
        reason = f"{subject} is another object"
    elif state := _STATE.match(guard):
        is_grad_mode = state[1] == "grad_mode"
        reason = _SAY_GRAD_MODE if is_grad_mode else f"a setting of torch changed: {state[1]}"
        advice = _TO_DO_GRAD_MODE if is_grad_mode else _TO_DO_ONCE.format(kind="setting")
    elif guard.startswith(_BACKEND):
        subject, reason, advice = _BACKEND, _SAY_BACKEND, _TO_DO_BACKEND
    return Told(
        text=text,
        reason=reason,
        advice=advice,
        subject=subject,
        values=tuple(values),
        module=module,
        stack=stack,
    )


def _read_tensor_guard(guard: str) -> tuple[str, str, str, list[str]] | None:
    """Returns reason, advice, subject and values of a guard on a tensor; None if it is none that is known."""
    if size := _SIZE.match(guard):
        tensor, kind, index, *values = size.groups()
        advice = _TO_DO_SIZE.format(index=index) if kind == "size" else _TO_DO_STRIDE
        reason = f"the {kind} of {_name_tensor(tensor)} changed in dimension {index}"
        return reason, advice, f"{kind} {index}", values
    if other := _TENSOR.match(guard):
        tensor, kind, *values = filter(None, other.groups())
        reason, advice = _OF_TENSORS[kind]
        if kind == "requires_grad":
            values = [_AS_BOOL.get(each, each) for each in values]
        return reason.format(named=_name_tensor(tensor)), advice, f"{kind} of {tensor}", values
    if at_least := _AT_LEAST.match(guard):
        tensor, index = at_least.groups()
        reason = f"the size of {_name_tensor(tensor)} in dimension {index} became 0 or 1, and those are compiled apart"
        return reason, _TO_DO_ONCE.format(kind="of them"), f"size {index}", []
    return None


def _name_tensor(tensor: str) -> str:
    return "a tensor" if tensor.startswith("___") else f"the tensor {tensor!r}"  # Dynamo's own name


def _say_kept(function: str) -> str:
    """Returns what a value is that is kept where the graph of a function breaks."""
    broken = _RESUMED.match(function)
    return f"the value alive across {f'the graph break at line {broken[2]}' if broken else 'a graph break'}"


def _name_modules(guard: str, base: str | None, paths: Collection[str]) -> tuple[str, str | None]:
    """Writes paths in place of chains of `_modules[...]` and `_parameters[...]`. Returns the first module's too."""
    found: list[str] = []

    def shorten(match: re.Match[str]) -> str:
        path = join(base or "", ".".join(_PART.findall(match[1])))
        if base is None or path not in paths:
            return match[0]
        found.append(path)
        return path

    named = _MODULES.sub(shorten, guard)
    return _HELD.sub(r".\1", named), found[0] if found else None


def read_break(text: str) -> Told:
    """Reads why a graph ends before its function does, or why a function was not compiled."""
    said, stack = _split(text)
    first, _, rest = said.removeprefix("Unsupported: ").partition("\n")
    if first.endswith(":"):  # the error that another one was made of
        first = " ".join((first, rest.strip().partition("\n")[0]))
    hints = [each for each in _behind("Hint:", rest) if not each.startswith(_NO_ADVICE)]
    explanation = next(_behind("Explanation:", rest), "")
    reason, advice = ": ".join(filter(None, (first, explanation))), next(iter(hints), "")
    reason = _SAY_INSTEAD.get(first, reason)
    if any(each in first for each in _BRANCHES):
        reason, advice = _SAY_BRANCH, _TO_DO_BRANCH
    elif _LIMIT in first:
        limit = _LIMIT_NAME.search(rest)
        name = limit[1] if limit else "recompile_limit"
        reason = _SAY_LIMIT.format(limit=f"{name}={limit[2]}" if limit else name)
        advice = _TO_DO_LIMIT.format(name=name)
    return Told(text=text, reason=reason, advice=advice, subject=first, stack=stack)


def _behind(heading: str, text: str) -> Iterator[str]:
    """Yields what stands behind each `heading` up to the end of its line."""
    lines = (line.strip() for line in text.splitlines())
    return (line.removeprefix(heading).strip() for line in lines if line.startswith(heading))


def _split(text: str) -> tuple[str, tuple[CodeLine, ...]]:
    """Returns what a text says, and the lines of the user's code in the stack below it, outermost first."""
    said, _, below = text.partition(_STACK)
    frames: list[CodeLine] = []
    for line in below.splitlines():
        if match := _FRAME.match(line):
            frames.append(CodeLine(match[1], int(match[2]), plain_name(match[3])))
        elif frames and not frames[-1].code:
            frames[-1] = replace(frames[-1], code=line.strip())
    users = [frame for frame in frames if not _NOT_OF_USERS.search(frame.file)]
    return said.strip(), tuple(users or (frame for frame in frames if not _OF_DYNAMO.search(frame.file)))
