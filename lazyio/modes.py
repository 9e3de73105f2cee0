"""Lazy modes: the fetcher of each, which one `auto` takes, and what takes the place of one that can't work."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass

from lazyio.errors import LazyIOError, TableError, Unsupported
from lazyio.fetchers import Fetcher, FetcherOptions, load
from lazyio.fetchers.files import cause_of
from lazyio.host import available_memory_bytes
from lazyio.ple.spec import TableSpec
from lazyio.units import format_bytes

# The fetcher of each mode. Any other word is the name of a registered fetcher.
FETCHERS = {"off": "resident", "on": "mmap", "on-bare": "mmap", "on-direct": "pread", "uring": "uring"}
MODES = (*FETCHERS, "auto")

# What takes the place of a mode that is Unsupported here.
_INSTEAD = {"uring": "on-direct", "on-direct": "on"}


@dataclass(frozen=True, slots=True)
class Backend:
    """What really reads a table, and why."""

    mode: str  # as asked
    fetcher: str  # name of the fetcher in use
    direct_io: bool
    queue_depth: int  # reads in flight at most
    workers: int  # reads at once, of a pool; 1 for the others
    block_bytes: int  # reads are multiples of this; 1 where any length will do
    fallback_reason: str | None  # what was asked for and could not be had
    why: str  # how the mode was arrived at


def choose(spec: TableSpec, options: FetcherOptions) -> tuple[str, str]:
    """The mode that `auto` takes for a table here, and why.

    `off` if the table fits in the memory that can be had less `options.reserve_bytes`; else the first of uring,
    on-direct and on that opens and passes its probing read.
    """
    available = available_memory_bytes()
    sizes = (
        f"the table takes {format_bytes(spec.table_bytes)}, {format_bytes(available)} of memory can be had and "
        f"{format_bytes(options.reserve_bytes)} must stay free"
    )
    if spec.table_bytes + options.reserve_bytes <= available:
        return "off", f"it fits in memory: {sizes}"
    fetcher, backend = open_fetcher("uring", spec, options, strict=False)
    fetcher.close()
    mode = next(mode for mode, name in FETCHERS.items() if name == backend.fetcher and mode != "on-bare")
    reason = f"; {backend.fallback_reason}" if backend.fallback_reason else ""
    return mode, f"it does not fit in memory: {sizes}{reason}"


def open_fetcher(mode: str, spec: TableSpec, options: FetcherOptions, *, strict: bool) -> tuple[Fetcher, Backend]:
    """Open the fetcher of a mode on a table, or the one that takes its place.

    With `strict`, anything that can't be had as asked raises Unsupported. Raises NeverFits for `off` where memory does
    not suffice, SettingError for an unknown mode, TableError for rows that lie beyond the end of their file.
    """
    _check_lengths(spec)
    why = "as asked"
    reasons: list[str] = []
    actual = mode
    if mode == "auto":
        actual, why = choose(spec, options)
    while True:
        try:
            fetcher = _open(actual, spec, options)
            break
        except Unsupported as error:
            if actual not in _INSTEAD or strict:
                raise
            reasons.append(f"{actual} can't be had: {error}")
            actual = _INSTEAD[actual]
    if fetcher.fell_back:
        if strict:
            fetcher.close()
            raise Unsupported(f"{fetcher.fell_back} (strict allows no fallback)")
        reasons.append(fetcher.fell_back)
    return fetcher, Backend(
        mode=mode,
        fetcher=fetcher.name,
        direct_io=fetcher.direct_io,
        queue_depth=fetcher.queue_depth,
        workers=fetcher.workers,
        block_bytes=fetcher.alignment.offset,
        fallback_reason="; ".join(reasons) or None,
        why=why,
    )


def _check_lengths(spec: TableSpec) -> None:
    """A spec may be older than the file that now lies at its path."""
    for extent in spec.extents:
        end = extent.offset + extent.rows * spec.row_bytes
        with contextlib.suppress(OSError):  # opening it will say why
            size = os.stat(extent.path).st_size
            if end > size:
                last = extent.first_row + extent.rows - 1
                raise TableError(
                    f"{extent.path} has {size} bytes, but rows {extent.first_row} to {last} of {spec.tensor} end at "
                    f"{end}: the file is not complete, or not the one in which the table was found"
                )


def _open(mode: str, spec: TableSpec, options: FetcherOptions) -> Fetcher:
    if mode == "on-bare":
        options = dataclasses.replace(options, advice=False)
    fetcher = load(FETCHERS.get(mode, mode))
    try:
        return fetcher(spec.extents, spec.row_bytes, options)
    except LazyIOError:
        raise
    except OSError as error:
        raise TableError(f"can't open {spec.path} with {fetcher.name}: {cause_of(error)}") from error
