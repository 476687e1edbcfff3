"""Damages a recording in one of many ways, by a seed; the files of the original stay as they are."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from modtrace.recording.arrow.arrays import absent_column
from modtrace.recording.schema import schemas

#: Numbers that parsers stumble over.
WILD = [0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**30, 2**16, 255, 2**62, 2**63 - 1, -(2**63)]
WILD_JSON = [
    *("null", "true", "-1", "[]", "{}", '""', "1e999", "-1e999", "NaN", "1.5", "1" * 40, "1" * 5000, "-0"),
    *(
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 300 + "]" * 300,
        r'"\ud800"',
        r'"\u0000"',
        '"' + "a" * 100_000 + '"',
    ),
    *(
        '["../../recording.json"]',
        "[1, 2]",
        '{"a": 1, "a": 2}',
        "9223372036854775808",
        '"\x1b[31m"',
        "\ufeff1",
    ),
]


def copy_of(original: Path, to: Path) -> list[Path]:
    """A folder of hard links to the files of the original, which a mutation replaces; returns the files."""
    files = []
    for each in sorted(original.rglob("*")):
        target = to / each.relative_to(original)
        if each.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(each, target)
            files.append(target)
    return files


def replace(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def flip_bits(file: Path, files: list[Path], random: Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(random.choice([1, 1, 2, 8])):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    replace(file, bytes(content))


def overwrite_run(file: Path, files: list[Path], random: Random) -> None:
    content = bytearray(file.read_bytes())
    at, length = random.randrange(len(content) + 1), random.choice([1, 4, 16, 300, 5000])
    fill = random.choice([b"\0", b"\xff", b"\x7f", b"[", random.randbytes(1)])
    content[at : at + length] = fill * len(content[at : at + length])
    replace(file, bytes(content))


def overwrite_number(file: Path, files: list[Path], random: Random) -> None:
    """A wild number where one may stand: in metadata, among offsets, or in a column."""
    content = bytearray(file.read_bytes())
    width = random.choice([2, 4, 4, 8])
    front = min(len(content), random.choice([600, 5000, len(content)]))
    for _ in range(random.choice([1, 1, 3])):
        at = random.randrange(max(front, 8)) // width * width
        number = random.choice([*WILD, random.randrange(1000)])
        content[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    replace(file, bytes(content))


def overwrite_offset(file: Path, files: list[Path], random: Random) -> None:
    """A wild number among numbers that grow, as the offsets of texts and lists do."""
    file = random.choice([each for each in files if each.suffix == ".arrow"])
    content = bytearray(file.read_bytes())
    numbers = np.frombuffer(bytes(content[: len(content) // 4 * 4]), np.int32)
    before, at, after = numbers[:-2], numbers[1:-1], numbers[2:]
    is_offset = (before >= 0) & (before <= at) & (at <= after) & (after < before + 10_000) & (after > 0)
    for place in random.choices(np.flatnonzero(is_offset).tolist(), k=random.choice([1, 2])):
        number = random.choice([*WILD, int(numbers[place]) + random.choice([-9, -1, 1, 9, 4096])])
        content[4 * place + 4 : 4 * place + 8] = (number % 2**32).to_bytes(4, "little")
    replace(file, bytes(content))


def truncate(file: Path, files: list[Path], random: Random) -> None:
    content = file.read_bytes()
    replace(
        file,
        content[: random.choice([0, 1, 7, 8, random.randrange(len(content) + 1), max(len(content) - 9, 0)])],
    )


def append(file: Path, files: list[Path], random: Random) -> None:
    content = file.read_bytes()
    replace(file, content + random.choice([b"\0" * 64, random.randbytes(40), content, content[-200:]]))


def move_bytes(file: Path, files: list[Path], random: Random) -> None:
    """Bytes that are missing or stand twice: all offsets behind them are wrong."""
    content = file.read_bytes()
    at, length = random.randrange(len(content) + 1), random.choice([1, 8, 64])
    replace(
        file, random.choice([content[:at] + content[at + length :], content[: at + length] + content[at:]])
    )


def edit_json(file: Path, files: list[Path], random: Random) -> None:
    """One value of a JSON file, or of a shard's header, becomes another."""
    file = random.choice([each for each in files if each.suffix in (".json", ".jsonl", ".safetensors")])
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        text = _edited(content[8 : 8 + length].decode(), random).encode()
        text = text.ljust(length) if random.random() < 0.8 else text
        replace(file, len(text).to_bytes(8, "little") + text + content[8 + length :])
    elif file.suffix == ".jsonl":
        lines = content.decode().splitlines()
        at = random.randrange(len(lines))
        lines[at] = _edited(lines[at], random)
        replace(file, ("\n".join(lines) + "\n").encode())
    else:
        replace(file, _edited(content.decode(), random).encode("utf-8", "surrogatepass"))


