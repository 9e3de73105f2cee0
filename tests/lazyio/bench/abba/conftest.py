from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lazyio.bench.abba.definition import plan_of
from lazyio.bench.abba.journal import Run
from lazyio.bench.abba.plan import Plan

IDLE = {"load": 0.5, "cpu_mhz": 2000.0, "gpus": []}


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """Arms a and b; keywords are keys of the definition."""

    def make(**given: Any) -> Plan:
        arms = {"a": {"set": {"n": 1}}, "b": {"set": {"n": 2}}}
        base = {"command": "run {n}", "arms": arms, "rounds": 2, "metrics": {"x": {"better": "lower"}}}
        return plan_of(base | given)

    return make


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """A run with one metric."""

    def make(arm: str, x: float, *, again: bool = False, **more: Any) -> Run:
        base: dict[str, Any] = {
            "arm": arm,
            "again": again,
            "metrics": {"x": x},
            "equal": {"tokens": "t", "logits": "l"},
            "wall_s": 1.0,
            "took_s": 1.5,
            "started": "2000-01-01T00:00:00.000+00:00",
            "cold_pages": None,
            "before": IDLE,
            "after": IDLE,
        }
        return Run(**(base | more))

    return make
