"""The hash and the sketch in plain Python, element by element: what `recording.statistics.fingerprints` defines."""

import math
from functools import cache

_ALL = 2**64 - 1


def mix(tag: int, number: int) -> int:
    bits = number * 0x9E3779B97F4A7C15 + tag * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D & _ALL
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _ALL
    return bits ^ bits >> 31


@cache
def group_of_blocks() -> dict[int, int]:
    ordered = sorted(range(4096), key=lambda block: (mix(1, block) >> 1 & 2**62 - 1, block))
    return {block: rank // 16 for rank, block in enumerate(ordered)}


def bucket_and_sign(place: int) -> tuple[int, int]:
    chunk, block, lane = place >> 18, place >> 6 & 4095, place & 63
    group = group_of_blocks()[block]
    bucket = lane ^ group & 63 ^ mix(5, chunk) & 63
    negative = mix(2, block) & 1, mix(3, group) >> lane & 1, mix(4, chunk) >> bucket & 1
    return bucket, (-1) ** sum(negative)


def weight(word: int) -> int:
    return (mix(6, word & 65535) | 1) * (mix(7, word >> 16) | 1) & _ALL


def hash_of(content: bytes, at_byte: int = 0) -> int:
    """The hash of elements that begin so many bytes after the tensor's first."""
    total, lead = 0, at_byte % 4
    content = bytes(lead) + content + bytes(-(lead + len(content)) % 4)
    for at in range(0, len(content), 4):
        word = int.from_bytes(content[at : at + 4], "little", signed=True)
        total += word * weight((at_byte - lead + at) // 4)
    return total & _ALL


def sketch_of(numbers: list[float], place: int = 0) -> list[float]:
    """The sketch of numbers of which the first has this place, as exact as float64 is."""
    buckets: list[list[float]] = [[] for _ in range(64)]
    for at, number in enumerate(numbers):
        bucket, sign = bucket_and_sign(place + at)
        buckets[bucket].append(sign * number if math.isfinite(number) else 0.0)
    return [math.fsum(bucket) for bucket in buckets]
