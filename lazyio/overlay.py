"""Edited rows, served in place of stored ones; the table's files stay as they are."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import TableError
from lazyio.fetchers.base import Bytes, Int64
from lazyio.gate import TableStats
from lazyio.ple.spec import TableSpec
from lazyio.rows import Rows
from lazyio.staged import Finish

#: Packed rows by their id, or the path of an .npz file with `ids` int64 [n] and `rows` uint8 [n, row_bytes].
Overlay = Mapping[int, bytes] | str | os.PathLike[str]

# Ids that are looked up together: their places take little memory beside the rows themselves.
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class EditedRows:
    """What is to be served in place of stored rows: one row or more."""

    ids: Int64  # [n], ascending and without repeats
    rows: Bytes  # [n, row_bytes]


class OverlaidRows:
    """A way of rows into memory, with some rows replaced on top of it."""

    def __init__(self, under: Rows, edited: EditedRows) -> None:
        self._under = under
        self._ids, self._edited = edited.ids, edited.rows

    def gather(self, asked: NDArray[Any], rows: Bytes, stats: TableStats) -> None:
        """Gather, then replace; `Rows` has the contract."""
        self._under.gather(asked, rows, stats)
        self._replace(asked.reshape(-1), rows)

    def read(self, unique: Int64, rows: Bytes, stats: TableStats) -> None:
        """Read, then replace; `Rows` has the contract."""
        self._under.read(unique, rows, stats)
        self._replace(unique, rows)

    def start(self, asked: NDArray[Any], stats: TableStats) -> Finish:
        """Begin below, and replace at the end; `Rows` has the contract."""
        gather = self._under.start(asked, stats)

        def finish(rows: Bytes, stats: TableStats) -> None:
            gather(rows, stats)
            self._replace(asked.reshape(-1), rows)

        return finish

    def close(self) -> None:
        """Close what lies below."""
        self._under.close()

    def _replace(self, asked: NDArray[Any], rows: Bytes) -> None:
        for start in range(0, len(asked), _IDS_AT_ONCE):
            ids = np.asarray(asked[start : start + _IDS_AT_ONCE], np.int64)
            place = self._ids.searchsorted(ids)
            place[place == len(self._ids)] = 0  # beyond the last edited row: compared with the first, and found unequal
            here = np.flatnonzero(self._ids[place] == ids)
            rows[start + here] = self._edited[place[here]]


def read_overlay(overlay: Overlay, spec: TableSpec) -> EditedRows | None:
    """The rows of an overlay, None where it is empty.

    Raises TableError for ids outside the table or given twice, rows of another length, and files without these.
    """
    if isinstance(overlay, Mapping):
        ids, edited = _of_mapping(overlay, spec)
        where = "the overlay"
    else:
        where = os.fspath(overlay)
        ids, edited = _of_file(where, spec)
    order = np.argsort(ids)
    ids, edited = ids[order], edited[order]
    if not len(ids):
        return None
    if ids[0] < 0 or ids[-1] >= spec.rows:
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise TableError(f"{where} replaces row {wrong} of {spec.tensor}, which has rows 0 to {spec.rows - 1}")
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        raise TableError(f"{where} has row {ids[twice[0]]} twice; leave one of them out")
    return EditedRows(ids, edited)


def _of_mapping(overlay: Mapping[int, bytes], spec: TableSpec) -> tuple[Int64, Bytes]:
    ids = np.empty(len(overlay), np.int64)
    edited = np.empty((len(overlay), spec.row_bytes), np.uint8)
    for place, (row, packed) in enumerate(overlay.items()):
        try:
            ids[place] = operator.index(row)
        except (TypeError, OverflowError):
            raise TableError(f"the overlay has the row id {row!r}; ids are whole numbers of 64 bits") from None
        try:
            content = np.frombuffer(packed, np.uint8)
        except (TypeError, ValueError, BufferError):
            raise TableError(f"row {row} of the overlay is a {type(packed).__name__}, not bytes") from None
        if content.size != spec.row_bytes:
            raise TableError(
                f"row {row} of the overlay has {content.size} bytes, and rows of {spec.tensor} have {spec.row_bytes}: "
                "give rows packed, as they are stored"
            )
        edited[place] = content
    return ids, edited


def _of_file(path: str, spec: TableSpec) -> tuple[Int64, Bytes]:
    try:
        # Given a path, numpy leaves the file of a damaged archive open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            ids, edited = stored["ids"], stored["rows"]
    except Exception as error:  # damage shows in many ways
        reason = getattr(error, "strerror", None) or "it is no such file, or a damaged one"
        raise TableError(
            f"{path} can't be read as an overlay, an .npz file of `ids` int64 [n] and `rows` uint8 [n, row_bytes]: "
            f"{reason}"
        ) from error
    if ids.dtype != np.int64 or ids.ndim != 1 or edited.dtype != np.uint8 or edited.shape != (len(ids), spec.row_bytes):
        raise TableError(
            f"{path} has ids {ids.dtype} {list(ids.shape)} and rows {edited.dtype} {list(edited.shape)}; an overlay of "
            f"{spec.tensor} has ids int64 [n] and rows uint8 [n, {spec.row_bytes}]"
        )
    return ids, edited
