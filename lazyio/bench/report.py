"""The comparison as a table for people, with how it was made and what fell back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyio.bench.figures import ratio, short
from lazyio.bench.outcome import Outcome
from lazyio.bench.rounds import Section
from lazyio.bench.summary import ArmSummary, Paired, SectionSummary, Spread
from lazyio.units import format_bytes

# What a line of the tables takes; files and pipes have no width of their own.
WIDTH = 120


def show(outcome: Outcome, console: Console) -> None:
    """Print everything."""
    for section in _measured(outcome):
        console.print(_table(outcome, section.summary()))
    for line in (*_method(outcome), *_fallbacks(outcome)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _measured(outcome: Outcome) -> list[Section]:
    return [section for section in outcome.sections if section.summary().arms]


def _table(outcome: Outcome, summary: SectionSummary) -> Table:
    title = Text(f"{summary.temperature}: median [lowest, highest] of {_rounds(summary)}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    columns = _columns(summary, outcome.workload.decode)
    table.add_column("mode", no_wrap=True)
    table.add_column("read by", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for arm in summary.arms:
        table.add_row(arm.arm, _reader(arm), *(Text(cell(arm)) for cell in columns.values()))
    return table


def _columns(summary: SectionSummary, decode: bool) -> dict[str, Callable[[ArmSummary], str]]:
    """What to print of each arm, by the heading of the column."""
    first, cold = summary.arms[0].arm, summary.temperature == "cold"
    columns: dict[str, Callable[[ArmSummary], str]] = {}
    if decode:
        columns["p50, us"] = lambda arm: _spread(arm.p50_us, short)
        columns["p99, us"] = lambda arm: _median(arm.p99_us, short)
    else:
        columns["rows/s"] = lambda arm: _spread(arm.rows_per_s, short)
    if cold and decode:
        columns["p50 of the\ndevice limit's"] = lambda arm: _spread(arm.p50_over_limit, ratio)
    elif cold:
        columns["of the\ndevice limit"] = lambda arm: _spread(arm.ratio_to_device_limit, ratio)
    elif summary.temperature == "warm":
        columns["of np.take"] = lambda arm: _spread(arm.ratio_to_take, ratio)
    columns[f"times {first}"] = lambda arm: _paired(arm.speedup_over.get(first))
    columns["rounds\nslower"] = lambda arm: _slower(arm.speedup_over.get(first))
    if cold:
        columns["user us\na row"] = lambda arm: _median(arm.user_us_per_row, ratio)
    elif not decode:
        columns["rows a\nCPU second"] = lambda arm: _median(arm.rows_per_cpu_s, short)
    return columns


def _reader(arm: ArmSummary) -> str:
    how = "" if arm.backend_used in ("mmap", "resident") else " direct" if arm.direct_io else " buffered"
    return f"{arm.backend_used}{how}{' *' if arm.fallback_reason else ''}"


def _spread(spread: Spread | None, form: Callable[[float], str]) -> str:
    return "-" if spread is None else f"{form(spread.median)} [{form(spread.low)}, {form(spread.high)}]"


def _median(spread: Spread | None, form: Callable[[float], str]) -> str:
    return "-" if spread is None else form(spread.median)


def _paired(paired: Paired | None) -> str:
    return "1" if paired is None else f"{ratio(paired.median)} [{ratio(paired.low)}, {ratio(paired.high)}]"


def _slower(paired: Paired | None) -> str:
    return "" if paired is None else f"{paired.slower} of {paired.rounds}"


def _rounds(summary: SectionSummary) -> str:
    if not summary.rounds:
        return "the one round, which was broken off"
    if not summary.counted_rounds:
        return f"{summary.rounds} rounds, NONE of which was steady enough to count"
    return f"{summary.counted_rounds} of {summary.rounds} rounds"


def _method(outcome: Outcome) -> Iterator[str]:
    spec, workload = outcome.spec, outcome.workload
    yield (
        f"Table: {spec.path}, {spec.tensor}: {spec.rows:,} rows of {spec.row_bytes:,} bytes ({spec.dtype}), "
        f"{format_bytes(spec.table_bytes)}."
    )
    cut = f"{len(workload.ubatches):,} {'steps' if workload.decode else 'ubatches'}"
    if not outcome.complete:
        yield from _stopped(outcome.sections[-1])
    yield f"Rows: {workload.rows:,} in {cut}, {workload.unique_rows:,} after dedup; {workload.source}."
    if proof := outcome.cold_proof():
        yield f"Cold: {proof}."
    yield from _limit(outcome)
    yield from _take(outcome)
    for section in _measured(outcome):
        yield from _bounds(section.summary())
        yield from _noise(section)
    if count := outcome.verify:
        yield f"Verified: {count} rows of every gather were read once more and compared, while the clock ran."
    yield "Bytes: equal in all runs, and a sample of rows equal to plain reads of the file."


def _stopped(section: Section) -> Iterator[str]:
    done = section.summary().rounds
    beside = " The figures are of those, and one that was broken off is in the JSON alone." if done else ""
    yield f"Stopped before the end: {section.temperature}, {done} of {section.rules.rounds} rounds complete.{beside}"


def _limit(outcome: Outcome) -> Iterator[str]:
    if measured := outcome.limit.as_json():
        depth = (
            f"queue depth {measured['queue_depth']}" if measured["queue_depth"] else f"{measured['workers']} at once"
        )
        fallback = f"; {measured['fallback_reason']}" if measured["fallback_reason"] else ""
        yield (
            f"Device limit: {measured['iops']:,.0f} reads/s (median of {len(measured['arms'])} arms of "
            f"{measured['reads_per_arm']:,} reads; {measured['backend']}, {measured['block_bytes']}-byte blocks, "
            f"{depth}{'' if measured['direct_io'] else ', buffered'}){fallback}."
        )


def _take(outcome: Outcome) -> Iterator[str]:
    if not outcome.take.possible and any(section.temperature == "warm" for section in outcome.sections):
        yield f"np.take: not measured; it needs one array, and the rows lie in {len(outcome.spec.extents)} extents."
    if measured := outcome.take.as_json():
        yield f"np.take: {measured['rows_per_s']:,.0f} rows/s from a map in memory (median of {len(measured['arms'])})."


def _bounds(summary: SectionSummary) -> Iterator[str]:
    for arm in summary.arms:
        if arm.bound_by is not None:
            yield f"{summary.temperature}: {arm.arm} is bound by {arm.bound_by}; {arm.bound_reason}."


def _noise(section: Section) -> Iterator[str]:
    summary, where = section.summary(), section.temperature
    first = summary.arms[0].arm
    for arm in summary.arms:
        if (over := arm.speedup_over.get(first)) and over.two_se is not None:
            mean = f"{ratio(over.mean)} ±{ratio(over.two_se)}"
            yield f"{where}: {arm.arm} is {mean} times {first} (mean, 2 standard errors)."
    if summary.noise is not None:
        yield f"{where}: {summary.twice} against itself {_paired(summary.noise)}, the noise of a round."
    if section.repeats:
        reasons = Counter(repeat.reason.partition(":")[0] for repeat in section.repeats)
        yield f"{where}: rounds repeated: {', '.join(f'{count} {reason}' for reason, count in reasons.items())}."


def _fallbacks(outcome: Outcome) -> Iterator[str]:
    seen = {
        f"* {arm.arm} fell back: {arm.fallback_reason}."
        for section in _measured(outcome)
        for arm in section.summary().arms
        if arm.fallback_reason
    }
    yield from sorted(seen)
