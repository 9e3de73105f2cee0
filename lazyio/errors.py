"""Every error this package raises on purpose.

    LazyIOError
      TableError      (ValueError)    a file, a tensor or a geometry that can't be used
      ModelError      (ValueError)    a checkpoint, a configuration or a tokenizer that can't be used
      PromptError     (ValueError)    a prompt that can't be served: empty, or with ids beyond the vocabulary
      RowIndexError   (IndexError)    a row id outside the table
      ReadError       (OSError)       a read that failed or came short; path, offset, wanted, got
      Unsupported     (RuntimeError)  something this machine or build can't do, and what can be done instead
      SettingError    (ValueError)    a setting that is malformed, or that contradicts another
      NeverFits       (ValueError)    a request larger than its budget can ever hold; names the setting to change
      NoRoom          (RuntimeError)  a request that must wait until others give back what they hold
      NotCold         (RuntimeError)  a measurement whose cold start could not be proved
      RunsDifferError (RuntimeError)  two ways of reading that gave different bytes, so that no figure counts
      RunFailed       (RuntimeError)  a command of a comparison that failed, or that gave no figures
      Cancelled       (RuntimeError)  a ticket whose rows were given up before they were taken

Each also inherits the builtin in brackets, so that callers who do not know this package can catch it.
"""

from __future__ import annotations

__all__ = [
    "Cancelled",
    "LazyIOError",
    "ModelError",
    "NetworkFilesystemWarning",
    "NeverFits",
    "NoRoom",
    "NotCold",
    "PromptError",
    "ReadError",
    "RowIndexError",
    "RunFailed",
    "RunsDifferError",
    "SettingError",
    "TableError",
    "Unsupported",
]


class LazyIOError(Exception):
    """Base of all errors of this package."""


class TableError(LazyIOError, ValueError):
    """A file, a tensor name or a geometry that can't be used as a table."""


class ModelError(LazyIOError, ValueError):
    """A checkpoint, a configuration or a tokenizer that can't be used; the message names the file and what is wrong."""


class PromptError(LazyIOError, ValueError):
    """A prompt that can't be served: empty, with token ids beyond the vocabulary, or longer than the model takes."""


class RowIndexError(LazyIOError, IndexError):
    """A row id that is negative or not below the number of rows."""


class SettingError(LazyIOError, ValueError):
    """A setting that can't be parsed, is out of range, or contradicts another one."""


class NeverFits(LazyIOError, ValueError):
    """A request that its budget can never hold, whatever else is freed."""


class NoRoom(LazyIOError, RuntimeError):
    """A request that its budget can't hold now, and can when what others hold is given back."""


class Unsupported(LazyIOError, RuntimeError):
    """A facility that is missing here; the message says what lacks it and what to do."""


class Cancelled(LazyIOError, RuntimeError):
    """A ticket that was cancelled, or whose table was closed or process forked, before its rows were taken."""


class NotCold(LazyIOError, RuntimeError):
    """OS pages of a table stayed in memory, so no cold figure can be given."""


class RunsDifferError(LazyIOError, RuntimeError):
    """Two arms of a measurement gave different bytes, or wrong ones, so that none of the figures means anything."""


class RunFailed(LazyIOError, RuntimeError):
    """A command of a comparison that failed, took too long, or gave no figures; the message has what it said last."""


class ReadError(LazyIOError, OSError):
    """A read that failed, came short, or hit a file that changed underneath.

    Attributes: `path`; `offset` and `wanted` and `got` in bytes (`got` is None where the device reported an error
    instead of a length); `errno` as in OSError, or None.
    """

    def __init__(self, message: str, *, path: str, offset: int, wanted: int, got: int | None, errno: int | None = None):
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.errno = errno


class NetworkFilesystemWarning(UserWarning):
    """The table lies on a filesystem on which tiny random reads crawl."""
