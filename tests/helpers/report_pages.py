"""Reads the data out of pages."""

import base64
import gzip
import json
import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

_TYPES = {"u8": "u1", "i32": "<i4", "f32": "<f4", "f64": "<f8", "ns": "<i8"}


def read_payload(page: str) -> dict[str, Any]:
    """Returns the JSON values of the payload in a page."""
    found = re.search(r'id="payload"[^>]*>([^<]*)<', page)
    assert found
    return decode(found[1])[0]


def decode(packed: str) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON values of a payload, and the bytes behind them."""
    content = gzip.decompress(base64.b64decode(packed))
    end = 4 + struct.unpack_from("<I", content)[0]
    return json.loads(content[4:end].decode("utf-8")), content[end:]


def numbers_of(data: dict[str, Any], rows: int, numbers: bytes) -> npt.NDArray[Any]:
    """Returns the numbers of a column: one byte of all of them comes after the other."""
    kind = np.dtype(_TYPES[data["type"]])
    planes = np.frombuffer(numbers, np.uint8, rows * kind.itemsize, data["offset"]).reshape(
        kind.itemsize, rows
    )
    found = planes.T.copy().view(kind).reshape(-1)
    if data["type"] != "ns":
        return found
    times = np.cumsum(found) if data.get("rises") else found
    return np.where(times == data.get("null"), np.nan, times / 1e9)
