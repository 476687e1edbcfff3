"""Folds the rows of modules that repeat: `blocks.0..31.attn` stands for 32 that do the same."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from ...recording.module_path import fold_numbers, number_free


def find_alike(
    places: Sequence[tuple[str | None, str | None]], likes: Sequence[Hashable]
) -> Iterator[tuple[str | None, list[int]]]:
    """Yields each path that stands for some of the rows, with the numbers of these rows, in order of the first.

    Rows are one if their paths count up in one root, and what is to be equal is.

    Args:
        places: the root and the path of each row; without a path it is left alone.
        likes: what has to be equal.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for row, ((root, path), like) in enumerate(zip(places, likes, strict=True)):
        alike[row if path is None else (root, number_free(path), like)].append(row)
    for rows in alike.values():
        paths = [path for path in (places[row][1] for row in rows) if path is not None]
        folded = fold_numbers(paths) if len(rows) > 1 else None
        if folded is not None:
            yield folded, rows
        else:
            yield from ((places[row][1], [row]) for row in rows)
