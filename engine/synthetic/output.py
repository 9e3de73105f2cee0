"""Files written piece by piece, that appear when all of them are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyio.errors import NeverFits, SettingError
from lazyio.fetchers.base import Bytes
from lazyio.units import format_bytes

#: Called with the number of bytes of tensors written so far.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: its bytes come piece by piece, and are made only then."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # values of a row last
    size_bytes: int
    pieces: Callable[[], Iterator[Bytes]]


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write: `head`, then the tensors, each from a multiple of `alignment` bytes behind it."""

    path: Path
    head: bytes
    tensors: Sequence[NewTensor] = ()
    alignment: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.head) + sum(-(-tensor.size_bytes // self.alignment) * self.alignment for tensor in self.tensors)


def write_files(
    files: Sequence[NewFile], *, overwrite: bool = False, progress: Progress | None = None
) -> tuple[Path, ...]:
    """Write all files, or none, and return their paths. The system does not keep them in its page cache.

    Raises SettingError if a file exists and `overwrite` is not set, or where the system refuses to write, and NeverFits
    if the disk has too little room.
    """
    _check(files, overwrite)
    temporary = {file.path: file.path.with_name(f".{file.path.name}.{os.getpid()}.partial") for file in files}
    written_bytes = 0
    try:
        for file in files:
            for size_bytes in _write(file, temporary[file.path]):
                written_bytes += size_bytes
                if progress is not None:
                    progress(written_bytes)
        for path, written in temporary.items():
            written.replace(path)
    except OSError as error:
        raise SettingError(f"can't write {error.filename or files[0].path}: {error.strerror}") from error
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)
    return tuple(temporary)


def _check(files: Sequence[NewFile], overwrite: bool) -> None:
    for file in files:
        if file.path.is_dir() or (file.path.exists() and not overwrite):
            raise SettingError(f"{file.path} exists; give another name, or allow replacing it (overwrite, --force)")
    folder = files[0].path.parent
    if not folder.is_dir():
        raise SettingError(f"can't write {files[0].path}: there is no folder {folder}")
    needed, free = sum(file.size_bytes for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise NeverFits(
            f"{folder.resolve()} has {format_bytes(free)} free, and the model takes {format_bytes(needed)}; ask for "
            "fewer layers or rows, a smaller type, or another folder"
        )


def _write(file: NewFile, path: Path) -> Iterator[int]:
    """Write one file; tell the bytes of each piece."""
    with open(path, "xb", buffering=0) as out:
        _write_all(out.fileno(), memoryview(file.head))
        for tensor in file.tensors:
            written_bytes = 0
            for piece in tensor.pieces():
                _write_all(out.fileno(), piece.reshape(-1).data)
                written_bytes += piece.nbytes
                yield piece.nbytes
            assert written_bytes == tensor.size_bytes, f"{tensor.name}: {written_bytes} of {tensor.size_bytes} bytes"
            _write_all(out.fileno(), memoryview(bytes(-written_bytes % file.alignment)))
        os.fsync(out.fileno())
        # Left in memory, a model would push out what others use, and its first reads would not be cold.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
