import ctypes
import errno
import gc
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lazyio.errors import ReadError, Unsupported
from lazyio.fetchers import mapping
from lazyio.fetchers.base import Bytes, Int64, ReadStats
from lazyio.fetchers.conformance import MadeTable, run_in_child, write_rows
from lazyio.fetchers.files import FileSet
from lazyio.fetchers.mapping import IOV_MAX, OS_PAGE_BYTES, MappedRows

SEVERAL = [("a", 131, 2000), ("b", 4099, 1500), ("a", 400_013, 700), ("c", 0, 3)]
ROWS = 4203


class Mapped:
    """Mapped rows, with a record of what they had to have brought in."""

    def __init__(self, table: MadeTable, *, safe: bool = False, rss_bytes: int = 0) -> None:
        self.table = table
        self.files = FileSet(extent.path for extent in table.extents)
        self.rows = MappedRows(self.files, table.extents, table.row_bytes, safe=safe, rss_bytes=rss_bytes)
        self.brought: list[list[int]] = []

    def bring_in(self, absent: Int64) -> ReadStats:
        self.brought.append(absent.tolist())
        return ReadStats(reads=1)

    def take(self, ids: Int64, *, advised: bool = True) -> ReadStats:
        """Take rows, and check them."""
        out: Bytes = np.zeros((len(ids), self.table.row_bytes), np.uint8)
        stats = self.rows.take(ids, out, self.bring_in if advised else None)
        np.testing.assert_array_equal(out, self.table.content[ids])
        return stats

    def close(self) -> None:
        self.rows.close()
        self.files.close()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> MadeTable:
    return write_rows(tmp_path_factory.mktemp("mapping"), 90, SEVERAL)


