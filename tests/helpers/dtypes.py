"""The dtypes that tests of measuring go through."""

import torch

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
DTYPES = [*FLOATS, *FLOAT8, *INTEGERS, *COMPLEX]

_IN_MEMORY_ALONE = {torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64, torch.complex32}

#: What the kernels of devices are tested with.
DEVICE_DTYPES = [dtype for dtype in DTYPES if dtype not in _IN_MEMORY_ALONE]
