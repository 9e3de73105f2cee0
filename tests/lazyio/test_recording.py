import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lazyio import SettingError, TableError, TableSpec, open_table
from lazyio.bench import workload
from lazyio.fetchers.conformance import run_in_child
from lazyio.fetchers.trace import traced
from lazyio.gate import TableStats
from lazyio.recording import RecordedRows, Recorder


class Rows:
    """Rows that cost two reads of 512 bytes a gather."""

    def __init__(self) -> None:
        self.closed = False

    def gather(self, asked: np.ndarray, rows: np.ndarray, stats: TableStats) -> None:
        stats.add(TableStats(reads=2, bytes_read=1024, service_s=0.5, unique_rows=len(np.unique(asked))))

    read = gather

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder / "run.npz"


def record(recorder: Recorder, *gathers: np.ndarray) -> None:
    rows = RecordedRows(Rows(), recorder)
    for ids in gathers:
        rows.gather(ids, np.empty((ids.size, 4), np.uint8), TableStats())


def test_a_trace_has_what_was_asked_and_what_it_cost(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, np.array([[3, 1], [3, 2]]), np.array([], np.int64), np.array([5], np.uint16))
    recorder.read(0.0, 0.25, 7, 4096)
    recorder.save()
    recorder.close()
    with np.load(path, allow_pickle=False) as trace:
        assert trace["row_ids"].tolist() == [3, 1, 3, 2, 5]
        assert trace["lengths"].tolist() == [4, 0, 1]
        gathers, reads = trace["gathers"], trace["reads"]
    assert gathers["unique_rows"].tolist() == [3, 0, 1]
    assert gathers[["reads", "bytes_read", "service_s"]].tolist() == [(2, 1024, 0.5)] * 3
    assert (np.diff(gathers["began_s"]) > 0).all()
    assert (gathers["seconds"] > 0).all()
    assert reads[["seconds", "windows", "bytes"]].tolist() == [(0.25, 7, 4096)]
    assert os.listdir(path.parent) == ["run.npz"]


def test_the_benchmark_replays_it(path: Path, spec: TableSpec) -> None:
    recorder = Recorder(path)
    record(recorder, np.arange(10), np.array([4200, 0, 0]))
    recorder.save()
    recorder.close()
    replayed = workload.from_trace(spec, str(path), steps=None, usual=None, decode=False)
    assert [ids.tolist() for ids in replayed.ubatches] == [list(range(10)), [4200, 0, 0]]


def test_gathers_of_many_threads_stay_whole(path: Path) -> None:
    recorder = Recorder(path)
    with ThreadPoolExecutor(8) as pool:
        for number in range(200):
            pool.submit(record, recorder, np.full(number + 1, number))
    recorder.save()
    recorder.close()
    with np.load(path) as trace:
        rows, lengths = trace["row_ids"], trace["lengths"]
        assert len(trace["gathers"]) == 200
    assert sorted(lengths.tolist()) == list(range(1, 201))
    np.testing.assert_array_equal(rows, np.repeat(lengths - 1, lengths))


def test_a_child_adds_nothing_and_does_not_wait(path: Path) -> None:
    recorder = Recorder(path)
    with recorder._lock:  # as when another thread is at it while the process forks
        run_in_child(lambda: record(recorder, np.arange(3)), limit_s=10)
    record(recorder, np.arange(5))
    recorder.save()
    recorder.close()
    with np.load(path) as trace:
        assert trace["lengths"].tolist() == [5]


def test_what_ends_after_the_recording_is_left_out(path: Path) -> None:
    recorder = Recorder(path)
    recorder.save()
    recorder.close()
    record(recorder, np.arange(3))
    with np.load(path) as trace:
        assert len(trace["row_ids"]) == 0


def test_memory_holds_none_of_the_ids(path: Path) -> None:
    recorder = Recorder(path)
    record(recorder, np.arange(1 << 18))
    assert sum(size_of(descriptor) for descriptor in recorder_files(path)) >= 8 << 18
    recorder.close()


def test_a_full_disk_is_told_to_who_records_and_not_to_who_gathers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(path)

    def full(values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder._columns["lengths"], "append", full)
    record(recorder, np.arange(3))
    with pytest.raises(SettingError, match=r"can't write a trace to .*run.npz: No space left on device; choose"):
        recorder.save()
    recorder.close()
    assert os.listdir(path.parent) == []


def test_a_folder_that_is_not_there_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SettingError, match=r"can't write a trace to .*none/run.npz: No such file or directory"):
        Recorder(tmp_path / "none" / "run.npz")
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_closes_what_is_recorded(path: Path) -> None:
    inner, recorder = Rows(), Recorder(path)
    RecordedRows(inner, recorder).close()
    recorder.close()
    assert inner.closed


def recorder_files(path: Path) -> list[int]:
    """Descriptors of nameless files in the folder of a trace."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(f"/proc/self/fd/{name}"):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return [number for number, target in links.items() if target.startswith(f"{path.parent}/")]


def size_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


# --- of a table ------------------------------------------------------------------------------------------------------


def test_a_table_is_recorded_between_two_moments(path: Path, spec: TableSpec) -> None:
    with open_table(spec, mode="off", reserve=0, wrap=traced) as table:
        table.gather([7])
        with table.record(path):
            table.gather([[5, 5], [4200, 1]])
            table.gather_unique([9, 3, 9])
            table.prefetch([8, 8, 2]).result()
        table.gather([7])
    with np.load(path) as trace:
        assert trace["row_ids"].tolist() == [5, 5, 4200, 1, 3, 9, 2, 8]
        assert trace["lengths"].tolist() == [4, 2, 2]
        assert len(trace["gathers"]) == 3
        assert trace["reads"][["windows", "bytes"]].tolist() == [(4, 360), (2, 180), (2, 180)]


@pytest.mark.parametrize("mode", ["off", "on", "on-direct"])
def test_other_tables_are_recorded_without_their_reads(path: Path, spec: TableSpec, mode: str) -> None:
    with open_table(spec, mode=mode) as table, table.record(path):
        table.gather([5, 6])
    with np.load(path) as trace:
        assert trace["row_ids"].tolist() == [5, 6]
        assert len(trace["reads"]) == 0


def test_a_table_is_recorded_once_at_a_time(path: Path, spec: TableSpec) -> None:
    with open_table(spec, mode="on") as table:
        with table.record(path):
            other = table.record(path.with_name("other.npz"))
            with pytest.raises(SettingError, match=r"rows is being recorded already: end that before .*other.npz"):
                other.__enter__()
            table.gather([1])
        with table.record(path.with_name("next.npz")):
            table.gather([2])
    assert sorted(os.listdir(path.parent)) == ["next.npz", "run.npz"]


def test_a_recording_survives_an_error_and_the_end_of_its_table(path: Path, spec: TableSpec) -> None:
    def run() -> None:
        with open_table(spec, mode="on") as table, table.record(path):
            table.gather([1])
            table.close()
            table.gather([2])

    with pytest.raises(TableError, match="closed"):
        run()
    with np.load(path) as trace:
        assert trace["row_ids"].tolist() == [1]
