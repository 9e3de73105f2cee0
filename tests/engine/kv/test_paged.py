"""Sequences in pages beside the same in windows, with models of every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine import forward
from lazyio.engine.kv import pieces
from lazyio.engine.kv.layout import Layout
from lazyio.engine.kv.paged import Paged, PagedSeat, Reuse
from lazyio.engine.kv.pieces import Paged as PagedEntries
from lazyio.engine.kv.pool import NULL, PAGE
from lazyio.engine.layers import attention, block_selection, delta_rule, gated_attention
from lazyio.engine.models import Model
from lazyio.engine.state import State
from lazyio.errors import NeverFits, NoRoom, Unsupported

ALL = ("qwen4_exp", "gemma4", "gemma3n", "qwen3_5", "qwen3_5_moe")
REUSE = Reuse()
SOME = ("qwen4_exp", "gemma3n")


@pytest.fixture(scope="session")
def pair(tiny: Callable[..., Any]) -> Callable[[str], Any]:
    """`pair(name)`: a tiny model for sequences of some pages, the same one for the whole session."""
    known: dict[str, Any] = {}

    def made(name: str) -> Any:
        if name not in known:
            known[name] = tiny(name, max_position_embeddings=2048)
        return known[name]

    return made


@pytest.fixture
def pool() -> Iterator[Callable[..., Paged]]:
    """`pool(model, pages)`: a poisoned one; at the end of the test it must balance to zero, the null page clean."""
    made: list[Paged] = []

    def make(model: Model, pages: int = 40, *, reuse: Reuse | None = REUSE) -> Paged:
        made.append(Paged(model, pages, streams=1, reuse=reuse, poison=True))
        return made[-1]

    yield make
    for each in made:
        assert each.ledger.seated == 0
        each.ledger.prefixes.clear()
        assert each.ledger.pool.used == 0
        assert each.buffer.null_is_clean()


def run(pair: Any, state: State, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
    """The logits of the tokens after those that the state stands for, cut at these positions."""
    found = []
    ends = [*(cut for cut in cuts if state.tokens < cut < len(tokens)), len(tokens)]
    for end in ends:
        before = None if pair.table is None else pair.row_ids.tail(tokens[: state.tokens])
        found += pair._step([(state, list(tokens[state.tokens : end]))], [before])
    return torch.cat(found)


def array(tokens: Sequence[int]) -> Any:
    return np.array(tokens, np.int64)


def fresh(pair: Any, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
    return run(pair, pair.model.new_state(len(tokens)), tokens, cuts)


def parted(pair: Any, at: int, length: int) -> list[int]:
    """Tokens that begin like `pair.tokens(length)` and go on otherwise after so many."""
    own, other = pair.tokens(length), pair.tokens(length, seed=8)
    found = [*own[:at], *other[at:]]
    found[at] = own[at] + 1 if own[at] < 200 else 7
    return found


@pytest.mark.parametrize("name", ALL)
def test_paged_is_windowed_bit_for_bit(name: str, pair: Callable[[str], Any], pool: Callable[..., Paged]) -> None:
    """Also of two sequences in turns, and of one whose pages others have used."""
    both = pair(name)
    tokens, other = both.tokens(PAGE + 30), both.tokens(100, seed=5)
    cuts = [1, 8, 40, 41, 250, 259, 260, 261]
    made = pool(both.model, reuse=None)
    first, second = made.seat(array(tokens), 1), made.seat(array(other), 1)
    found = [run(both, seat.state, part, cuts) for seat, part in ((first, tokens[:50]), (second, other[:60]))]
    found += [run(both, seat.state, part, cuts) for seat, part in ((first, tokens), (second, other))]
    expected = fresh(both, tokens, sorted([*cuts, 50]))
    expected_other = fresh(both, other, sorted([*cuts, 60]))
    assert torch.equal(torch.cat([found[0], found[2]]), expected)
    assert torch.equal(torch.cat([found[1], found[3]]), expected_other)
    made.release(first)
    third = made.seat(array(other), 1)
    assert torch.equal(run(both, third.state, other, [60]), fresh(both, other, [60]))
    made.release(second)
    made.release(third)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows in the interpreter
@pytest.mark.parametrize("name", ["qwen4_exp", "qwen3_5"])
def test_kernels_find_in_pages_what_they_find_in_windows(
    name: str, pair: Callable[[str], Any], pool: Callable[..., Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: chunks, and steps of two sequences together, over the edge of a page; nothing is copied."""
    pytest.importorskip("triton")
    both = pair(name)
    tokens, other = both.tokens(PAGE + 30), both.tokens(100, seed=5)
    made = pool(both.model, reuse=None)
    seats = [made.seat(array(some), 1) for some in (tokens, other)]
    states = [[seat.state for seat in seats], [both.model.new_state(len(some)) for some in (tokens, other)]]
    for state in (ours[0] for ours in states):
        run(both, state, tokens[: PAGE - 4], [])
    for module in (attention, block_selection, gated_attention, pieces):
        monkeypatch.setattr(module, "usable", lambda _: True)
    monkeypatch.setattr(PagedEntries, "entries", property(lambda _: pytest.fail("pages were copied")))

    def found(first: State, second: State) -> list[torch.Tensor]:
        results = [run(both, second, other[:9], [4])]
        for _ in range(6):
            pairs = [(first, tokens), (second, other)]
            before = [None if both.table is None else both.row_ids.tail(of[: state.tokens]) for state, of in pairs]
            results += both._step([(state, [of[state.tokens]]) for state, of in pairs], before)
        return [*results, run(both, first, tokens[: PAGE + 12], [PAGE + 5])]

    for one, expected in zip(found(*states[0]), found(*states[1]), strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, expected)
    for seat in seats:
        made.release(seat)


