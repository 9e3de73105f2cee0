"""From a request to an outcome: the table, the rows to ask, the rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from lazyio import settings
from lazyio.bench.arms import Course
from lazyio.bench.cold import make_cold
from lazyio.bench.demo import demo_table
from lazyio.bench.equal import Verifier
from lazyio.bench.limit import DEPTHS, DeviceLimit
from lazyio.bench.options import DEFAULT_LIMIT_READS, Request
from lazyio.bench.outcome import Outcome
from lazyio.bench.rounds import Section
from lazyio.bench.runs import Yardstick
from lazyio.bench.take import TakeBaseline
from lazyio.bench.watch import Watch
from lazyio.ple.spec import TableSpec
from lazyio.ple.tables import find_table


def execute(request: Request, console: Console, keep: Callable[[Outcome], None] = lambda _: None) -> Outcome:
    """Measure what is asked for; `keep` has what there is after each run.

    Raises SettingError for a request that can't be, NotCold, RunsDifferError, and what tables raise.
    """
    request.check()
    arms, twice = request.arms()
    spec = table_of(request, console)
    workload = request.workload(spec)
    sections = request.sections
    # Refused at once where no cold figure can be had, before anything takes time.
    proved_pages = make_cold(spec) if sections != ("warm",) else 0
    limit = DeviceLimit(
        spec,
        workload,
        block_bytes=settings.resolve("block_bytes", request.block_bytes),
        reads=request.limit_reads or DEFAULT_LIMIT_READS,
        seed=request.seed,
        strict=request.strict and "cold" in sections,
    )
    course = Course(spec, workload, limit.windows, Verifier(spec, workload, request.seed), request.strict)
    take, done = TakeBaseline(course), list[Section]()
    outcome = Outcome(spec, workload, limit, take, done, proved_pages)
    yardsticks: dict[str, Yardstick] = {"cold": limit} | ({"warm": take} if take.possible else {})
    with Watch(console, len(sections) * request.rounds * (len(arms) + 1)) as watch:
        for name in sections:
            if name == "cold":
                watch.begin(f"device limit: the best queue depth of {DEPTHS[0]} to {DEPTHS[-1]}")
                limit.choose_depth()
            measure = functools.partial(course.measure, section=name)
            rules = request.rules if name == "cold" else replace(request.rules, min_iops=0.0)
            section = Section(name, arms, twice, rules, measure, yardsticks.get(name))
            done.append(section)
            section.execute(watch, lambda: keep(outcome))
    outcome.complete = True
    return outcome


def table_of(request: Request, console: Console) -> TableSpec:
    """The table that is asked for, or the demo table, which is made if it must be."""
    path = demo_table(request.demo_dir, console) if request.path is None else request.path
    return find_table(path, request.tensor)
