"""Replies that are computed together, by how many: tokens a second, waits for rows, the scheduler's own time.

Each stream follows a part of a real text, as the steps of one sequence do in `decoding`. Steps are measured from the
moment when all of them reply.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from lazyio import settings
from lazyio.bench.turns import in_turn
from lazyio.bench.watch import Watch
from lazyio.engine.account import Meter, percentile
from lazyio.engine.bench.rig import Rig
from lazyio.engine.bench.rounds import Rounds
from lazyio.engine.bench.ways import Way, values_of
from lazyio.engine.feed import Feed
from lazyio.engine.forward import Chunk, Forward
from lazyio.engine.kv.options import KvOptions
from lazyio.engine.kv.paged import Paged
from lazyio.engine.kv.pool import PAGE
from lazyio.engine.models import Model
from lazyio.engine.planning import Limits
from lazyio.engine.request import Request
from lazyio.engine.sampling import Following
from lazyio.engine.scheduler import Scheduler
from lazyio.engine.ubatch import Rows
from lazyio.engine.weights.trunk import Trunk
from lazyio.engine.writing import Plan, Writing
from lazyio.errors import NeverFits
from lazyio.gate import TableStats
from lazyio.modes import Backend
from lazyio.ple.cuts import fixed_cuts

# Of a run that is not measured: libraries choose and compile their kernels in the prompts and the first steps.
_WARM_STEPS = 4
# Numbers of pages that have a name.
_PAGES = {0: "off", None: "auto"}


@dataclass(frozen=True, slots=True)
class Arm:
    """So many replies at once, with a lazy mode, and windows ("off") or so many pages for what they carry."""

    streams: int
    way: Way
    kv_pages: str

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.streams}, {self.way.mode}{'' if self.kv_pages == 'off' else f', pages {self.kv_pages}'}"


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Steps of all replies at once. `waits_s` are what computing stood still for rows, in each step.

    `rows_s` is what asking for rows took in all of them, `host_s` what the scheduler took beside that, launching the
    model and waiting for it. `peak_pages` is how many were ever held, None with windows.
    `aside_s` is what came before the steps: memory for what they carry, making the table cold, opening it, prompts.
    """

    arm: Arm
    again: bool
    steps_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    rows_s: float
    host_s: float
    stats: TableStats
    backend: Backend
    logits: str  # a digest of the checksums of all logits
    peak_pages: int | None
    aside_s: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together."""
        return self.arm.streams * len(self.steps_s) / sum(self.steps_s)

    @property
    def host_share(self) -> float:
        """The scheduler's part of a step."""
        return self.host_s / sum(self.steps_s)

    @property
    def host_us(self) -> float:
        """What the scheduler took of a step, on average."""
        return 1e6 * self.host_s / len(self.steps_s)

    @property
    def waits_us(self) -> tuple[float, float]:
        """How long a step waited for its rows, p50 and p99."""
        half, most = (1e6 * percentile(self.waits_s, share) for share in (0.5, 0.99))
        return half, most

    @property
    def step_us(self) -> float:
        """A step, p50."""
        return 1e6 * statistics.median(self.steps_s)

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.1f} tokens/s, step {self.step_us:,.0f} us, waited {self.waits_us[0]:,.0f} us, "
            f"scheduler {self.host_us:,.0f} us, {100 * self.host_share:.1f} % of a step"
        )