def test_a_read_of_what_nobody_wrote_shows(
    pair: Callable[[str], Any], pool: Callable[..., Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, entries = pair("qwen3_5"), PagedEntries.entries

    def one_too_many(piece: PagedEntries) -> torch.Tensor:
        read = entries.__get__(piece)
        piece._length += 1
        beyond = entries.__get__(piece)[-1:]
        piece._length -= 1
        return torch.cat([read[:-1], beyond])

    monkeypatch.setattr(PagedEntries, "entries", property(one_too_many))
    made = pool(both.model)
    seat = made.seat(array([1] * 20), 1)
    assert run(both, seat.state, both.tokens(20), []).isnan().any()
    made.release(seat)


def test_a_write_to_the_null_page_is_found(pair: Callable[[str], Any]) -> None:
    made = Paged(pair("qwen3_5").model, 40, streams=1, reuse=Reuse(), poison=True)
    made.buffer._bytes[NULL, 5] = 3
    with pytest.raises(AssertionError, match="wrote to the null page"):
        made.seat(array([1]), 1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("at", [PAGE - 1, PAGE, PAGE + 1])
def test_resumed_around_a_page_edge_is_fresh_at_equal_cuts(
    name: str, at: int, pair: Callable[[str], Any], pool: Callable[..., Paged], agree: Callable[..., None]
) -> None:
    both = pair(name)
    tokens, length = both.tokens(PAGE + 20), PAGE + 40
    made = pool(both.model)
    first = made.seat(array(tokens), 5)
    assert first.marks == (PAGE,)
    run(both, first.state, tokens[:PAGE], [])
    made.mark(first, tokens[:PAGE])
    run(both, first.state, tokens, [])
    made.release(first, tokens)

    prompt = parted(both, at, length)
    seat = made.seat(array(prompt), 5)
    assert seat.state.tokens == (0 if at < PAGE else PAGE)
    found = run(both, seat.state, prompt, [PAGE, PAGE + 10])
    expected = fresh(both, prompt, [PAGE, PAGE + 10])
    assert torch.equal(found, expected[length - len(found) :])
    agree(found, fresh(both, prompt, [])[length - len(found) :])
    made.release(seat)


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_goes_on_where_it_ended(
    name: str, pair: Callable[[str], Any], pool: Callable[..., Paged]
) -> None:
    """Within a page, which is copied: two go on from it at the same time, and each is as if it were alone."""
    both = pair(name)
    history = both.tokens(PAGE + 20)
    made = pool(both.model)
    first = made.seat(array(history), 5)
    run(both, first.state, history, [PAGE, PAGE + 19])
    made.release(first, history)

    prompts = [history + both.tokens(25, seed=seed) for seed in (5, 6)]
    seats = [made.seat(array(prompt), 5) for prompt in prompts]
    assert [seat.state.tokens for seat in seats] == [len(history)] * 2
    found = [run(both, seat.state, prompt[:-9], []) for seat, prompt in zip(seats, prompts, strict=True)]
    found += [run(both, seat.state, prompt, []) for seat, prompt in zip(seats, prompts, strict=True)]
    for number, prompt in enumerate(prompts):
        expected = fresh(both, prompt, [PAGE, PAGE + 19, len(history), len(prompt) - 9])
        assert torch.equal(torch.cat(found[number::2]), expected[len(history) :])
    for seat, prompt in zip(seats, prompts, strict=True):
        made.release(seat, prompt)


def test_prompts_that_parted_leave_a_mark_where_they_did(
    pair: Callable[[str], Any], pool: Callable[..., Paged]
) -> None:
    both = pair("qwen3_5")
    tokens = both.tokens(3 * PAGE + 10)
    made = pool(both.model)
    first = made.seat(array(tokens), 1)
    run(both, first.state, tokens, [])
    made.release(first, tokens)
    seat = made.seat(array(parted(both, 2 * PAGE + 30, len(tokens))), 1)
    assert (seat.state.tokens, seat.marks) == (0, (2 * PAGE, 3 * PAGE))
    made.release(seat)


def test_nothing_is_resumed_where_it_is_not_asked_for(pair: Callable[[str], Any], pool: Callable[..., Paged]) -> None:
    both = pair("qwen3_5")
    tokens = both.tokens(PAGE + 20)
    made = pool(both.model, reuse=None)
    for _ in range(2):
        seat = made.seat(array(tokens), 1)
        assert (seat.state.tokens, seat.marks) == (0, ())
        run(both, seat.state, tokens, [])
        made.release(seat, tokens)
    assert made.ledger.prefixes.pages == 0


@pytest.mark.parametrize("name", SOME)
def test_more_lanes_than_windows_would_have_room_for(
    name: str, pair: Callable[[str], Any], pool: Callable[..., Paged]
) -> None:
    both = pair(name)
    made = pool(both.model, pages=3 * (1 + Layout(both.model).run_pages))
    prompts = [both.tokens(20 + number, seed=number) for number in range(8)]
    waiting, seated, found = list(enumerate(prompts)), list[tuple[int, PagedSeat]](), dict[int, torch.Tensor]()
    waits = 0
    while waiting or seated:
        try:
            while waiting:
                seated.append((waiting[0][0], made.seat(array(waiting[0][1]), 5)))
                waiting.pop(0)
        except NoRoom:
            waits += 1
        number, seat = seated.pop(0)
        found[number] = run(both, seat.state, prompts[number], [])
        made.release(seat)
    assert waits
    assert made.ledger.pool.peak == len(made.ledger.pool)
    for number, prompt in enumerate(prompts):
        assert torch.equal(found[number], fresh(both, prompt, []))


def test_who_found_no_room_is_not_tried_again_before_that_can_change(
    pair: Callable[[str], Any], pool: Callable[..., Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tried = pool(pair("qwen3_5").model, pages=4), 0
    seats = made.ledger.seat

    def counted(*arguments: Any) -> Any:
        nonlocal tried
        tried += 1
        return seats(*arguments)

    monkeypatch.setattr(made.ledger, "seat", counted)
    first, waiting = made.seat(array([1] * 300), 1), array([2] * 300)
    for _ in range(3):
        with pytest.raises(NoRoom):
            made.seat(waiting, 1)
    with pytest.raises(NoRoom):
        made.seat(array([2] * 300), 1)
    assert tried == 3
    made.release(first)
    made.release(made.seat(waiting, 1))


@pytest.mark.parametrize("method", ["open", "copy"])
def test_a_lane_that_can_not_be_opened_holds_nothing(
    method: str, pair: Callable[[str], Any], pool: Callable[..., Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair("qwen3_5")
    made, prompt = pool(both.model), both.tokens(40)
    first = made.seat(array(prompt), 1)
    run(both, first.state, prompt, [])
    made.release(first, prompt)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(made.buffer, method, fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            made.seat(array([*prompt, 5]), 1)
    assert made.ledger.seated == 0
    resumed = made.seat(array([*prompt, 5]), 1)
    assert resumed.known == len(prompt)
    made.release(resumed)


def test_windows_of_keys_hold_no_more_than_their_window(pair: Callable[[str], Any], pool: Callable[..., Paged]) -> None:
    both = pair("gemma4")
    window = both.reference.config.sliding_window
    parts = pool(both.model).buffer.layout.parts
    assert len(parts) == 2 * 2
    assert all(part.shape[0] == window - 1 for part in parts)


def test_a_pool_too_small_for_one_stream_or_too_large_for_the_machine(pair: Callable[[str], Any]) -> None:
    model = pair("qwen3_5").model
    with pytest.raises(
        NeverFits, match="kv_pages comes to 1, and one stream takes 2 at least: 1 for its state and 1 for"
    ):
        Paged(model, 1, streams=1, reuse=Reuse(), poison=False)
    with pytest.raises(NeverFits, match=r"a pool of 16777216 pages .* lower kv_pages"):
        Paged(model, 1 << 24, streams=1, reuse=Reuse(), poison=False)


def test_a_request_beyond_the_pool_is_refused(pair: Callable[[str], Any], pool: Callable[..., Paged]) -> None:
    made = pool(pair("qwen3_5").model, pages=3)
    made.fits_ever(2 * PAGE - 1)
    with pytest.raises(NeverFits, match="set kv_pages to 4 or more"):
        made.fits_ever(2 * PAGE)


def test_entries_that_do_not_fill_a_page(tiny: Callable[..., Any]) -> None:
    model = tiny("qwen4_exp", indexer_budget=9, indexer_compress_ratio=3).model
    with pytest.raises(Unsupported, match=r"pages of 256 positions can't hold 85 entries each .* set kv_pages to off"):
        Paged(model, 40, streams=1, reuse=Reuse(), poison=False)


def test_blocks_of_kernels_and_batches_divide_a_page() -> None:
    assert PAGE % delta_rule.BLOCK == PAGE % forward.BLOCK == 0


def test_the_tables_of_host_and_device_are_the_same(pair: Callable[[str], Any], pool: Callable[..., Paged]) -> None:
    made = pool(pair("qwen3_5").model)
    seat = made.seat(array([1] * 3 * PAGE), 1)
    pieces = [piece.keys for piece in seat.state.pieces.values() if hasattr(piece, "keys")]
    assert pieces
    for piece in pieces:
        assert np.array_equal(piece.table.device.numpy(), seat.claim.table.pages)
    made.release(seat)
