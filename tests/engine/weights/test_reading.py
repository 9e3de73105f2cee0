from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from lazyio.bench.residency import PAGE_BYTES, PageRange, drop_pages, resident_in
from lazyio.engine.weights import reading
from lazyio.engine.weights.reading import FileOnce, Landing, identity_of
from lazyio.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE_BYTES + 100))
    return path


def pages(path: Path, start: int, stop: int) -> PageRange:
    return PageRange(str(path), start * PAGE_BYTES, stop * PAGE_BYTES)


def read(file: FileOnce, offset: int, size: int) -> bytes:
    memory = torch.zeros(size, dtype=torch.uint8)
    file.read_into(memory, offset)
    return memory.numpy().tobytes()


def test_bytes_are_those_of_the_file(path: Path) -> None:
    data = path.read_bytes()
    with FileOnce(str(path), identity_of(str(path))) as file:
        for offset, size in ((0, 1), (5, 5000), (len(data) - 7, 7)):
            assert read(file, offset, size) == data[offset : offset + size]


def test_short_answers_are_read_on_from(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, preadv = path.read_bytes(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda number, views, offset: preadv(number, [views[0][:1000]], offset))
    with FileOnce(str(path), identity_of(str(path))) as file:
        assert read(file, 10, 9999) == data[10:10009]


@pytest.mark.parametrize("forget_bytes", [1, 2500, 32 << 20])
def test_what_was_read_leaves_the_page_cache_and_nothing_else_does(
    path: Path, forget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FORGET_BYTES", forget_bytes)
    drop_pages(pages(path, 0, 65))
    path.read_bytes()
    with FileOnce(str(path), identity_of(str(path))) as file:
        for offset in range(8 * PAGE_BYTES + 10, 32 * PAGE_BYTES, 1000):
            read(file, offset, min(1000, 32 * PAGE_BYTES + 10 - offset))
    assert resident_in(pages(path, 9, 32)) == 0
    assert resident_in(pages(path, 0, 9)) == 9
    assert resident_in(pages(path, 32, 65)) == 33


def test_dropping_does_not_wait_for_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FORGET_BYTES", 4 * PAGE_BYTES)
    drop_pages(pages(path, 0, 65))
    path.read_bytes()
    with FileOnce(str(path), identity_of(str(path))) as file:
        read(file, 0, 3 * PAGE_BYTES)
        assert resident_in(pages(path, 0, 3)) == 3
        read(file, 3 * PAGE_BYTES, PAGE_BYTES)
        assert resident_in(pages(path, 0, 4)) == 0


def test_a_gap_is_left_as_it_is(path: Path) -> None:
    drop_pages(pages(path, 0, 65))
    path.read_bytes()
    with FileOnce(str(path), identity_of(str(path))) as file:
        read(file, 0, 10 * PAGE_BYTES)
        read(file, 20 * PAGE_BYTES, 10 * PAGE_BYTES)
    assert resident_in(pages(path, 0, 10)) == resident_in(pages(path, 20, 30)) == 0
    assert resident_in(pages(path, 10, 20)) == 10


def test_refuses_what_is_not_there(tmp_path: Path, path: Path) -> None:
    identity = identity_of(str(path))
    with FileOnce(str(path), identity) as file, pytest.raises(ModelError, match=r"file is cut short: bytes 262200 to"):
        read(file, 262200, 1000)
    path.unlink()
    with pytest.raises(ModelError, match=r"can't open .*file: No such file"):
        FileOnce(str(path), identity)
    with pytest.raises(ModelError, match=r"can't open .*file: No such file"):
        identity_of(str(path))
    with pytest.raises(ModelError, match="not a regular file"):
        identity_of(str(tmp_path))


def test_tells_a_file_that_changed(path: Path) -> None:
    identity = identity_of(str(path))
    with FileOnce(str(path), identity) as file:
        file.check()
        os.utime(path, ns=(1, 1))
        with pytest.raises(ModelError, match="file changed while"):
            file.check()
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(ModelError, match="file changed while"):
        FileOnce(str(path), identity)
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


def test_an_error_of_the_device_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with FileOnce(str(path), identity_of(str(path))) as file, pytest.raises(ModelError, match=r"at byte 7: Input/out"):
        read(file, 7, 1)


def test_a_landing_is_aligned_and_used_again() -> None:
    with Landing(CPU, 1 << 16) as landing:
        assert landing.piece_bytes == 1 << 16
        with landing.piece(100) as first:
            assert first.dtype == torch.uint8
            assert len(first) == 100
            assert first.data_ptr() % mmap.PAGESIZE == 0
        with landing.piece(1 << 16) as second:
            assert second.data_ptr() == first.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_a_device_are_not_overtaken() -> None:
    device = torch.device("cuda")
    size, copies = 1 << 24, []
    with Landing(device, 2 * size) as landing:
        for number in range(20):
            with landing.piece(size) as piece:
                piece.fill_(number)
                copies.append(piece.to(device, non_blocking=True))
    assert [int(copy.min()) for copy in copies] == [int(copy.max()) for copy in copies] == list(range(20))
