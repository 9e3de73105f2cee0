import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from lazyio.errors import ReadError, SettingError
from lazyio.fetchers import direct
from lazyio.fetchers.base import Alignment
from lazyio.fetchers.direct import open_for_reads
from lazyio.fetchers.files import FileSet


@pytest.fixture
def files(tmp_path: Path):
    paths = []
    for name, size in (("a", 10_000), ("b", 5), ("c", 1 << 16)):
        path = tmp_path / name
        path.write_bytes(np.random.default_rng(size).bytes(size))
        paths.append(str(path))
    files = FileSet(paths)
    yield files
    files.close()


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_direct(files: FileSet, choice: str = "on", row_bytes: int = 90, block_bytes: int = 0):
    opened = open_for_reads(files, choice, row_bytes, block_bytes)
    if not opened.direct:
        opened.close()
        pytest.skip(str(opened.reason))
    return opened


def test_off_is_buffered_and_needs_no_alignment(files):
    opened = open_for_reads(files, "off", 90, 4096)
    assert (opened.direct, opened.alignment, opened.reason) == (False, Alignment(), None)
    assert not any(map(is_direct, opened.descriptors))
    assert os.pread(opened.descriptors[1], 9, 1) == Path(files.paths[1]).read_bytes()[1:]
    opened.close()


def test_on_opens_every_file_directly(files):
    before = count_descriptors()
    opened = open_direct(files)
    assert all(map(is_direct, opened.descriptors))
    assert opened.reason is None
    opened.close()
    assert count_descriptors() == before


@pytest.mark.parametrize(("row_bytes", "direct"), [(90, True), (4095, True), (4096, False), (21504, False)])
def test_auto_leaves_large_rows_to_the_page_cache(files, row_bytes, direct):
    open_direct(files).close()
    opened = open_for_reads(files, "auto", row_bytes, 0)
    assert opened.direct is direct
    assert opened.reason is None
    opened.close()


def test_a_block_raises_the_offset_alignment_alone(files):
    plain, blocks = open_direct(files), open_direct(files, block_bytes=1 << 14)
    assert blocks.alignment == Alignment(1 << 14, plain.alignment.memory)
    small = open_direct(files, block_bytes=1)
    assert small.alignment == plain.alignment
    for opened in (plain, blocks, small):
        opened.close()


def test_the_most_demanding_file_decides(files, monkeypatch):
    open_direct(files).close()
    answers = iter([Alignment(512, 4), Alignment(4096, 512), Alignment(1024, 1024)])
    monkeypatch.setattr(direct, "direct_alignment", lambda descriptor: next(answers))
    monkeypatch.setattr(direct, "_probe", lambda descriptor, alignment: None)
    opened = open_for_reads(files, "on", 90, 0)
    assert opened.alignment == Alignment(4096, 1024)
    opened.close()


@pytest.mark.parametrize("choice", ["auto", "on"])
def test_a_filesystem_in_memory_is_read_through_the_page_cache(choice):
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs here")
    path = Path(f"/dev/shm/lazyio-test-{os.getpid()}")
    path.write_bytes(bytes(8192))
    try:
        files = FileSet([str(path)])
        opened = open_for_reads(files, choice, 90, 0)
        assert not opened.direct
        assert "tmpfs" in opened.reason
        assert str(path) in opened.reason
        opened.close()
        files.close()
    finally:
        path.unlink()


def refuse_open(monkeypatch):
    def reopen(self, number, flags):
        if number == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.dup(self.descriptors[number])

    monkeypatch.setattr(FileSet, "reopen", reopen)
    monkeypatch.setattr(direct, "_probe", lambda descriptor, alignment: None)


def refuse_read(monkeypatch):
    def preadv(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(direct.os, "preadv", preadv)


def have_none(monkeypatch):
    monkeypatch.setattr(direct, "direct_alignment", lambda descriptor: None)


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (refuse_open, "refused to open .*b for direct I/O .EINVAL"),
        (refuse_read, "refused to read it .EINVAL"),
        (have_none, "no direct I/O"),
    ],
)
def test_a_refusal_means_buffered_reads_and_a_reason(files, monkeypatch, refuse, words):
    before = count_descriptors()
    with monkeypatch.context() as patch:
        refuse(patch)
        opened = open_for_reads(files, "on", 90, 0)
    assert not opened.direct
    assert opened.alignment == Alignment()
    assert re.search(words, opened.reason)
    assert not any(map(is_direct, opened.descriptors))
    opened.close()
    assert count_descriptors() == before


def test_the_probe_is_aligned_as_asked_and_no_better(files, monkeypatch):
    seen = []

    def preadv(descriptor, buffers, offset):
        seen.append((np.frombuffer(buffers[0], np.uint8).ctypes.data, len(buffers[0]), offset))
        return 0

    monkeypatch.setattr(direct.os, "preadv", preadv)
    direct._probe(files.descriptors[2], Alignment(1024, 512))
    direct._probe(files.descriptors[1], Alignment(1024, 512))
    assert [(address % 1024, length, offset) for address, length, offset in seen] == [(512, 1024, 1024), (512, 1024, 0)]


@pytest.mark.parametrize(
    ("choice", "block_bytes", "words"),
    [("yes", 0, "'yes'.*auto, on, off"), ("on", 1000, "1000 bytes.*power of two"), ("off", -512, "-512 bytes")],
)
def test_malformed_settings_are_refused(files, choice, block_bytes, words):
    with pytest.raises(SettingError, match=words):
        open_for_reads(files, choice, 90, block_bytes)


def test_a_file_rewritten_meanwhile_is_an_error(files):
    open_direct(files).close()
    before = count_descriptors()
    with open(files.paths[1], "ab") as file:
        file.write(b"more")
    with pytest.raises(ReadError, match="changed after the table was opened"):
        open_for_reads(files, "on", 90, 0)
    assert count_descriptors() == before


def test_refused_advice_is_done_without(files, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    opened = open_for_reads(files, "off", 90, 0)
    assert os.pread(opened.descriptors[1], 9, 1) == Path(files.paths[1]).read_bytes()[1:]
    opened.close()


def test_an_interrupt_in_probing_is_raised(files, monkeypatch):
    before = count_descriptors()

    def interrupted(descriptor, blocks, offset):
        held.extend(memoryview(block) for block in blocks)  # as a traceback may
        raise KeyboardInterrupt

    held = []
    monkeypatch.setattr(os, "preadv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        direct._probe(files.descriptors[2], Alignment(512, 512))
    assert held
    assert count_descriptors() == before
