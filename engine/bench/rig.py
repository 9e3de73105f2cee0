"""Running one prompt, or the steps that follow on one, with a table opened for it alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from lazyio import settings
from lazyio.bench.cold import make_cold
from lazyio.bench.gauge import Counters, Gauge
from lazyio.engine.bench.moments import Moments
from lazyio.engine.bench.ways import RESIDENT, Way
from lazyio.engine.device_table import DeviceTable
from lazyio.engine.feed import Feed
from lazyio.engine.models import Model
from lazyio.engine.sampling import no_numbers
from lazyio.engine.ubatch import Rows, Ubatch
from lazyio.errors import RunsDifferError
from lazyio.gate import TableStats
from lazyio.modes import Backend
from lazyio.ple.rowids import RowIds
from lazyio.ple.spec import TableSpec
from lazyio.table import LazyTable, open_table


@dataclass(frozen=True, slots=True)
class PromptRun:
    """A prompt from the first request for rows to the logits of its last token.

    `computes_s` and `waits_s` have an entry a ubatch, as the device has it: what it computed, and how long it stood at
    the table, until the rows were there and expanded.
    """

    wall_s: float
    computes_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    stats: TableStats
    counters: Counters
    backend: Backend
    logits: str  # a digest of those of the last token


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Decode steps of given tokens, each begun when the token before it had been sampled. An entry a step, seconds.

    `to_table_s` is what the host took from asking for the rows to the point at which it has launched all that comes
    before they are needed, `waits_s` how long it then waited for them, without what sending and expanding them takes.
    """

    steps_s: tuple[float, ...]
    to_table_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    stats: TableStats
    backend: Backend
    logits: str  # a digest of those of all steps


