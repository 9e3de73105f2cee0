"""Rows kept in memory as they are stored, so that what is asked for again is not read again.

The cache is set-associative. A row belongs to one set of eight places, found by hashing its id, and takes the one among
them that was used the longest ago:

    tags   uint32 [sets, 8]               row id + 1, or 0 where the place is empty; uint64 for tables that need it
    used   uint8  [sets, 8]               the epoch of the last use
    rows   uint8  [sets * 8, row_bytes]   place w of set s holds row 8 * s + w

A hash per set instead of one list of all rows in order of use keeps as much, and is a handful of numpy calls whatever
the number of ids. Epochs are coarse, so that one byte suffices and noting a use is cheap.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import NeverFits
from lazyio.fetchers.base import Bytes, Int64
from lazyio.fetchers.mapping import libc
from lazyio.forking import renew_in_child
from lazyio.interrupts import as_interrupts
from lazyio.units import format_bytes

_WAYS = 8
# Ids that are handled under one hold of the lock, and at most so many bytes of rows: enough to make numpy's calls
# cheap, few enough that a decode step does not wait for a long prompt and that what is computed stays close.
_AT_ONCE, _AT_ONCE_BYTES = 4096, 1 << 20
# A decode step: so few rows seldom meet in one set, and need no sorting then.
_FEW = 64
# An epoch is over when so large a part of the cache has been renewed.
_EPOCHS_PER_TURNOVER = 32
_LAST_EPOCH = 255
# 2**64 divided by the golden ratio: neighbouring ids get sets far apart.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
# Eight comparisons are eight bytes, of which at most one, byte w, is 1: as a word, 1 << 8 * w on a machine that stores
# the low byte first. Its product with this number has w in the top byte.
_NUMBER_OF_BYTE = np.uint64(0x0001020304050607)
_TOP_BYTE = np.uint64(56)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, which kernels before 5.14 do not know
_POPULATE_BYTES = 4 << 20  # a call, after which whoever closes the cache need wait no longer


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds, and what it has done.

    `hits` and `misses` count the ids that were looked up, duplicates and all; `evicted` the rows that made room.
    """

    rows: int
    capacity_rows: int
    memory_bytes: int  # of all places, and of what is known about them
    hits: int
    misses: int
    inserted: int
    evicted: int

    @property
    def hit_rate(self) -> float:
        """Hits among all ids that were looked up; 0 where there were none."""
        return self.hits / max(1, self.hits + self.misses)


