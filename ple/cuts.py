"""Cutting a prompt into ubatches, so that reading and computing hide behind each other.

Reading and computing are a pipeline of two stages: ubatch i is computed when the rows of ubatches 1 to i have been read
and ubatch i-1 is computed. Nothing hides the reads of the first ubatch, nor the computing of the last. With cuts of one
size the price is high where the prompt is hardly longer than a ubatch; small cuts throughout pay the fixed cost of a
ubatch again and again. What is best lies between, and can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lazyio.errors import SettingError

# More ubatches than the fewest by so many gain nothing that could be seen.
_MORE_UBATCHES = 32
# Makespans closer than this part of one are the same.
_PRECISION = 1e-5


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the two stages take for a ubatch: seconds a token, and seconds whatever its size."""

    read_token_s: float
    compute_token_s: float
    read_fixed_s: float = 0.0
    compute_fixed_s: float = 0.0

    def reads_s(self, cuts: Sequence[int]) -> list[float]:
        """Seconds of reading each ubatch."""
        return [self.read_fixed_s + tokens * self.read_token_s for tokens in cuts]

    def computes_s(self, cuts: Sequence[int]) -> list[float]:
        """Seconds of computing each ubatch."""
        return [self.compute_fixed_s + tokens * self.compute_token_s for tokens in cuts]

    def makespan_s(self, cuts: Sequence[int]) -> float:
        """Seconds from the first read to the end of the last ubatch."""
        return makespan_s(self.reads_s(cuts), self.computes_s(cuts))


def makespan_s(reads_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """Seconds from the first read to the end of the last ubatch, given the seconds of each stage of each ubatch."""
    read = computed = 0.0
    for read_s, compute_s in zip(reads_s, computes_s, strict=True):
        read += read_s
        computed = max(computed, read) + compute_s
    return computed


def plan_cuts(
    n_tokens: int,
    reads_per_token: float,
    limit_reads_per_s: float,
    tokens_per_s: float,
    ubatch_max: int,
    *,
    step: int = 32,
    read_fixed_s: float = 0.5e-3,
    compute_fixed_s: float = 2e-3,
) -> list[int]:
    """Cut `n_tokens` into ubatches of at most `ubatch_max`, so that their makespan is the least.

    `reads_per_token` are device reads, after dedup; `limit_reads_per_s` is what the device gives and `tokens_per_s`
    what the trunk computes with all rows in memory. A ubatch costs `read_fixed_s` and `compute_fixed_s` whatever its
    size. All cuts but the last are multiples of `step` tokens, or of `ubatch_max` where that is less. Returns [] for no
    tokens. Raises SettingError for numbers that are not finite and positive (the two fixed costs may be 0).

    The makespan is the greatest, over all i, of reads 1 to i and computes i to m. So within a given makespan the end of
    ubatch i has a bound that grows with the end of ubatch i-1, and making each ubatch as large as its bound reaches
    farthest; the least makespan that reaches the end is found by bisection, for each number of ubatches.
    """
    _check(locals())
    if not n_tokens:
        return []
    pace = Pace(reads_per_token / limit_reads_per_s, 1 / tokens_per_s, read_fixed_s, compute_fixed_s)
    sizes = _Sizes(min(step, ubatch_max), ubatch_max)
    best = fixed_cuts(n_tokens, sizes.largest)
    best_s = pace.makespan_s(best)
    for ubatches in range(len(best), len(best) + _MORE_UBATCHES):
        cuts = _shortest(n_tokens, pace, ubatches, sizes, best_s)
        if cuts and (cuts_s := pace.makespan_s(cuts)) < best_s * (1 - _PRECISION):
            best, best_s = cuts, cuts_s
    return best


def fixed_cuts(n_tokens: int, ubatch: int) -> list[int]:
    """Cuts of one size, and what is left."""
    return [min(ubatch, n_tokens - start) for start in range(0, n_tokens, ubatch)]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What ubatches may be as large as: multiples of `step`, and the last one anything, up to `most`."""

    step: int
    most: int

    @property
    def largest(self) -> int:
        return self.most // self.step * self.step


def _shortest(tokens: int, pace: Pace, ubatches: int, sizes: _Sizes, below_s: float) -> list[int] | None:
    """The best cuts into at most so many ubatches; None where they are no better than `below_s`."""
    found = _within(tokens, pace, ubatches, sizes, below_s)
    low, high = 0.0, below_s
    while found is not None and high - low > _PRECISION * high:
        middle = (low + high) / 2
        cuts = _within(tokens, pace, ubatches, sizes, middle)
        if cuts is None:
            low = middle
        else:
            found, high = cuts, middle
    return found


def _within(tokens: int, pace: Pace, ubatches: int, sizes: _Sizes, limit_s: float) -> list[int] | None:
    """Cuts into at most `ubatches` whose makespan is at most `limit_s`, or None."""
    cuts: list[int] = []
    end = 0
    for number in range(ubatches):
        # Reads up to this ubatch, then computing from it to the last.
        fixed_s = (number + 1) * pace.read_fixed_s + (ubatches - number) * pace.compute_fixed_s
        spare_s = limit_s - fixed_s - (tokens - end) * pace.compute_token_s
        reach = math.floor(spare_s / pace.read_token_s + 1e-9)
        if reach >= tokens and tokens - end <= sizes.most:
            return [*cuts, tokens - end]
        stop = min(reach // sizes.step * sizes.step, end + sizes.largest)
        if stop <= end:
            return None
        cuts.append(stop - end)
        end = stop
    return None


def _check(given: dict[str, float]) -> None:
    for name, value in given.items():
        may_be_zero = name in ("n_tokens", "read_fixed_s", "compute_fixed_s")
        if not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
            least = "0 or more" if may_be_zero else "more than 0"
            raise SettingError(f"{name} is {value}; it must be finite and {least}")
