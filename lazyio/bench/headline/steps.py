"""Making the table, and measuring two rounds of one prompt at a time."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lazyio
from lazyio.bench.abba.process import do
from lazyio.bench.headline.room import check_disk
from lazyio.bench.headline.work import ARCHITECTURE, STEP_ROUNDS, Subject, Work
from lazyio.errors import RunFailed, SettingError
from lazyio.units import format_bytes

_LAZYIO = "from lazyio.cli import main; main()"


def make(work: Work, subject: Subject, table_bytes: int, say: Callable[[str], None]) -> bool:
    """Make what is read of the model, its configuration and its table; whether it was not there.

    Raises NeverFits where the disk has too little room, RunFailed where it can't be made, or not in time.
    """
    if work.model.exists():
        return False
    unfinished = work.model.with_name(f"{work.model.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    check_disk(work.model.parent, table_bytes)
    command = [sys.executable, str(work.maker), str(unfinished), "--no-trunk", "--arch", ARCHITECTURE]
    command += ["--size", subject.size, "--rows", str(subject.rows), "--type", subject.stored]
    say(f"making {work.model}, {format_bytes(table_bytes)}")
    try:
        do(command, _environment(), min(work.step_s, work.left_s), work.lock)
        unfinished.rename(work.model)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def measure(work: Work, subject: Subject, advanced: bool, say: Callable[[str], None]) -> bool:
    """Measure what is missing; whether the budget sufficed. `advanced`: whether it has already served for something.

    Raises RunFailed where a step fails or takes too long, SettingError for a budget that served for nothing.
    """
    short: int | None = None
    for tokens, step in work.missing():
        known_s = max((done["took_s"] for done in work.measured(tokens)), default=0.0)
        rounds = 0 if known_s > work.left_s else _step(work, subject, tokens, step)
        if rounds < STEP_ROUNDS:
            short = short or tokens
        if rounds:
            advanced = True
            how = "measured" if rounds == STEP_ROUNDS else f"the budget ended it after {rounds} of {STEP_ROUNDS} rounds"
            say(f"{tokens:,} tokens, step {step} of {work.steps}: {how}")
    if short is not None and not advanced:
        raise SettingError(f"BUDGET_S is {work.budget_s:g}, too little for a step of {short:,} tokens: raise it")
    return short is None


def _step(work: Work, subject: Subject, tokens: int, step: int) -> int:
    """Measure two rounds of a prompt and keep those that are complete; how many they are, fewer where the budget ended
    first. Raises RunFailed."""
    out = work.partial_of(tokens, step)
    command = [sys.executable, "-c", _LAZYIO, "bench-engine", str(work.model), "--load-format", "dummy"]
    command += ["--layers", str(subject.layers), "--device", subject.device, "--prompts", str(tokens), "--decode", "0"]
    command += ["--modes", subject.modes, "--lookahead", subject.lookahead, "--rounds", str(STEP_ROUNDS), "--cold"]
    command += ["--strict", "--json", str(out), *(["--ids", subject.ids] if subject.ids else [])]
    command += ["--trunk", subject.trunk] if subject.trunk else []
    started = time.monotonic()
    limit_s = min(work.step_s, work.left_s)
    if limit_s <= 0:
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)  # of one that was killed
    try:
        do(command, _environment(), limit_s, work.lock)
    except RunFailed:
        if work.left_s > 0:
            raise
    finally:
        rounds = work.keep_partial(tokens, step, subject, time.monotonic() - started)
    return rounds


def _environment() -> dict[str, str]:
    """Where Python finds this very package, whatever else is installed."""
    own = str(Path(lazyio.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])}
