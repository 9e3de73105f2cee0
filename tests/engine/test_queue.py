"""Requests that wait for a lane are warm when they get it. Waits are counted, not timed: whether rows were there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lazyio.engine import LLM
from lazyio.engine import scheduler as scheduler_module
from lazyio.engine.sampling import Sampling
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.prefetch import Ticket


class Waits:
    """Whether each ticket that was taken had been read by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warm: list[bool] = []
        taken = Ticket.result

        def result(ticket: Ticket) -> Any:
            self.warm.append(ticket.done())
            return taken(ticket)

        monkeypatch.setattr(Ticket, "result", result)


@contextmanager
def slow(folder: Path, delay_s: float) -> Iterator[LLM]:
    """One lane, and a device whose reads all come so late."""
    given: dict[str, Any] = {"lazy_mode": "on-direct", "row_cache": 0, "direct_io": "on", "ubatch": 64}
    late = Faults(late=1, delay_s=delay_s)
    with LLM(folder, device="cpu", wrap=lambda fetcher: with_faults(fetcher, late), **given) as llm:
        yield llm


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def first_tokens(folder: Path, pair: Any, queued: int, waits: Waits, delay_s: float = 0.002) -> list[bool]:
    """Of so many prompts that wait while a reply goes on for as long as their reads take: whose rows were there."""
    with slow(folder, delay_s) as llm:
        running = llm.reply(pair.tokens(5), max_tokens=4)
        next(running)
        requests = [llm._request(llm._plan(pair.tokens(30, seed=i), 2, ()), Sampling()) for i in range(queued)]
        for request in requests:
            llm.scheduler.add(request)
        waits.warm.clear()
        until(lambda: all(each.first is None or each.first._rows._done() for each in requests))
        while llm.scheduler.step():
            pass
        assert all(len(request.writing.tokens) == 2 for request in requests)
    return waits.warm


@pytest.mark.parametrize("queued", [4, 16])
def test_who_has_waited_long_enough_waits_for_no_rows(
    queued: int, saved: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, folder = saved("qwen4_exp")
    assert first_tokens(folder, pair, queued, Waits(monkeypatch)) == [True] * queued


def test_without_reading_ahead_they_wait(
    saved: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail. Reads take longer than a busy machine computes a layer in."""
    pair, folder = saved("qwen4_exp")
    monkeypatch.setattr(scheduler_module.Scheduler, "_read_ahead", lambda _: None)
    assert not all(first_tokens(folder, pair, 4, Waits(monkeypatch), delay_s=0.1))
