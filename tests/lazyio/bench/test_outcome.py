from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyio.bench.outcome import Outcome
from lazyio.version import __version__

PAGE = Path(__file__).parents[3] / "docs" / "bench.md"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return {}


@pytest.fixture
def both(compare: Callable[..., Outcome], document: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of a comparison at both temperatures, as a reader of the file sees it."""
    if not document:
        document |= json.loads(json.dumps(compare(cold=True, warm=True, modes="on-bare,on").as_json()))
    return document


def test_top_level(both: dict[str, Any]) -> None:
    parts = {"table", "workload", "device_limit", "take_limit", "runs", "unfinished", "summary", "method"}
    assert parts | {"lazyio_version", "complete"} == set(both)
    assert both["complete"]
    assert both["lazyio_version"] == __version__


def test_table_and_workload(both: dict[str, Any], gguf_path: Path) -> None:
    table, workload = both["table"], both["workload"]
    assert (table["path"], table["rows"], table["row_bytes"], table["dtype"]) == (str(gguf_path), 40_000, 90, "IQ4_NL")
    assert (workload["rows"], workload["tokens"], workload["ubatches"]) == (1600, 100, 3)
    assert workload["windows"] <= workload["unique_rows"] <= 1600


def test_the_limit_is_of_cold_rounds_alone(both: dict[str, Any]) -> None:
    limit = both["device_limit"]
    assert {"iops", "block_bytes", "queue_depth", "backend", "arms"} <= set(limit)
    assert len(limit["arms"]) == 4
    rates = sorted(arm["reads_per_s"] for arm in limit["arms"])
    assert limit["iops"] == (rates[1] + rates[2]) / 2
    assert len(both["take_limit"]["arms"]) == 4


def test_runs_and_their_ratios(both: dict[str, Any]) -> None:
    assert [run["temperature"] for run in both["runs"]] == ["cold"] * 3 + ["warm"] * 3
    for run in both["runs"]:
        cold = run["temperature"] == "cold"
        rate, before, after, ratio = (
            ("reads_per_s", "limit_before", "limit_after", "ratio_to_device_limit")
            if cold
            else ("rows_per_s", "take_before", "take_after", "ratio_to_take")
        )
        assert run[ratio] == pytest.approx(run[rate] / ((run[before] + run[after]) / 2))
        assert (run["ratio_to_take"] is None) == cold


def test_summary(both: dict[str, Any]) -> None:
    assert set(both["summary"]) == {"cold", "warm"}
    arms = both["summary"]["cold"]["arms"]
    assert [arm["arm"] for arm in arms] == ["on-bare", "on"]
    assert set(arms[1]["rows_per_s"]) == {"median", "low", "high"}
    assert {"median", "mean", "two_se", "slower", "rounds"} <= set(arms[1]["speedup_over"]["on-bare"])


def test_method(both: dict[str, Any]) -> None:
    method = both["method"]
    assert method["rounds"] == 1
    assert method["repeats"] == []
    assert method["twice"] == "on"
    assert re.match(r"0 of [\d,]+ OS pages", method["cold_proof"])


def test_settings_of_the_environment_are_told(
    compare: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, both: dict[str, Any]
) -> None:
    assert both["method"]["settings"] == []
    monkeypatch.setenv("LAZYIO_WORKERS", "5")
    assert compare(warm=True).as_json()["method"]["settings"] == ["workers=5 (LAZYIO_WORKERS)"]


def test_what_was_never_cold_has_no_proof(compare: Callable[..., Outcome]) -> None:
    for asked in ({"warm": True}, {"preload": "hot-set"}):
        outcome = compare(**asked)
        assert outcome.cold_proof() is None
        assert outcome.as_json()["device_limit"] is None


def keys_of(document: Any) -> Iterator[str]:
    """Every name in a JSON document that is not itself something measured: a temperature, an arm, a depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            if re.fullmatch(r"[a-z][a-z0-9_]*", key) and key not in ("cold", "warm", "on"):
                yield key
            yield from keys_of(value)
    elif isinstance(document, list):
        for value in document:
            yield from keys_of(value)


def test_every_key_is_in_the_documentation(both: dict[str, Any]) -> None:
    documented = set(re.findall(r"`([a-z0-9_]+)`", PAGE.read_text()))
    assert set(keys_of(both)) - documented == set()


def test_decode_adds_no_key(both: dict[str, Any], compare: Callable[..., Outcome]) -> None:
    decode = json.loads(json.dumps(compare(decode=True, steps=5).as_json()))
    assert set(keys_of(decode)) <= set(keys_of(both))
