from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyio.engine.state import Sliding

CPU = torch.device("cpu")


def sliding(window: int, capacity: int) -> Sliding:
    return Sliding(window, capacity, 2, dtype=torch.float32, device=CPU)


def entries(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 2)


@given(window=st.integers(1, 7), chunks=st.lists(st.integers(1, 30), min_size=1, max_size=25))
def test_a_chunk_lies_behind_what_its_first_token_reaches(window: int, chunks: list[int]):
    piece = sliding(window, sum(chunks))
    before = 0
    for count in chunks:
        reached = min(before, window - 1)
        assert torch.equal(piece.append(entries(before, count)), entries(before - reached, reached + count))
        before += count


@given(window=st.integers(1, 5), chunks=st.lists(st.integers(1, 12), min_size=2, max_size=12), at=st.integers(1, 11))
def test_a_clone_goes_its_own_way(window: int, chunks: list[int], at: int):
    at = min(at, len(chunks) - 1)
    piece = sliding(window, sum(chunks))
    before = 0
    for count in chunks[:at]:
        piece.append(entries(before, count))
        before += count
    copy = piece.clone()
    assert copy.nbytes == piece.nbytes
    for count in chunks[at:]:
        piece.append(torch.full((count, 2), -1.0))
        reached = min(before, window - 1)
        assert torch.equal(copy.append(entries(before, count)), entries(before - reached, reached + count))
        before += count


@pytest.mark.parametrize(("capacity", "kept"), [(5, 5), (1000, 16)])
def test_no_more_is_kept_than_two_windows_or_the_whole_sequence(capacity: int, kept: int):
    piece = sliding(8, capacity)
    assert piece.nbytes == kept * 2 * 4
    for first in range(0, capacity, 5):
        piece.append(entries(first, 5))
    assert piece.nbytes == kept * 2 * 4
