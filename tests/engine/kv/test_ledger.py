from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lazyio.engine.kv.ledger import Ledger, Memory, Seat
from lazyio.engine.kv.pool import PAGE, Pool
from lazyio.errors import NeverFits, NoRoom

Make = Callable[..., Ledger]
TEXT = np.random.default_rng(0).integers(0, 1000, 4 * PAGE).tolist()


def resume(ledger: Ledger, tokens: list[int], max_tokens: int) -> Seat:
    return ledger.seat(len(tokens), max_tokens, ledger.prefixes.match(tokens, len(tokens) - 1))


def test_a_claim_is_prompt_reply_and_one_more_forward(ledger: Make):
    made = ledger(10)
    seat = made.seat(200, 55)
    assert seat.table.pages.tolist() == [1]
    assert seat.runs.tolist() == [9, 10]
    other = made.seat(200, 56)
    assert other.table.pages.tolist() == [2, 3]
    assert other.runs.tolist() == [7, 8]
    assert (made.seated, made.free, made.pool.peak) == (2, 3, 7)
    made.release(seat)
    made.release(other)


def test_what_never_fits_names_the_setting(ledger: Make):
    made = ledger(5)
    made.fits_ever(3 * PAGE - 1)
    message = (
        "a prompt and a reply of 768 tokens together take 4 pages of 256 positions and 2 for its state, and the pool "
        "has 5: set kv_pages to 6 or more, shorten the prompt or lower max_tokens"
    )
    with pytest.raises(NeverFits, match=message):
        made.fits_ever(3 * PAGE)
    with pytest.raises(NeverFits, match="set kv_pages to 6"):
        made.seat(3 * PAGE - 1, 1)


def test_no_room_waits_until_a_lane_ends(ledger: Make):
    made = ledger(6)
    seat = made.seat(300, 100)
    message = "1 pages and 2 in a row for a state are needed; of 6 pages 2 can be had, the others are held by 1 lanes"
    with pytest.raises(NoRoom, match=message):
        made.seat(1, 1)
    assert made.pool.used == 4
    made.release(seat)
    made.release(made.seat(1, 1))


def test_a_seat_is_released_once(ledger: Make):
    made = ledger(6)
    seat = made.seat(300, 100)
    made.release(seat)
    with pytest.raises(AssertionError, match="released twice"):
        made.release(seat)


def test_what_is_kept_is_free_and_goes_before_anyone_waits(ledger: Make):
    made = ledger(6)
    made.release(made.seat(300, 100), keep=TEXT[:400])
    assert (made.pool.free, made.free) == (2, 6)
    seat = made.seat(700, 300)
    assert made.prefixes.pages == 0
    assert len(seat.table.pages) == 4
    made.release(seat)


def test_what_can_not_be_had_evicts_nothing(ledger: Make):
    made = ledger(9)
    made.release(made.seat(300, 100), keep=TEXT[:400])
    seat = made.seat(300, 100)
    with pytest.raises(NoRoom):
        made.seat(1000, 1)
    assert made.prefixes.pages == 4
    made.release(seat)


def test_a_resumed_lane_shares_whole_pages_and_copies_the_last(ledger: Make):
    made = ledger(12)
    first = made.seat(300, 100)
    made.release(first, keep=TEXT[:400])
    seat = resume(made, TEXT[:700], 60)
    assert seat.prefix.tokens == 400
    assert seat.table.pages.tolist() == [1, 3, 4]
    assert seat.prefix.partial == 2
    assert sorted(seat.pinned) == [2, *first.runs.tolist()]
    made.prefixes.clear()
    assert made.prefixes.pages == 4  # all that the lane resumes
    made.resumed(seat)
    made.prefixes.clear()
    assert made.prefixes.pages == 1
    made.release(seat)


def test_the_only_request_does_not_wait_for_what_it_resumes(ledger: Make):
    made = ledger(6)
    made.release(made.seat(300, 100), keep=TEXT[:400])
    seat = resume(made, TEXT[:700], 300)
    assert (seat.prefix.matched, seat.prefix.tokens) == (400, 0)
    made.release(seat)


