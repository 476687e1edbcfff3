"""Files that are written wholly or not at all."""

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modtrace.errors import ModtraceError
from modtrace.views.common.whole_file import write_pieces


def test_pieces_are_written_behind_each_other_and_nothing_lies_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_pieces(["a\n", "b \u2603"], path)
    assert path.read_bytes() == "a\nb \u2603".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "reason"), [("gone/out.txt", "No such file or directory"), ("", "Is a directory")]
)
def test_path_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, path: str, reason: str
) -> None:
    with pytest.raises(ModtraceError) as error:
        write_pieces(["a"], tmp_path / path)
    assert str(error.value) == f"{tmp_path / path}: cannot be written: {reason}. Give another path."
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_full_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.TextIOWrapper):
        def writelines(self, pieces: Any) -> None:
            self.write(next(iter(pieces)))
            raise OSError(28, "No space left on device")

    path = tmp_path / "out.txt"
    path.write_text("old")
    monkeypatch.setattr("builtins.open", lambda path, *_, **__: Full(io.FileIO(path, "w")))
    with pytest.raises(ModtraceError, match="No space left on device"):
        write_pieces(["new"], path)
    monkeypatch.undo()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("out.txt", "old")]


def test_error_while_the_pieces_are_made_comes_out_and_leaves_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[str]:
        yield "new"
        raise KeyboardInterrupt

    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_pieces(pieces(), path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("out.txt", "old")]


def test_link_stays_a_link_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_pieces(["new"], link)
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_named_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    write_pieces(["a", "b"], path)
    reader.join(timeout=60)
    assert read == ["ab"]
    assert path.is_fifo()
