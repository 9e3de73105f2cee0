from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.errors import NeverFits
from lazyio.ple.ngram import derive_constants, is_prime, largest_primes_within, splitmix64

BELOW_3000 = [number for number in range(2, 3000) if all(number % divisor for divisor in range(2, number))]


def test_the_released_constants():
    constants = derive_constants(320_001_536)
    assert constants.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert [size - 20_000_000 for size in constants.head_sizes] == [
        *(3, 23, 33, 47, 59, 63, 69, 77),
        *(81, 93, 107, 147, 153, 159, 161, 171),
    ]
    assert constants.head_offsets[0] == 0
    assert constants.head_offsets[15] == 300_001_275
    assert constants.head_offsets[15] + constants.head_sizes[15] == 320_001_446
    assert (constants.heads_per_ngram, constants.eos) == (8, 248_044)


def test_splitmix64_gives_the_generator_s_known_outputs():
    golden = 0x9E3779B97F4A7C15
    state = 1234567
    states = np.array([(state + step * golden) % 2**64 for step in range(3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_multipliers_keep_products_below_2_to_63_and_differ_between_layers():
    first, second = (derive_constants(10_000, vocab=1000, eos=9, module=module) for module in (0, 1))
    for multiplier in first.multipliers + second.multipliers:
        assert multiplier % 2 == 1
        assert 999 * multiplier < 2**63
    assert not set(first.multipliers) & set(second.multipliers)


def test_primes():
    assert [number for number in range(-5, 3000) if is_prime(number)] == BELOW_3000


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 20_000), st.integers(1, 12))
def test_the_largest_run_of_primes(total: int, number: int):
    runs = [BELOW_3000[start : start + number] for start in range(len(BELOW_3000) - number)]
    fitting = [run for run in runs if sum(run) <= total]
    if not fitting:
        with pytest.raises(NeverFits):
            largest_primes_within(total, number)
    elif sum(runs[-1]) > total:
        assert list(largest_primes_within(total, number)) == fitting[-1]


def test_the_smallest_table_there_can_be():
    assert derive_constants(381).head_sizes == tuple(BELOW_3000[:16])
    with pytest.raises(NeverFits, match="380 rows can't hold 16"):
        derive_constants(380)
