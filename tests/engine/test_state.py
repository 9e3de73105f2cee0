from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyio.engine.state import Growing, Recent, Sliding

CPU = torch.device("cpu")


def sliding(window: int, capacity: int) -> Sliding:
    return Sliding(window, capacity, 2, dtype=torch.float32, device=CPU)


def entries(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 2)


@pytest.mark.parametrize("sequences", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_convolutions_reach_back_to_is_kept_for_several_sequences_at_once(sequences: int, tokens: int):
    together, apart = ([Recent(3, 2, dtype=torch.float32, device=CPU) for _ in range(sequences)] for _ in range(2))
    for turn in range(4):
        new = torch.rand(sequences, tokens, 2, generator=torch.Generator().manual_seed(turn))
        expected = torch.stack([piece.extend(each) for piece, each in zip(apart, new, strict=True)])
        assert torch.equal(Recent.extend_each(together, new), expected)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.entries, other.entries)


@pytest.mark.parametrize("kinds", [1, 2])
def test_windows_of_several_sequences_grow_at_once(kinds: int):
    together, apart = (
        [[Growing(20, 2, dtype=torch.float32, device=CPU) for _ in range(3)] for _ in range(kinds)] for _ in range(2)
    )
    for ones, others in zip(together, apart, strict=True):
        for i, (one, other) in enumerate(zip(ones, others, strict=True)):
            one.append(entries(0, i))
            other.append(entries(0, i))
    for turn in range(4):
        new, positions = [entries(100 * turn + 50 * kind, 3) for kind in range(kinds)], torch.zeros(3)
        Growing.put_each(together, new, positions)
        for ones, others, some in zip(together, apart, new, strict=True):
            for one, other, each in zip(ones, others, some.split(1), strict=True):
                assert torch.equal(one.entries, other.append(each))
    together[0][1].append(entries(0, 20 - len(together[0][1].entries)))
    with pytest.raises(AssertionError, match="outgrew"):
        Growing.put_each(together, new, positions)
    Growing.put_each([ones[:1] for ones in together], [entries(0, 5)] * kinds, torch.zeros(5))
    assert torch.equal(together[-1][0].entries[-5:], entries(0, 5))


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
