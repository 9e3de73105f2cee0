"""Making a table cold, and proving that it is.

A cold figure is worth nothing if part of the table was still in memory, and the kernel drops pages only if it likes
to: not those that someone has mapped, not dirty ones, and on some filesystems none at all. So `make_cold` drops, counts
what stayed, and refuses to go on unless that is nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from lazyio import host
from lazyio.bench.residency import PageRange, drop_pages, page_ranges, resident_in
from lazyio.errors import NotCold
from lazyio.ple.spec import TableSpec

# Pages wait in per-CPU lists, or are under writeback, for a moment after they were last used.
_ATTEMPTS = 5
_PAUSE_S = 0.1


def make_cold(spec: TableSpec) -> int:
    """Drop the table from the page cache and prove it; returns the number of OS pages that were looked at.

    The caller closes whatever of its own maps the files first. Raises NotCold, which names the file, how many pages of
    how many stayed, and the cause where one can be found.
    """
    ranges = page_ranges(spec)
    for wanted in ranges:
        _refuse_hopeless(wanted.path)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        for wanted in ranges:
            drop_pages(wanted)
        stayed = [(wanted, count) for wanted in ranges if (count := resident_in(wanted))]
        if not stayed:
            return sum(wanted.pages for wanted in ranges)
    wanted, count = stayed[0]
    raise NotCold(
        f"{count} of {wanted.pages} OS pages of the table stayed in memory after {_ATTEMPTS} attempts to drop "
        f"{wanted.path}, so no cold figure can be given: {_cause(wanted)}"
    )


def _refuse_hopeless(path: str) -> None:
    filesystem = host.filesystem_of(path)
    if not filesystem.drops_cache:
        raise NotCold(
            f"{path} lies on {filesystem.kind} ({filesystem.mount}), which keeps its files in memory and never drops "
            "them, so no cold figure can be given; put the table on a disk, or measure with --warm"
        )
    if not host.owns_or_writes(path):
        raise NotCold(
            f"mincore can't tell which pages of {path} are in memory, because this user neither owns the file nor may "
            "write it, so no cold figure can be given; run as its owner, or measure a copy of your own"
        )


def _cause(wanted: PageRange) -> str:
    holders = list(mapping_processes(wanted))
    if holders:
        return f"it is mapped by {', '.join(holders)}; close what maps it and measure again"
    if os.access(wanted.path, os.W_OK) and (writers := list(writing_processes(wanted.path))):
        return (
            f"it is being written by {', '.join(writers)}, and dirty pages are not dropped; wait for the writer to end"
        )
    return (
        "none of the processes this user may look into maps or writes it; another user's process may, or something "
        "reads it all the time"
    )


def mapping_processes(wanted: PageRange) -> Iterator[str]:
    """Name the processes that have any byte of the range mapped, as far as /proc lets this user see."""
    status = os.stat(wanted.path)
    real = os.path.realpath(wanted.path)
    for process in _processes():
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:  # it ended, or is another user's
            continue
        if any(_maps(line, status, real, wanted) for line in lines):
            yield _named(process)


def writing_processes(path: str) -> Iterator[str]:
    """Name the processes that hold the file open for writing, as far as /proc lets this user see."""
    status = os.stat(path)
    for process in _processes():
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:
            continue
        if any(_writes(process, descriptor, status) for descriptor in descriptors):
            yield _named(process)


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _maps(line: str, status: os.stat_result, real: str, wanted: PageRange) -> bool:
    # address-range permissions offset device inode path
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or int(fields[4]) != status.st_ino:
        return False
    # Some filesystems show another device here than stat reports; then the name decides.
    device = ":".join(f"{number:02x}" for number in (os.major(status.st_dev), os.minor(status.st_dev)))
    if fields[3] != device and fields[5] != real:
        return False
    low, high = (int(address, 16) for address in fields[0].split("-"))
    start = int(fields[2], 16)
    return start < wanted.stop and wanted.start < start + (high - low)


def _writes(process: Path, descriptor: Path, status: os.stat_result) -> bool:
    try:
        if not os.path.samestat(descriptor.stat(), status):
            return False
        flags = (process / "fdinfo" / descriptor.name).read_text()
    except OSError:
        return False
    octal = next(line.split()[1] for line in flags.splitlines() if line.startswith("flags:"))
    return int(octal, 8) & os.O_ACCMODE != os.O_RDONLY


def _named(process: Path) -> str:
    try:
        name = (process / "comm").read_text().strip()
    except OSError:
        name = "?"
    mine = " (this process)" if process.name == str(os.getpid()) else ""
    return f"process {process.name} {name!r}{mine}"
