from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.engine.kv.pieces import LaneTable, Paged, Placed, Window
from lazyio.engine.kv.pool import PAGE
from lazyio.engine.kv.tables import Table
from lazyio.engine.state import Growing, Sliding

CPU = torch.device("cpu")


def entries(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 2)


def paged(pages: list[int], ratio: int) -> Paged:
    plane = torch.full((max(pages) + 1, PAGE // ratio, 2), torch.nan)
    return Paged(plane, LaneTable(Table(np.array(pages, np.int32)), torch.tensor(pages)), 0)


@settings(deadline=None)
@given(
    pages=st.lists(st.integers(1, 9), unique=True, min_size=1, max_size=6),
    chunks=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=8),
    ratio=st.sampled_from([1, 4]),
)
def test_paged_entries_are_those_of_a_window(pages: list[int], chunks: list[int], ratio: int) -> None:
    """Whatever pages there are, in a row or not, and whatever chunks come."""
    piece = paged(pages, ratio)
    room = len(pages) * PAGE // ratio
    window = Growing(room, 2, dtype=torch.float32, device=CPU)
    before = 0
    for chunk in chunks:
        count = min(chunk, room - before)
        new = entries(before, count)
        assert torch.equal(piece.append(new), window.append(new))
        before += count
    assert torch.equal(piece.entries, window.entries)
    assert piece.nbytes == window.nbytes
    used = set(pages[: -(-before * ratio // PAGE)])
    assert all(piece.plane[page].isnan().all() for page in range(len(piece.plane)) if page not in used)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 2 * PAGE), min_size=1, max_size=3), ratio=st.sampled_from([1, 4]))
def test_steps_of_several_sequences_are_those_of_each(lengths: list[int], ratio: int) -> None:
    plane = torch.full((9, PAGE // ratio, 2), torch.nan)
    tables = [np.array([7 - 2 * i, 2 + 2 * i], np.int32) for i in range(len(lengths))]
    pieces = [Paged(plane, LaneTable(Table(table), torch.tensor(table.tolist())), 0) for table in tables]
    windows = [Growing(2 * PAGE // ratio, 2, dtype=torch.float32, device=CPU) for _ in lengths]
    for number, (piece, window, length) in enumerate(zip(pieces, windows, lengths, strict=True)):
        known = min(length // ratio, 2 * PAGE // ratio - 2)  # two more are to come
        if known:
            piece.append(entries(1000 * number, known))
            window.append(entries(1000 * number, known))
    for step in range(2):
        new, positions = entries(-10 * step - 10, len(pieces)), torch.zeros(len(pieces))
        Growing.put_each([windows], [new], positions)
        Paged.put_each([pieces], [new], positions)
        for piece, window in zip(pieces, windows, strict=True):
            assert torch.equal(piece.entries, window.entries)
            assert torch.equal(piece.lie.gathered(), window.entries)


def test_a_sequence_that_outgrows_its_pages() -> None:
    piece = paged([3, 1], 4)
    piece.append(entries(0, 128))
    with pytest.raises(AssertionError, match="outgrew its claim"):
        piece.append(entries(128, 1))
    with pytest.raises(AssertionError, match="outgrew its claim"):
        Paged.put_each([[piece]], [entries(128, 1)], torch.zeros(1))


def test_a_clone_of_paged_entries_goes_its_own_way() -> None:
    piece = paged([3, 1], 4)
    piece.append(entries(0, 100))
    copy = piece.clone()
    piece.append(-entries(100, 5))
    assert torch.equal(copy.append(entries(100, 7)), entries(0, 107))


@given(window=st.integers(1, 7), chunks=st.lists(st.integers(1, 30), min_size=1, max_size=25))
def test_a_window_in_place_gives_what_one_with_room_does(window: int, chunks: list[int]) -> None:
    piece = Window(torch.full((window - 1, 2), torch.nan), 0)
    expected = Sliding(window, sum(chunks) + 2, 2, dtype=torch.float32, device=CPU)
    before = 0
    for count in chunks:
        assert torch.equal(piece.append(entries(before, count)), expected.append(entries(before, count)))
        before += count
    copy = piece.clone()
    assert torch.equal(copy.append(entries(before, 2)), expected.append(entries(before, 2)))
    assert piece.nbytes == (window - 1) * 8


def test_a_tensor_is_replaced_where_it_is() -> None:
    place = torch.zeros(3)
    piece = Placed(place)
    piece.value = torch.ones(3)
    copy = piece.clone()
    copy.value = 2 * torch.ones(3)
    assert place.tolist() == [1, 1, 1]
