def fingerprint(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    steps: tuple[int, ...],
    first: int,
    item_size: int,
    kind: int,
    weights: int,
    signs: int,
    swaps: int,
    sketch: int,
    /,
) -> int: ...
