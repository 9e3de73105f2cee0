from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lazyio.errors import NeverFits, SettingError, TableError
from lazyio.ple.synthetic import expected_rows, output
from lazyio.ple.synthetic.output import NewFile, Run, write_files

ROW_BYTES = 90


def file_of(path: Path, rows: int = 50) -> NewFile:
    """A head of 33 bytes, rows 7 and up, a gap of 5 bytes, rows 0 to 6, and 11 bytes at the end."""
    later = Run(33, 7, rows - 7)
    first = Run(33 + later.rows * ROW_BYTES + 5, 0, 7)
    return NewFile(path, b"h" * 33, (later, first), 33 + rows * ROW_BYTES + 5 + 11)


def bytes_of(file: NewFile, rows: int = 50) -> bytes:
    table = expected_rows(range(rows))
    return file.head + table[7:].tobytes() + bytes(5) + table[:7].tobytes() + bytes(11)


@pytest.mark.parametrize("write_bytes", [1, 89, 90, 200, 4500, 8 << 20])
def test_rows_land_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_bytes: int):
    monkeypatch.setattr(output, "_WRITE_BYTES", write_bytes)
    monkeypatch.setattr(output, "_FILL_BYTES", 3 * ROW_BYTES)
    file = file_of(tmp_path / "table")
    assert write_files([file], ROW_BYTES) == (file.path,)
    assert file.path.read_bytes() == bytes_of(file)
    assert os.listdir(tmp_path) == ["table"]


def test_progress_counts_the_bytes_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "_WRITE_BYTES", 10 * ROW_BYTES)
    steps: list[int] = []
    write_files([file_of(tmp_path / "a"), file_of(tmp_path / "b")], ROW_BYTES, progress=steps.append)
    assert steps == sorted(set(steps))
    assert len(steps) > 10
    assert steps[-1] == 2 * 50 * ROW_BYTES


def test_holes(tmp_path: Path):
    file = file_of(tmp_path / "table", rows=100_000)
    write_files([file], ROW_BYTES, sparse=True, progress=pytest.fail)
    assert file.path.stat().st_size == file.size_bytes
    assert file.path.stat().st_blocks * 512 < 100_000
    assert file.path.read_bytes() == file.head + bytes(file.size_bytes - 33)


def test_writes_that_come_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:100], offset))
    file = file_of(tmp_path / "table")
    write_files([file], ROW_BYTES)
    assert file.path.read_bytes() == bytes_of(file)


def test_what_is_interrupted_leaves_nothing(tmp_path: Path):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_files([file_of(tmp_path / "a"), file_of(tmp_path / "b")], ROW_BYTES, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TableError, match=r"can't write .*table: No space left"):
        write_files([file_of(tmp_path / "table")], ROW_BYTES)
    assert os.listdir(tmp_path) == []


def test_files_are_flushed_before_they_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(os.listdir(tmp_path)))
    write_files([file_of(tmp_path / "table")], ROW_BYTES)
    assert len(flushed) == 1
    assert "table" not in flushed[0]


def test_an_existing_file_stays(tmp_path: Path):
    path = tmp_path / "b"
    path.write_text("precious")
    with pytest.raises(SettingError, match=r"b exists; .*--force"):
        write_files([file_of(tmp_path / "a"), file_of(path)], ROW_BYTES)
    assert os.listdir(tmp_path) == ["b"]
    assert path.read_text() == "precious"


def test_an_existing_file_is_replaced_on_request(tmp_path: Path):
    file = file_of(tmp_path / "table")
    file.path.write_text("old")
    write_files([file], ROW_BYTES, overwrite=True)
    assert file.path.read_bytes() == bytes_of(file)


def test_a_folder_is_never_replaced(tmp_path: Path):
    with pytest.raises(SettingError, match="exists"):
        write_files([file_of(tmp_path)], ROW_BYTES, overwrite=True)


def test_room_is_checked_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    file = file_of(tmp_path / "table")
    with pytest.raises(NeverFits, match=r"needs 4\..* KiB and .* has 3\.9 KiB free"):
        write_files([file], ROW_BYTES)
    assert os.listdir(tmp_path) == []
    write_files([file], ROW_BYTES, sparse=True)


def test_a_folder_that_is_missing(tmp_path: Path):
    with pytest.raises(TableError, match="there is no folder"):
        write_files([file_of(tmp_path / "absent" / "table")], ROW_BYTES)