class RowCache:
    """Rows of one table, those that were used last, in at most `budget_bytes`.

    Ids are int64 and valid for a table of `table_rows`. Any number of threads may use a cache, and a forked child goes
    on with what it inherits. Raises NeverFits where the budget does not hold one set.
    """

    def __init__(self, table_rows: int, row_bytes: int, budget_bytes: int) -> None:
        tag = np.dtype(np.uint32 if table_rows < 2**32 else np.uint64)
        set_bytes = _WAYS * (tag.itemsize + 1 + row_bytes)
        # With two places for each row of the table, more of them would stay empty.
        self._sets = min(budget_bytes // set_bytes, max(1, 2 * table_rows // _WAYS))
        if not self._sets:
            raise NeverFits(
                f"row_cache is {format_bytes(budget_bytes)}, and {_WAYS} rows of {row_bytes} bytes, the least it can "
                f"hold, take {set_bytes} bytes: raise it, or set it to 0"
            )
        self._at_once = max(1, min(_AT_ONCE, _AT_ONCE_BYTES // row_bytes))
        self._allocate(self._sets * _WAYS, row_bytes, tag)
        self._epoch, self._renewed = 1, 0
        self._hits = self._misses = self._inserted = self._evicted = 0
        self._is_ready = False
        self.renew()
        renew_in_child(self)

    def renew(self) -> None:
        """Have a free lock in a child. What is held is right whenever the fork came, so it is kept."""
        self._lock = threading.Lock()
        self._populating: threading.Thread | None = None

    def make_ready(self) -> None:
        """Have the kernel bring the memory of all places, in a thread that ends with that: once, and without waiting.

        Places are taken at random, so that else nearly every row of the first ubatches would wait for a page. To be
        called when many rows are about to be read, which takes longer. Where no thread can be had, rows wait for pages.
        """
        with contextlib.suppress(RuntimeError), as_interrupts(), self._lock:
            if self._is_ready:
                return
            self._is_ready = True
            populating = threading.Thread(target=self._populate, name="lazyio cache", daemon=True)
            populating.start()
            self._populating = populating  # now that it can be waited for

    def take(self, ids: Int64, out: Bytes) -> Int64:
        """Copy the rows among `ids` [n] that are held to their places in `out` [n, row_bytes].

        Returns the places of the others, ascending; what `out` has there is arbitrary.
        """
        if len(ids) <= self._at_once:
            return self._take(ids, out)
        pieces = (slice(start, start + self._at_once) for start in range(0, len(ids), self._at_once))
        return np.concatenate([self._take(ids[piece], out[piece]) + piece.start for piece in pieces])

    def insert(self, ids: Int64, rows: Bytes) -> None:
        """Keep `rows` [n, row_bytes], those of `ids` [n], which do not repeat. Rows that are held already stay."""
        for start in range(0, len(ids), self._at_once):
            piece = slice(start, start + self._at_once)
            self._insert(ids[piece], rows[piece])

    def held(self) -> Iterator[tuple[Int64, Bytes]]:
        """All that is held, in pieces: ids [n] and a copy of their rows [n, row_bytes].

        The cache may be used meanwhile; a row that comes or goes then may be among them or not.
        """
        step = self._at_once * _WAYS
        for start in range(0, len(self._tags), step):
            with self._lock:
                place = np.flatnonzero(self._tags[start : start + step]) + start
                ids, rows = self._tags[place].astype(np.int64) - 1, self._rows[place]
            if len(ids):
                yield ids, rows

    def stats(self) -> CacheStats:
        """What is held, and what was done since the cache was made."""
        with self._lock:
            return CacheStats(
                rows=int(np.count_nonzero(self._tags)),
                capacity_rows=len(self._tags),
                memory_bytes=sum(part.nbytes for part in (self._tags, self._used, self._rows)),
                hits=self._hits,
                misses=self._misses,
                inserted=self._inserted,
                evicted=self._evicted,
            )

    def close(self) -> None:
        """Free the memory, when nobody uses the cache any more. What was counted stays."""
        with self._lock:
            self._allocate(0, self._rows.shape[1], self._tags.dtype)
            populating, self._populating, self._is_ready = self._populating, None, True
        if populating is not None:
            populating.join()

    def _populate(self) -> None:
        memory = (self._tags, self._used, self._rows)
        for part in memory:
            address, size = part.ctypes.data, part.nbytes
            for start in range(0, size, _POPULATE_BYTES):
                if self._rows is not memory[-1]:
                    return  # the cache was closed
                libc().madvise(address + start, min(_POPULATE_BYTES, size - start), _POPULATE_WRITE)

    def _allocate(self, places: int, row_bytes: int, tag: np.dtype[Any]) -> None:
        self._tags: NDArray[Any] = _memory(places * tag.itemsize).view(tag)
        self._used = _memory(places)
        self._rows = _memory(places * row_bytes).reshape(places, row_bytes)
        # Whole sets as one item each, which numpy copies faster than eight.
        self._sets_of_tags = self._tags.view(f"V{_WAYS * tag.itemsize}")
        self._sets_of_used = self._used.view(f"V{_WAYS}")

    def _take(self, ids: Int64, out: Bytes) -> Int64:
        home = self._home(ids)
        tags = self._tags_of(ids)
        with self._lock:
            match = self._matches(home, tags)
            missing = np.flatnonzero(match == 0)
            self._misses += len(missing)
            self._hits += len(ids) - len(missing)
            if len(missing) == len(ids):
                return missing
            # Where there is no hit this is the first place of the set, and copying its row does no harm.
            place = (match * _NUMBER_OF_BYTE >> _TOP_BYTE).view(np.int64)
            place += home * _WAYS
            self._used[place if not len(missing) else place[match != 0]] = self._epoch
            self._rows.take(place, axis=0, out=out, mode="clip")
        return missing

    def _insert(self, ids: Int64, rows: Bytes) -> None:
        home = self._home(ids)
        tags = self._tags_of(ids)
        with self._lock:
            # Another thread may have read the same rows meanwhile.
            absent = np.flatnonzero(self._matches(home, tags) == 0)
            new, way = self._oldest(absent, home[absent])
            place = home[new] * _WAYS + way
            self._evicted += int(np.count_nonzero(self._tags[place]))
            # In this order, so that wherever an interrupt or a fork cuts in, no tag stands at another row's bytes.
            self._tags[place] = 0
            self._rows[place] = rows[new]
            self._used[place] = self._epoch
            self._tags[place] = tags[new]
            self._inserted += len(new)
            self._age(len(new))

    def _oldest(self, new: Int64, home: Int64) -> tuple[Int64, Int64]:
        """Those of `new` [n] that their sets `home` [n] have places for, and for each the place longest not used."""
        if len(new) <= _FEW and len(set(home.tolist())) == len(new):
            return new, self._used_in(home).argmin(axis=1)
        new, home, rank = _ranked_in_sets(new, home)
        return new, self._used_in(home).argsort(axis=1)[np.arange(len(new)), rank]

    def _used_in(self, home: Int64) -> Bytes:
        return self._sets_of_used.take(home).view(np.uint8).reshape(len(home), _WAYS)

    def _home(self, ids: Int64) -> Int64:
        """The set of each id: the upper half of a multiplicative hash, scaled to the number of sets."""
        home = ids.view(np.uint64) * _GOLDEN
        home >>= _HALF
        home *= np.uint64(self._sets)
        home >>= _HALF
        return home.view(np.int64)

    def _tags_of(self, ids: Int64) -> NDArray[Any]:
        return (ids + 1).astype(self._tags.dtype)

    def _matches(self, home: Int64, tags: NDArray[Any]) -> NDArray[np.uint64]:
        """Compare each id with the eight tags of its set: uint64 [n], byte w of which is 1 where place w has it."""
        found: NDArray[Any] = self._sets_of_tags.take(home).view(tags.dtype) == tags.repeat(_WAYS)
        return found.view(np.uint64)

    def _age(self, renewed: int) -> None:
        """Begin a new epoch when enough rows have come. After the last one, the time gone by counts half."""
        self._renewed += renewed
        if self._renewed * _EPOCHS_PER_TURNOVER < len(self._tags):
            return
        self._renewed = 0
        if self._epoch == _LAST_EPOCH:
            self._used >>= 1
            self._epoch >>= 1
        self._epoch += 1


def _ranked_in_sets(new: Int64, home: Int64) -> tuple[Int64, Int64, Int64]:
    """Sort `new` by set and number those of the same set from 0; those for which a set has no place are left out."""
    order = home.argsort()
    home = home[order]
    rank = np.arange(len(home)) - home.searchsorted(home)
    room = rank < _WAYS
    return new[order[room]], home[room], rank[room]


def _memory(size: int) -> Bytes:
    """Zeros that begin at an OS page.

    Not in huge pages: places are visited at random, so that the first ubatch would wait for all of them to be zeroed.
    """
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
