import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyio.bench.cold import make_cold, mapping_processes, writing_processes
from lazyio.bench.residency import PAGE_BYTES, PageRange, resident_pages
from lazyio.errors import NotCold
from lazyio.fetchers.base import Extent
from lazyio.ple.spec import TableSpec

ROWS, ROW_BYTES, OFFSET = 5000, 90, 1234


def table_in(folder: Path) -> TableSpec:
    path = folder / "table.bin"
    path.write_bytes(os.urandom(OFFSET + ROWS * ROW_BYTES))
    return TableSpec(str(path), "table", "U8", ROWS, 0, ROW_BYTES, (Extent(str(path), OFFSET, 0, ROWS),))


@pytest.fixture
def spec(tmp_path: Path) -> TableSpec:
    return table_in(tmp_path)


@pytest.fixture
def in_memory() -> Iterator[TableSpec]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield table_in(Path(folder))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyio.bench.cold._PAUSE_S", 0.01)


def test_a_table_that_was_just_written_becomes_cold(spec: TableSpec) -> None:
    assert resident_pages(spec) > 0
    looked_at = make_cold(spec)
    assert looked_at == -(-(OFFSET + ROWS * ROW_BYTES) // PAGE_BYTES)
    assert resident_pages(spec) == 0


def test_a_map_in_this_process_is_named(spec: TableSpec) -> None:
    make_cold(spec)
    with open(spec.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert held[100 * ROW_BYTES] >= 0
        with pytest.raises(NotCold, match=rf"of {-(-(OFFSET + ROWS * ROW_BYTES) // PAGE_BYTES)} OS pages") as caught:
            make_cold(spec)
    assert spec.path in str(caught.value)
    assert f"process {os.getpid()} " in str(caught.value)
    assert "this process" in str(caught.value)
    make_cold(spec)


def test_a_map_in_another_process_is_named(spec: TableSpec) -> None:
    script = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(held[5000], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, spec.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            with pytest.raises(NotCold, match=f"process {child.pid} "):
                make_cold(spec)
        finally:
            child.communicate()
    make_cold(spec)


def test_a_map_of_another_part_of_the_file_is_not_blamed(spec: TableSpec) -> None:
    with open(spec.path, "rb") as file, mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ):
        assert list(mapping_processes(PageRange(spec.path, 2 * PAGE_BYTES, 3 * PAGE_BYTES))) == []
        assert len(list(mapping_processes(PageRange(spec.path, 0, 3 * PAGE_BYTES)))) == 1


def test_a_writer_is_seen_and_a_reader_is_not(spec: TableSpec) -> None:
    with open(spec.path, "rb"):
        assert list(writing_processes(spec.path)) == []
    with open(spec.path, "r+b"):
        assert len(list(writing_processes(spec.path))) == 1


def test_a_filesystem_that_never_drops_is_refused(in_memory: TableSpec) -> None:
    with pytest.raises(NotCold, match="tmpfs"):
        make_cold(in_memory)


def test_a_file_that_mincore_lies_about_is_refused(spec: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyio.host.owns_or_writes", lambda path: False)
    with pytest.raises(NotCold, match="neither owns the file nor may write it"):
        make_cold(spec)
