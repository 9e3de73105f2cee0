"""What a reply took: one line for people, the same numbers for programs."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lazyio.bench.figures import short
from lazyio.engine.waits import Wait
from lazyio.gate import TableStats
from lazyio.modes import Backend
from lazyio.table import LazyTable


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds and counts of one prompt and its reply.

    `waited_s` are times in which computing stood still for rows, `device_s` the time in which this program waited for
    the device to finish, 0 on a CPU. Ubatches and their times are shared with all that is computed in them. Table and
    faults are those of the whole process meanwhile.
    """

    prompt_tokens: int
    cuts: tuple[int, ...]  # tokens of each ubatch of the prompt
    prompt_s: float  # up to the first token of the reply
    prompt_waited_s: float
    reply_tokens: int
    steps_s: tuple[float, ...]  # of each token of the reply but the first
    steps_waited_s: tuple[float, ...]
    device_s: float
    on_cuda: bool
    table: TableStats | None  # None for a model without a table
    major_faults: int
    backend: Backend | None
    queued_s: float = 0.0  # before the prompt, until it had a lane
    most_together: int = 1  # sequences in a ubatch
    known_tokens: int = 0  # of the prompt, which need not be computed

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of the prompt, as much as was computed, up to the first token of the reply."""
        return (self.prompt_tokens - self.known_tokens) / self.prompt_s if self.prompt_s else 0.0

    @property
    def reply_tokens_per_s(self) -> float:
        """Of the tokens that follow on the first one; 0 where there are none."""
        return len(self.steps_s) / sum(self.steps_s) if self.steps_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the time by what they went to, which sum to 1: rows, compute and, beside a device, host.

        On a device, `compute` is what the host spent waiting for it, and `host` the time it spent itself, launching.
        """
        wall_s = self.prompt_s + sum(self.steps_s)
        rows = min(1.0, (self.prompt_waited_s + sum(self.steps_waited_s)) / wall_s) if wall_s else 0.0
        if not self.on_cuda:
            return {"rows": rows, "compute": 1 - rows}
        compute = min(1 - rows, self.device_s / wall_s) if wall_s else 0.0
        return {"rows": rows, "compute": compute, "host": 1 - rows - compute}

    @property
    def bound(self) -> str:
        """What took the greatest part of the time, and would have to be faster."""
        shares = self.shares
        return max(shares, key=lambda name: shares[name])

    def line(self) -> str:
        """All of it in one line."""
        if not self.cuts:
            return f"prompt of {_counted(self.prompt_tokens, 'token')}, not computed"
        return "; ".join([self._speed(), *self._rows(), self._bounds()])

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        derived = {
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "reply_tokens_per_s": self.reply_tokens_per_s,
            "shares": self.shares,
            "bound": self.bound,
        }
        return dataclasses.asdict(self) | derived

    def _speed(self) -> str:
        known = f", {self.known_tokens:,} of them known," if self.known_tokens else ""
        prompt = f"prompt of {self.prompt_tokens:,} tokens{known} at {short(self.prompt_tokens_per_s)}/s"
        if len(self.cuts) > 1:
            prompt += f" in {len(self.cuts)} ubatches"
        if self.most_together > 1:
            prompt = f"queued {self.queued_s:.1f} s, {prompt}"
        reply = f"reply of {_counted(self.reply_tokens, 'token')}"
        if self.steps_s:
            reply += f" at {short(self.reply_tokens_per_s)}/s"
        if self.most_together > 1:
            reply += f" beside up to {_counted(self.most_together - 1, 'other')}"
        return f"{prompt}, {reply}"

    def _rows(self) -> list[str]:
        if self.table is None or self.backend is None:
            return ["no table"]
        return [self._waits(), self._reads(self.table), describe(self.backend)]

    def _waits(self) -> str:
        waits = f"waited for rows {1e3 * self.prompt_waited_s:.1f} ms in the prompt"
        if not self.steps_waited_s:
            return waits
        half, most = (1e6 * percentile(self.steps_waited_s, share) for share in (0.5, 0.99))
        return f"{waits} and {half:,.0f} us a step (p50, p99 {most:,.0f})"

    def _reads(self, table: TableStats) -> str:
        # Rows that are copied from memory need no dedup, and then nothing is counted.
        unique = f", {table.unique_rows:,} unique" if table.unique_rows else ""
        lent = f", {table.lent_rows:,} of ubatches before" if table.lent_rows else ""
        rate = f" ({short(table.reads / table.wall_s)}/s in gathers)" if table.reads else ""
        return (
            f"{_counted(table.rows, 'row')}{unique}{lent}, {_counted(table.cache_hits, 'cache hit')}, "
            f"{_counted(table.reads, 'read')}{rate}, {_counted(self.major_faults, 'fault')}, "
            "ratio to the device's limit not measured"
        )

    def _bounds(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
        return f"bound by {self.bound} ({shares})"


class Meter:
    """Notes what a reply takes; `account` sums it up at any time, and stays the same after `end`."""

    def __init__(self, prompt_tokens: int, table: LazyTable | None, *, on_cuda: bool) -> None:
        self._prompt_tokens, self._table, self._on_cuda = prompt_tokens, table, on_cuda
        self._cuts: list[int] = []
        self._prompt_s = self._device_s = 0.0
        self._steps_s: list[float] = []
        self._waits: list[Wait] = []
        self._together, self._known_tokens = 1, 0
        self._ended: tuple[TableStats | None, int] | None = None
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._stats = None if self._table is None else self._table.stats()
        self._faults = _major_faults()
        self._began = time.perf_counter()
        self._seated: float | None = None

    def seated(self, known_tokens: int = 0) -> None:
        """It has a lane, and so many tokens of its prompt are known."""
        self._known_tokens = known_tokens
        self._seated = time.perf_counter()

    def prompt_done(self, tokens: int, seconds: float) -> None:
        """So many tokens more of the prompt were computed; with the last of them, the first token of the reply."""
        self._cuts.append(tokens)
        self._prompt_s += seconds

    def step_done(self, seconds: float) -> None:
        """Another token of the reply is there."""
        self._steps_s.append(seconds)

    def shared(self, wait: Wait, awaited_s: float, together: int) -> None:
        """Of a ubatch: its wait for rows, how long the device was waited for in the end, and how many sequences."""
        self._waits.append(wait)
        self._device_s += awaited_s if self._on_cuda else 0.0
        self._together = max(self._together, together)

    def end(self) -> None:
        """Count no further."""
        if self._ended is None:
            self._ended = self._counts()
            self._seated = self._seated or time.perf_counter()

    def account(self, reply_tokens: int) -> Account:
        """What it took so far."""
        stats, faults = self._ended or self._counts()
        waited_s = [wait.seconds() for wait in self._waits]
        ubatches = len(self._cuts)
        return Account(
            prompt_tokens=self._prompt_tokens,
            cuts=tuple(self._cuts),
            prompt_s=self._prompt_s,
            prompt_waited_s=sum(waited_s[:ubatches]),
            reply_tokens=reply_tokens,
            steps_s=tuple(self._steps_s),
            steps_waited_s=tuple(waited_s[ubatches:]),
            device_s=self._device_s,
            on_cuda=self._on_cuda,
            table=stats,
            major_faults=faults,
            backend=None if self._table is None else self._table.backend,
            queued_s=(self._seated or time.perf_counter()) - self._began,
            most_together=self._together,
            known_tokens=self._known_tokens,
        )

    def _counts(self) -> tuple[TableStats | None, int]:
        stats = None if self._table is None or self._stats is None else self._table.stats() - self._stats
        return stats, _major_faults() - self._faults


def describe(backend: Backend) -> str:
    """The mode, what really reads, and what could not be had."""
    direct = "direct" if backend.direct_io else "buffered"
    reason = f": {backend.fallback_reason}" if backend.fallback_reason else ""
    return f"mode {backend.mode} by {backend.fetcher}, {direct}{reason}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
