"""The comparison as a table for people, with how it was made and what fell back."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from lazyio.bench.outcome import Outcome
from lazyio.bench.rounds import Section
from lazyio.bench.summary import ArmSummary, Paired, SectionSummary, Spread
from lazyio.units import format_bytes


def show(outcome: Outcome, console: Console) -> None:
    """Print everything."""
    for section in outcome.sections:
        console.print(_table(outcome, section.summary()))
    for line in (*_method(outcome), *_fallbacks(outcome)):
        console.print(line, highlight=False, markup=False)


def _table(outcome: Outcome, summary: SectionSummary) -> Table:
    first = summary.arms[0].arm
    table = Table(title=f"{summary.temperature}: median [lowest, highest] of {_rounds(summary)}", title_justify="left")
    table.add_column("mode", no_wrap=True)
    table.add_column("read by")
    columns = ["rows/s", f"times {first}", f"slower than {first}", "user us/row"]
    if summary.temperature == "cold":
        columns.insert(1, "of the device limit")
    if outcome.workload.decode:
        columns += ["p50 us", "p99 us"]
        if summary.temperature == "cold":
            columns.append("p50 / limit's")
    for name in columns:
        table.add_column(name, justify="right")
    for arm in summary.arms:
        cells = _cells(arm, first)
        table.add_row(arm.arm, _reader(arm), *(cells[name] for name in columns))
    return table


def _cells(arm: ArmSummary, first: str) -> dict[str, str]:
    over = arm.speedup_over.get(first)
    return {
        "rows/s": _spread(arm.rows_per_s, ",.0f"),
        "of the device limit": _spread(arm.ratio_to_device_limit, ".2f"),
        f"times {first}": _paired(over),
        f"slower than {first}": f"{over.slower} of {over.rounds}" if over else "",
        "user us/row": f"{arm.user_us_per_row.median:.2f}" if arm.user_us_per_row else "",
        "p50 us": _spread(arm.p50_us, ",.0f"),
        "p99 us": _spread(arm.p99_us, ",.0f"),
        "p50 / limit's": _spread(arm.p50_over_limit, ".2f"),
    }


def _reader(arm: ArmSummary) -> str:
    how = "" if arm.backend_used in ("mmap", "resident") else ", direct" if arm.direct_io else ", buffered"
    return f"{arm.backend_used}{how}{' (fell back)' if arm.fallback_reason else ''}"


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:{form}} [{spread.low:{form}}, {spread.high:{form}}]"


def _paired(paired: Paired | None) -> str:
    if paired is None:
        return "1"
    error = "" if paired.two_se is None else f" ±{paired.two_se:.2f}"
    return f"{paired.median:.2f} [{paired.low:.2f}, {paired.high:.2f}], mean {paired.mean:.2f}{error}"


def _rounds(summary: SectionSummary) -> str:
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
    yield f"Rows: {workload.rows:,} in {cut}, {workload.unique_rows:,} after dedup; {workload.source}."
    if proof := outcome.cold_proof():
        yield f"Cold: {proof}."
    if outcome.limit_was_measured:
        yield _limit(outcome)
    for section in outcome.sections:
        yield from _noise(section)
    yield "Bytes: equal in all runs, and a sample of rows equal to plain reads of the file."


def _limit(outcome: Outcome) -> str:
    measured = outcome.limit.as_json([limit for section in outcome.sections for limit in section.limits])
    depth = f"queue depth {measured['queue_depth']}" if measured["queue_depth"] else f"{measured['workers']} at once"
    fallback = f"; {measured['fallback_reason']}" if measured["fallback_reason"] else ""
    return (
        f"Device limit: {measured['iops']:,.0f} reads/s (median of {len(measured['arms'])} arms of "
        f"{measured['reads_per_arm']:,} reads; {measured['backend']}, {measured['block_bytes']}-byte blocks, {depth}"
        f"{'' if measured['direct_io'] else ', buffered'}){fallback}."
    )


def _noise(section: Section) -> Iterator[str]:
    noise, where = section.summary().noise, section.temperature
    if noise is not None:
        yield f"Noise ({where}): {section.twice.label} against itself {_paired(noise)}."
    if section.repeats:
        reasons = "; ".join(f"{repeat.round + 1}: {repeat.reason}" for repeat in section.repeats)
        yield f"Repeated rounds ({where}): {len(section.repeats)} ({reasons})."


def _fallbacks(outcome: Outcome) -> Iterator[str]:
    seen = {
        f"{arm.arm} fell back: {arm.fallback_reason}."
        for section in outcome.sections
        for arm in section.summary().arms
        if arm.fallback_reason
    }
    yield from sorted(seen)
