from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lazyio.errors import TableError
from lazyio.ple.checkpoint import SourceFile, StoredTensor, check_ranges


def tensor(name: str, offset: int, size_bytes: int | None) -> StoredTensor:
    return StoredTensor(name, "U8", (1, size_bytes or 0), "file", offset, size_bytes)


def test_reads_exactly_what_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(10)))
    with SourceFile(str(tmp_path / "file")) as source:
        assert source.size == 10
        assert source.read(3, 4) == bytes([3, 4, 5, 6])
        assert source.read(10, 0) == b""
        with pytest.raises(TableError, match="bytes 8 to 11 are needed and it has 10"):
            source.read(8, 3)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with SourceFile(str(path)) as source:
        os.truncate(path, 5)
        with pytest.raises(TableError, match="became shorter"):
            source.read(0, 10)


def test_too_many_open_files_come_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TableError, match=r"can't open .*: Too many open files; raise RLIMIT_NOFILE \(ulimit -n\)"):
        SourceFile(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["missing", "with\0nul", "x" * 300])
def test_what_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(TableError, match="can't open"):
        SourceFile(str(tmp_path / name))


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(TableError, match="not a regular file"):
            SourceFile(str(path))


def test_ranges_that_fit() -> None:
    check_ranges([tensor("b", 10, 5), tensor("a", 0, 10), tensor("empty", 10, 0), tensor("unknown", 15, None)], 15)


def test_ranges_that_do_not() -> None:
    with pytest.raises(TableError, match="'a' and 'b' overlap: the first ends at byte 11, the second starts at"):
        check_ranges([tensor("b", 10, 5), tensor("a", 0, 11)], 15)
    with pytest.raises(TableError, match="'b' takes bytes 10 to 15, and the file has 14"):
        check_ranges([tensor("b", 10, 5), tensor("a", 0, 10)], 14)
    with pytest.raises(TableError, match="cut short"):
        check_ranges([tensor("unknown", 16, None)], 15)


def test_a_file_that_nobody_closes_is_closed_with_its_last_reference(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8))
    before = len(os.listdir("/proc/self/fd"))
    file = SourceFile(str(tmp_path / "file"))
    assert file.read(0, 8) == bytes(8)
    del file
    assert len(os.listdir("/proc/self/fd")) == before
