"""A table: row ids in, rows out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lazyio import settings
from lazyio.errors import NetworkFilesystemWarning, RowIndexError, SettingError, TableError
from lazyio.fetchers.base import Bytes, Extent, Fetcher, FetcherOptions, Int64
from lazyio.fetchers.trace import TracedFetcher, TracedRowFetcher
from lazyio.gate import Gate, Gather, TableStats
from lazyio.host import filesystem_of
from lazyio.modes import open_fetcher
from lazyio.overlay import EditedRows, OverlaidRows, Overlay, read_overlay
from lazyio.ple.codec import decode
from lazyio.ple.headbias import HeadBias
from lazyio.ple.plan import dedup
from lazyio.ple.spec import TableSpec
from lazyio.ple.tables import find_table
from lazyio.prefetch import Prefetcher, Ticket
from lazyio.recording import RecordedRows, Recorder
from lazyio.rows import AddressableRows, Rows, rows_of
from lazyio.staged import FEW_IDS, CachedRows
from lazyio.staging import Staging
from lazyio.started import Started
from lazyio.table_cache import TableCache
from lazyio.verify import VerifiedRows

#: Puts something around a fetcher, or another in its place.
Wrap = Callable[[Fetcher], Fetcher]

# This part of the budget is for rows that were read ahead and not yet taken; gathers never wait for it.
_AHEAD = 4
# And this part for gathers that were started: those never wait for room, nor does any gather for them.
_STARTED = 16


class LazyTable:
    """The rows of one table on disk. Use it from any number of threads, and as a context manager.

    Made by `open_table`. `cache` is its row cache, and `head_bias` what an EXL3 table adds to its rows; None where it
    has none.
    """

    def __init__(
        self,
        spec: TableSpec,
        mode: str,
        options: FetcherOptions,
        *,
        strict: bool,
        budget_bytes: int,
        cache_bytes: int | None = 0,
        edited: EditedRows | None = None,
        verify: int = 0,
        wrap: Wrap | None = None,
    ) -> None:
        self.spec = spec
        ahead_bytes = budget_bytes // _AHEAD
        started_bytes = budget_bytes // _STARTED
        self._staging = Staging(budget_bytes - ahead_bytes - started_bytes)
        self._started = Staging(started_bytes)
        self._gate = Gate()
        self._fetcher, self.backend = open_fetcher(mode, spec, options, strict=strict)
        try:
            self.head_bias = None if spec.head_bias is None else HeadBias(spec, self._fetcher.files)
            if wrap is not None:
                self._fetcher = _wrapped(self._fetcher, wrap)
            self._rows: Rows = rows_of(self._fetcher, spec, self._staging, self._started, options, cache_bytes)
        except BaseException:
            self._fetcher.close()
            raise
        cached = self._rows if isinstance(self._rows, CachedRows) else None
        self.cache = None if cached is None else TableCache(cached, spec, self._gate)
        # Where rows are copied from memory, there is no read to save.
        lends = not isinstance(self._rows, AddressableRows)
        if verify:
            try:
                self._rows = VerifiedRows(self._rows, spec.extents, spec.row_bytes, verify)
            except BaseException:
                self._rows.close()
                self._fetcher.close()
                raise
        if edited is not None:
            self._rows = OverlaidRows(self._rows, edited)
        self._prefetcher = Prefetcher(self._gate, self._rows, spec.row_bytes, ahead_bytes, lends=lends, cached=cached)

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self.spec.rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as stored."""
        return self.spec.row_bytes

    @property
    def rows_ahead(self) -> int:
        """Rows that tickets can have read and not taken at once, within the budget."""
        return self._prefetcher.most_ids

    @property
    def row_values(self) -> int:
        """Values of a row; 0 where this package does not know the type."""
        return self.spec.row_values

    @property
    def dtype(self) -> str:
        """Name of the stored type, as in `TableSpec`."""
        return self.spec.dtype

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where the rows lie."""
        return self.spec.extents

    def stats(self) -> TableStats:
        """Counts since the table was opened."""
        with self._gate.lock:
            return replace(self._gate.stats)

    def gather(self, ids: Any, out: Bytes | None = None) -> Bytes:
        """Return the rows `ids`, in the order asked: uint8 [*ids.shape, row_bytes].

        `ids` are ints of any shape, duplicates welcome: each distinct row is read once. `out`, if given, is filled and
        returned; it must be C-contiguous uint8 of that shape.
        Raises RowIndexError for an id outside the table, before anything is read; TypeError where ids are no integers;
        ReadError for a failed or short read, or a file that changed after it was opened.
        """
        asked = _integers(ids)
        self._validate(asked)
        result = self._result(asked, out)
        with self._gate.turn, Gather(self._gate, asked.size) as stats:
            self._rows.gather(asked, result.reshape(asked.size, self.row_bytes), stats)
        return result

    def gather_unique(self, ids: Any) -> tuple[Bytes, Int64]:
        """Return the distinct rows of `ids`, uint8 [unique, row_bytes] by ascending id, and the inverse.

        The inverse is int64 of the shape of `ids`: `rows[inverse]` is what `gather(ids)` returns. Raises as that does.
        """
        asked = _integers(ids)
        self._validate(asked)
        with self._gate.turn, Gather(self._gate, asked.size) as stats:
            unique, inverse = dedup(np.ascontiguousarray(asked, np.int64).reshape(-1))
            stats.unique_rows = len(unique)
            packed = np.empty((len(unique), self.row_bytes), np.uint8)
            self._rows.read(unique, packed, stats)
        return packed, inverse.reshape(asked.shape)

    def start(self, ids: Any) -> Started:
        """Have the reads of a small gather begin, and return at once; `Started.rows()` waits for the rows.

        For the rows of a decode step, whose reads go on while the caller computes what comes before they are needed.
        No thread is involved: they are submitted by this one, and waited for by it. `ids` are as for `gather`, and are
        copied. What has room in a sixteenth of the budget begins early; what has none is read at the end.
        Raises what `gather` raises; what goes wrong with reads under way is raised by `rows()`.
        """
        asked = _integers(ids)
        self._validate(asked)
        return Started(self._gate, self._rows, np.array(asked, np.int64), self.row_bytes)

    def prefetch(self, ids: Any, *, patient: bool = False) -> Ticket:
        """Have the distinct rows of `ids` read by a thread of the table, and return at once.

        Tickets are read one after the other, a `patient` one when no other is waiting; any number may be queued, and
        docs/lookahead.md tells how many rows they hold meanwhile. `ids` are as for `gather`, and copied. Raises
        RowIndexError and TypeError as that does, TableError where the table is closed, Unsupported where no thread can
        be had; what comes later is raised by `result`.
        """
        asked = _integers(ids)
        self._validate(asked)
        return self._prefetcher.submit(np.array(asked, np.int64).reshape(-1), asked.shape, patient=patient)

    @contextmanager
    def record(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record, for the length of a with block, the rows of every gather and ticket; write them to `path` at its end.

        The file is a trace that `lazyio bench --trace` replays; docs/wrappers.md lists its arrays. Of a ticket it has
        the distinct rows that were read. The reads of the fetcher are in it where the table was opened with
        `wrap=traced`.
        Raises SettingError where the file can't be written, or this table is being recorded already.
        """
        recorder = Recorder(path)
        try:
            with self._gate.lock:
                if isinstance(self._rows, RecordedRows):
                    raise SettingError(f"{self.spec.tensor} is being recorded already: end that before {path}")
                before = self._rows
                self._rows = self._prefetcher.rows = RecordedRows(before, recorder)
            listening = self._fetcher if isinstance(self._fetcher, TracedFetcher | TracedRowFetcher) else None
            if listening is not None:
                listening.listener = recorder.read
            try:
                yield
            finally:
                self._rows = self._prefetcher.rows = before
                if listening is not None:
                    listening.listener = None
                recorder.save()
        finally:
            recorder.close()

    def decode(self, packed: Bytes, dtype: Any = np.float32, *, ids: Any = None) -> NDArray[Any]:
        """Turn packed rows, uint8 [..., row_bytes], into values [..., row_values] of `dtype` (float32 or float16).

        `ids` are the ids of these rows, of shape [...]: a table whose rows have a bias for their n-gram head
        (`spec.head_bias`, EXL3) needs them, others do without. Those of `gather_unique(ids)` are `np.unique(ids)`.
        `lazyio.ple.codec.decode` tells in which precision each step is taken.
        Raises Unsupported for a stored type without a decoder, TableError for rows of another length and for ids that
        are missing or of another shape, RowIndexError for ids outside the table, TypeError for rows in no array.
        """
        if not isinstance(packed, np.ndarray):
            raise TypeError(
                f"packed rows must be an array of uint8 [..., {self.row_bytes}], and are a {type(packed).__name__}"
            )
        if packed.shape[-1:] != (self.row_bytes,):
            raise TableError(f"packed rows are {self.row_bytes} bytes long here, not {packed.shape[-1:]}")
        bias = None if self.head_bias is None else self._bias_of(self.head_bias, ids, packed.shape[:-1])
        return decode(packed, self.dtype, dtype, scale=self.spec.scale, bias=bias)

    def close(self) -> None:
        """Wait for gathers under way, cancel tickets not begun, then free everything. Harmless when done twice."""
        self._prefetcher.close()
        if self._gate.close():
            self._rows.close()
            self._fetcher.close()
            self._staging.close()
            self._started.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<LazyTable {self.spec.tensor} {self.n_rows} x {self.row_values} {self.dtype} by {self.backend.fetcher}>"
        )

    def _bias_of(self, bias: HeadBias, ids: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        asked = None if ids is None else _integers(ids)
        if asked is None or asked.shape != shape:
            raise TableError(
                f"rows of {self.spec.tensor} are decoded with a bias for their n-gram head: decode needs their ids, of "
                f"shape {list(shape)}, and got {'none' if asked is None else f'ids of shape {list(asked.shape)}'}"
            )
        self._validate(asked)
        return bias.of(asked)

    def _validate(self, asked: NDArray[Any]) -> None:
        if not asked.size:
            return
        if asked.size <= FEW_IDS:
            few = asked.reshape(-1).tolist()
            low, high = min(few), max(few)
        elif asked.dtype == np.int64 and asked.view(np.uint64).max() < self.n_rows:
            return  # the common case in one pass: negative ids are huge ones here
        else:
            low, high = int(asked.min()), int(asked.max())
        if low < 0 or high >= self.n_rows:
            wrong = low if low < 0 else high
            raise RowIndexError(
                f"row {wrong} is outside the table {self.spec.tensor}, which has rows 0 to {self.n_rows - 1}"
            )

    def _result(self, asked: NDArray[Any], out: Bytes | None) -> Bytes:
        wanted = (*asked.shape, self.row_bytes)
        if out is None:
            return np.empty(wanted, np.uint8)
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out must be an array of uint8 {wanted}, and is a {type(out).__name__}")
        if out.shape != wanted or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(
                f"out must be writeable C-contiguous uint8 {wanted}, and is {out.dtype} {out.shape}"
                f"{'' if out.flags.c_contiguous else ', not contiguous'}{'' if out.flags.writeable else ', read-only'}"
            )
        if np.may_share_memory(asked, out):
            raise ValueError("out must not overlap the ids: they would be overwritten before they are all looked at")
        return out


def _wrapped(fetcher: Fetcher, wrap: Wrap) -> Fetcher:
    wrapped: object = wrap(fetcher)
    if not isinstance(wrapped, Fetcher):
        raise TypeError(
            f"wrap must return a Fetcher to read with, and returned a {type(wrapped).__name__}: {wrapped!r}"
        )
    return wrapped


def _integers(ids: Any) -> NDArray[Any]:
    array = np.asarray(ids)
    if array.dtype.kind in "iu":
        return array
    if not array.size and not isinstance(ids, np.ndarray):
        return array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype == np.object_ and _beyond_64_bits(array):
        return array  # as far outside a table as ids can be, which is for the check of ids to say
    raise TypeError(f"row ids must be integers of at most 64 bits, and are {array.dtype}")


def _beyond_64_bits(array: NDArray[Any]) -> bool:
    numbers = array.reshape(-1).tolist()
    return all(isinstance(number, int) for number in numbers) and not -(2**63) <= min(numbers) <= max(numbers) < 2**64


def open_table(
    path: str | bytes | os.PathLike[str] | TableSpec,
    tensor: str | None = None,
    *,
    mode: str | None = None,
    strict: bool | None = None,
    direct_io: str | None = None,
    workers: int | None = None,
    queue_depth: int | None = None,
    block_bytes: int | str | None = None,
    budget: int | str | None = None,
    row_cache: int | str | None = None,
    reserve: int | str | None = None,
    mmap_rss: int | str | None = None,
    mmap_safe: bool | None = None,
    overlay: Overlay | None = None,
    verify: int | None = None,
    wrap: Wrap | None = None,
    extra: dict[str, Any] | None = None,
) -> LazyTable:
    """Open a table in a GGUF file (any part of a split one), a safetensors file or a folder of those.

    Without `tensor` it is the per-layer embedding table, found by itself. `mode` is a lazy mode (off, on, on-bare,
    on-direct, uring, auto) or the name of a registered fetcher. What is None comes from the environment
    (`LAZYIO_...`), else from the defaults that docs/settings.md lists. Sizes are bytes, or text such as "512MiB".
    A raw file is opened through `lazyio.ple.raw.raw_table(...)`, whose spec is given as `path`. `extra` is handed to
    fetchers of third parties. `overlay` is packed rows by id, or the path of an .npz file with `ids` int64 [n] and
    `rows` uint8 [n, row_bytes]: they are served in place of the stored ones. `wrap` is called with the fetcher and
    returns one to use in its place, such as `lazyio.fetchers.trace.traced`; docs/wrappers.md has those there are.

    Raises TableError where there is no such table or its file can't be used, SettingError for a setting that is
    malformed or has no effect in this mode, NeverFits where mode off is asked for and memory does not suffice,
    Unsupported under `strict` where something can't be had as asked, TypeError for an argument of another type.
    """
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra must be a dict of options by name, and is {extra!r}")
    given = {
        "direct_io": direct_io,
        "workers": workers,
        "queue_depth": queue_depth,
        "block_bytes": block_bytes,
        "budget": budget,
        "row_cache": row_cache,
        "reserve": reserve,
        "mmap_rss": mmap_rss,
        "mmap_safe": mmap_safe,
        "verify": verify,
    }
    mode = settings.resolve("lazy_mode", mode)
    settings.check(mode, given)
    options = settings.fetcher_options(given, extra)
    if isinstance(path, TableSpec) and tensor is not None:
        raise SettingError(f"the spec of {path.tensor} is given, so that the tensor name {tensor} has no effect")
    spec = path if isinstance(path, TableSpec) else find_table(path, tensor)
    _warn_of_networks(spec)
    table = LazyTable(
        spec,
        mode,
        options,
        strict=settings.resolve("strict", strict),
        budget_bytes=settings.resolve("budget", budget),
        cache_bytes=settings.resolve("row_cache", row_cache),
        edited=None if overlay is None else read_overlay(overlay, spec),
        verify=settings.resolve("verify", verify),
        wrap=wrap,
    )
    try:
        settings.check_opened(given, table.backend, spec.row_bytes)
    except BaseException:
        table.close()
        raise
    return table


def _warn_of_networks(spec: TableSpec) -> None:
    for path in dict.fromkeys(extent.path for extent in spec.extents):
        try:
            filesystem = filesystem_of(path)
        except OSError:
            return  # opening it will say why
        if filesystem.network:
            warnings.warn(
                f"{path} lies on {filesystem.kind}, where each of thousands of small reads is a message: copy it to a "
                "local disk, or load it with mode off",
                NetworkFilesystemWarning,
                stacklevel=3,
            )
            return
