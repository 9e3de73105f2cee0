"""What an EXL3 table adds to its rows: a bias for each n-gram head, by the ids of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import TableError
from lazyio.ple.checkpoint import SourceFile
from lazyio.ple.floats import FLOATS, Float32
from lazyio.ple.spec import TableSpec


class HeadBias:
    """The biases of a table that has them, read once.

    Raises TableError where the file can't be read, or the n-gram constants, which tell the heads, are not known.
    """

    def __init__(self, spec: TableSpec) -> None:
        place = spec.head_bias
        assert place is not None
        if spec.ngram is None:
            raise TableError(
                f"{spec.path}: rows of {spec.tensor} are decoded with a bias for their n-gram head, and the constants "
                "that tell it are not in the file; open the folder of the model, with its config.json"
            )
        self._first_rows = np.array(spec.ngram.head_offsets, np.int64)
        with SourceFile(place.path) as source:
            packed = source.read(place.offset, place.rows * spec.row_values * 2)
        self._biases = FLOATS["F16"](np.frombuffer(packed, np.uint8)).reshape(place.rows, spec.row_values)

    def of(self, ids: NDArray[Any]) -> Float32:
        """The biases of rows `ids`, valid and of any shape: float32 [*ids.shape, row_values].

        Rows behind the last head, which only fill the table up, count as its own.
        """
        head = self._first_rows.searchsorted(np.asarray(ids, np.int64), side="right") - 1
        return self._biases[np.maximum(head, 0)]
