"""Whether every arm got the same bytes, and the right ones."""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b

import numpy as np

from lazyio.bench.workload import Workload
from lazyio.errors import RunsDifferError
from lazyio.fetchers.base import Bytes
from lazyio.ple.spec import TableSpec

_SAMPLE_ROWS = 256


class Verifier:
    """Compares each arm's rows with those of the first arm, and a sample of them with plain seeks and reads."""

    def __init__(self, spec: TableSpec, workload: Workload, seed: int) -> None:
        self._first: dict[int, tuple[str, bytes]] = {}  # by ubatch: which arm gave it first, and its digest
        self._sample: dict[int, list[tuple[int, bytes]]] = {}  # by ubatch: place in it, and the row
        random = np.random.default_rng(seed)
        for _ in range(min(_SAMPLE_ROWS, workload.rows)):
            ubatch = int(random.integers(len(workload.ubatches)))
            place = int(random.integers(len(workload.ubatches[ubatch])))
            row = read_row(spec, int(workload.ubatches[ubatch][place]))
            self._sample.setdefault(ubatch, []).append((place, row))

    def check(self, arm: str, ubatch: int, rows: Bytes) -> None:
        """Check the rows uint8 [n, row_bytes] that an arm got for a ubatch. Raises RunsDifferError."""
        for place, expected in self._sample.get(ubatch, ()):
            if rows[place].tobytes() != expected:
                raise RunsDifferError(
                    f"{arm} gave wrong bytes: row {place} of ubatch {ubatch} is not what a plain read of the file "
                    "gives; the whole comparison is void"
                )
        digest = blake2b(rows.data, digest_size=16).digest()
        first, expected = self._first.setdefault(ubatch, (arm, digest))
        if digest != expected:
            raise RunsDifferError(
                f"{arm} and {first} gave different bytes for ubatch {ubatch} (of {len(rows)} rows); the whole "
                "comparison is void"
            )


def read_row(spec: TableSpec, row: int) -> bytes:
    """One row with one seek and one read, by a way that shares nothing with the fetchers."""
    extent = spec.extents[bisect_right([extent.first_row for extent in spec.extents], row) - 1]
    with open(extent.path, "rb", buffering=0) as file:
        file.seek(extent.offset + (row - extent.first_row) * spec.row_bytes)
        return file.read(spec.row_bytes)
