"""The row cache of an open table, as its user sees it: what it did, and its rows kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from lazyio.errors import TableError
from lazyio.gate import Gate, Gather, TableStats
from lazyio.ple.cache import CacheStats
from lazyio.ple.spec import TableSpec
from lazyio.row_file import RowFile, write_row_file
from lazyio.staged import CachedRows

# Rows that are read to tell one table from another of the same shape.
_SAMPLED_ROWS = 256


class TableCache:
    """The row cache of one table, found as `LazyTable.cache`. Used from any thread."""

    def __init__(self, rows: CachedRows, spec: TableSpec, gate: Gate) -> None:
        self._cache, self._staged = rows.cache, rows.staged
        self._spec, self._gate = spec, gate

    def stats(self) -> CacheStats:
        """What the cache holds, and what it has done."""
        return self._cache.stats()

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the rows that are held to a file, and return how many; gathers may go on meanwhile.

        The file appears whole or not at all, in place of one that was there. Raises TableError where it can't be
        written or the table is closed, ReadError where the table can't be read.
        """
        with self._inside() as stats:
            return write_row_file(os.fspath(path), self._identity(stats), self._cache.held())

    def load(self, path: str | os.PathLike[str]) -> int:
        """Put the rows of a file that `save` wrote into the cache, and return how many the file has.

        Of more rows than the cache has places for, those read last remain. Raises TableError, and takes none, where the
        file can't be read, is damaged or cut short, of another version or of another table, and where the table is
        closed; ReadError where the table can't be read.
        """
        with self._inside() as stats, RowFile(os.fspath(path)) as file:
            self._check(file, self._identity(stats))
            count = 0
            for ids, rows in file.pieces(self._spec.row_bytes):
                self._cache.insert(ids, rows)
                count += len(ids)
            return count

    @contextmanager
    def _inside(self) -> Iterator[TableStats]:
        """Keep the table from being closed. Raises TableError where it is."""
        with self._gate.turn, Gather(self._gate, 0) as stats:
            stats.gathers = 0
            yield stats

    def _identity(self, stats: TableStats) -> dict[str, Any]:
        """What tells this table from others, wherever it lies and however it is cut in files.

        The fingerprint is a hash of the constants that give rows their ids and values their scale, and of rows sampled
        at even distances.
        """
        spec = self._spec
        sample = np.unique(np.linspace(0, spec.rows - 1, _SAMPLED_ROWS).astype(np.int64))
        rows = np.empty((len(sample), spec.row_bytes), np.uint8)
        self._staged.read(sample, rows, stats)
        constants = [spec.ngram and asdict(spec.ngram), spec.scale, spec.row_values]
        digest = hashlib.blake2b(json.dumps(constants).encode(), digest_size=16)
        digest.update(rows.data)
        return {
            "tensor": spec.tensor,
            "dtype": spec.dtype,
            "rows": spec.rows,
            "row_bytes": spec.row_bytes,
            "fingerprint": digest.hexdigest(),
        }

    def _check(self, file: RowFile, identity: dict[str, Any]) -> None:
        for name, value in identity.items():
            theirs = file.header.get(name)
            if theirs != value:
                what = "other contents" if name == "fingerprint" else f"{name} {theirs}, where this one has {value}"
                raise TableError(
                    f"{file.path} has rows of another table than {self._spec.path}: of one with {what}; save it anew"
                )
        for ids, _ in file.pieces(self._spec.row_bytes):
            if not 0 <= int(ids.min()) <= int(ids.max()) < self._spec.rows or len(np.unique(ids)) < len(ids):
                raise TableError(f"{file.path} has rows twice, or others than 0 to {self._spec.rows - 1}")
