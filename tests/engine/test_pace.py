from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine import pace as pace_module
from lazyio.engine.pace import MeasuredPace, measure_pace
from lazyio.engine.ubatch import Rows, Ubatch


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Trunk:
    """Takes a fixed time a forward and a time a token, and ten times that the first time of each length."""

    vocab, max_tokens, row_values = 50, 4096, 8
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, clock: Clock, fixed_s: float, token_s: float, max_tokens: int = 4096) -> None:
        self._clock, self._fixed_s, self._token_s = clock, fixed_s, token_s
        self.max_tokens = max_tokens
        self.lengths: list[int] = []

    def new_state(self, capacity: int) -> Any:
        return SimpleNamespace(tokens=0)

    def step(self, ubatch: Ubatch, rows: Rows) -> torch.Tensor:
        assert rows.values().shape == (len(ubatch), self.row_values)
        seconds = self._fixed_s + len(ubatch) * self._token_s
        self._clock.now += seconds if len(ubatch) in self.lengths else 10 * seconds
        self.lengths.append(len(ubatch))
        return rows.values()


class Disk:
    """Takes a time a row."""

    n_rows = 1000

    def __init__(self, clock: Clock, row_s: float) -> None:
        self._clock, self._row_s = clock, row_s

    def gather_unique(self, ids: np.ndarray[Any, Any]) -> None:
        assert ids.min() >= 0
        assert ids.max() < self.n_rows
        self._clock.now += len(ids) * self._row_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


@pytest.mark.parametrize("fixed_s", [0.0, 4e-3])
@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 0.1])
def test_both_stages_are_measured_and_first_times_left_out(clock: Clock, fixed_s: float, token_s: float) -> None:
    trunk = Trunk(clock, fixed_s, token_s)
    pace = measure_pace(trunk, Disk(clock, 2e-5), 16)  # type: ignore[arg-type]
    assert pace.row_s == pytest.approx(2e-5)
    assert pace.token_s == pytest.approx(token_s)
    assert pace.forward_s == pytest.approx(fixed_s, abs=1e-9)
    assert trunk.lengths[:2] == [64, 64]
    few, many = sorted(set(trunk.lengths))
    assert few == 64
    assert 128 <= many <= 2048


def test_a_model_of_a_short_context(clock: Clock) -> None:
    trunk = Trunk(clock, 1e-3, 1e-4, max_tokens=32)
    pace = measure_pace(trunk, Disk(clock, 1e-5), 16)  # type: ignore[arg-type]
    assert set(trunk.lengths) == {32}
    assert (pace.token_s, pace.forward_s) == (pytest.approx((1e-3 + 32e-4) / 32), 0.0)


def test_times_that_do_not_grow_give_a_pace_all_the_same(clock: Clock) -> None:
    pace = measure_pace(Trunk(clock, 0.05, 0.0), Disk(clock, 1e-5), 16)  # type: ignore[arg-type]
    assert 0 < pace.token_s < 1e-3
    assert sum(pace.cuts(5000, 2048)) == 5000


def test_cuts_follow_the_pace() -> None:
    slow_disk = MeasuredPace(row_s=1e-5, token_s=1.7e-4, forward_s=2e-3, rows_per_token=13)
    in_memory = MeasuredPace(row_s=1e-8, token_s=1.7e-4, forward_s=2e-3, rows_per_token=13)
    assert slow_disk.cuts(2048, 2048)[0] < 128
    assert in_memory.cuts(2048, 2048) == [2048]
    assert sum(slow_disk.cuts(5001, 2048)) == 5001
    assert max(slow_disk.cuts(5001, 512)) <= 512
    assert str(slow_disk) == "100k rows/s and 5,882 tokens/s"
