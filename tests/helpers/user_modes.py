"""Modes as a user may have them, which keep what they see."""

from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode


class SeesOps(TorchDispatchMode):
    """Keeps the name of every op that the dispatcher runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    """Keeps the name of every torch function, method and attribute access."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(resolve_name(function) or repr(function).partition(" at 0x")[0])
        return function(*args, **(kwargs or {}))