def _edited(text: str, random: Random) -> str:
    try:
        values = json.loads(text)
    except ValueError:
        return text[: random.randrange(len(text) + 1)]
    mark = "MARK-OF-THE-PLACE"
    at, key = values, random.choice(list(values))
    while isinstance(at[key], dict | list) and at[key] and random.random() < 0.8:
        at = at[key]
        key = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
    at[key] = mark
    return json.dumps(values).replace(f'"{mark}"', random.choice(WILD_JSON))


def swap(file: Path, files: list[Path], random: Random) -> None:
    """Another file of the recording in the place of this one."""
    replace(file, random.choice(files).read_bytes())


def link(file: Path, files: list[Path], random: Random) -> None:
    other = str(random.choice(files).absolute())
    devices = ["/dev/zero", "/dev/null", "/dev/random", "/proc/self/mem"]
    target = random.choice([*devices, file.name, "nowhere", "/", "/etc/passwd", ".", other])
    file.unlink()
    file.symlink_to(target)


def no_file(file: Path, files: list[Path], random: Random) -> None:
    """What is no regular file in the place of one."""
    file.unlink()
    kind = random.choice(["fifo", "folder", "socket", "nothing"])
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(file))


def folders(file: Path, files: list[Path], random: Random) -> None:
    """Ranks that are missing, files, links, or under another name."""
    ranks = sorted({each.parent for each in files if each.parent.name.startswith("rank-")})
    rank = random.choice(ranks)
    what = random.choice(["rename", "file", "link", "empty"])
    if what == "rename":
        rank.rename(
            rank.with_name(random.choice(["rank-00007", "rank-00000.attempt-1", "rank-99999", "other"]))
        )
    elif what == "file":
        rank.with_name("rank-00003").write_bytes(b"no folder")
    elif what == "link":
        rank.with_name("rank-00004").symlink_to(random.choice([".", "rank-00004", rank.name, "nowhere"]))
    else:
        rank.with_name("rank-00005").mkdir()


def change_cells(file: Path, files: list[Path], random: Random) -> None:
    """A table that Arrow finds valid, with wild values in some cells, or nulls where none may be."""

    table, name = random.choice([(table, name) for table in schemas() for name in schemas()[table].names])
    files = [file for file in files if file.stem == table] or files

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        if name not in batch.schema.names:
            batch = _with_empty(batch, schemas()[table].field(name))
        at = batch.schema.get_field_index(name)
        field, cells = batch.schema.field(at), batch.column(at).to_pylist()
        for row in random.sample(range(len(cells)), min(len(cells), random.choice([1, 3, 1000]))):
            cells[row] = _wild_cell(field.type, cells, random)
        columns = list(batch.columns)
        columns[at] = _to_array(cells, field.type, columns[at])
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    _rewrite(files, random, change)


def _with_empty(batch: pa.RecordBatch, field: pa.Field) -> pa.RecordBatch:
    """The batch with a column that its file lacks."""
    columns = [*batch.columns, absent_column(field, batch.num_rows)]
    return pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, field.name])


def _wild_cell(kind: pa.DataType, cells: list, random: Random):
    if random.random() < 0.2:
        return None
    if pa.types.is_integer(kind):
        return random.choice([*WILD, *[each for each in cells if each is not None][:50]])
    if pa.types.is_floating(kind):
        return random.choice([0.0, -1.0, 1e308, float("nan"), float("inf"), -float("inf")])
    if pa.types.is_list(kind):
        inner = [_wild_cell(kind.value_type, [], random) for _ in range(random.choice([0, 1, 5, 256]))]
        return inner
    if pa.types.is_boolean(kind):
        return random.random() < 0.5
    if pa.types.is_binary(kind):
        return random.randbytes(random.randrange(20))
    words = [
        "",
        "wild",
        "\u202e",
        "a.b.c",
        "a" * 10_000,
        "\x1b[31m",
        "\0",
        "[" * 100_000,
        "backward",
        "output",
        "🦊",
        "$a $b",
    ]
    return random.choice([*words, *[each for each in cells if each is not None][:50]])


