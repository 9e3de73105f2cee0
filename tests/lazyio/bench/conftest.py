from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lazyio import host
from lazyio.bench.options import Request
from lazyio.bench.outcome import Outcome
from lazyio.bench.runs import Arm, Mark, Run
from lazyio.bench.session import execute
from lazyio.ple.spec import TableSpec
from lazyio.ple.synthetic import write_gguf
from lazyio.ple.tables import find_table

ROWS = 40_000

RUN = Run(
    mode="uring",
    arm="uring",
    backend_used="uring",
    fallback_reason=None,
    direct_io=True,
    temperature="cold",
    section="cold",
    workers=1,
    queue_depth=4096,
    block_bytes=512,
    rows=1000,
    unique_rows=900,
    windows=800,
    cache_hits=0,
    reads=800,
    bytes_read=409_600,
    device_read_bytes=409_600,
    syscr=0,
    wall_s=0.01,
    user_s=0.001,
    system_s=0.001,
    caller_cpu_s=0.002,
    major_faults=0,
    service_us_mean=100.0,
    effective_concurrency=8.0,
    service_source="fetcher",
    resident_pages_before=0,
    rows_per_s=100_000.0,
    rows_per_cpu_s=500_000.0,
    reads_per_s=80_000.0,
)


@pytest.fixture(autouse=True)
def _at_once_and_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between attempts, and no settings of the environment."""
    for variable in [name for name in os.environ if name.startswith("LAZYIO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr("lazyio.bench.cold._PAUSE_S", 0.01)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """A run of an arm; arguments replace what it measured."""

    def make(arm: str = "uring", **measured: Any) -> Run:
        return replace(RUN, **{"arm": arm, "mode": arm, **measured})

    return make


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of hashed rows of 90 bytes, on a filesystem that can be cold."""
    folder = tmp_path_factory.mktemp("bench")
    if not host.filesystem_of(folder).drops_cache:
        pytest.skip("temporary files lie in memory here")
    (path,) = write_gguf(folder / "table.gguf", ROWS, "IQ4_NL", 160)
    return path


@pytest.fixture(scope="session")
def table(gguf_path: Path) -> TableSpec:
    return find_table(gguf_path)


@pytest.fixture
def ids_path(tmp_path: Path) -> Path:
    """Token ids, some of them often."""
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(1).integers(0, 3000, 600))
    return path


@pytest.fixture
def console() -> Console:
    """A file, as wide as the reports."""
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def compare(gguf_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a small comparison on the table; arguments are those of a request. Every round counts."""
    monkeypatch.setattr("lazyio.bench.rounds.STEADY_WITHIN", 1e9)

    def run(**asked: Any) -> Outcome:
        small: dict[str, Any] = {"path": gguf_path, "modes": "on", "rounds": 1, "max_repeats": 0}
        if not asked.get("decode"):
            small |= {"tokens": 100, "ubatch": 40}
        if asked.get("preload"):
            del small["max_repeats"]
        return execute(Request(**(small | asked)), console)

    return run


class Scripted:
    """A yardstick that shows the rates it is told, the last one for ever."""

    name, unit = "device limit", "reads/s"

    def __init__(self, *rates: float) -> None:
        self._rates = list(rates)
        self.compared: list[tuple[float, float]] = []

    def run(self) -> Mark:
        return Mark(self._rates.pop(0) if len(self._rates) > 1 else self._rates[0])

    def compare(self, run: Run, before: Mark, after: Mark) -> None:
        self.compared.append((before.rate, after.rate))


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def arms() -> list[Arm]:
    return [Arm(label, label) for label in ("a", "b", "c")]
