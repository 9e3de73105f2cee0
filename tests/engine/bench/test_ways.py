from __future__ import annotations

import pytest

from lazyio import SettingError
from lazyio.engine.bench.ways import Way, ways_of


def test_all_pairs_with_mode_off_first_and_once() -> None:
    assert ways_of("on,off,uring", "0,3") == [
        Way("off", 3),
        Way("on", 0),
        Way("on", 3),
        Way("uring", 0),
        Way("uring", 3),
    ]


@pytest.mark.parametrize(
    ("modes", "lookahead", "said"),
    [
        ("on,maybe", "0", "maybe"),
        ("on,on", "0", "each once"),
        ("on", "0,00", "each once"),
        ("on,", "0", "each once"),
        ("on", "0,x", "lookahead"),
    ],
)
def test_words_that_are_none(modes: str, lookahead: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        ways_of(modes, lookahead)
