from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lazyio import RunsDifferError
from lazyio.bench.headline.report import report
from lazyio.bench.headline.work import Subject, Work

SUBJECT = Subject("tiny", "F8_E4M3", 4000, 4, "cpu", "on-bare,uring", "0,2", None)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "maker", tmp_path / "model", tmp_path / "results", [100], 2, 60, math.inf, math.inf, -1)


def timed(mode: str, lookahead: int, wall_s: float, *, again: bool = False, logits: str = "a") -> dict[str, Any]:
    return {
        "way": {"mode": mode, "lookahead": lookahead},
        "again": again,
        "run": {
            "wall_s": wall_s,
            "waits_s": [0.25 * wall_s, 0.25 * wall_s],
            "stats": {"reads": 1200},
            "counters": {"major_faults": 7},
            "logits": logits,
        },
        "limits": None if mode == "off" else [1000.0, 1400.0],
        "floor_s": 0.5,
    }


def step(*rounds: list[dict[str, Any]], subject: str = "Model: m.") -> dict[str, Any]:
    prompt = {"tokens": 100, "cuts": [64, 36], "reads": [700, 400], "repeats": 1, "rounds": list(rounds)}
    return {"subject": subject, "prompts": [prompt], "decode": None}


def a_round(bare_s: float, uring_s: float, logits: str = "a") -> list[dict[str, Any]]:
    return [
        timed("off", 2, 0.4, again=True, logits=logits),
        timed("uring", 2, uring_s, logits=logits),
        timed("on-bare", 2, bare_s / 2, logits=logits),
        timed("on-bare", 0, bare_s, logits=logits),
        timed("off", 2, 0.5, logits=logits),
    ]


def printed(work: Work) -> list[list[str]]:
    console = Console(width=140)
    with console.capture() as said:
        report(work, SUBJECT, console)
    return [line.split() for line in said.get().splitlines()]


def test_figures_are_of_all_steps_and_beside_on_bare_of_the_same_round(work: Work) -> None:
    work.keep(100, 1, SUBJECT, step(a_round(2.0, 0.5), a_round(4.0, 0.8)), 1.0)
    work.keep(100, 2, SUBJECT, step(a_round(3.0, 1.0)), 1.0)
    lines = printed(work)
    rows = [line[1:] for line in lines if line[:1] == ["100"]]
    ways = {" ".join(row[:2]): row[2:] for row in rows[:-1]}
    assert list(ways) == ["uring +2", "on-bare +2", "on-bare +0", "off +2"]
    assert rows[-1][:3] == ["off", "+2", "(again)"]
    # tokens/s, T, T*, T / T* [,], waited, reads, faults, times on-bare [,]
    uring = "125 800 500 1.60 [1.00, 2.00] 400 1,200 7 4.00 [3.00, 5.00]"
    assert ways["uring +2"] == uring.split()
    assert ways["on-bare +0"][-3:] == ["1.00", "[1.00,", "1.00]"]
    assert ways["on-bare +2"][-3:] == ["2.00", "[2.00,", "2.00]"]
    note = next(" ".join(line) for line in lines if line[:1] == ["Prompt"])
    assert note == (
        "Prompt of 100: 3 rounds; 2 ubatches of at most 64; 1,100 reads at least; the device's limit 1,200 "
        "[1,000, 1,400] reads/s; runs beside an unsteady device: 9; rounds that were run again: 2."
    )
    kept = json.loads((work.results / "headline.json").read_text())
    assert kept["figures"]["100"]["uring +2"]["times on-bare"] == [4.0, 5.0, 3.0]
    assert kept["subject"]["layers"] == 4


def test_nothing_measured_prints_nothing(work: Work) -> None:
    assert printed(work) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (step(a_round(3.0, 1.0, logits="b")), "had logits that differ"),
        (step(a_round(3.0, 1.0), subject="Model: another."), "had a model, a table, a device or tokens that differ"),
    ],
)
def test_steps_that_differ_give_no_figures(work: Work, other: dict[str, Any], message: str) -> None:
    work.keep(100, 1, SUBJECT, step(a_round(2.0, 0.5)), 1.0)
    work.keep(100, 2, SUBJECT, other, 1.0)
    with pytest.raises(RunsDifferError, match=message):
        printed(work)