class Rig:
    """A model, and a table that is opened anew for each run, with those of the `options` that its mode has.

    A table in memory has nothing that a run could leave behind: it is read once, and stays until the `stack` closes.
    Runs over the same tokens in the same cuts must give the same logits, bit for bit.
    """

    def __init__(
        self, model: Model, spec: TableSpec, row_ids: RowIds, options: dict[str, Any], stack: ExitStack
    ) -> None:
        self.model, self.spec, self.row_ids = model, spec, row_ids
        self._options, self._stack = options, stack
        self._resident: LazyTable | None = None
        self._digests: dict[str, tuple[str, str]] = {}  # by what was computed: the way that was first, and its logits

    def prompt(self, way: Way, tokens: Sequence[int], cuts: Sequence[int], *, warm: bool) -> PromptRun:
        """Compute a prompt cold, or once more with what a first pass left in the caches.

        Raises NotCold, RunsDifferError, and what tables raise.
        """
        if not warm:
            self.make_cold(way)
        with self.feed(way, {}) as feed:
            if warm:
                self._timed_prompt(way, feed, tokens, cuts)
            return self._timed_prompt(way, feed, tokens, cuts)

    def decode(self, way: Way, tokens: Sequence[int], context: int) -> DecodeRun:
        """Compute tokens[:context] as a prompt, untimed, then the others one by one, cold and with no row cache.

        Raises as `prompt` does.
        """
        self.make_cold(way)
        without_cache = {"row_cache": 0} if settings.applies("row_cache", way.mode) else {}
        with self.feed(way, without_cache) as feed:
            return self._timed_steps(way, feed, tokens, context)

    def make_cold(self, way: Way) -> None:
        """Have nothing of the table in the page cache, unless it is in memory as a whole. Raises NotCold."""
        if way.mode != RESIDENT:
            make_cold(self.spec)

    @contextmanager
    def feed(self, way: Way, more: dict[str, Any], *, timed: bool = False) -> Iterator[Feed]:
        """What brings the rows, from a table opened with some options `more`; see DeviceTable for `timed`."""
        with self._table(way.mode, more) as table:
            device_table = DeviceTable(table, self.model.device, self.model.dtype, timed=timed)
            with closing(device_table):
                yield Feed(device_table, self.row_ids, way.lookahead)

    def _table(self, mode: str, more: dict[str, Any]) -> AbstractContextManager[LazyTable]:
        if mode == RESIDENT and self._resident is not None:
            return nullcontext(self._resident)
        given = {name: value for name, value in self._options.items() if settings.applies(name, mode)}
        table = open_table(self.spec, mode=mode, **(given | more))
        if mode != RESIDENT:
            return table
        self._resident = self._stack.enter_context(table)
        return nullcontext(table)

    def _timed_prompt(self, way: Way, feed: Feed, tokens: Sequence[int], cuts: Sequence[int]) -> PromptRun:
        model, table = self.model, feed.table
        state, moments, gauge = model.new_state(len(tokens)), Moments(model.device), Gauge(self.spec.extents[0].path)
        ends = list(accumulate(cuts, initial=0))
        chunks = [np.asarray(tokens[start:end], np.int64) for start, end in pairwise(ends)]
        before = table.stats()
        moments.wait()
        gauge.start()
        start = time.perf_counter()
        moments.mark()
        with closing(feed.prompt(chunks, None)) as all_rows:
            for chunk, rows in zip(chunks, all_rows, strict=True):
                ubatch = Ubatch.of([(state, chunk.tolist())], model.device)
                hidden = model.step(ubatch, _Marked(rows, moments))
                moments.mark()
        logits = model.logits(hidden[-1:])
        moments.wait()
        wall = time.perf_counter() - start
        gauge.stop()
        to_table, waits, behind = (moments.seconds()[first::3] for first in range(3))
        computes = tuple(one + other for one, other in zip(to_table, behind, strict=True))
        digest = self.checked(f"a prompt of {len(tokens)} tokens in {list(cuts)}", way.label, [logits])
        return PromptRun(wall, computes, tuple(waits), table.stats() - before, gauge.total, table.backend, digest)

    def _timed_steps(self, way: Way, feed: Feed, tokens: Sequence[int], context: int) -> DecodeRun:
        model, state = self.model, self.model.new_state(len(tokens))
        steps, to_table, waits, sampled = list[float](), list[float](), list[float](), list[torch.Tensor]()
        with closing(feed.prompt([np.asarray(tokens[:context], np.int64)], None)) as all_rows:
            for rows in all_rows:
                hidden = model.step(Ubatch.of([(state, tokens[:context])], model.device), rows)
        int(model.logits(hidden[-1:]).argmax())
        before = feed.table.stats()
        known = max(1, self.row_ids.context)
        for place in range(context, len(tokens)):
            start = time.perf_counter()
            rows = feed.step([(tokens[place : place + 1], tokens[max(0, place - known) : place])])
            noted = _Noted(rows)
            hidden = model.step(Ubatch.of([(state, tokens[place : place + 1])], model.device), noted)
            logits = model.logits(hidden)
            int(logits.argmax())  # what generating waits for before it knows the next rows
            steps.append(time.perf_counter() - start)
            to_table.append(noted.reached - start)
            waits.append(rows.exposed_s)
            sampled.append(logits)
        stats = feed.table.stats() - before
        digest = self.checked(f"{len(tokens) - context} steps after {context} tokens", way.label, sampled)
        return DecodeRun(tuple(steps), tuple(to_table), tuple(waits), stats, feed.table.backend, digest)

    def checked(self, what: str, label: str, logits: Sequence[torch.Tensor]) -> str:
        """A digest of the logits, or of what stands for them, if it is that of the runs before of the same `what`.

        Raises RunsDifferError, with the labels of both runs, and ModelError for logits that are no finite numbers.
        """
        found = torch.cat(list(logits))
        if not bool(found.isfinite().all()):
            raise no_numbers(f"the logits of {label} for {what}")
        digest = blake2b(found.cpu().numpy().tobytes(), digest_size=16).hexdigest()
        first, expected = self._digests.setdefault(what, (label, digest))
        if digest != expected:
            raise RunsDifferError(f"{label} and {first} gave different logits for {what}; the whole comparison is void")
        return digest


class _Marked:
    """Rows, with marks at the moments when the device stands at the table and when it goes on."""

    def __init__(self, rows: Rows, moments: Moments) -> None:
        self._rows, self._moments = rows, moments

    def values(self) -> torch.Tensor:
        self._moments.mark()
        values = self._rows.values()
        self._moments.mark()
        return values


class _Noted:
    """Rows, with the moment at which the host got to the table."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.reached = 0.0

    def values(self) -> torch.Tensor:
        self.reached = time.perf_counter()
        return self._rows.values()
