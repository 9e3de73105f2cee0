"""Constants of the n-gram hash for a table of any number of rows.

A model's file stores its own constants, and those are to be used. These derive from a seed and a number of rows, as
the model's authors did, what a table made from nothing needs. Source: `Qwen4ExpTextNGramEmbedding` of transformers.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, count, islice
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from lazyio.errors import NeverFits
from lazyio.ple.spec import NgramHash

UInt64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_constants(
    rows: int,
    *,
    vocab: int = 248_320,
    eos: int = 248_044,
    ngram_size: int = 3,
    heads_per_ngram: int = 8,
    seed: int = 1234,
    module: int = 0,
) -> NgramHash:
    """Constants whose heads fill `rows` rows as far as consecutive primes can; the defaults are those of the release.

    `module` counts the PLE layers of a model from 0. Raises NeverFits if `rows` is too small for that many heads.
    """
    sizes = largest_primes_within(rows, heads_per_ngram * (ngram_size - 1))
    return NgramHash(
        multipliers=derive_multipliers(vocab, ngram_size, seed, module),
        head_sizes=sizes,
        head_offsets=(0, *accumulate(sizes[:-1])),
        heads_per_ngram=heads_per_ngram,
        eos=eos,
    )


def derive_multipliers(vocab: int, ngram_size: int, seed: int = 1234, module: int = 0) -> tuple[int, ...]:
    """One odd multiplier a position, so small that the product with a token id below `vocab` stays below 2**63.

    half = max(1, floor((2**63 - 1) / vocab) div 2)
    m_i  = 2 * (splitmix64(seed + 10007 * module + golden * (i + 1)) mod half) + 1
    """
    half = max(1, (2**63 - 1) // vocab // 2)
    states = [(seed + 10_007 * module + int(_GOLDEN) * (i + 1)) % 2**64 for i in range(ngram_size)]
    return tuple(2 * (output % half) + 1 for output in splitmix64(np.array(states, np.uint64)).tolist())


def splitmix64(states: UInt64) -> UInt64:
    """What the splitmix64 generator gives for each of these states: uint64, any shape."""
    value = states + _GOLDEN
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


def largest_primes_within(total: int, number: int) -> tuple[int, ...]:
    """The largest `number` consecutive primes, in rising order, whose sum is at most `total`. Raises NeverFits."""
    run = deque(islice(filter(is_prime, count(max(2, total // number))), number))
    while sum(run) > total:
        below = next(filter(is_prime, range(run[0] - 1, 1, -1)), None)
        if below is None:
            raise NeverFits(
                f"{total} rows can't hold {number} n-gram heads of prime size, which take {sum(run)} or more"
            )
        run.pop()
        run.appendleft(below)
    return tuple(run)


def is_prime(number: int) -> bool:
    """Whether `number` is prime, by trial division: sizes of heads are small enough for it."""
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