@pytest.fixture
def mapped(table: MadeTable) -> Iterator[Mapped]:
    mapped = Mapped(table)
    yield mapped
    mapped.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of major faults, to be told one after the other; 0 for ever after."""
    told: list[int] = []
    monkeypatch.setattr(mapping, "_major_faults", lambda: told.pop(0) if told else 0)
    return told


# --- copying ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("places", [SEVERAL, [("a", 77, 4203)]], ids=["several", "one"])
def test_rows_come_in_the_order_asked_with_duplicates(
    tmp_path: Path, safe: bool, places: list[tuple[str, int, int]]
) -> None:
    mapped = Mapped(write_rows(tmp_path, 90, places), safe=safe)
    ids = np.random.default_rng(1).integers(0, ROWS, 3 * IOV_MAX + 5)
    mapped.take(ids)
    mapped.take(np.array([0, ROWS - 1, 0]))
    mapped.take(np.array([], np.int64))
    mapped.close()


@pytest.mark.parametrize("safe", [False, True])
def test_rows_as_long_as_os_pages(tmp_path: Path, safe: bool) -> None:
    mapped = Mapped(write_rows(tmp_path, 5040, [("a", 11, 30), ("b", 4096, 20)]), safe=safe)
    mapped.take(np.random.default_rng(2).integers(0, 50, 200))
    mapped.close()


def test_closing_unmaps(table: MadeTable) -> None:
    mapped = Mapped(table)
    mapped.take(np.arange(ROWS))
    mapped.close()
    assert table.extents[0].path not in Path("/proc/self/maps").read_text()


def test_what_can_not_be_mapped_leaves_nothing_mapped(table: MadeTable) -> None:
    files = FileSet(extent.path for extent in table.extents)
    beyond = replace(table.extents[1], rows=10**6)
    with pytest.raises(ValueError, match="greater than file size"):
        MappedRows(files, [table.extents[0], beyond], 90, safe=False, rss_bytes=0)
    assert table.extents[0].path not in Path("/proc/self/maps").read_text()
    files.close()


# --- what has been brought in ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("faults")
def test_rows_are_brought_in_once(mapped: Mapped) -> None:
    scattered = np.arange(0, ROWS, 101)
    assert mapped.take(scattered).reads == 1
    assert mapped.take(scattered[::-1]).reads == 0
    assert mapped.take(np.array([*scattered, 50])).reads <= 1
    assert mapped.brought[0] == scattered.tolist()
    assert mapped.brought[1:] in ([], [[50]])


@pytest.mark.usefixtures("faults")
def test_a_row_over_two_pages_needs_both(tmp_path: Path) -> None:
    mapped = Mapped(write_rows(tmp_path, 90, [("a", 0, 200)]))
    mapped.take(np.array([0]))
    straddling = 4096 // 90
    assert mapped.rows.absent(np.array([straddling - 1])).tolist() == []
    assert mapped.rows.absent(np.array([straddling])).tolist() == [straddling]
    mapped.take(np.array([50]))
    assert mapped.rows.absent(np.array([straddling])).tolist() == []
    mapped.close()


@pytest.mark.usefixtures("faults")
def test_long_rows_are_remembered_one_by_one(tmp_path: Path) -> None:
    mapped = Mapped(write_rows(tmp_path, 10_000, [("a", 11, 30)]))
    mapped.take(np.array([3, 5]))
    assert mapped.rows.absent(np.array([3, 4, 5, 6])).tolist() == [4, 6]
    mapped.close()


def test_nothing_is_brought_in_unless_asked(mapped: Mapped) -> None:
    mapped.take(np.arange(ROWS), advised=False)
    assert mapped.brought == []


def test_faults_are_counted_as_reads_and_make_it_forget(mapped: Mapped, faults: list[int]) -> None:
    ids = np.arange(0, 1000)
    mapped.take(ids)
    faults += [100, 108]
    stats = mapped.take(ids)
    assert (stats.reads, stats.bytes_read) == (8, 8 * OS_PAGE_BYTES)
    assert len(mapped.rows.absent(ids)) == len(ids)


def test_a_few_faults_are_put_up_with(mapped: Mapped, faults: list[int]) -> None:
    ids = np.arange(0, 1000)
    mapped.take(ids)
    faults += [100, 107]
    assert mapped.take(ids).reads == 7
    assert len(mapped.rows.absent(ids)) == 0


@pytest.mark.usefixtures("faults")
def test_a_sample_is_enough_while_all_is_there(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    absent = MappedRows.absent

    def spy(self: MappedRows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        looked_at.append(len(ids))
        return absent(self, ids)

    monkeypatch.setattr(MappedRows, "absent", spy)
    mapped.rows._mincore_tells = False
    warm = np.arange(8192) % 1000
    for _ in range(3):
        mapped.take(warm)
    assert looked_at == [8192, 8192, 512]
    looked_at.clear()
    mapped.take(np.concatenate([warm[:4096], np.arange(4096) % ROWS]))
    assert looked_at == [512, 8192]
    assert len(mapped.brought) == 2


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(("state", "brought"), [("cached", 0), ("dropped", 1), ("unknown", 1)])
def test_what_others_have_cached_is_not_brought_in(tmp_path: Path, state: str, brought: int) -> None:
    made = write_rows(tmp_path, 90, [("a", 13, ROWS)])
    path = made.extents[0].path
    with open(path, "rb") as file:
        if state == "dropped":
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = Mapped(made)
    if state == "unknown":
        mapped.rows._mincore_tells = False
    mapped.take(np.arange(2000))
    assert len(mapped.brought) == brought
    assert len(mapped.rows.absent(np.arange(2000))) == 0
    mapped.close()


# --- ranges of OS pages ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60))
@example(ids=[1999, 2000])  # the last page of one map and the first of the next
def test_ranges_are_the_merged_pages_of_the_rows(table: MadeTable, ids: list[int]) -> None:
    mapped = Mapped(table)
    addresses, lengths = mapped.rows.ranges(np.array(ids))
    assert (addresses % OS_PAGE_BYTES == 0).all()
    found = [ctypes.string_at(*each) for each in zip(addresses.tolist(), lengths.tolist(), strict=True)]
    assert found == expected_ranges(table, ids)
    mapped.close()


def expected_ranges(table: MadeTable, ids: list[int]) -> list[bytes]:
    """Contents of the runs of pages that hold the rows, extent by extent, with zeros beyond the end of the file."""
    contents = []
    for extent in table.extents:
        pages = set()
        for row in ids:
            if extent.first_row <= row < extent.first_row + extent.rows:
                offset = extent.offset + (row - extent.first_row) * table.row_bytes
                pages |= {offset // OS_PAGE_BYTES, (offset + table.row_bytes - 1) // OS_PAGE_BYTES}
        data = Path(extent.path).read_bytes()
        for page in sorted(pages):
            content = data[page * OS_PAGE_BYTES : (page + 1) * OS_PAGE_BYTES].ljust(OS_PAGE_BYTES, b"\0")
            if page - 1 in pages:
                contents[-1] += content
            else:
                contents.append(content)
    return contents


# --- files that change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [False, True])
def test_a_truncated_file_is_noticed_before_it_is_touched(tmp_path: Path, safe: bool) -> None:
    table = write_rows(tmp_path, 90, SEVERAL)
    mapped = Mapped(table, safe=safe)
    os.truncate(tmp_path / "b", 5000)

    def check() -> None:
        mapped.take(np.arange(2000))
        with pytest.raises(ReadError, match="b changed after the table was opened: it is 5000 bytes long"):
            mapped.take(np.arange(ROWS))

    run_in_child(check)
    mapped.close()


def test_a_file_that_is_truncated_later_gives_an_error_in_the_safe_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the file and the copy, that is, where a plain copy is killed."""
    mapped = Mapped(write_rows(tmp_path, 90, [("a", 10, 3000)]), safe=True)
    monkeypatch.setattr(mapped.files, "check", lambda number: None)
    os.truncate(tmp_path / "a", 3 * OS_PAGE_BYTES)
    lost = (3 * OS_PAGE_BYTES - 10) // 90

    def check() -> None:
        mapped.take(np.arange(lost))
        with pytest.raises(ReadError, match=rf"a at offset {10 + 90 * lost}: row {lost} can't be read") as caught:
            mapped.take(np.arange(3000))
        assert (caught.value.offset, caught.value.wanted, caught.value.got) == (10 + 90 * lost, 90, 0)

    run_in_child(check)
    mapped.close()


