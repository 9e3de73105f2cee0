"""Files of rows with their ids, read and written from front to back.

All numbers are little-endian:

    8 bytes    LAZYROWS
    uint32     version of this layout, 1
    uint32     bytes of the header
    header     JSON, an object: whose rows they are
    pieces     uint64 n, then n ids of int64, then n rows as stored; a piece of no rows is the last one
    16 bytes   BLAKE2b of all that lies before
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Self

import numpy as np

from lazyio.errors import TableError
from lazyio.fetchers.base import Bytes, Int64

_MAGIC = b"LAZYROWS"
_VERSION = 1
_START = struct.Struct("<8sII")
_COUNT = struct.Struct("<Q")
_ID_BYTES = 8
_DIGEST_BYTES = 16
_HASHED_AT_ONCE = 1 << 20


def write_row_file(path: str, header: dict[str, Any], pieces: Iterable[tuple[Int64, Bytes]]) -> int:
    """Write ids [n] and rows [n, row_bytes], piece by piece, and return how many there were.

    The file appears whole or not at all, in place of one that was there. Raises TableError where it can't be written.
    """
    try:
        with _replacing(path) as file:
            return _write(file, header, pieces)
    except OSError as error:
        raise TableError(f"can't write rows to {path}: {error.strerror or error}") from error


class RowFile:
    """A file of rows that was found to be whole; a context manager.

    Raises TableError where it can't be read, is no such file, of another version, damaged or cut short.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by close
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self.header: dict[str, Any] = self._check()
        except BaseException as error:
            self.close()
            raise self._unreadable(error) if isinstance(error, OSError) else error from None

    def pieces(self, row_bytes: int) -> Iterator[tuple[Int64, Bytes]]:
        """Read ids [n] and rows [n, row_bytes], piece by piece."""
        self._file.seek(self._first_piece)
        left = self._size - self._first_piece - _DIGEST_BYTES
        try:
            while count := _COUNT.unpack(self._file.read(_COUNT.size))[0]:
                left -= _COUNT.size + count * (_ID_BYTES + row_bytes)
                if left < _COUNT.size:
                    raise TableError(f"{self.path} has no rows of {row_bytes} bytes")
                ids = np.frombuffer(self._file.read(count * _ID_BYTES), "<i8").astype(np.int64)
                rows = np.frombuffer(self._file.read(count * row_bytes), np.uint8)
                yield ids, rows.reshape(count, row_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> dict[str, Any]:
        start = self._file.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MAGIC):
            raise TableError(f"{self.path} is no file of rows, which begins with {_MAGIC.decode()}")
        _, version, header_bytes = _START.unpack(start)
        if version != _VERSION:
            raise TableError(
                f"{self.path} is a file of rows of version {version}, and this package reads version {_VERSION}: "
                "save it anew"
            )
        self._size = os.fstat(self._file.fileno()).st_size
        self._first_piece = _START.size + header_bytes
        self._file.seek(0)
        digest, left = hashlib.blake2b(digest_size=_DIGEST_BYTES), self._size - _DIGEST_BYTES
        while left > 0 and (block := self._file.read(min(left, _HASHED_AT_ONCE))):
            digest.update(block)
            left -= len(block)
        if self._file.read(_DIGEST_BYTES) != digest.digest():
            raise TableError(f"{self.path} is damaged or cut short: its checksum is not that of its rows; save it anew")
        self._file.seek(_START.size)
        header: dict[str, Any] = json.loads(self._file.read(header_bytes))
        return header

    def _unreadable(self, error: OSError) -> TableError:
        return TableError(f"can't read rows from {self.path}: {error.strerror or error}")


def _write(file: BinaryIO, header: dict[str, Any], pieces: Iterable[tuple[Int64, Bytes]]) -> int:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    written = 0

    def put(content: bytes | memoryview) -> None:
        digest.update(content)
        file.write(content)

    text = json.dumps(header).encode()
    put(_START.pack(_MAGIC, _VERSION, len(text)) + text)
    for ids, rows in pieces:
        if len(ids):
            put(_COUNT.pack(len(ids)) + ids.astype("<i8").tobytes())
            put(np.ascontiguousarray(rows).data.cast("B"))
            written += len(ids)
    put(_COUNT.pack(0))
    file.write(digest.digest())
    return written


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """Lend a temporary file that takes the place of `path` when all of it has been written."""
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=os.path.basename(path) + ".")
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
