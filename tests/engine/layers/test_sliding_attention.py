from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyio.engine.layers.attention import attend
from lazyio.engine.layers.sliding_attention import attend_blocks, blocks

CPU = torch.device("cpu")


def seen(tokens: int, keys: int, window: int | None) -> torch.Tensor:
    """Which of `keys` positions each of the last `tokens` sees, said position by position."""
    reach = keys if window is None else window
    rows = [[0 <= query - key < reach for key in range(keys)] for query in range(keys - tokens, keys)]
    return torch.tensor(rows)


@given(tokens=st.integers(1, 40), before=st.integers(0, 40), window=st.none() | st.integers(1, 12))
def test_each_query_is_in_one_block_and_sees_its_window(tokens: int, before: int, window: int | None):
    keys = tokens + before
    found = torch.zeros(tokens, keys, dtype=torch.int)
    for block in blocks(tokens, keys, CPU, window):
        allowed = torch.tensor(True) if block.allowed is None else block.allowed
        found[block.queries, block.keys] += allowed.int()
    assert torch.equal(found, seen(tokens, keys, window).int())


@pytest.mark.parametrize("window", [1, 4, 16])
def test_work_grows_with_the_window_and_not_with_the_chunk(window: int):
    tokens = 200
    parts = blocks(tokens, tokens + window - 1, CPU, window)
    scores = sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in parts)
    assert scores < 2 * window * tokens


@pytest.mark.parametrize(("tokens", "keys", "window"), [(1, 9, None), (1, 4, 4), (13, 13, None), (11, 14, 4)])
def test_attention_in_blocks_is_attention(tokens: int, keys: int, window: int | None):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(tokens, 4, 8, generator=generator)
    k, v = torch.randn(2, keys, 2, 8, generator=generator)
    found = attend_blocks(q, k, v, blocks(tokens, keys, CPU, window), scale=0.5)
    expected = attend(q, k, v, scale=0.5, allowed=seen(tokens, keys, window))
    torch.testing.assert_close(found, expected)
