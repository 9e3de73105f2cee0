"""What bounds a run: the one thing that would have to be faster, or better used, for the run to be.

It is worked out from what was measured anyway; docs/bench.md has the rules in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyio.bench.figures import ratio, short
from lazyio.bench.runs import Run

# From this share on, something counts as used up.
_MOST = 0.7
# From this share on, it counts as the greater part.
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class Bound:
    """A word, `device`, `cpu`, `gil`, `compute`, `latency` or `both`, and the figures that it follows from."""

    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of the gathers of a run. None: not measured."""

    wall_s: float  # inside gathers
    cpu_s: float  # of the thread that gathered
    all_cpu_s: float  # of all threads, the kernel's work for them included
    reads_device: bool
    of_limit: float | None = None  # reads a second over those of the device's limit
    in_flight: float | None = None  # reads, on average
    limit_in_flight: float | None = None  # the same where the limit was measured


@dataclass(frozen=True, slots=True)
class Pipelined:
    """What is known of a prompt that was read and computed."""

    wall_s: float
    computing_s: float
    kept: float  # share of the computing in which its thread was on a processor, and so had the interpreter
    reading: Reading
    beside: float | None = None  # rows a second read beside computing, over those of the first ubatch, read alone


def bound_of_run(run: Run, cpus: int) -> Bound:
    """Of a run of `lazyio bench` on `cpus` processors, once its yardsticks are measured."""
    counted = run.device_read_bytes
    return bound_of_reading(
        Reading(
            wall_s=run.wall_s,
            cpu_s=run.caller_cpu_s,
            all_cpu_s=run.user_s + run.system_s,
            reads_device=bool(counted if counted is not None else run.reads or run.major_faults),
            of_limit=run.ratio_to_device_limit,
            in_flight=_in_flight(run),
            limit_in_flight=run.limit_in_flight,
        ),
        cpus,
    )


def _in_flight(run: Run) -> float | None:
    """Reads under way on average."""
    if run.service_source == "device" and run.service_us_mean is not None:
        # The disk counted other processes' reads too: take the time of one from it, and how many from the workload.
        return 1e-6 * run.service_us_mean * run.reads_per_s
    return run.effective_concurrency


def bound_of_reading(reading: Reading, cpus: int) -> Bound:
    """Of gathers that nothing else goes on beside."""
    busy = min(1.0, reading.cpu_s / reading.wall_s)
    works = f"the gathering thread was on a processor {busy:.0%} of the time"
    if not reading.reads_device:
        return Bound("cpu", f"nothing was read from the device; {works}")
    if reading.of_limit is not None and reading.of_limit >= _MOST:
        return Bound("device", f"it gave reads at {ratio(reading.of_limit)} of its limit")
    if busy >= _MOST:
        return Bound("cpu", f"{works}{_beside_the_limit(reading)}")
    if reading.all_cpu_s >= _MOST * cpus * reading.wall_s:
        used = ratio(reading.all_cpu_s / reading.wall_s)
        return Bound("cpu", f"threads and kernel used {used} of {cpus} processors{_beside_the_limit(reading)}")
    if busy >= _HALF:
        return Bound("both", f"{works}, and waited for reads else{_beside_the_limit(reading)}")
    if reading.of_limit is None:
        return Bound("device", f"{works}, and waited for reads else; the limit was not measured beside it")
    return _waiting(reading)


def bound_of_pipeline(pipelined: Pipelined, cpus: int) -> Bound:
    """Of a prompt whose ubatches are read, perhaps ahead by a thread of the table, and computed."""
    share = pipelined.computing_s / pipelined.wall_s
    computed = Bound("compute", f"computing took {share:.0%} of the time, waiting for rows the rest")
    if share >= _MOST:
        return computed
    at_limit = pipelined.reading.of_limit is not None and pipelined.reading.of_limit >= _MOST
    slowed = pipelined.beside is not None and pipelined.beside < _MOST
    if slowed and not at_limit and pipelined.kept >= _HALF:
        return Bound(
            "gil",
            f"beside computing, which kept the interpreter {pipelined.kept:.0%} of its time, rows were read at "
            f"{ratio(pipelined.beside or 0)} of the rate of the first ubatch",
        )
    return computed if share >= _HALF else bound_of_reading(pipelined.reading, cpus)


def _waiting(reading: Reading) -> Bound:
    """Of a run that waited for a device which can give more: too few reads at once, or each one slow."""
    at, usual = reading.in_flight, reading.limit_in_flight
    less = f"the device gave reads at {ratio(reading.of_limit or 0)} of its limit"
    if not at or not usual:
        return Bound("latency", f"{less}, and the processors were idle")
    # Little's law: reads in flight over the time of one is their rate. The greater of the two factors is the reason.
    fewer = usual / at
    slower = 1 / (fewer * (reading.of_limit or 1))
    figures = (
        f"{short(at)} reads in flight on average instead of {short(usual)}, each taking {ratio(slower)} times as long"
    )
    return Bound("device" if slower >= fewer else "latency", f"{less}: {figures}")


def _beside_the_limit(reading: Reading) -> str:
    return "" if reading.of_limit is None else f"; reads came at {ratio(reading.of_limit)} of the device's limit"