def _to_array(cells: list, kind: pa.DataType, old: pa.Array) -> pa.Array:
    try:
        if pa.types.is_dictionary(kind):
            return pa.array(cells, kind.value_type).dictionary_encode().cast(kind)
        return pa.array(cells, kind)
    except (pa.ArrowException, OverflowError):  # the number does not fit
        return old


def change_rows(file: Path, files: list[Path], random: Random) -> None:
    """Rows of a table in another order, twice, or some of them alone."""

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [random.randrange(batch.num_rows) for _ in range(random.choice([0, 1, batch.num_rows]))]
        return batch.take(pa.array(rows, pa.int64())) if batch.num_rows else batch

    _rewrite(files, random, change)


def change_columns(file: Path, files: list[Path], random: Random) -> None:
    """A table without a column, with one of another type, with one twice, or one that is unknown."""
    what = random.choice(["drop", "twice", "name", *_OTHER_TYPES])
    place, name = random.random(), random.choice(["", "unknown", "🦊", "step"])

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        names, columns = list(batch.schema.names), list(batch.columns)
        at = int(place * len(names))
        if what == "drop":
            del names[at], columns[at]
        elif what == "twice":
            names.append(names[at])
            columns.append(columns[at])
        elif what == "name":
            names[at] = name
        else:
            columns[at] = _OTHER_TYPES[what](range(batch.num_rows))
        return pa.RecordBatch.from_arrays(columns, names=names)

    _rewrite(files, random, change)


_OTHER_TYPES: dict[str, Callable[[range], pa.Array]] = {
    "string": lambda rows: pa.array([str(each) for each in rows], pa.string()),
    "list": lambda rows: pa.array([[each] for each in rows], pa.list_(pa.int64())),
    "struct": lambda rows: pa.array([{"a": each} for each in rows], pa.struct([("a", pa.int64())])),
    "float": lambda rows: pa.array([float(each) for each in rows], pa.float64()),
    "null": lambda rows: pa.nulls(len(rows)),
    "int8": lambda rows: pa.array([each % 100 for each in rows], pa.int8()),
    "uint64": lambda rows: pa.array([2**64 - 1 - each for each in rows], pa.uint64()),
}


def compress(file: Path, files: list[Path], random: Random) -> None:
    _rewrite(files, random, lambda batch: batch, random.choice(["lz4", "zstd"]))


def _rewrite(
    files: list[Path],
    random: Random,
    change: Callable[[pa.RecordBatch], pa.RecordBatch],
    compression: str | None = None,
) -> None:
    file = random.choice([each for each in files if each.suffix == ".arrow"])
    table = ipc.open_stream(pa.BufferReader(file.read_bytes())).read_all().unify_dictionaries()
    changed = [change(each) for each in table.to_batches()]
    sink = pa.BufferOutputStream()
    with ipc.new_stream(
        sink, changed[0].schema, options=ipc.IpcWriteOptions(compression=compression)
    ) as stream:
        for each in changed:
            stream.write_batch(each)
    replace(file, sink.getvalue().to_pybytes())


#: How often each comes is how often it stands here. What is in `UNSEEN` may take rows away and leave a valid
#: recording, so that nothing can tell that they are missing.
MUTATIONS = [
    *[flip_bits] * 2,
    *[overwrite_number] * 3,
    *[overwrite_offset] * 3,
    *[edit_json] * 3,
    *[change_cells] * 4,
    *(
        overwrite_run,
        truncate,
        append,
        move_bytes,
        swap,
        link,
        no_file,
        folders,
        change_rows,
        change_columns,
        compress,
    ),
]
UNSEEN = {change_rows, edit_json, folders, swap}  # tensors.arrow has all that must be in uses.arrow


def mutate(folder: Path, files: list[Path], seed: int) -> Callable[..., None]:
    """Damages a copy; returns how."""
    random = Random(seed)
    mutation = random.choice(MUTATIONS)
    mutation(random.choice(files), files, random)
    return mutation
