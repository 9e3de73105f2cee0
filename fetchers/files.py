"""Open files with the identity they had when the table was opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

from lazyio.errors import ReadError, TableError


class Identity(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Identity:
        """Read it from an open descriptor."""
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Descriptors(list[int]):
    """Descriptors that are closed with the list, at the latest when nothing refers to it any more.

    So none stays open where an interrupt cuts opening or closing off. A forked child has, and closes, copies.
    """

    def close(self) -> None:
        """Close them all; harmless when done twice."""
        while self:
            os.close(self.pop())

    def __del__(self) -> None:
        self.close()


class FileSet:
    """The files of a table, each opened once for reading, in order of first mention.

    Descriptors are inherited across fork and hold no position (only positioned reads are used), so a child may go on
    with them.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = tuple(dict.fromkeys(os.fspath(path) for path in paths))
        self.index = {path: number for number, path in enumerate(self.paths)}
        self.descriptors = Descriptors()
        self.identities: list[Identity] = []
        try:
            for path in self.paths:
                self.descriptors.append(_open(path, os.O_RDONLY))
                self.identities.append(Identity.of(self.descriptors[-1]))
        except BaseException:
            self.close()
            raise

    def reopen(self, number: int, flags: int) -> int:
        """Open file `number` once more with other flags, and return the descriptor, which the caller closes.

        Raises OSError as `os.open` does, ReadError if the file is not what it was any more.
        """
        self.check(number)
        return os.open(f"/proc/self/fd/{self.descriptors[number]}", flags | os.O_CLOEXEC)

    def check(self, number: int) -> None:
        """Raise ReadError if file `number` was truncated, grown or rewritten since it was opened."""
        now, then = Identity.of(self.descriptors[number]), self.identities[number]
        if now != then:
            path = self.paths[number]
            what = (
                f"is {now.size} bytes long now and was {then.size}"
                if now.size != then.size
                else "was written to since then"
            )
            raise ReadError(
                f"{path} changed after the table was opened: it {what}; open the table again",
                path=path,
                offset=0,
                wanted=then.size,
                got=now.size,
            )

    def close(self) -> None:
        """Close every descriptor; harmless when done twice."""
        self.descriptors.close()


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise TableError(f"can't open {path}: {cause_of(error)}") from error


def cause_of(error: OSError) -> str:
    """Why a file can't be opened, and what to do where that can be told; words for a user."""
    hint = "; raise RLIMIT_NOFILE (ulimit -n)" if error.errno == errno.EMFILE else ""
    return f"{error.strerror or error}{hint}"
