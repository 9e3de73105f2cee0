"""Reading a checkpoint from start to end once: in pieces, into memory used again and again, past the page cache.

A file is read with plain positioned reads, which the kernel reads ahead of, and what was read is dropped from the page
cache soon after. OS pages that also hold bytes of other tensors, of a table above all, are left as they are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from typing import Self

import torch

from lazyio.engine.pinned import PinnedMemory
from lazyio.errors import ModelError
from lazyio.fetchers.files import Identity, cause_of

#: Memory that pieces of files land in; on CUDA in two halves, one being filled while the other is copied.
LANDING_BYTES = 64 << 20

# Dropping is worth a call for so much; small tensors by the thousand are dropped together.
_FORGET_BYTES = 32 << 20
# The largest folio that a page cache is kept in.
_FOLIO_BYTES = 2 << 20


class Landing:
    """The memory that pieces are read into: page-aligned, and pinned where they go on to a CUDA device."""

    def __init__(self, device: torch.device, size_bytes: int = LANDING_BYTES) -> None:
        self._device = device
        self._pinned = PinnedMemory(size_bytes, device) if device.type == "cuda" else None
        memory = _private_memory(size_bytes) if self._pinned is None else self._pinned.bytes
        self._halves = memory.chunk(1 if self._pinned is None else 2)
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._halves)
        self._turn = 0

    @property
    def piece_bytes(self) -> int:
        """The most that one piece can have."""
        return len(self._halves[0])

    @contextlib.contextmanager
    def piece(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Room for the next piece, uint8 [size_bytes]. Copies of it that are started inside may go on afterwards."""
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        yield self._halves[self._turn][:size_bytes]
        if self._pinned is not None:
            self._copied[self._turn] = torch.cuda.current_stream(self._device).record_event()
        self._turn = (self._turn + 1) % len(self._halves)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the copies under way, then unpin."""
        if self._pinned is not None:
            torch.cuda.synchronize(self._device)
            self._pinned.close()


def _private_memory(size_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


class FileOnce:
    """A file of a checkpoint, read in ascending order, whose read OS pages are not left in the page cache."""

    def __init__(self, path: str, identity: Identity) -> None:
        """Open it. Raises ModelError where it can't be opened, or is not any more what `identity` says."""
        self.path = path
        self._identity = identity
        self._read = slice(0, 0)  # without a gap, and perhaps still in the page cache
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelError(f"can't open {path}: {cause_of(error)}; it was there when loading began") from error
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            self.check()
            undone.pop_all()

    def check(self) -> None:
        """Raise ModelError if the file changed since its identity was taken."""
        if Identity.of(self._descriptor) != self._identity:
            raise ModelError(f"{self.path} changed while the model was loaded; load it again")

    def read_into(self, memory: torch.Tensor, offset: int) -> None:
        """Fill uint8 [n] with the bytes from `offset` on. Raises ModelError where the file gives less, or an error."""
        view = memoryview(memory.numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"can't read {self.path} at byte {offset + done}: {error.strerror}") from error
            if got == 0:
                raise ModelError(
                    f"{self.path} is cut short: bytes {offset} to {offset + len(view)} are needed and it ends at byte "
                    f"{offset + done}; copy or download it again"
                )
            done += got
        self._was_read(offset, offset + done)

    def _was_read(self, start: int, stop: int) -> None:
        if not 0 <= start - self._read.stop < mmap.PAGESIZE:
            self._forget()
            self._read = slice(start, start)
        self._read = slice(self._read.start, stop)
        if stop - self._read.start >= _FORGET_BYTES:
            self._forget()

    def _forget(self) -> None:
        """Have what was read dropped from the page cache. The kernel keeps OS pages that reach beyond it."""
        start, stop = self._read.start, self._read.stop
        if start < stop:
            with contextlib.suppress(OSError):  # a filesystem that can't
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
        # The folio at the end goes only when all of it was read.
        self._read = slice(max(start, stop - stop % _FOLIO_BYTES), stop)

    def close(self) -> None:
        """Close the file."""
        self._forget()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def identity_of(path: str) -> Identity:
    """What tells the file from what it may become. Raises ModelError where there is no regular file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ModelError(f"can't open {path}: {cause_of(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file")
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
