from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyio.bench import save_trace
from lazyio.bench.options import DEFAULT_UBATCH, Request
from lazyio.bench.rounds import Rules
from lazyio.errors import SettingError, TableError
from lazyio.ple.spec import TableSpec

IDS, TRACE = Path("ids.npy"), Path("trace.npz")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ids": IDS, "uniform": True}, "--ids and --uniform contradict"),
        ({"ids": IDS, "trace": TRACE}, "--ids and --trace contradict"),
        ({"uniform": True, "trace": TRACE}, "--uniform and --trace contradict"),
        ({"trace": TRACE, "tokens": 5}, "--trace and --tokens contradict"),
        ({"trace": TRACE, "ubatch": 5}, "--trace and --ubatch contradict"),
        ({"decode": True, "tokens": 5}, "--decode and --tokens contradict.* use --steps"),
        ({"decode": True, "ubatch": 5}, "--decode and --ubatch contradict"),
        ({"decode": True, "limit_reads": 5}, "--decode and --limit-reads contradict"),
        ({"preload": "hot-set", "warm": True}, "--preload and --warm contradict"),
        ({"preload": "hot-set", "cold": True}, "--preload and --cold contradict"),
        ({"preload": "hot-set", "direct_io": "on"}, "--preload and --direct-io on contradict"),
        ({"preload": "hot-set", "max_repeats": 1}, "--max-repeats has no effect with --preload"),
        ({"preload": "all"}, "--preload is 'all'; it can be hot-set"),
        ({"steps": 5}, "--steps has no effect without --decode"),
        ({"pause": 5.0}, "--pause has no effect without --min-iops"),
        ({"tensor": "rows"}, "--tensor has no effect without PATH"),
        ({"path": Path("model.gguf"), "demo_dir": Path("demo")}, "--demo-dir has no effect"),
        ({"warm": True, "min_iops": 5.0}, "--min-iops has no effect without --cold"),
        ({"warm": True, "limit_reads": 5}, "--limit-reads has no effect without --cold"),
        ({"preload": "hot-set", "limit_reads": 5}, "--limit-reads has no effect without --cold"),
        ({"json": Path("nowhere/result.json")}, "there is no folder nowhere"),
        ({"plot": Path("nowhere/result.png")}, "there is no folder nowhere"),
        ({"json": Path("/")}, "it is a folder"),
        ({"plot": Path("result.pdf")}, "the picture is a .png file"),
    ],
)
def test_contradictions(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Request(**asked).check()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"decode": True, "steps": 5, "ids": IDS, "warm": True, "cold": True},
        {"trace": TRACE, "decode": True, "steps": 5},
        {"preload": "hot-set", "direct_io": "off"},
        {"warm": True, "max_repeats": 0},
        {"cold": True, "min_iops": 4e4, "pause": 1.0, "max_repeats": 0, "limit_reads": 10},
    ],
)
def test_what_goes_together(asked: dict[str, Any]) -> None:
    Request(**asked).check()


def test_temperatures() -> None:
    assert Request().sections == Request(cold=True).sections == ("cold",)
    assert Request(warm=True).sections == ("warm",)
    assert Request(warm=True, cold=True).sections == ("cold", "warm")
    assert Request(preload="hot-set").sections == ("preloaded",)


def test_rules() -> None:
    assert Request(rounds=3).rules == Rules(3)
    assert Request(max_repeats=0, min_iops=4e4, pause=1.0).rules == Rules(5, 0, 4e4, 1.0)


def arms(**asked: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(arm.label, dict(arm.settings)) for arm in Request(**asked).arms()[0]]


def test_each_arm_gets_the_settings_that_it_has() -> None:
    found = arms(modes="on, on-direct,uring", direct_io="on", queue_depth=64, block_bytes="4KiB")
    assert found == [
        ("on", {}),
        ("on-direct", {"direct_io": "on", "block_bytes": "4KiB"}),
        ("uring", {"direct_io": "on", "block_bytes": "4KiB", "queue_depth": 64}),
    ]


def test_an_arm_a_number_of_workers() -> None:
    assert arms(modes="on,on-direct", workers="1,8,32") == [
        ("on", {}),
        ("on-direct/1", {"workers": 1}),
        ("on-direct/8", {"workers": 8}),
        ("on-direct/32", {"workers": 32}),
    ]
    assert arms(modes="on-direct", workers="8") == [("on-direct", {"workers": 8})]


def test_preloaded_rows_are_read_buffered() -> None:
    assert arms(modes="on,uring", preload="hot-set") == [("on", {}), ("uring", {"direct_io": "off"})]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"modes": "on,off", "workers": "8"}, "--workers has no effect in --modes on,off"),
        ({"modes": "on", "direct_io": "on"}, "--direct-io has no effect in --modes on"),
        ({"modes": "on-direct", "queue_depth": 8}, "--queue-depth has no effect in --modes on-direct"),
        ({"modes": "on", "block_bytes": "4096"}, "--block-bytes has no effect in --modes on"),
        (
            {"modes": "uring", "direct_io": "off", "block_bytes": "4096"},
            "block_bytes has no effect while direct_io is off",
        ),
        ({"modes": "on,on"}, "each once"),
        ({"modes": " ,"}, "name one mode or more"),
        ({"modes": "on,fast"}, "lazy_mode is 'fast'; it can be off, on,"),
        ({"modes": "on-direct", "workers": "8,8"}, "name each number once"),
        ({"modes": "on-direct", "workers": "8,"}, "workers is ''"),
        ({"modes": "on-direct", "workers": "many"}, "workers is 'many'"),
        ({"modes": "on,uring", "aa": "off"}, "--aa is 'off', which is not among on, uring"),
    ],
)
def test_modes_that_can_not_be(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Request(**asked).arms()


def test_the_arm_that_runs_twice() -> None:
    assert Request(modes="on,uring").arms()[1].label == "uring"
    assert Request(modes="on,uring", aa="on").arms()[1].label == "on"
    workers = {"modes": "on-direct,on", "workers": "1,8"}
    assert Request(**workers, aa="on-direct").arms()[1].label == "on-direct/8"
    assert Request(**workers, aa="on-direct/1").arms()[1].label == "on-direct/1"


def test_rows_come_from_what_is_named(table: TableSpec, ids_path: Path, tmp_path: Path) -> None:
    assert str(ids_path) in Request(ids=ids_path).workload(table).source
    assert "uniform random token ids" in Request(uniform=True, tokens=10).workload(table).source
    text = Request().workload(table)
    assert "comes with lazyio" in text.source
    assert (text.tokens, len(text.ubatches[0])) == (16_384, 16 * DEFAULT_UBATCH)
    assert "uniform random token ids" in Request(tokens=16_385).workload(table).source  # more than the text has
    trace = tmp_path / "trace.npz"
    save_trace(trace, [np.array([1, 2]), np.array([3])])
    assert Request(trace=trace).workload(table).rows == 3
    assert Request(trace=trace, decode=True, steps=1).workload(table).rows == 2


def test_decoding_is_steps_of_one_token(table: TableSpec, ids_path: Path) -> None:
    found = Request(decode=True, ids=ids_path).workload(table)
    assert found.decode
    assert [len(ids) for ids in found.ubatches] == [16] * 500
    assert len(Request(decode=True, steps=7).workload(table).ubatches) == 7
    with pytest.raises(TableError, match="601 are asked for"):
        Request(decode=True, steps=601, ids=ids_path).workload(table)
