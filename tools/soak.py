"""Use a small table in every way for as long as you like, compare every byte, and see that nothing grows.

    python tools/soak.py --minutes 60
    python tools/soak.py --minutes 60 --faults 0.01 --direct
    python tools/soak.py --rows 10000000 --faults 0.01

Sessions follow one another: a mode is chosen, a table opened, used and closed. Uses are gathers of a few rows and of
many, gathers in several threads at once, tickets of which some are cancelled, tickets that several threads wait for,
and forked children that gather. With --faults, reads come short, are interrupted, refused, late or out of order at that
rate, and fail for good at a thousandth of it; a gather that fails so is done again. A line a minute says how it goes.
Ends with 1 where a byte was wrong or memory, descriptors or threads grew, and with the stacks of all threads where
something hung.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

# In a checkout that is not installed, the package lies beside this folder; one that is installed comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lazyio import Cancelled, LazyIOError, LazyTable, ReadError, SettingError, TableSpec, Unsupported, open_table
from lazyio.fetchers import Fetcher
from lazyio.fetchers.base import Bytes, Int64
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.fetchers.faulty_kernel import with_faulty_kernel
from lazyio.ple.synthetic import expected_rows, write_gguf
from lazyio.ple.tables import find_table

app = typer.Typer(add_completion=False)

_HANGS_AFTER_S = 120
_USES = 12  # of a table before it is closed
_MANY = 16_384  # rows of a long gather
_TABLE_ROWS = 200_000
_TRIES = 100  # of a gather that fails
_THREADS = 4
# What the allocator may keep more of at the end than it did in the first half.
_TOLERATED_BYTES = 32 << 20

# A row cache is there to be filled, hit and evicted from, or not there at all, so that every row is read.
_SMALL_CACHE = "4MiB"
_BUFFERED: tuple[dict[str, Any], ...] = (
    {"mode": "off", "reserve": 0},
    {"mode": "on"},
    {"mode": "on-bare"},
    {"mode": "on-direct", "direct_io": "off", "row_cache": 0},
    {"mode": "uring", "direct_io": "off", "row_cache": 0},
    {"mode": "on-direct", "direct_io": "off", "row_cache": _SMALL_CACHE},
    {"mode": "uring", "direct_io": "off", "row_cache": _SMALL_CACHE},
)
_DIRECT: tuple[dict[str, Any], ...] = (
    {"mode": "on-direct", "direct_io": "on", "row_cache": 0},
    {"mode": "uring", "direct_io": "on", "row_cache": _SMALL_CACHE},
)


class WrongBytes(Exception):
    """Rows that are not what they should be."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds between two sessions."""

    memory_bytes: int  # without mapped files
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        words = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        memory = sum(int(words[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
        return cls(memory, len(os.listdir("/proc/self/fd")), threading.active_count())


@dataclass(slots=True)
class Tally:
    """What was done."""

    rows: int = 0
    gathers: int = 0
    cancelled: int = 0
    forks: int = 0
    sessions: int = 0
    failed: int = 0  # gathers that ended with EIO, and were done again
    resumed: int = 0  # reads that were gone on with or repeated
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows in {self.gathers:,} gathers of {self.sessions} tables, {self.resumed:,} reads resumed"
            f", {self.failed} gathers repeated, {self.cancelled} tickets cancelled, {self.forks} forks"
        )


class Soak:
    """The uses of one synthetic table."""

    def __init__(self, spec: TableSpec, faults: float, seed: int) -> None:
        self.spec = spec
        self.tally = Tally()
        self._content = expected_rows(np.arange(spec.rows))
        self._faults, self._seed = faults, seed
        self._random = np.random.default_rng(seed)
        self._uses = (
            self._few,
            self._many,
            self._distinct,
            self._at_once,
            self._ahead,
            self._awaited_together,
            self._in_a_child,
        )

    def session(self, arguments: dict[str, Any], ended: Callable[[], bool]) -> None:
        """Open a table, use it until it is time or it was used enough, and close it."""
        with open_table(self.spec, wrap=self._wrap if self._faults else None, **arguments) as table:
            for _ in range(_USES):
                faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True, file=sys.__stderr__)
                self._uses[self._random.integers(len(self._uses))](table)
                if ended():
                    break
            self.tally.resumed += table.stats().resumed
        self.tally.sessions += 1

    # --- uses --------------------------------------------------------------------------------------------------------

    def _few(self, table: LazyTable) -> None:
        for _ in range(20):
            self._gather(table, self._ids(16))

    def _many(self, table: LazyTable) -> None:
        self._gather(table, self._ids(_MANY))

    def _distinct(self, table: LazyTable) -> None:
        ids = self._ids(_MANY // 4)
        rows, inverse = self._insist(lambda: table.gather_unique(ids))
        self._check(ids, rows[inverse])

    def _at_once(self, table: LazyTable) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda ids: self._gather(table, ids), [self._ids(_MANY // 4) for _ in range(_THREADS)]))

    def _ahead(self, table: LazyTable) -> None:
        """Tickets, taken in any order, or cancelled before or while they are read."""
        asked = [self._ids(_MANY // 8) for _ in range(6)]
        tickets = [table.prefetch(ids) for ids in asked]
        for place in self._random.permutation(len(tickets)).tolist():
            if self._random.random() < 0.3:
                tickets[place].cancel()
                self.tally.cancelled += 1
                continue
            try:
                rows, inverse = tickets[place].result()
            except ReadError as error:
                self._expect(error)
                self._gather(table, asked[place])
            else:
                self._check(asked[place], rows[inverse])

    def _awaited_together(self, table: LazyTable) -> None:
        """A ticket behind a long one, which several threads wait for, and which may be cancelled meanwhile."""
        long = table.prefetch(self._ids(_MANY))
        ids = self._ids(_MANY // 8)
        ticket = table.prefetch(ids)
        cancel = self._random.random() < 0.5
        with ThreadPoolExecutor(_THREADS) as pool:
            waiting = [pool.submit(ticket.result) for _ in range(_THREADS)]
            if cancel:
                ticket.cancel()
                self.tally.cancelled += 1
        for each in waiting:
            try:
                rows, inverse = each.result()
            except Cancelled:
                if not cancel:
                    raise
            except ReadError as error:
                self._expect(error)
            else:
                self._check(ids, rows[inverse])
        long.cancel()
        self.tally.cancelled += 1

    def _in_a_child(self, table: LazyTable) -> None:
        """Fork while a ticket is being read, and gather in the child."""
        ids, ahead = self._ids(1000), table.prefetch(self._ids(_MANY // 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what comes of forking with threads is tested here
            child = os.fork()
        if not child:
            self._be_the_child(table, ids)
        self.tally.forks += 1
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise WrongBytes(f"a forked child ended with {code}")
        ahead.cancel()
        self.tally.cancelled += 1

    def _be_the_child(self, table: LazyTable, ids: Int64) -> None:
        code = 1
        try:
            signal.alarm(_HANGS_AFTER_S // 2)
            self._gather(table, ids)
            code = 0
        finally:
            os._exit(code)

    # --- rows and what is wrong with them ----------------------------------------------------------------------------

    def _ids(self, count: int) -> Int64:
        """Ids, of which some repeat and some are neighbours."""
        ids = self._random.integers(0, self.spec.rows, count)
        start = int(self._random.integers(0, self.spec.rows - count // 8))
        ids[: count // 8] = np.arange(start, start + count // 8)
        return ids

    def _gather(self, table: LazyTable, ids: Int64) -> None:
        self._check(ids, self._insist(lambda: table.gather(ids)))

    def _insist(self, gather: Callable[[], Any]) -> Any:
        """Gather, again where a device that fails now and then has failed."""
        for _ in range(_TRIES):
            try:
                return gather()
            except ReadError as error:
                self._expect(error)
        raise LazyIOError(f"a gather failed {_TRIES} times: lower the rate of faults")

    def _expect(self, error: ReadError) -> None:
        if not self._faults or error.errno != errno.EIO:
            raise error
        with self.tally.lock:
            self.tally.failed += 1

    def _check(self, ids: Int64, rows: Bytes) -> None:
        wrong = np.flatnonzero((rows != self._content[ids]).any(axis=1))
        if len(wrong):
            raise WrongBytes(f"{len(wrong)} of {len(ids)} rows are wrong, the first of them row {ids[wrong[0]]}")
        with self.tally.lock:
            self.tally.rows += len(ids)
            self.tally.gathers += 1

    def _wrap(self, fetcher: Fetcher) -> Fetcher:
        """Plant faults below our own fetchers, or around them."""
        seed = self._seed + self.tally.sessions
        faults = Faults.everywhere(self._faults, eio=self._faults / 1000, delay_s=0.0002, seed=seed)
        below = fetcher.name in ("uring", "pread") and self.tally.sessions % 2
        faulty = with_faulty_kernel(fetcher, faults) if below else with_faults(fetcher, faults)
        faulty.direct_io = True  # so that rows are taken out of what it reads, and not out of a map of the page cache
        return faulty


@app.command()
def soak(
    minutes: Annotated[float | None, typer.Option(min=0, help="How long (unset: 1, unless --rows is given).")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="End when so many rows were compared.")] = None,
    faults: Annotated[float, typer.Option(min=0, max=0.1, help="Rate of each fault a read.")] = 0.0,
    direct: Annotated[bool, typer.Option("--direct", help="Read past the page cache too.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the table goes (unset: a temporary folder).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Where the randomness starts.")] = 0,
) -> None:
    """Use a table in every way, compare every byte, and see that nothing grows."""
    try:
        with _table(folder) as spec:
            ways = [way for way in (*_BUFFERED, *(_DIRECT if direct else ())) if _works(spec, way)]
            limit_s = np.inf if minutes is None and rows else 60 * (1 if minutes is None else minutes)
            failure = _run(Soak(spec, faults, seed), ways, limit_s, rows or sys.maxsize)
    except LazyIOError as error:
        typer.echo(f"soak: error: {error}", err=True)
        raise typer.Exit(2) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    if failure is not None:
        typer.echo(f"soak: FAILED: {failure}", err=True)
        raise typer.Exit(1)


def _run(soak: Soak, ways: list[dict[str, Any]], limit_s: float, rows: int) -> str | None:
    """Use tables until the time is up or the rows are compared; return what went wrong."""
    since, minute = time.monotonic(), 1
    seen = [Footprint.now()]
    failure = None

    def ended() -> bool:
        return time.monotonic() - since >= limit_s or soak.tally.rows >= rows

    while failure is None and not ended():
        try:
            soak.session(ways[soak.tally.sessions % len(ways)], ended)
        except WrongBytes as wrong:
            failure = f"{wrong}, in {ways[soak.tally.sessions % len(ways)]}"
        seen.append(Footprint.now())
        if time.monotonic() - since >= 60 * minute:
            typer.echo(f"{minute} min: {soak.tally}; {seen[-1].memory_bytes >> 20} MiB")
            minute += 1
    last, bytes_are = seen[-1], "0 wrong bytes" if failure is None else "WRONG BYTES"
    typer.echo(
        f"{time.monotonic() - since:.0f} s: {soak.tally}; {bytes_are}; at the end {last.memory_bytes >> 20} MiB, "
        f"{last.descriptors} descriptors, {last.threads} threads"
    )
    return failure or _growth(seen)


def _growth(seen: list[Footprint]) -> str | None:
    """What there is more of at the end: memory than in the first half, descriptors and threads than at the start."""
    first, last = seen[0], seen[-1]
    early = max(each.memory_bytes for each in seen[: len(seen) // 2 + 1])
    late = min(each.memory_bytes for each in seen[-(len(seen) // 4 + 1) :])
    if late > early + _TOLERATED_BYTES:
        return f"memory grew from at most {early >> 20} MiB in the first half to {late >> 20} MiB"
    if last.descriptors > first.descriptors:
        return f"descriptors grew from {first.descriptors} to {last.descriptors}"
    if last.threads > first.threads:
        return f"threads grew from {first.threads} to {last.threads}"
    return None


def _works(spec: TableSpec, way: dict[str, Any]) -> bool:
    """Whether a way can be had here as asked; says so where not."""
    try:
        open_table(spec, strict=True, **way).close()
    except Unsupported as refused:
        typer.echo(f"left out: {way}: {refused}")
        return False
    return True


@contextmanager
def _table(folder: Path | None) -> Iterator[TableSpec]:
    if folder is not None and not folder.is_dir():
        raise SettingError(f"there is no folder {folder}: make it, or leave --folder out")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "table.gguf"
        write_gguf(path, _TABLE_ROWS)
        yield find_table(path)


if __name__ == "__main__":
    app()
