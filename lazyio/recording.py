"""Traces of real runs: what was asked of a table, when, and how long it took, in a file that `lazyio bench` replays."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import zipfile
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import SettingError
from lazyio.fetchers.base import Bytes, Int64
from lazyio.gate import TableStats
from lazyio.rows import Rows
from lazyio.staged import Finish

_COPY_BYTES = 1 << 20

#: One entry a gather. `began_s` counts from the start of the recording, `seconds` is the time it took, `unique_rows`,
#: `reads`, `bytes_read` and `service_s` are as in `TableStats`.
GATHERS = np.dtype(
    [
        ("began_s", "f8"),
        ("seconds", "f8"),
        ("unique_rows", "i8"),
        ("reads", "i8"),
        ("bytes_read", "i8"),
        ("service_s", "f8"),
    ]
)
#: One entry a call of the fetcher: its windows, and the bytes they have.
READS = np.dtype([("began_s", "f8"), ("seconds", "f8"), ("windows", "i8"), ("bytes", "i8")])


class Recorder:
    """A trace that grows on the disk, beside the file that it becomes when it is saved; memory holds next to nothing.

    The arrays are `row_ids` int64 [all rows], the gathers one after the other in the order in which they ended;
    `lengths` int64 [gathers]; `gathers` [gathers] of type GATHERS; `reads` [reads] of type READS. Used by any number of
    threads; what a forked child does is not in it.
    Raises SettingError where the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._columns: dict[str, _Column] = {}
        self._failure: OSError | None = None
        self._since = time.perf_counter()
        try:
            for name, dtype in (
                ("row_ids", np.dtype("i8")),
                ("lengths", np.dtype("i8")),
                ("gathers", GATHERS),
                ("reads", READS),
            ):
                self._columns[name] = _Column(os.path.dirname(self.path), dtype)
        except OSError as error:
            self.close()
            raise self._unwritable(error) from error

    def gathered(self, asked: NDArray[Any], began: float, seconds: float, did: TableStats) -> None:
        """Add a gather of rows `asked`."""
        entry = (began - self._since, seconds, did.unique_rows, did.reads, did.bytes_read, did.service_s)
        self._append(row_ids=asked, lengths=[asked.size], gathers=[entry])

    def read(self, began: float, seconds: float, windows: int, size: int) -> None:
        """Add a read of the fetcher."""
        self._append(reads=[(began - self._since, seconds, windows, size)])

    def save(self) -> None:
        """Write the file, which shows under its name when it is complete. Raises SettingError where that fails."""
        unfinished = f"{self.path}.part"
        try:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
                    for name, column in self._columns.items():
                        column.save(archive, f"{name}.npy")
                os.replace(unfinished, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Drop what was collected."""
        with self._lock:
            for column in self._columns.values():
                column.close()
            self._columns.clear()

    def _append(self, **entries: Any) -> None:
        if os.getpid() != self._pid:
            return  # a child has the parent's files, and perhaps a lock that nobody will release
        with self._lock:
            if self._failure is not None or not self._columns:  # a gather may end after the recording has
                return
            try:
                for name, values in entries.items():
                    self._columns[name].append(values)
            except OSError as error:
                self._failure = error  # for who records, and not for who gathers

    def _unwritable(self, error: OSError) -> SettingError:
        return SettingError(f"can't write a trace to {self.path}: {error.strerror}; choose another place")


class RecordedRows:
    """Rows of another way into memory, with every gather told to a recorder."""

    def __init__(self, rows: Rows, recorder: Recorder) -> None:
        self._inner = rows
        self._recorder = recorder

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Fill and record; `Rows` has the contract."""
        began = time.perf_counter()
        self._inner.gather(asked, rows, stats)
        self._recorder.gathered(asked, began, time.perf_counter() - began, stats)

    def read(self, unique: Int64, rows: Bytes, stats: TableStats) -> None:
        """Fill and record; `Rows` has the contract."""
        began = time.perf_counter()
        self._inner.read(unique, rows, stats)
        self._recorder.gathered(unique, began, time.perf_counter() - began, stats)

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Begin, and record when it ends, with the time of both; `Rows` has the contract."""
        began = time.perf_counter()
        gather = self._inner.start(asked, stats)
        spent, at_start = time.perf_counter() - began, replace(stats)

        def finish(rows: Bytes, stats: TableStats) -> None:
            since = time.perf_counter()
            gather(rows, stats)
            at_start.add(stats)
            self._recorder.gathered(asked, began, spent + time.perf_counter() - since, at_start)

        return finish

    def close(self) -> None:
        """Close the way that is recorded."""
        self._inner.close()


class _Column:
    """An array in one dimension that grows in a file without a name."""

    def __init__(self, folder: str, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the column
        self._bytes = 0

    def append(self, values: Any) -> None:
        array = np.ascontiguousarray(values, self._dtype)
        self._file.write(array.reshape(-1).view(np.uint8).data)
        self._bytes += array.nbytes

    def save(self, archive: zipfile.ZipFile, name: str) -> None:
        """Write it as an array of a .npz file."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._bytes // self._dtype.itemsize,),
        }
        self._file.seek(0)
        with archive.open(name, "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            while chunk := self._file.read(_COPY_BYTES):
                member.write(chunk)

    def close(self) -> None:
        self._file.close()
