"""Rows as values on a device: the same whatever reads them, and whatever the device."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyio import Cancelled, LazyTable, RowIndexError, SettingError, TableSpec, Unsupported, open_table
from lazyio.engine import pinned
from lazyio.engine.device_table import DeviceTable
from lazyio.fetchers.conformance import write_rows
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.ple.dtypes import TYPES

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(31)
IDS = RANDOM.integers(0, 1500, (40, 16))
STORED = {"Q4_0": 160, "Q8_0": 64, "BF16": 24, "F32": 8, "F8_E4M3": 32, "EXL3_K4": 160, "MLX_Q4_G32": 64, "Q4_K": 256}
WAYS = ("gather", "prefetch", "start", "later")
MODES: dict[str, dict[str, Any]] = {
    "off": {"reserve": 0},
    "on": {},
    "on-bare": {},
    "on-direct": {"direct_io": "on", "row_cache": 0},
    "uring": {"direct_io": "on"},
}


def make_spec(folder: Path, stored: str, rows: int = 1500) -> TableSpec:
    """A table of random rows whose values are finite."""
    row_bytes = TYPES[stored].row_bytes(STORED[stored])
    made = write_rows(folder, row_bytes, [("rows", 77, rows)])
    if stored in ("BF16", "F32", "F8_E4M3"):
        made.content[:] &= 0x3F
    else:
        made.content[:, 1::2] &= 0x3F  # the upper bytes of scales
    path = folder / "rows"
    with path.open("r+b") as file:
        file.seek(77)
        file.write(made.content.tobytes())
    return TableSpec(
        path=str(path),
        tensor="rows",
        dtype=stored,
        rows=rows,
        row_values=STORED[stored],
        row_bytes=row_bytes,
        extents=made.extents,
        scale=0.37 if stored == "F8_E4M3" else None,
    )


@pytest.fixture
def table(tmp_path: Path) -> Iterator[LazyTable]:
    with open_table(make_spec(tmp_path, "Q4_0"), mode="on-direct") as table:
        yield table


def expected(table: LazyTable, ids: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(table.decode(table.gather(ids), ids=ids)).to(dtype)


def same_bits(values: torch.Tensor, wanted: torch.Tensor) -> None:
    assert values.dtype == wanted.dtype
    assert values.shape == wanted.shape
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    assert torch.equal(values.cpu().contiguous().view(kind), wanted.contiguous().view(kind))


def values_of(rows: DeviceTable, way: str, ids: Any) -> torch.Tensor:
    asked = getattr(rows, way)(ids)
    return asked if way == "gather" else asked.values()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [stored for stored in STORED if not stored.startswith("EXL3")])
def test_values_are_those_of_decode(tmp_path: Path, stored: str, dtype: torch.dtype, way: str) -> None:
    with open_table(make_spec(tmp_path, stored), mode="on-direct") as table:
        rows = DeviceTable(table, CPU, dtype)
        assert rows.row_values == STORED[stored]
        assert rows.decoded_on == ("host" if stored.startswith("MLX") else "device")
        for ids in (IDS, [3], np.empty((0, 16), np.int64), [], 7):
            same_bits(values_of(rows, way, ids), expected(table, np.asarray(ids, np.int64), dtype))
        rows.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same(tmp_path: Path, mode: str, way: str) -> None:
    try:
        table = open_table(make_spec(tmp_path, "Q4_0"), mode=mode, strict=True, **MODES[mode])
    except Unsupported as refused:
        pytest.skip(str(refused))
    with table:
        same_bits(values_of(DeviceTable(table, CPU, torch.float32), way, IDS), expected(table, IDS, torch.float32))


@pytest.mark.parametrize("way", WAYS)
def test_biases_of_heads_are_added(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heads:
        biases = RANDOM.normal(size=(3, 160)).astype(np.float32)

        def heads(self, ids: Any) -> np.ndarray:
            return np.asarray(ids, np.int64) // 500

        def of(self, ids: Any) -> np.ndarray:
            return self.biases[self.heads(ids)]

    with open_table(make_spec(tmp_path, "EXL3_K4"), mode="on-direct") as table:
        monkeypatch.setattr(table, "head_bias", Heads())
        same_bits(values_of(DeviceTable(table, CPU, torch.float32), way, IDS), expected(table, IDS, torch.float32))


def test_values_go_where_the_caller_wants_them(table: LazyTable) -> None:
    rows = DeviceTable(table, CPU, torch.bfloat16)
    out = torch.full((40, 16, 160), torch.nan, dtype=torch.bfloat16)
    assert rows.start(IDS).values(out) is out
    same_bits(out, expected(table, IDS, torch.bfloat16))
    for wrong in (out[:39], out.float(), out.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \[40, 16, 160\] on cpu"):
            rows.start(IDS).values(wrong)


def test_values_may_be_asked_for_again(table: LazyTable) -> None:
    rows = DeviceTable(table, CPU, torch.float32)
    for asked in (rows.start(IDS), rows.prefetch(IDS)):
        same_bits(asked.values(), asked.values())


def test_ids_may_change_after_they_were_asked_for(table: LazyTable) -> None:
    rows = DeviceTable(table, CPU, torch.float32)
    ids = IDS.copy()
    asked = [rows.start(ids), rows.prefetch(ids), rows.later(ids)]
    ids[:] = 0
    for each in asked:
        same_bits(each.values(), expected(table, IDS, torch.float32))


@pytest.mark.parametrize("way", ["prefetch", "start", "later"])
def test_cancelled_rows_are_not_to_be_had(table: LazyTable, way: str) -> None:
    asked = getattr(DeviceTable(table, CPU, torch.float32), way)(IDS)
    asked.cancel()
    asked.cancel()
    with pytest.raises(Cancelled):
        asked.values()


@pytest.mark.parametrize("way", WAYS)
def test_wrong_ids_are_errors(table: LazyTable, way: str) -> None:
    with pytest.raises(RowIndexError, match="row 1500 is outside"):
        values_of(DeviceTable(table, CPU, torch.float32), way, [0, 1500])


def test_what_was_waited_for_is_told(tmp_path: Path) -> None:
    def slow(fetcher: Any) -> Any:
        return with_faults(fetcher, Faults(late=1, delay_s=0.05))

    with open_table(make_spec(tmp_path, "Q4_0"), mode="on-direct", direct_io="on", row_cache=0, wrap=slow) as table:
        rows = DeviceTable(table, CPU, torch.float32)
        for asked in (rows.later(IDS), rows.start(IDS)):
            asked.values()
            assert asked.exposed_s >= 0.05
        ahead = rows.prefetch(IDS)
        deadline = time.monotonic() + 20
        while not ahead._done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ahead.values()
        assert ahead.exposed_s < 0.05


def test_what_can_not_be_served_is_refused(tmp_path: Path, table: LazyTable) -> None:
    with pytest.raises(SettingError, match=r"float32, bfloat16 or float16, and not in torch\.float64"):
        DeviceTable(table, CPU, torch.float64)
    with pytest.raises(SettingError, match="cpu or cuda device, and not on meta"):
        DeviceTable(table, torch.device("meta"), torch.float32)
    spec = make_spec(tmp_path, "Q4_0")
    unknown = TableSpec(**{**{n: getattr(spec, n) for n in spec.__slots__}, "dtype": "odd", "row_values": 0})
    with open_table(unknown, mode="on-direct") as other, pytest.raises(Unsupported, match="type odd of rows"):
        DeviceTable(other, CPU, torch.float32)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [stored for stored in STORED if not stored.startswith("EXL3")])
def test_gpu_values_are_those_of_the_cpu(
    cuda: torch.device, tmp_path: Path, stored: str, dtype: torch.dtype, way: str
) -> None:
    with open_table(make_spec(tmp_path, stored), mode="on-direct") as table:
        rows = DeviceTable(table, cuda, dtype)
        for ids in (IDS, [3], np.empty((0, 16), np.int64), 7, IDS[::-1]):
            same_bits(values_of(rows, way, ids), expected(table, np.asarray(ids, np.int64), dtype))
        rows.close()
        rows.close()


@pytest.mark.gpu
def test_gpu_values_are_valid_in_the_order_of_the_stream(cuda: torch.device, table: LazyTable) -> None:
    """With the device so far behind that the host is done with everything before it begins."""
    rows = DeviceTable(table, cuda, torch.float32)
    asked = [RANDOM.integers(0, 1500, (200 + 60 * number, 16)) for number in range(12)]
    rows.gather(asked[0])
    for make in (rows.prefetch, rows.start):
        torch.cuda._sleep(200_000_000)
        sums = [make(ids).values().double().sum((0, 1)) for ids in asked]
        for ids, total in zip(asked, sums, strict=True):
            wanted = expected(table, ids, torch.float32).double().sum((0, 1))
            torch.testing.assert_close(total.cpu(), wanted, rtol=1e-9, atol=1e-9)
    rows.close()


@pytest.mark.gpu
def test_gpu_rows_sent_ahead_and_dropped(cuda: torch.device, table: LazyTable) -> None:
    rows = DeviceTable(table, cuda, torch.bfloat16)
    for turn in range(20):
        asked = [RANDOM.integers(0, 1500, (50 + turn, 16)) for _ in range(7)]
        ahead = [rows.prefetch(ids) for ids in asked]
        ahead[-1].values()
        for each in ahead:
            each.send()
        ahead[1].cancel()
        del ahead[0]
        gc.collect()
        for ids, each in zip(asked[2:], ahead[1:], strict=True):
            same_bits(each.values(), expected(table, ids, torch.bfloat16))
    assert rows._ahead is not None
    assert rows._ahead._lent == 0
    assert len(rows._ahead._free) <= 4
    rows.close()


@pytest.mark.gpu
def test_gpu_values_in_a_graphs_input(cuda: torch.device, table: LazyTable) -> None:
    rows = DeviceTable(table, cuda, torch.float32)
    out = torch.zeros(2, 16, 160, device=cuda)
    doubled = torch.zeros_like(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled.copy_(out * 2)
    for _ in range(30):
        ids = RANDOM.integers(0, 1500, (2, 16))
        asked = rows.start(ids)
        asked.values(out)
        graph.replay()
        same_bits(doubled, expected(table, ids, torch.float32) * 2)
    rows.close()


@pytest.mark.gpu
def test_gpu_values_on_other_streams_and_in_inference_mode(cuda: torch.device, table: LazyTable) -> None:
    rows = DeviceTable(table, cuda, torch.float32)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        inside = rows.gather(IDS)
    stream.synchronize()
    same_bits(inside, expected(table, IDS, torch.float32))
    same_bits(rows.gather(IDS), expected(table, IDS, torch.float32))
    rows.close()


@pytest.mark.gpu
def test_gpu_stalls_are_timed(cuda: torch.device, table: LazyTable) -> None:
    rows = DeviceTable(table, cuda, torch.float32, timed=True)
    asked = rows.prefetch(IDS)
    asked.values()
    torch.cuda.synchronize()
    assert asked.stall_events is not None
    before, after = asked.stall_events
    assert 0 <= before.elapsed_time(after) < 10_000
    rows.close()


@pytest.mark.gpu
def test_gpu_memory_is_registered_and_given_back(cuda: torch.device, table: LazyTable) -> None:
    rows = DeviceTable(table, cuda, torch.float32)
    rows.gather(IDS)
    assert rows._ahead is not None
    (staging,) = rows._ahead._free
    memory = staging._memory
    assert memory is not None
    assert memory.registered
    assert memory.bytes.is_pinned()
    rows.close()
    assert not memory.registered
    assert not memory.bytes.is_pinned()


@pytest.mark.gpu
def test_gpu_refused_registration_costs_only_time(
    cuda: torch.device, table: LazyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            return int(real.cudaHostRegister(0, size, flags))  # an error that CUDA remembers

    monkeypatch.setattr(pinned, "_cudart", Refusing)
    monkeypatch.setattr(pinned.PinnedMemory, "_warned", False)
    rows = DeviceTable(table, cuda, torch.float32)
    with pytest.warns(RuntimeWarning, match="refuses to register staging memory"):
        values = rows.gather(IDS)
    same_bits(values, expected(table, IDS, torch.float32))
    same_bits(rows.start(IDS).values(), expected(table, IDS, torch.float32))
    rows.close()


@pytest.mark.gpu
def test_gpu_threads_read_while_it_sends(cuda: torch.device, table: LazyTable) -> None:
    rows = DeviceTable(table, cuda, torch.float32)
    stop = threading.Event()

    def gather() -> None:
        while not stop.is_set():
            table.gather(IDS)

    thread = threading.Thread(target=gather)
    thread.start()
    try:
        for _ in range(50):
            same_bits(rows.prefetch(IDS).values(), expected(table, IDS, torch.float32))
    finally:
        stop.set()
        thread.join()
    rows.close()
