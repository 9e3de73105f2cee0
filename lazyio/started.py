"""Gathers in two phases: their reads begin now, and are waited for when the rows are needed."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.fetchers.base import Bytes
from lazyio.gate import Gate, Gather
from lazyio.rows import Rows
from lazyio.staged import Finish


class Started:
    """Rows whose reads are under way. Made by `LazyTable.start`; one that is forgotten costs nothing more.

    Any thread may ask for the rows, and so may a forked child. Only the thread that began the reads can wait for them:
    others read the rows themselves.
    """

    __slots__ = ("__weakref__", "_asked", "_finish", "_gate", "_owner", "_result", "_row_bytes", "_rows")

    def __init__(self, gate: Gate, rows: Rows, asked: NDArray[Any], row_bytes: int) -> None:
        self._gate, self._rows, self._asked, self._row_bytes = gate, rows, asked, row_bytes
        self._owner = os.getpid(), threading.get_ident()
        self._finish: Finish | None = None
        self._result: Bytes | None = None
        with gate.turn, Gather(gate, asked.size) as stats:
            self._finish = rows.start(asked, stats)

    def rows(self) -> Bytes:
        """Wait for the rows, in the order asked: uint8 [*ids.shape, row_bytes], the same array each time.

        Raises what `LazyTable.gather` raises, and TableError where the table was closed before they were asked for.
        """
        if self._result is None:
            with self._gate.turn, Gather(self._gate, 0) as stats:
                stats.gathers = 0  # it was counted when it began
                result = np.empty((*self._asked.shape, self._row_bytes), np.uint8)
                rows = result.reshape(self._asked.size, self._row_bytes)
                finish = self._take_finish()
                if finish is None:
                    self._rows.gather(self._asked, rows, stats)
                else:
                    finish(rows, stats)
            self._result = result
        return self._result

    def _take_finish(self) -> Finish | None:
        """What waits for the reads, once, and only in the thread that began them."""
        if self._owner != (os.getpid(), threading.get_ident()):
            return None
        finish, self._finish = self._finish, None
        return finish
