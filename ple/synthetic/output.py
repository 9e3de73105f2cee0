"""Files that appear whole or not at all: headers and rows, streamed at the speed of the disk.

A file is written under a temporary name beside its own, flushed to the device, and renamed when all files of a table
are complete. Whatever ends the writing early takes the temporary files with it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lazyio.errors import NeverFits, SettingError, TableError
from lazyio.fetchers.base import Bytes
from lazyio.ple.synthetic.pattern import fill_rows
from lazyio.units import format_bytes

#: Called with the number of bytes of rows written so far.
Progress = Callable[[int], None]

_WRITE_BYTES = 8 << 20
# A piece of rows and what is computed on the way to it stay in the processor's caches.
_FILL_BYTES = 1 << 20
_BEHIND_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows in a file."""

    offset: int  # of the first row, bytes from the start of the file
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write: `head` from byte 0, then runs of rows; what no run covers is zero."""

    path: Path
    head: bytes
    runs: tuple[Run, ...]
    size_bytes: int


def write_files(
    files: Sequence[NewFile],
    row_bytes: int,
    *,
    sparse: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write all files, and return their paths. With `sparse` the rows are left as holes, which read as zeros.

    Raises SettingError if a file exists and `overwrite` is not set, NeverFits if the disk has too little room, and
    TableError if the system refuses to write.
    """
    _check_absent(files, overwrite)
    _check_room(files, sparse)
    advance = _summing(progress)
    temporary = {file.path: file.path.with_name(f".{file.path.name}.{os.getpid()}.partial") for file in files}
    try:
        for file in files:
            _write(file, temporary[file.path], 0 if sparse else row_bytes, advance)
        for path, written in temporary.items():
            written.replace(path)
    except OSError as error:
        raise TableError(f"can't write {error.filename or files[0].path}: {error.strerror}") from error
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)
    return tuple(temporary)


def _summing(progress: Progress | None) -> Callable[[int], None]:
    """What to call with the bytes of each step, for `progress` to get their sum."""
    total_bytes = 0

    def advance(step_bytes: int) -> None:
        nonlocal total_bytes
        total_bytes += step_bytes
        if progress is not None:
            progress(total_bytes)

    return advance


def _check_absent(files: Iterable[NewFile], overwrite: bool) -> None:
    for file in files:
        if file.path.is_dir() or (file.path.exists() and not overwrite):
            raise SettingError(f"{file.path} exists; give another name, or allow replacing it (overwrite, --force)")


def _check_room(files: Sequence[NewFile], sparse: bool) -> None:
    folder = files[0].path.parent
    if not folder.is_dir():
        raise TableError(f"can't write {files[0].path}: there is no folder {folder}")
    needed = sum(len(file.head) if sparse else file.size_bytes for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NeverFits(
            f"{files[0].path} needs {format_bytes(needed)} and {folder.resolve()} has {format_bytes(free)} free; "
            "ask for fewer rows, another folder, or a sparse file"
        )


def _write(file: NewFile, path: Path, row_bytes: int, advance: Callable[[int], None]) -> None:
    """Write one file and flush it to the device, without its rows if `row_bytes` is 0."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, file.size_bytes)
        _write_all(descriptor, memoryview(file.head), 0)
        if row_bytes:
            _write_rows(descriptor, file.runs, row_bytes, advance)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_rows(descriptor: int, runs: Iterable[Run], row_bytes: int, advance: Callable[[int], None]) -> None:
    """Write runs of rows, computing the next ones while the last ones are on their way."""
    step = max(1, _WRITE_BYTES // row_bytes)
    filling, leaving = (np.empty((step, row_bytes), np.uint8) for _ in range(2))
    on_its_way: Future[int] | None = None
    with ThreadPoolExecutor(1) as writer:
        for run in runs:
            for start in range(0, run.rows, step):
                rows = filling[: min(step, run.rows - start)]
                _fill(rows, run.first_row + start)
                if on_its_way is not None:
                    advance(on_its_way.result())
                offset = run.offset + start * row_bytes
                on_its_way = writer.submit(_write_all, descriptor, rows.data.cast("B"), offset)
                filling, leaving = leaving, filling
        if on_its_way is not None:
            advance(on_its_way.result())


def _fill(rows: Bytes, first_row: int) -> None:
    step = max(1, _FILL_BYTES // rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        fill_rows(np.arange(first_row + start, first_row + start + len(part), dtype=np.uint64), part)


def _write_all(descriptor: int, data: memoryview, offset: int) -> int:
    """Write all of `data` at `offset`; return its length."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    # Advice to drop pages starts their way to the device, and drops those that have already been there: otherwise
    # gigabytes of them would fill memory, push out what others use, and be waited for at the end.
    start = max(0, offset - _BEHIND_BYTES)
    os.posix_fadvise(descriptor, start, offset + written - start, os.POSIX_FADV_DONTNEED)
    return written
