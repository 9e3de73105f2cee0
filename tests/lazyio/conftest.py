from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyio import LazyTable, TableSpec, Unsupported, modes, open_table
from lazyio.fetchers import Fetcher, FetcherOptions, ReadPlan, ReadStats
from lazyio.fetchers.base import Bytes, Landed
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.fetchers.mapping import MappedRows

#: Opens a table in one of the ways that there are; further arguments go to `open_table`.
OpenWay = Callable[..., LazyTable]

ROW_BYTES = 90
PLACES = [("a", 131, 2000), ("b", 3, 1500), ("a", 400_013, 700), ("c", 0, 1)]

# What reads, and the arguments that make it do so.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("resident", {"mode": "off", "reserve": 0}),
    "on": ("mmap", {"mode": "on"}),
    "on, safe": ("mmap", {"mode": "on", "mmap_safe": True}),
    "on-bare": ("mmap", {"mode": "on-bare"}),
    "on-direct": ("pread", {"mode": "on-direct", "direct_io": "on"}),
    "on-direct, buffered": ("pread", {"mode": "on-direct", "direct_io": "off"}),
    "uring": ("uring", {"mode": "uring", "direct_io": "on"}),
    "uring, buffered": ("uring", {"mode": "uring", "direct_io": "off"}),
}


class Double(Fetcher):
    """Reads one window after the other; says that it reads directly, so that rows go through staging."""

    name = "double"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.direct_io = True
        self.steps: list[int] | None = None  # windows to report as landed; None reports each
        self.plans: list[ReadPlan] = []
        self.reading = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.closed = False

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        self.plans.append(plan)
        self.reading.set()
        self.may_go_on.wait()
        assert not self.closed
        for window in range(len(plan)):
            offset, length, dest = (int(value[window]) for value in (plan.offset, plan.length, plan.dest))
            os.preadv(self.files.descriptors[plan.file[window]], [buffer[dest : dest + length]], offset)
            if landed is not None and (self.steps is None or window + 1 in self.steps):
                landed(window + 1)
        return ReadStats(len(plan), int(plan.needed.sum()))

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def open_double(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LazyTable]:
    """Opens a table that the double reads."""
    monkeypatch.setattr(modes, "load", lambda name: Double)

    def open_it(spec: TableSpec, budget_bytes: int = 64 << 20, cache_bytes: int = 0) -> LazyTable:
        return LazyTable(
            spec, "double", FetcherOptions(), strict=False, budget_bytes=budget_bytes, cache_bytes=cache_bytes
        )

    return open_it


@pytest.fixture
def double(spec: TableSpec, open_double: Callable[..., LazyTable]) -> Iterator[LazyTable]:
    with open_double(spec) as table:
        yield table


@pytest.fixture
def made(tmp_path: Path) -> MadeTable:
    """A table of 4,201 rows in several extents and files, at odd offsets."""
    return write_rows(tmp_path, ROW_BYTES, PLACES)


@pytest.fixture
def spec(made: MadeTable) -> TableSpec:
    return spec_of(made)


@pytest.fixture
def one_extent(tmp_path: Path) -> MadeTable:
    return write_rows(tmp_path, ROW_BYTES, [("one", 77, 3000)])


@pytest.fixture
def make_spec() -> Callable[[MadeTable], TableSpec]:
    return spec_of


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way_arguments(way: str) -> dict[str, Any]:
    """What `open_table` is given."""
    return WAYS[way][1]


@pytest.fixture
def open_way(way: str) -> OpenWay:
    """Opens a table in each of the ways in turn, or skips what this machine can't do."""
    fetcher, arguments = WAYS[way]

    def open_it(spec: TableSpec, **more: Any) -> LazyTable:
        try:
            table = open_table(spec, strict=True, **arguments, **more)
        except Unsupported as refused:
            pytest.skip(str(refused))
        assert table.backend.fetcher == fetcher
        assert table.backend.direct_io == (arguments.get("direct_io") == "on")
        return table

    return open_it


def spec_of(made: MadeTable) -> TableSpec:
    rows, row_bytes = made.content.shape
    return TableSpec(
        path=made.extents[0].path,
        tensor="rows",
        dtype="U8",
        rows=rows,
        row_values=row_bytes,
        row_bytes=row_bytes,
        extents=made.extents,
    )


@pytest.fixture(autouse=True)
def _nothing_seems_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's files were just written and are all in the page cache; read them all the same, as if they were not."""
    monkeypatch.setattr(MappedRows, "_seem_cached", lambda *_: False)
