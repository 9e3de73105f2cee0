from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lazyio.bench.outcome import Outcome
from lazyio.bench.report import WIDTH, show
from lazyio.bench.rounds import Repeat, Section
from lazyio.bench.runs import Run

Compare = Callable[..., Outcome]


def shown(outcome: Outcome) -> list[str]:
    console = Console(file=io.StringIO(), width=WIDTH)
    show(outcome, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def big(compare: Compare, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """An outcome with numbers as long as they get, at one temperature."""

    def make(temperature: str, decode: bool = False, **measured: Any) -> Outcome:
        small: dict[str, Any] = {"decode": True, "steps": 3} if decode else {}
        outcome = compare(warm=temperature == "warm", **small)
        (section,) = outcome.sections
        section.temperature = temperature
        long = {
            "temperature": temperature,
            "ratio_to_device_limit": 10.25 if temperature == "cold" else None,
            "ratio_to_take": 0.0001 if temperature == "warm" else None,
            "p50_us": 123_456.0 if decode else None,
            "p99_us": 223_456.0 if decode else None,
            "p50_over_limit": 12.34 if decode and temperature == "cold" else None,
            "backend_used": "pread",
            "fallback_reason": "on-direct can't be had",
            **measured,
        }
        section.arms = [replace(section.arms[0], label=label) for label in ("on-bare", "on-direct/1024")]
        section.twice = section.arms[-1]
        section.runs = [
            make_run(arm.label, round=number, again=again, rows_per_s=rate * (number + 1.0), **long)
            for number in range(2)
            for arm, rate in zip(section.arms, (999_999.0, 1234.0), strict=True)
            for again in (False, True)[: 1 + (arm is section.twice)]
        ]
        return outcome

    return make


@pytest.mark.parametrize("temperature", ["cold", "warm", "preloaded"])
@pytest.mark.parametrize("decode", [False, True])
def test_a_line_an_arm_however_long_the_numbers(big: Callable[..., Outcome], temperature: str, decode: bool) -> None:
    lines = shown(big(temperature, decode))
    assert lines[0].rstrip() == f"{temperature}: median [lowest, highest] of 2 of 2 rounds"
    rule = next(number for number, line in enumerate(lines) if "───" in line)
    assert [line.split()[0] for line in lines[rule + 1 : rule + 3]] == ["on-bare", "on-direct/1024"]
    assert lines[rule + 3].strip() == ""
    assert all(len(line) <= WIDTH for line in lines[: rule + 4])
    assert "…" not in "".join(lines)


def test_what_is_beside_the_rows(big: Callable[..., Outcome]) -> None:
    assert "of np.take" in " ".join(shown(big("warm")))
    assert "CPU second" in " ".join(shown(big("warm")))
    cold = " ".join(shown(big("cold")))
    assert "device limit" in cold
    assert "np.take" not in cold


def test_how_it_was_made_is_said(compare: Compare) -> None:
    text = "\n".join(shown(compare(cold=True, warm=True, modes="on-bare,on", rounds=2)))
    for said in (
        "Table: ",
        "40,000 rows of 90 bytes (IQ4_NL), 3.4 MiB.",
        "Rows: 1,600 in 3 ubatches, ",
        "token ids of the text that comes with lazyio.",
        " OS pages of ",
        "counted with mincore on a fresh map.",
        "Device limit: ",
        "-byte blocks, ",
        "np.take: ",
        "cold: on is ",
        "warm: on against itself ",
        "Bytes: equal in all runs",
    ):
        assert said in text


def test_a_fallback_is_marked_and_named_once(big: Callable[..., Outcome]) -> None:
    lines = shown(big("cold"))
    assert sum("pread direct *" in line for line in lines) == 2
    assert lines.count("* on-direct/1024 fell back: on-direct can't be had.") == 1


def test_rounds_that_do_not_count_are_said(big: Callable[..., Outcome]) -> None:
    assert "NONE of which was steady" in shown(big("cold", counted=False))[0]


def test_repeats_are_counted(compare: Compare) -> None:
    outcome = compare()
    section: Section = outcome.sections[0]
    section.repeats += [Repeat(0, "slow: a"), Repeat(1, "unsteady: b"), Repeat(1, "unsteady: c")]
    assert "cold: rounds repeated: 1 slow, 2 unsteady." in shown(outcome)


def test_why_there_is_no_take(compare: Compare) -> None:
    outcome = compare(warm=True)
    course = outcome.take._course
    outcome.take._course = replace(course, spec=replace(course.spec, extents=course.spec.extents * 3))
    outcome.take.arms.clear()
    outcome = replace(outcome, spec=outcome.take._course.spec)
    assert "np.take: not measured; it needs one array, and the rows lie in 3 extents." in shown(outcome)