def test_a_mark_is_kept_while_the_lane_runs(ledger: Make):
    made = ledger(12)
    seat = made.seat(700, 10)
    run = made.mark(seat, TEXT[:512])
    assert run is not None
    assert made.mark(seat, TEXT[:512]) is None
    assert made.prefixes.inactive == 2  # its snapshot; its pages are in use
    other = resume(made, [*TEXT[:512], 5], 10)
    assert other.table.pages[:2].tolist() == seat.table.pages[:2].tolist()
    made.release(seat)
    made.release(other)
    assert made.free == 12


def test_a_mark_lets_nobody_wait(ledger: Make):
    made = ledger(7)
    seat = made.seat(700, 10)
    assert made.mark(seat, TEXT[:256]) is not None
    assert made.mark(seat, TEXT[:512]) is not None  # in place of that before
    assert resume_point(made, TEXT[:600]) == 512
    short = made.seat(1, 1) if made.free >= 3 else None
    assert short is None
    made.release(seat)


def resume_point(ledger: Ledger, tokens: list[int]) -> int:
    return ledger.prefixes.match(tokens, len(tokens) - 1).tokens


def test_a_ledger_that_was_interrupted_begins_afresh(ledger: Make):
    made = ledger(10, 2)
    lane = made.seat(200, 300)
    made.release(lane, range(400))
    made.seat(100, 20)
    made.pool.take(1)  # of a claim that went no further
    made.clear()
    assert (made.seated, made.pool.used, made.prefixes.pages) == (0, 0, 0)
    assert made.prefixes.match(range(400), 400).matched == 0
    made.release(made.seat(7 * PAGE, 0))


def test_without_states_there_are_no_runs(ledger: Make):
    made = ledger(5, run_pages=0)
    seat = made.seat(600, 10)
    assert len(seat.runs) == 0
    assert made.mark(seat, TEXT[:256]) is None
    assert resume_point(made, TEXT[:300]) == 256
    made.release(seat, keep=TEXT[:600])
    assert resume_point(made, TEXT[:500]) == 499


def test_the_parts_of_the_summary_sum_to_what_there_is():
    memory = Memory(
        had_bytes=10 << 30, weights_bytes=3_333_333_333, reserve_bytes=1 << 30, page_bytes=(6 << 20) + 12_345
    )
    line = Ledger(Pool(101), 18, streams=4, memory=memory).summary()
    number = r"(\d+)"
    told = re.match(
        rf"memory of {number} MiB = {number} weights \+ {number} reserve \+ {number} streams \+ {number} pages \+ "
        rf"{number} left",
        line,
    )
    assert told is not None
    had, *parts = map(int, told.groups())
    assert had == 10240 == sum(parts)
    assert parts[:2] == [3178, 1024]
    assert "4 streams of 18 pages, 28 pages of 256 positions and the null page" in line
    assert "2 streams of 18 pages, 3 pages" in Ledger(Pool(40), 18, streams=4, memory=memory).summary()


