import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from lazyio.bench.residency import PAGE_BYTES, PageRange, drop_pages, page_ranges, resident_in, resident_pages
from lazyio.fetchers.base import Extent
from lazyio.ple.spec import TableSpec


def spec_of(path: Path, extents: list[tuple[int, int]], row_bytes: int = 90) -> TableSpec:
    first, found = 0, []
    for offset, rows in extents:
        found.append(Extent(str(path), offset, first, rows))
        first += rows
    return TableSpec(str(path), "table", "U8", first, 0, row_bytes, tuple(found))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "table.bin"
    path.write_bytes(os.urandom(64 * PAGE_BYTES + 100))
    return path


def test_ranges_are_rounded_outward(path: Path) -> None:
    # 100 rows of 90 bytes from byte 4000 end at byte 13000: OS pages 0 to 3 of 4 KiB
    (found,) = page_ranges(spec_of(path, [(4000, 100)]))
    assert found.start <= 4000 < found.start + PAGE_BYTES
    assert found.stop - PAGE_BYTES < 13000 <= found.stop
    assert found.start % PAGE_BYTES == found.stop % PAGE_BYTES == 0


def test_extents_that_share_a_page_count_it_once(path: Path) -> None:
    ranges = page_ranges(spec_of(path, [(9100, 10), (100, 100), (40 * PAGE_BYTES, 1)]))
    assert [found.pages for found in ranges] == [3, 1]


def test_an_extent_without_rows_has_no_pages(path: Path) -> None:
    assert page_ranges(spec_of(path, [(100, 0)])) == []


def test_counts_what_was_read_and_nothing_else(path: Path) -> None:
    whole = PageRange(str(path), 0, 65 * PAGE_BYTES)
    drop_pages(whole)
    assert resident_in(whole) == 0
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 10, 5 * PAGE_BYTES)
    assert resident_in(whole) >= 1
    assert resident_in(PageRange(str(path), 5 * PAGE_BYTES, 6 * PAGE_BYTES)) == 1
    assert resident_in(PageRange(str(path), 40 * PAGE_BYTES, 60 * PAGE_BYTES)) == 0


def test_counts_across_slices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.read_bytes()
    whole = PageRange(str(path), 0, 65 * PAGE_BYTES)
    assert resident_in(whole) == 65
    monkeypatch.setattr("lazyio.bench.residency._SLICE_BYTES", 7 * PAGE_BYTES)
    assert resident_in(whole) == 65


def test_a_table_past_the_end_of_its_file_is_counted_to_the_end(path: Path) -> None:
    path.read_bytes()
    assert resident_pages(spec_of(path, [(60 * PAGE_BYTES, 10_000)])) == 5


def test_dropping_leaves_what_is_mapped(path: Path) -> None:
    whole = PageRange(str(path), 0, 65 * PAGE_BYTES)
    drop_pages(whole)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert held[0] >= 0
        drop_pages(whole)
        assert resident_in(whole) >= 1
    drop_pages(whole)
    assert resident_in(whole) == 0


def test_freshly_written_pages_are_dropped_too(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * 3 * PAGE_BYTES)
    whole = PageRange(str(path), 0, 65 * PAGE_BYTES)
    drop_pages(whole)
    assert resident_in(whole) == 0


def test_a_refused_call_is_named_with_the_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def answer_refused(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    whole = PageRange(str(path), 0, 65 * PAGE_BYTES)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with pytest.raises(OSError, match="posix_fadvise failed: Operation not permitted") as caught:
        drop_pages(whole)
    assert (caught.value.errno, caught.value.filename) == (errno.EPERM, str(path))
    monkeypatch.setattr("lazyio.bench.residency._libc.mincore", answer_refused)
    with pytest.raises(OSError, match="mincore failed: Operation not permitted") as caught:
        resident_in(whole)
    assert (caught.value.errno, caught.value.filename) == (errno.EPERM, str(path))
