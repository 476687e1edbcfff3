from typing import Any

import torch

class HostMeasurer:
    def __init__(
        self, held: tuple[Any, ...], exchange: object, block_rows: int, row_bytes: int, /
    ) -> None: ...
    def measure(self, tensor: torch.Tensor, /) -> Any: ...

def measure_into(address: int, count: int, repeats: int, kind: int, row_address: int) -> bool: ...