@dataclass(slots=True)
class StreamsOutcome(Rounds[StreamsRun]):
    """All rounds."""

    arms: list[Arm]
    context: int
    steps: int
    limits: Limits

    def tokens_each(self, streams: int) -> int:
        """Of the text that a stream follows: steps go on until the last one's prompt is done, and then are measured."""
        return self.context + streams * -(-self.context // self.limits.mixed) + self.steps + 1

    @property
    def most_tokens(self) -> tuple[int, int]:
        """Of the text that a stream follows at most, and of all streams that go on at once."""
        each = [(self.tokens_each(arm.streams), arm.streams) for arm in self.arms]
        return max((n for n, _ in each), default=0), max((n * streams for n, streams in each), default=0)

    def of(self, arm: Arm, *, again: bool = False) -> list[StreamsRun]:
        """The runs of an arm, one a round."""
        return [run for run in self.runs() if (run.arm, run.again) == (arm, again)]


class Summed(Forward):
    """The model, with a checksum of the logits of each token, and of how many tokens each ubatch was.

    All logits of many streams would take more memory than there may be. Sums of their bits do for a comparison.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.sums: list[torch.Tensor] = []
        self.sizes: list[int] = []

    def step(self, chunks: Sequence[Chunk], rows: Rows | None) -> torch.Tensor:
        """See `Forward`."""
        self.sizes.append(sum(len(tokens) for _, tokens in chunks))
        return super().step(chunks, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        logits = super().logits(hidden)
        self.sums.append(logits.view(torch.int32).sum(-1))
        return logits


def arms_of(streams: str, ways: Sequence[Way], kv_pages: str) -> list[Arm]:
    """All of them, by numbers of streams and of pages, separated by commas. Raises SettingError for other text."""
    counts = counts_of("--streams", streams)
    numbers = values_of("--kv-pages", kv_pages, "kv_pages", some=False) or [0]
    pages = [_PAGES.get(number, str(number)) for number in numbers]
    return [Arm(count, way, kv) for count in counts for way in ways for kv in pages]


def counts_of(name: str, text: str) -> list[int]:
    """Numbers of requests, separated by commas. Raises SettingError for other text."""
    return values_of(name, text, "parallel", some=False)


def measure_streams(
    rig: Rig,
    outcome: StreamsOutcome,
    tokens: Sequence[int],
    rounds: int,
    watch: Watch,
    keep: Callable[[StreamsOutcome], None],
) -> None:
    """All rounds over parts of `tokens`, one for each stream; `keep` has what there is after each run.

    Raises NotCold, RunsDifferError, what tables raise.
    """
    arms = outcome.arms
    for arm in arms:
        if arm.way == arms[0].way:  # each number of streams and of pages once, with the table in memory
            _run(rig, outcome, arm, tokens, again=False, steps=min(_WARM_STEPS, outcome.steps))
    for number in range(rounds):
        turns = in_turn(arms, arms[0], number)
        for arm, again in turns:
            label = f"streams: {arm.label}"
            watch.begin(f"{label}, round {number + 1} of {rounds}")
            run = _run(rig, outcome, arm, tokens, again=again, steps=outcome.steps)
            outcome.add(run, len(turns))
            watch.note(f"{label}: {run}")
            keep(outcome)


def _run(rig: Rig, outcome: StreamsOutcome, arm: Arm, tokens: Sequence[int], *, again: bool, steps: int) -> StreamsRun:
    way, streams, laps = arm.way, arm.streams, _Laps()
    admission = KvOptions.resolve(arm.kv_pages, None, None).admission(rig.model, streams, batch_invariant=False)
    laps.end("memory")
    rig.make_cold(way)
    laps.end("cold")
    without_cache = {"row_cache": 0} if settings.applies("row_cache", way.mode) else {}
    with rig.feed(way, without_cache, timed=True) as feed:
        each, context = outcome.tokens_each(streams), outcome.context
        requests, forward = requests_of(rig, outcome.limits, feed, tokens, streams, each, context), Summed(rig.model)
        scheduler = Scheduler(forward, feed, admission, outcome.limits, streams)
        with closing(scheduler):
            for request in requests:
                scheduler.add(request)
            laps.end("opening")
            _compute_prompts(scheduler, requests, arm)
            laps.end("prompts")
            before, stats = replace(scheduler.counts), feed.table.stats()
            for _ in range(steps):
                step(scheduler, requests)
            stats, counts = feed.table.stats() - stats, scheduler.counts
            rows_s, host_s = counts.rows_s - before.rows_s, counts.host_s - before.host_s
            account = requests[0].meter.account(steps)
        backend = feed.table.backend
    cuts = forward.sizes[:-steps]
    what = f"{streams} streams of {steps} steps after {outcome.context} tokens each in {cuts}"
    logits = rig.checked(what, arm.label, forward.sums)
    steps_s, waits_s = account.steps_s[-steps:], account.steps_waited_s[-steps:]
    peak = admission.ledger.pool.peak if isinstance(admission, Paged) else None
    return StreamsRun(arm, again, steps_s, waits_s, rows_s, host_s, stats, backend, logits, peak, laps.seconds)


class _Laps:
    """What each part of a run takes, by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """That part ends now, and the next one begins."""
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now


def _compute_prompts(scheduler: Scheduler, requests: Sequence[Request], arm: Arm) -> None:
    """Go on until all of them reply. Raises NeverFits where they do not have room at once."""
    while not all(request.replies for request in requests):
        step(scheduler, requests)
    if scheduler.counts.most_lanes < arm.streams:
        raise NeverFits(_no_room(arm, "more"))


def check_arms(outcome: StreamsOutcome, trunk: Trunk, tokens: Sequence[int]) -> None:
    """Raise NeverFits, before weights are read, for an arm whose streams, parts of `tokens`, have no room at once."""
    for arm in {(arm.streams, arm.kv_pages): arm for arm in outcome.arms}.values():
        options, each = KvOptions.resolve(arm.kv_pages, None, None), outcome.tokens_each(arm.streams)
        options.check(trunk)
        options.fits_ever(trunk, each, arm.streams)
        lacking = options.lacking(trunk, each, arm.streams)
        starts = range(0, arm.streams * each, each)
        # Streams with the same first page might share it, and have room after all.
        if lacking and len({tuple(tokens[start : start + PAGE]) for start in starts}) == arm.streams:
            assert options.pages is not None
            raise NeverFits(_no_room(arm, f"{options.pages + lacking} or more"))


def _no_room(arm: Arm, pages: str) -> str:
    have, lower = f"{arm.streams} streams have no room at once", "lower --streams, --context or --decode"
    if arm.kv_pages == "off":
        return f"{have} in windows: {lower}"
    if arm.kv_pages == "auto":
        return f"{have} in as many pages as there is memory for: {lower}"
    return f"{have} with kv_pages {arm.kv_pages}: give {pages} pages, or {lower}"


def requests_of(
    rig: Rig, limits: Limits, feed: Feed, tokens: Sequence[int], count: int, each: int, context: int
) -> list[Request]:
    """So many requests, each for `each` tokens of the text, of which `context` are the prompt."""
    requests = []
    for start in range(0, count * each, each):
        text = tokens[start : start + each]
        prompt, reply = text[:context], text[context:]
        plan = Plan(prompt, fixed_cuts(len(prompt), limits.ubatch), len(reply), (), ())
        meter = Meter(len(prompt), feed.table, on_cuda=rig.model.device.type == "cuda")
        requests.append(Request(plan, Following(reply, rig.model.vocab), Writing(plan, None), meter))
    return requests


def step(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Compute a ubatch. Raises what one of the requests fails with."""
    scheduler.step()
    for request in requests:
        if request.error is not None:
            raise request.error
