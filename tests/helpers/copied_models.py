"""A model whose parts are copied in different ways, and what there is of a copy. It needs no more than torch."""

import copy
import hashlib
import json
import sys
from typing import Any

import torch
from torch import nn


def double(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook of the user's, which belongs into every copy."""
    return output * 2


class Part(nn.Module):
    """Is copied as Python copies objects."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.a.register_forward_hook(double, with_kwargs=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)

    @staticmethod
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def make(cls) -> "Part":
        return cls()


class WithState(Part):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stored": True}


class WithDeepcopy(Part):
    def __deepcopy__(self, memo: Any) -> "WithDeepcopy":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class WithCopy(Part):
    def __copy__(self) -> "WithCopy":
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


class WithReduce(Part):
    def __reduce__(self) -> Any:
        return build, (type(self), self.__dict__.copy())


class WithReduceEx(Part):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return build, (type(self), (self.__dict__,))


def build(kind: type[nn.Module], state: Any) -> nn.Module:
    made = kind.__new__(kind)
    made.__dict__.update(state[0] if isinstance(state, tuple) else state)
    return made


class Whole(Part):
    """One part of each kind, one of them twice, and an attribute that is a method of a part."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (Part, WithState, WithDeepcopy, WithCopy, WithReduce, WithReduceEx)
        self.parts = nn.ModuleList([kind() for kind in kinds])
        self.parts.append(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
        self.parts.append(self.parts[0])
        self.encode = self.parts[1].encode  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return super().forward(x)


def make_whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


def describe(model: nn.Module) -> dict[str, list[str]]:
    """Returns, by path, the attributes, the hooks and the parameters of each module, and what the model returns."""
    found = {path: sorted(_facts(module)) for path, module in model.named_modules()}
    for _ in range(2):
        output = model(torch.ones(2, 4))
        output.sum().backward()
        found["output"] = [*found.get("output", ()), _hash(output), *map(_hash, _gradients(model))]
    return found


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def _facts(module: nn.Module) -> list[str]:
    hooks = [
        f"{name}: {list(table.values())}"
        for name, table in vars(module).items()
        if "_hooks" in name and table
    ]
    tensors = [f"{name}: {_hash(each)}" for name, each in module.named_parameters(recurse=False)]
    return [*vars(module), *(hook.partition(" at 0x")[0] for hook in hooks), *tensors]


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


class _Refuses:
    """Refuses to import modtrace."""

    def find_spec(self, name: str, *given: Any) -> None:
        if name.partition(".")[0] == "modtrace":
            raise ModuleNotFoundError(f"{name} is not on this machine")


def main() -> None:
    """Loads each file that a line of standard input names, without modtrace, and prints what there is."""
    sys.meta_path.insert(0, _Refuses())  # type: ignore[arg-type]
    for line in sys.stdin:
        try:
            loaded = torch.load(line.strip(), weights_only=False)
            answer: Any = describe(loaded["model"])
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
