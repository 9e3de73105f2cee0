"""What every format of model file comes down to: named tensors, and where their bytes lie."""

from __future__ import annotations

import abc
import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from lazyio.errors import TableError
from lazyio.fetchers.files import Descriptors, cause_of
from lazyio.ple.spec import NgramHash


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a header describes it. `shape` has the values of a row last, whatever the format's own order.

    `size_bytes` is None where the type is unknown and the file does not tell the size in another way.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int  # bytes from the start of the file
    size_bytes: int | None


class Checkpoint(abc.ABC):
    """A model as stored, in one file or many, whose headers have been read."""

    path: str  # as the caller gave it
    architecture: str | None  # as the file calls it

    @property
    @abc.abstractmethod
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    @abc.abstractmethod
    def tensor(self, name: str) -> StoredTensor:
        """The tensor of that name, one of `names`. Raises TableError where its file can't be used."""

    @abc.abstractmethod
    def ngram(self, table: str) -> NgramHash | None:
        """Constants of the row ids of a table of n-grams; None where the checkpoint has none. Unchecked."""


class SourceFile:
    """A regular file, open for reading parts of it. Whatever goes wrong is a TableError that names the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Opening a pipe would wait for its writer.
            self._descriptors = Descriptors([os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)])
        except OSError as error:
            raise TableError(f"can't open {path!r}: {cause_of(error)}") from error
        except ValueError as error:
            raise TableError(f"can't open {path!r}: {error}") from error
        status = os.fstat(self._descriptors[0])
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise TableError(f"{path} is not a regular file")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        if offset + length > self.size:
            raise TableError(
                f"{self.path} is cut short: bytes {offset} to {offset + length} are needed and it has {self.size}; "
                "copy or download it again"
            )
        parts = []
        while length:
            try:
                part = os.pread(self._descriptors[0], min(length, 1 << 30), offset)
            except OSError as error:
                raise TableError(f"can't read {self.path} at byte {offset}: {error.strerror}") from error
            if not part:
                raise TableError(f"{self.path} became shorter while it was read; open it again")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tensor(tensor: StoredTensor) -> bytes:
    """The bytes of a tensor, which must be small: a constant or a scale."""
    with SourceFile(tensor.path) as source:
        return source.read(tensor.offset, tensor.size_bytes or 0)


def check_ranges(tensors: Iterable[StoredTensor], file_bytes: int) -> None:
    """Raise TableError if a tensor of one file reaches past the file's end or into the next tensor."""
    previous: StoredTensor | None = None
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes or 0)):
        if previous is not None and tensor.offset < end:
            raise TableError(
                f"{tensor.path}: tensors {previous.name!r} and {tensor.name!r} overlap: "
                f"the first ends at byte {end}, the second starts at byte {tensor.offset}; the file is damaged"
            )
        previous, end = tensor, tensor.offset + (tensor.size_bytes or 0)
        if end > file_bytes:
            raise TableError(
                f"{tensor.path} is cut short: tensor {tensor.name!r} takes bytes {tensor.offset} to {end}, "
                f"and the file has {file_bytes}; copy or download it again"
            )