class Answering:
    """A C library whose `process_vm_readv` answers with an error."""

    def __init__(self, code: int) -> None:
        self._code = code

    def process_vm_readv(self, *_: object) -> int:
        ctypes.set_errno(self._code)
        return -1


@pytest.mark.parametrize(
    ("code", "cause"), [(errno.EPERM, "a seccomp profile forbids it"), (errno.ENOSYS, "this kernel .* has none")]
)
def test_a_refused_safe_copy_is_found_out_at_once_and_not_blamed_on_the_file(
    table: MadeTable, monkeypatch: pytest.MonkeyPatch, code: int, cause: str
) -> None:
    monkeypatch.setattr(mapping, "libc", lambda: Answering(code))
    files = FileSet(extent.path for extent in table.extents)
    name = errno.errorcode[code]
    with pytest.raises(Unsupported, match=rf"mmap_safe .*process_vm_readv, which is refused \({name}\): {cause}"):
        MappedRows(files, table.extents, 90, safe=True, rss_bytes=0)
    assert table.extents[0].path not in Path("/proc/self/maps").read_text()
    MappedRows(files, table.extents, 90, safe=False, rss_bytes=0).close()
    files.close()


def test_another_error_of_a_safe_copy_is_told_as_it_is(table: MadeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = Mapped(table, safe=True)
    monkeypatch.setattr(mapping, "libc", lambda: Answering(errno.ENOMEM))
    with pytest.raises(ReadError, match=r"row 7 can't be copied: process_vm_readv failed: Cannot allocate") as caught:
        mapped.take(np.array([7]), advised=False)
    assert (caught.value.errno, caught.value.got) == (errno.ENOMEM, None)
    mapped.close()


# --- memory ----------------------------------------------------------------------------------------------------------


def resident_kib(path: str) -> int:
    """KiB of the maps of a file that are in this process' page tables."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(int(re.search(r"^Rss:\s+(\d+)", entry, re.MULTILINE)[1]) for entry in entries if path in entry)


def test_mapped_pages_are_given_back_beyond_the_limit(table: MadeTable) -> None:
    path = table.extents[0].path
    for limit, expected in ((0, True), (1 << 40, True), (1, False)):
        mapped = Mapped(table, rss_bytes=limit)
        mapped.take(np.arange(ROWS))
        assert bool(resident_kib(path)) == expected
        mapped.close()


def test_what_an_interrupted_gather_refers_to_does_not_keep_it_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = Mapped(write_rows(tmp_path, 90, [("a", 0, 100)]))

    def interrupted(rows: Bytes, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "take", interrupted)

    def gather_and_close() -> None:
        try:
            mapped.take(np.arange(10))
        finally:
            mapped.close()

    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt) as caught:
        gather_and_close()
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2  # of the file, and of the map
