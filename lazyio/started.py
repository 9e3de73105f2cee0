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

    __slots__ = (
        "__weakref__", "_asked", "_end", "_finish", "_gate", "_owner", "_packed", "_result", "_rows", "_there", "_turn"
    )  # fmt: skip

    def __init__(self, gate: Gate, rows: Rows, asked: NDArray[Any], row_bytes: int) -> None:
        self._gate, self._rows, self._asked = gate, rows, asked
        self._owner = os.getpid(), threading.get_ident()
        self._turn = gate.turn
        with self._turn, Gather(gate, asked.size) as stats:
            self._finish: Finish | None = rows.start(asked, stats)
        # What takes time and need not wait is done while the reads are under way.
        self._result = np.empty((*asked.shape, row_bytes), np.uint8)
        self._packed = self._result.reshape(asked.size, row_bytes)
        self._end = Gather(gate, 0, gathers=0)
        self._there = False

    def rows(self) -> Bytes:
        """Wait for the rows, in the order asked: uint8 [*ids.shape, row_bytes], the same array each time.

        Raises what `LazyTable.gather` raises, and TableError where the table was closed before they were asked for.
        """
        if not self._there:
            finish = self._take_finish()
            if finish is None:
                self._result = self._read_anew()
            else:
                with self._turn, self._end as stats:
                    finish(self._packed, stats)
            self._there = True
        return self._result

    def _take_finish(self) -> Finish | None:
        """What waits for the reads, once, and only in the thread that began them."""
        if self._owner != (os.getpid(), threading.get_ident()):
            return None
        finish, self._finish = self._finish, None
        return finish

    def _read_anew(self) -> Bytes:
        """The rows in an array of their own: into the first one, another thread may be copying rows right now."""
        result = np.empty_like(self._result)
        with self._gate.turn, Gather(self._gate, 0, gathers=0) as stats:
            self._rows.gather(self._asked, result.reshape(self._packed.shape), stats)
        return result
