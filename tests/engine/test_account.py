import json
from typing import Any

import pytest

from lazyio.engine.account import Account, Meter, describe, percentile
from lazyio.gate import TableStats
from lazyio.modes import Backend

BACKEND = Backend("uring", "pread", True, 32, 32, 512, "uring can't be had: EPERM", "as asked")
STATS = TableStats(
    gathers=4, rows=2064, unique_rows=1900, lent_rows=30, cache_hits=120, reads=1780, wall_s=0.5, service_s=1.0
)


def account(**changed: Any) -> Account:
    given: dict[str, Any] = {
        "prompt_tokens": 2000,
        "cuts": (1500, 500),
        "prompt_s": 4.0,
        "prompt_waited_s": 0.5,
        "reply_tokens": 5,
        "steps_s": (0.25, 0.25, 0.25, 0.25),
        "steps_waited_s": (1e-4, 2e-4, 3e-4, 9e-4),
        "device_s": 0.0,
        "on_cuda": False,
        "table": STATS,
        "major_faults": 1,
        "backend": BACKEND,
    }
    return Account(**given | changed)


def test_the_line() -> None:
    assert account().line() == (
        "prompt of 2,000 tokens at 500/s in 2 ubatches, reply of 5 tokens at 4.00/s; "
        "waited for rows 500.0 ms in the prompt and 300 us a step (p50, p99 900); "
        "2,064 rows, 1,900 unique, 30 of ubatches before, 120 cache hits, 1,780 reads (3,560/s in gathers), 1 fault, "
        "ratio to the device's limit not measured; "
        "mode uring by pread, direct: uring can't be had: EPERM; "
        "bound by compute (rows 10%, compute 90%)"
    )


def test_what_was_not_counted_is_not_claimed() -> None:
    backend = Backend("off", "resident", False, 1, 1, 1, None, "as asked")
    line = account(table=TableStats(rows=1), backend=backend, steps_s=(), steps_waited_s=(), cuts=(2000,)).line()
    assert "; waited for rows 500.0 ms in the prompt; 1 row, 0 cache hits, 0 reads, 1 fault, " in line
    assert line.startswith("prompt of 2,000 tokens at 500/s, reply of 5 tokens; ")
    assert "; mode off by resident, buffered; " in line


def test_a_prompt_that_never_had_its_turn() -> None:
    assert account(cuts=(), steps_s=(), steps_waited_s=()).line() == "prompt of 2,000 tokens, not computed"
    waiting = Meter(5, None, on_cuda=False)
    waiting.end()
    queued_s = waiting.account(0).queued_s
    assert waiting.account(0).queued_s == queued_s > 0


def test_a_model_without_a_table() -> None:
    line = account(table=None, backend=None, prompt_waited_s=0.0, steps_waited_s=(0.0,) * 4).line()
    assert "; no table; bound by compute (rows 0%, compute 100%)" in line


@pytest.mark.parametrize(
    ("changed", "bound", "shares"),
    [
        ({}, "compute", {"rows": 0.1003, "compute": 0.8997}),
        ({"prompt_waited_s": 3.0}, "rows", {"rows": 0.6003, "compute": 0.3997}),
        ({"on_cuda": True, "device_s": 4.0}, "compute", {"rows": 0.1003, "compute": 0.8, "host": 0.0997}),
        ({"on_cuda": True, "device_s": 1.0}, "host", {"rows": 0.1003, "compute": 0.2, "host": 0.6997}),
        ({"on_cuda": True, "device_s": 9.0}, "compute", {"rows": 0.1003, "compute": 0.8997, "host": 0.0}),
        ({"prompt_s": 0.0, "steps_s": ()}, "compute", {"rows": 0.0, "compute": 1.0}),
    ],
)
def test_what_bounds_a_run(changed: dict[str, Any], bound: str, shares: dict[str, float]) -> None:
    found = account(**changed)
    assert found.shares == pytest.approx(shares)
    assert found.bound == bound


def test_speeds_of_nothing() -> None:
    nothing = account(prompt_s=0.0, steps_s=(), steps_waited_s=())
    assert (nothing.prompt_tokens_per_s, nothing.reply_tokens_per_s) == (0.0, 0.0)


def test_as_json() -> None:
    document = json.loads(json.dumps(account().as_json()))
    assert document["prompt_tokens_per_s"] == 500.0
    assert document["reply_tokens_per_s"] == 4.0
    assert document["bound"] == "compute"
    assert document["table"]["reads"] == 1780
    assert document["backend"]["fallback_reason"] == "uring can't be had: EPERM"


def test_the_way_of_rows() -> None:
    assert describe(BACKEND) == "mode uring by pread, direct: uring can't be had: EPERM"


@pytest.mark.parametrize(("share", "value"), [(0.5, 3), (0.0, 1), (0.99, 5), (1.0, 5)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile([5, 1, 4, 2, 3], share) == value
