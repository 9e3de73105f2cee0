"""What an EXL3 table adds to its rows: a bias for each n-gram head, by the ids of the rows."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import TableError
from lazyio.fetchers.base import Extent, Int64
from lazyio.fetchers.files import FileSet
from lazyio.ple.floats import FLOATS, Float32
from lazyio.ple.spec import TableSpec


class HeadBias:
    """The biases of a table that has them, read when it is opened.

    `files` are those that its rows are read from: biases that lie in one of them are read through the same descriptor,
    so that both come from one state of the file.
    Raises TableError where they can't be read, ReadError where the file was written to after it was opened.
    """

    def __init__(self, spec: TableSpec, files: FileSet) -> None:
        place = spec.head_bias
        assert place is not None
        self._spec = spec
        if place.path in files.index:
            packed = _read(place, spec.row_values * 2, files)
        else:
            own = FileSet([place.path])
            try:
                packed = _read(place, spec.row_values * 2, own)
            finally:
                own.close()
        #: float32 [heads, row_values].
        self.biases = FLOATS["F16"](np.frombuffer(packed, np.uint8)).reshape(place.rows, spec.row_values)

    def of(self, ids: NDArray[Any]) -> Float32:
        """The biases of rows `ids`, as in `heads`: float32 [*ids.shape, row_values]. Raises as that does."""
        return self.biases[self.heads(ids)]

    def heads(self, ids: NDArray[Any]) -> Int64:
        """The heads that rows `ids`, valid and of any shape, belong to: int64 of that shape.

        Rows behind the last head, which only fill the table up, count as its own.
        Raises TableError where the n-gram constants, which tell the heads, are not known.
        """
        if self._spec.ngram is None:
            raise TableError(
                f"{self._spec.path}: rows of {self._spec.tensor} are decoded with a bias for their n-gram head, and "
                "the constants that tell it are not in the file; open the folder of the model, with its config.json"
            )
        first_rows = np.array(self._spec.ngram.head_offsets, np.int64)
        head = first_rows.searchsorted(np.asarray(ids, np.int64), side="right") - 1
        return np.maximum(head, 0)


def _read(place: Extent, row_bytes: int, files: FileSet) -> bytes:
    number, wanted = files.index[place.path], place.rows * row_bytes
    try:
        packed = os.pread(files.descriptors[number], wanted, place.offset)
    except OSError as error:
        raise TableError(f"can't read {place.path} at byte {place.offset}: {error.strerror}") from error
    files.check(number)
    if len(packed) < wanted:
        raise TableError(
            f"{place.path} is cut short: the biases of the n-gram heads take {wanted} bytes from {place.offset} on, "
            f"and {len(packed)} are there; copy or download it again"
        )
    return packed
