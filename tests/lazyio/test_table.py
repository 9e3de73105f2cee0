"""Gathers are numpy indexing, whatever reads, and whatever they are asked."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazyio.table
from lazyio import (
    LazyTable,
    NetworkFilesystemWarning,
    ReadError,
    RowIndexError,
    SettingError,
    TableError,
    TableSpec,
    open_table,
    raw_table,
)
from lazyio.fetchers.conformance import MadeTable, write_rows
from lazyio.host import Filesystem

OpenWay = Callable[..., LazyTable]
MIB = 1 << 20
RANDOM = np.random.default_rng(11)


def fetcher_of(table: LazyTable) -> Any:
    return table._fetcher


# --- what comes out --------------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "none": [],
    "none, typed": np.empty((0, 3), np.int32),
    "none, nested": [[]],
    "one": [0],
    "a number": 5,
    "first and last": [0, 4200, 0],
    "one over and over": [7] * 8192,
    "sixteen": RANDOM.integers(0, 4201, 16),
    "int32": RANDOM.integers(0, 4201, 100, dtype=np.int32),
    "uint64": RANDOM.integers(0, 4201, 100, dtype=np.uint64),
    "uint8": RANDOM.integers(0, 256, 100, dtype=np.uint8),
    "of the other byte order": RANDOM.integers(0, 4201, 50).astype(">i8"),
    "in a plane": RANDOM.integers(0, 4201, (13, 7)),
    "in space, transposed": RANDOM.integers(0, 4201, (3, 4, 5)).T,
    "every other": RANDOM.integers(0, 4201, 200)[::2],
    "backwards": np.arange(4201)[::-1],
    "all": np.arange(4201),
    "many": RANDOM.integers(0, 4201, 70_000),
}


def test_gather_is_indexing(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        for name, ids in ASKED.items():
            rows = table.gather(ids)
            assert rows.dtype == np.uint8, name
            np.testing.assert_array_equal(rows, made.content[np.asarray(ids, np.int64)], err_msg=name)


def test_gather_from_one_extent(
    open_way: OpenWay, one_extent: MadeTable, make_spec: Callable[[MadeTable], TableSpec]
) -> None:
    with open_way(make_spec(one_extent)) as table:
        for ids in (RANDOM.integers(0, 3000, 16), RANDOM.integers(0, 3000, (40, 50)), np.arange(3000)):
            np.testing.assert_array_equal(table.gather(ids), one_extent.content[ids])


def test_unique_rows_and_their_inverse(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    with open_way(spec) as table:
        for name, ids in ASKED.items():
            rows, inverse = table.gather_unique(ids)
            unique, expected = np.unique(np.asarray(ids, np.int64), return_inverse=True)
            np.testing.assert_array_equal(rows, made.content[unique], err_msg=name)
            np.testing.assert_array_equal(inverse, expected.reshape(np.shape(ids)), err_msg=name)
            assert inverse.dtype == np.int64


def test_rows_far_into_a_large_table(open_way: OpenWay, way: str, tmp_path: Path) -> None:
    """Ids beyond 2**31 and offsets beyond 2**32, at the cost of a few blocks of a sparse file."""
    if way == "off":
        pytest.skip("all of it would have to be in memory")
    rows, offset = (1 << 31) + 1000, 13
    path = tmp_path / "sparse"
    ids = np.array([0, 1, 1 << 30, (1 << 32) // 3, (1 << 31) - 1, 1 << 31, rows - 1])
    content = RANDOM.integers(1, 256, (len(ids), 3), np.uint8)
    with path.open("wb") as file:
        for row, value in zip(ids.tolist(), content, strict=True):
            file.seek(offset + row * 3)
            file.write(value.tobytes())
    with open_way(raw_table(path, row_bytes=3, offset=offset)) as table:
        assert table.n_rows == rows
        np.testing.assert_array_equal(table.gather(ids), content)
        np.testing.assert_array_equal(table.gather(ids[::-1]), content[::-1])


def test_out_is_filled_and_returned(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    ids = RANDOM.integers(0, 4201, (5, 6))
    with open_way(spec) as table:
        out = np.zeros((5, 6, 90), np.uint8)
        assert table.gather(ids, out) is out
        np.testing.assert_array_equal(out, made.content[ids])


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([4201], 4201),
        ([-1], -1),
        ([2**31], 2**31),
        ([0, 4200, 4201], 4201),
        ([[5], [-7]], -7),
        (np.array([2**63], np.uint64), 2**63),
        (np.array([-(2**63)]), -(2**63)),
        (np.int32(-3), -3),
        ([2**64], 2**64),
        ([5, -(2**70)], -(2**70)),
        ([0] * 100 + [2**64], 2**64),
    ],
)
def test_ids_outside_are_refused_before_anything_is_read(double: LazyTable, ids: Any, wrong: int) -> None:
    for gather in (double.gather, double.gather_unique):
        with pytest.raises(RowIndexError, match=f"^row {wrong} is outside the table rows, which has rows 0 to 4200$"):
            gather(ids)
    with pytest.raises(IndexError):
        double.gather(ids)
    nothing_happened(double)


@pytest.mark.parametrize(
    "ids", [[1.0], np.empty(0), [True], ["1"], None, [2**70, "1"], [None], np.array([1], object), [1 + 0j]]
)
def test_what_is_no_integer_is_refused(double: LazyTable, ids: Any) -> None:
    for gather in (double.gather, double.gather_unique):
        with pytest.raises(TypeError, match="row ids must be integers"):
            gather(ids)
    nothing_happened(double)


@pytest.mark.parametrize(
    ("out", "what"),
    [
        (np.zeros((2, 90), np.uint8), r"and is uint8 \(2, 90\)"),
        (np.zeros((3, 91), np.uint8), r"\(3, 91\)"),
        (np.zeros(270, np.uint8), r"\(270,\)"),
        (np.zeros((3, 90), np.int8), "int8"),
        (np.zeros((3, 180), np.uint8)[:, ::2], "not contiguous"),
        (np.asfortranarray(np.zeros((3, 90), np.uint8)), "not contiguous"),
        (np.frombuffer(bytes(270), np.uint8).reshape(3, 90), "read-only"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_before_anything_is_read(double: LazyTable, out: Any, what: str) -> None:
    with pytest.raises(ValueError, match=rf"out must be writeable C-contiguous uint8 \(3, 90\), .*{what}"):
        double.gather([1, 2, 3], out)
    with pytest.raises(TypeError, match="and is a list"):
        double.gather([1, 2, 3], [[0] * 90] * 3)
    nothing_happened(double)


def nothing_happened(table: LazyTable) -> None:
    assert fetcher_of(table).plans == []
    assert table.stats() == lazyio.table.TableStats()


def test_nothing_is_read_for_no_rows(double: LazyTable) -> None:
    assert double.gather([]).shape == (0, 90)
    rows, inverse = double.gather_unique([])
    assert (rows.shape, inverse.shape) == ((0, 90), (0,))
    assert sum(len(plan) for plan in fetcher_of(double).plans) == 0


def test_rows_of_another_length_are_not_decoded(double: LazyTable) -> None:
    with pytest.raises(TableError, match="packed rows are 90 bytes long here"):
        double.decode(np.zeros((2, 91), np.uint8))


def test_rows_in_no_array_are_not_decoded(double: LazyTable) -> None:
    with pytest.raises(TypeError, match=r"packed rows must be an array of uint8 \[\.\.\., 90\], and are a list"):
        double.decode([[0] * 90])  # type: ignore[arg-type]


def test_a_table_beyond_the_end_of_its_file_is_not_opened(open_way: OpenWay, spec: TableSpec, tmp_path: Path) -> None:
    open_way(spec).close()
    before = len(os.listdir("/proc/self/fd"))
    os.truncate(tmp_path / "b", 135_002)
    with pytest.raises(TableError, match="b has 135002 bytes, but rows 2000 to 3499 of rows end at 135003"):
        open_way(spec)
    (tmp_path / "b").unlink()
    with pytest.raises(TableError, match=r"can't open .*/b: No such file"):
        open_way(spec)
    assert len(os.listdir("/proc/self/fd")) == before


# --- how it is read --------------------------------------------------------------------------------------------------


def test_stats_count_what_was_done_since_it_was_opened(double: LazyTable) -> None:
    double.gather([1, 2, 2000])
    middle = double.stats()
    double.gather([[5, 5], [6, 6]])
    done = double.stats() - middle
    assert (middle.gathers, middle.rows, middle.unique_rows, middle.reads) == (1, 3, 3, 2)
    assert (done.gathers, done.rows, done.unique_rows, done.reads, done.bytes_read) == (1, 4, 2, 1, 180)
    assert 0 < done.wall_s < 60
    assert double.stats() - double.stats() == lazyio.table.TableStats()


def test_eight_threads_on_one_table(open_way: OpenWay, spec: TableSpec, made: MadeTable) -> None:
    start = threading.Barrier(8)
    with open_way(spec) as table, ThreadPoolExecutor(8) as pool:

        def work(seed: int) -> int:
            random = np.random.default_rng(seed)
            start.wait()
            for count in (16, 3000, 100, 1, 5000):
                ids = random.integers(0, 4201, count)
                np.testing.assert_array_equal(table.gather(ids), made.content[ids])
            return 5

        assert sum(pool.map(work, range(8))) == table.stats().gathers


# --- closing ---------------------------------------------------------------------------------------------------------


def test_after_closing_nothing_is_gathered(open_way: OpenWay, spec: TableSpec) -> None:
    table = open_way(spec)
    table.gather([1, 2, 3])
    table.close()
    table.close()
    for gather in (table.gather, table.gather_unique):
        with pytest.raises(TableError, match="the table is closed"):
            gather([1])
    assert table.stats().gathers == 1


def test_closing_frees_everything(open_way: OpenWay, spec: TableSpec, tmp_path: Path) -> None:
    open_way(spec).close()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with open_way(spec) as table:
        table.gather(np.arange(4201))
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_closing_waits_for_gathers_under_way(double: LazyTable, made: MadeTable) -> None:
    fetcher = fetcher_of(double)
    fetcher.may_go_on.clear()
    with ThreadPoolExecutor(2) as pool:
        gathering = pool.submit(double.gather, [1, 2, 3])
        fetcher.reading.wait()
        closing = pool.submit(double.close)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                double.gather([])  # until closing has begun
            except TableError:
                break
        assert not closing.done()
        assert not fetcher.closed
        fetcher.may_go_on.set()
        np.testing.assert_array_equal(gathering.result(), made.content[[1, 2, 3]])
        closing.result()
    assert fetcher.closed


def test_an_error_inside_a_gather_does_not_keep_it_from_closing(
    double: LazyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ReadError("failed", path="a", offset=0, wanted=90, got=0)

    monkeypatch.setattr(fetcher_of(double), "read", fail)
    with pytest.raises(ReadError, match="failed"):
        double.gather([1])
    double.close()


# --- opening ---------------------------------------------------------------------------------------------------------


def test_what_it_says_of_itself(spec: TableSpec) -> None:
    with open_table(spec, mode="on") as table:
        assert (table.n_rows, table.row_bytes, table.row_values, table.dtype) == (4201, 90, 90, "U8")
        assert table.extents == spec.extents
        assert table.spec is spec
        assert repr(table) == "<LazyTable rows 4201 x 90 U8 by mmap>"


def test_a_setting_without_effect_is_an_error(spec: TableSpec) -> None:
    with pytest.raises(SettingError, match="queue_depth has no effect in mode on"):
        open_table(spec, mode="on", queue_depth=7)


@pytest.mark.parametrize("mode", ["uring", "on-direct"])
@pytest.mark.parametrize("setting", [{"mmap_safe": True}, {"mmap_rss": "1GiB"}], ids=["safe", "rss"])
def test_a_setting_of_maps_is_refused_where_there_is_no_map(
    spec: TableSpec, monkeypatch: pytest.MonkeyPatch, mode: str, setting: dict[str, Any]
) -> None:
    (name,) = setting
    with open_table(spec, mode=mode, direct_io="on") as table:
        if not table.backend.direct_io:
            pytest.skip(str(table.backend.fallback_reason))
    for direct_io in ("on", "auto", None):
        before = os.listdir("/proc/self/fd")
        with pytest.raises(SettingError, match=f"{name} has no effect where direct_io"):
            open_table(spec, mode=mode, direct_io=direct_io, **setting)
        assert os.listdir("/proc/self/fd") == before
    with pytest.raises(SettingError, match=f"{name} has no effect beside row_cache"):
        open_table(spec, mode=mode, direct_io="off", row_cache="1MiB", **setting)
    open_table(spec, mode=mode, direct_io="off", **setting).close()
    open_table(spec, mode=mode, direct_io="on", mmap_safe=False).close()
    monkeypatch.setenv(f"LAZYIO_{name.upper()}", "1")
    open_table(spec, mode=mode, direct_io="on").close()


def test_what_auto_did_not_take_may_have_its_settings(spec: TableSpec) -> None:
    with open_table(spec, mode="auto", reserve="1000T", mmap_safe=True, workers=3, block_bytes=4096) as table:
        assert table.backend.fetcher != "resident"


@pytest.mark.parametrize("mode", ["uring", "on-direct"])
def test_a_block_is_refused_where_rows_are_too_large_for_direct_reads(
    tmp_path: Path, make_spec: Callable[[MadeTable], TableSpec], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    spec = make_spec(write_rows(tmp_path, 4096, [("large", 11, 30)]))
    with pytest.raises(SettingError, match=r"block_bytes has no effect where direct_io auto .* rows of 4096 bytes"):
        open_table(spec, mode=mode, block_bytes=8192)
    open_table(spec, mode=mode, block_bytes=8192, direct_io="on").close()
    monkeypatch.setenv("LAZYIO_BLOCK_BYTES", "8192")
    open_table(spec, mode=mode).close()


@pytest.mark.parametrize("extra", [5, 0, "a", [("a", 1)]])
def test_extra_options_have_names(spec: TableSpec, extra: Any) -> None:
    with pytest.raises(TypeError, match="extra must be a dict of options by name, and is "):
        open_table(spec, mode="on", extra=extra)


def test_the_environment_is_heard(spec: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYIO_LAZY_MODE", "on-direct")
    monkeypatch.setenv("LAZYIO_WORKERS", "3")
    with open_table(spec) as table:
        assert (table.backend.fetcher, table.backend.workers) == ("pread", 3)
    monkeypatch.setenv("LAZYIO_WORKERS", "three")
    with pytest.raises(SettingError, match="LAZYIO_WORKERS is 'three'"):
        open_table(spec)


def test_a_network_filesystem_is_warned_of(spec: TableSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Filesystem("nfs4", "/data", "server:/data", 0, 50)
    monkeypatch.setattr(lazyio.table, "filesystem_of", lambda path: network)
    with pytest.warns(
        NetworkFilesystemWarning, match=r"a lies on nfs4, .*copy it to a local disk, or load it with mode"
    ):
        open_table(spec, mode="on").close()


def test_an_out_over_the_ids_is_refused(spec: TableSpec) -> None:
    memory = np.zeros(90 * 1000, np.uint8)
    ids = memory[:8000].view(np.int64)
    with open_table(spec, mode="on") as table, pytest.raises(ValueError, match="must not overlap the ids"):
        table.gather(ids, out=memory.reshape(1000, 90))


def test_a_wrap_that_fails_leaves_nothing_open(open_way: OpenWay, spec: TableSpec, tmp_path: Path) -> None:
    def fail(fetcher: object) -> Any:
        raise RuntimeError("no wrapper today")

    open_way(spec).close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="no wrapper today"):
        open_way(spec, wrap=fail)
    with pytest.raises(TypeError, match="wrap must return a Fetcher to read with, and returned a NoneType: None"):
        open_way(spec, wrap=lambda fetcher: None)
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