class Serving(RuleBasedStateMachine):
    """Lanes seated and released in any order: nobody has a page of another, nothing leaks, nobody waits in vain."""

    @initialize(pages=st.sampled_from([5, 9, 14, 40]), run_pages=st.integers(0, 2))
    def begin(self, pages: int, run_pages: int) -> None:
        self.ledger = Ledger(Pool(pages + 1), run_pages, streams=2, memory=Memory(1 << 30, 0, 0, 1 << 16))
        self.lanes: list[tuple[Seat, list[int]]] = []
        self.memory: dict[int, list[int]] = {}  # what lies in each page: tokens, or all those that a state stands for

    @rule(
        at=st.sampled_from([100, 256, 300]),
        variant=st.integers(0, 1),
        prompt=st.sampled_from([200, 256, 257, 301, 400, 700]),
        reply=st.sampled_from([1, 255]),
        is_resumed=st.sampled_from([True, True, False]),
        is_short=st.booleans(),
    )
    def seat(self, at: int, variant: int, prompt: int, reply: int, is_resumed: bool, is_short: bool) -> None:
        """All begin alike, and go on in one of two ways from one of a few places on. Short ones end at once."""
        tokens = [*TEXT[:at], *(token + variant for token in TEXT[at:])][:prompt]
        match = self.ledger.prefixes.match(tokens, prompt - 1) if is_resumed else None
        before = self.ledger.pool.used
        try:
            seat = self.ledger.seat(prompt, reply, match)
        except NeverFits:
            assert self.ledger.pages_of(prompt + reply) + self.ledger.run_pages > len(self.ledger.pool)
            return
        except NoRoom:
            assert self.lanes, "a request waits though nobody holds anything"
            assert self.ledger.pool.used <= before
            return
        assert len(seat.table.pages) == -(-(prompt + reply + 1) // PAGE)
        assert seat.prefix.tokens < prompt
        self.lanes.append((seat, tokens))
        self.resume(seat, tokens)
        self.compute(seat, tokens)
        if is_short:
            self.ledger.release(*self.lanes.pop())

    def resume(self, seat: Seat, tokens: list[int]) -> None:
        """What is resumed is what the tokens before it left, wherever they were computed."""
        found, owned = seat.prefix, seat.table.pages[len(seat.prefix.pages) :]
        self.memory |= {page: [] for page in [*owned.tolist(), *seat.runs.tolist()]}  # nobody else has them
        known = [token for page in found.pages for token in self.memory[page]]
        if found.partial is not None:
            known += self.memory[found.partial][: found.tokens % PAGE]
            self.memory[int(owned[0])] = known[len(found.pages) * PAGE :]
        assert known == tokens[: found.tokens]
        if self.ledger.run_pages and found.tokens:
            assert found.run is not None
            assert self.memory[int(found.run[0])] == known
        self.ledger.resumed(seat)

    def compute(self, seat: Seat, tokens: list[int]) -> None:
        for start in range(seat.prefix.tokens // PAGE * PAGE, len(tokens), PAGE):
            self.memory[int(seat.table.pages[start // PAGE])] = tokens[start : start + PAGE]
        if len(seat.runs):
            self.memory[int(seat.runs[0])] = tokens

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 9), pages=st.integers(1, 3))
    def mark(self, which: int, pages: int) -> None:
        seat, tokens = self.lanes[which % len(self.lanes)]
        if len(tokens) >= pages * PAGE:
            free = self.ledger.free
            run = self.ledger.mark(seat, tokens[: pages * PAGE])
            if run is not None:
                self.memory[int(run[0])] = tokens[: pages * PAGE]
            assert self.ledger.free == free

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 9), is_kept=st.booleans())
    def release(self, which: int, is_kept: bool) -> None:
        seat, tokens = self.lanes.pop(which % len(self.lanes))
        self.ledger.release(seat, keep=tokens if is_kept else None)

    @invariant()
    def nobody_writes_where_others_do(self) -> None:
        if not hasattr(self, "lanes"):
            return
        owned = [
            page
            for seat, _ in self.lanes
            for page in [*seat.table.pages[len(seat.prefix.pages) :].tolist(), *seat.runs.tolist()]
        ]
        assert len(owned) == len(set(owned))
        assert 0 not in owned

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "lanes"):
            return
        ledger = self.ledger
        of_lanes = {page for seat, _ in self.lanes for page in [*seat.table.pages.tolist(), *seat.runs.tolist()]}
        assert ledger.pool.used == len(of_lanes) + ledger.prefixes.inactive
        assert ledger.free == len(ledger.pool) - len(of_lanes)

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        for seat, _ in self.lanes:
            self.ledger.release(seat)
        assert self.ledger.free == len(self.ledger.pool)
        self.ledger.prefixes.clear()
        assert self.ledger.pool.used == 0


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
