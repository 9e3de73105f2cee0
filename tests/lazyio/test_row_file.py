import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lazyio import TableError
from lazyio.fetchers.base import Bytes, Int64
from lazyio.row_file import RowFile, write_row_file

HEADER = {"tensor": "rows", "rows": 100}
IDS = [np.array([5, 1, 99]), np.array([2**40]), np.empty(0, np.int64), np.arange(10, 60)]


def pieces() -> Iterator[tuple[Int64, Bytes]]:
    for ids in IDS:
        yield ids, (ids[:, None] + np.arange(7)).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "hot.rows")
    assert write_row_file(path, HEADER, pieces()) == 54
    return path


def test_what_was_written_is_read(path: str) -> None:
    with RowFile(path) as file:
        assert file.header == HEADER
        for _ in range(2):
            read = list(file.pieces(7))
            written = [(ids, rows) for ids, rows in pieces() if len(ids)]
            assert len(read) == len(written)
            for (ids, rows), (expected_ids, expected_rows) in zip(read, written, strict=True):
                np.testing.assert_array_equal(ids, expected_ids)
                np.testing.assert_array_equal(rows, expected_rows)


def test_a_file_without_rows(tmp_path: Path) -> None:
    path = str(tmp_path / "none.rows")
    assert write_row_file(path, HEADER, []) == 0
    with RowFile(path) as file:
        assert list(file.pieces(7)) == []


def test_every_length_but_the_whole_is_refused(path: str) -> None:
    whole = Path(path).read_bytes()
    for length in range(len(whole)):
        Path(path).write_bytes(whole[:length])
        with pytest.raises(TableError, match=r"hot\.rows is (no file of rows|damaged or cut short)"):
            RowFile(path)
    Path(path).write_bytes(whole + b"\0")
    with pytest.raises(TableError, match="damaged or cut short"):
        RowFile(path)


def test_every_changed_byte_is_found(path: str) -> None:
    whole = Path(path).read_bytes()
    for place in range(len(whole)):
        Path(path).write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(TableError, match=r"hot\.rows"):
            RowFile(path)


def test_another_version_is_named(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 2))
    with pytest.raises(TableError, match=r"of version 2, and this package reads version 1: save it anew"):
        RowFile(path)


def test_rows_of_another_length_are_refused(path: str) -> None:
    with RowFile(path) as file, pytest.raises(TableError, match="has no rows of 9 bytes"):
        list(file.pieces(9))


def test_what_can_not_be_read_or_written_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"can't read rows from .*none: No such file"):
        RowFile(str(tmp_path / "none"))
    with pytest.raises(TableError, match=r"can't read rows from .*: Is a directory"):
        RowFile(str(tmp_path))
    with pytest.raises(TableError, match=r"can't write rows to .*: No such file"):
        write_row_file(str(tmp_path / "none" / "hot"), HEADER, [])
    with pytest.raises(TableError, match=r"can't write rows to .*: Is a directory"):
        write_row_file(str(tmp_path), HEADER, [])


def test_a_file_is_replaced_whole_or_not_at_all(path: str) -> None:
    before = Path(path).read_bytes()

    def failing() -> Iterator[tuple[Int64, Bytes]]:
        yield from pieces()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_row_file(path, HEADER, failing())
    assert Path(path).read_bytes() == before
    assert os.listdir(Path(path).parent) == ["hot.rows"]
    write_row_file(path, HEADER, [])
    assert len(Path(path).read_bytes()) < len(before)
    assert os.listdir(Path(path).parent) == ["hot.rows"]


def test_a_refused_file_is_closed(path: str) -> None:
    os.truncate(path, 100)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TableError):
        RowFile(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
