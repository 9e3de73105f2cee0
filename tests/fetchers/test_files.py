import os
from pathlib import Path

import pytest

from lazyio.errors import ReadError, TableError
from lazyio.fetchers.direct import open_for_reads
from lazyio.fetchers.files import FileSet


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 1000 bytes, written long ago."""
    path = tmp_path / "rows"
    path.write_bytes(bytes(1000))
    os.utime(path, ns=(0, 0))
    return path


def test_files_are_opened_once_in_order_of_first_mention(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in "cab"]
    for name in names:
        Path(name).write_text(name)
    before = open_count()
    files = FileSet([names[0], names[1], names[0], names[2], names[1]])
    assert files.paths == tuple(names)
    assert files.index == {name: number for number, name in enumerate(names)}
    assert open_count() == before + 3
    assert [os.pread(descriptor, 100, 0).decode() for descriptor in files.descriptors] == names
    files.close()
    files.close()
    assert open_count() == before


def test_a_missing_file_is_named_and_nothing_stays_open(path: Path) -> None:
    before = open_count()
    with pytest.raises(TableError, match=r"can't open .*/nowhere: No such file"):
        FileSet([str(path), str(path.with_name("nowhere"))])
    assert open_count() == before


def test_descriptors_do_not_reach_other_programs(path: Path) -> None:
    files = FileSet([str(path)])
    again = files.reopen(0, os.O_RDONLY)
    assert not os.get_inheritable(files.descriptors[0])
    assert not os.get_inheritable(again)
    os.close(again)
    files.close()


def test_what_has_not_changed_passes(path: Path) -> None:
    files = FileSet([str(path)])
    path.read_bytes()
    files.check(0)
    files.close()


@pytest.mark.parametrize(("size", "what"), [(400, "is 400 bytes long now and was 1000"), (1001, "is 1001 bytes long")])
def test_another_length_is_told_with_both_numbers(path: Path, size: int, what: str) -> None:
    files = FileSet([str(path)])
    os.truncate(path, size)
    with pytest.raises(ReadError, match=what) as caught:
        files.check(0)
    assert (caught.value.path, caught.value.wanted, caught.value.got) == (str(path), 1000, size)
    files.close()


def test_a_rewrite_of_the_same_length_is_noticed(path: Path) -> None:
    files = FileSet([str(path)])
    with path.open("r+b") as file:
        file.write(b"other")
    with pytest.raises(ReadError, match="was written to since then; open the table again"):
        files.check(0)
    files.close()


def test_a_file_that_was_replaced_is_still_the_old_one(path: Path) -> None:
    files = FileSet([str(path)])
    other = path.with_name("other")
    other.write_bytes(b"x" * 1000)
    os.replace(other, path)
    files.check(0)
    again = files.reopen(0, os.O_RDONLY)
    assert os.pread(again, 1000, 0) == bytes(1000)
    os.close(again)
    files.close()


def test_reopening_what_was_rewritten_is_an_error_and_leaves_nothing_open(path: Path) -> None:
    files = FileSet([str(path)])
    path.write_bytes(b"x" * 1000)
    before = open_count()
    with pytest.raises(ReadError, match="changed after the table was opened"):
        files.reopen(0, os.O_RDONLY)
    assert open_count() == before
    files.close()


def test_what_nobody_closes_is_closed_with_its_last_reference(path: Path) -> None:
    before = open_count()
    files = FileSet([str(path)])
    opened = open_for_reads(files, "off", 90, 0)
    assert open_count() == before + 2
    del files, opened
    assert open_count() == before
