"""Who is served when, and what happens to the others when one is cancelled or fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.engine.planning import Planner
from lazyio.engine.request import Request
from lazyio.errors import ModelError, NeverFits, ReadError

from .serving import BROKEN, UNREADABLE, Rows, request_of, run, serving


def counting(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def lengths_of(model: Any) -> list[list[int]]:
    """Tokens of each sequence in each ubatch."""
    return [[len(tokens) for _, tokens in ubatch] for ubatch in model.ubatches]


def test_a_prompt_is_cut_and_its_reply_follows() -> None:
    scheduler, model, memory = serving()
    request = request_of(counting(10, 20))
    scheduler.add(request)
    run(scheduler)
    assert lengths_of(model) == [[8], [8], [4], [1], [1], [1]]
    assert request.writing.tokens == [30, 31, 32, 33]
    assert [piece.token for piece in request.pieces] == [30, 31, 32, 33]
    assert (request.ended, request.error, request.writing.reason) == (True, None, "length")
    assert memory.free == memory.room


def test_replies_go_on_beside_a_long_prompt_which_is_cut_smaller_then() -> None:
    scheduler, model, _ = serving(rows=Rows())
    short, long = request_of([5], max_tokens=6), request_of(counting(20, 30))
    for request in (short, long):
        scheduler.add(request)
    run(scheduler)
    # A prompt is not cut anywhere to fill the first ubatch up. Then at most 3 of its tokens lie beside a reply's.
    assert lengths_of(model)[:10] == [[1], [1, 3], [1, 3], [1, 2], [1, 3], [1, 3], [2], [3], [5], [6]]
    assert short.writing.tokens == counting(6, 6)
    assert long.writing.tokens == counting(50, 4)


def test_the_first_to_come_is_the_first_to_be_served() -> None:
    scheduler, _, memory = serving(parallel=2, ubatch=4, mixed=4)
    requests = [request_of(counting(10 * i, i + 1), max_tokens=5 - i) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    run(scheduler)
    assert memory.seated == [6] * 4
    assert [request.writing.tokens[0] for request in requests] == [1, 12, 23, 34]
    assert scheduler.counts.most_lanes == 2


def test_who_finds_no_room_waits_and_so_do_those_behind() -> None:
    scheduler, _, memory = serving(room=20)
    first, large, small = request_of([1], 9), request_of(counting(20, 8), 8), request_of([9], 2)
    for request in (first, large, small):
        scheduler.add(request)
    assert scheduler.step()
    assert memory.seated == [10]
    run(scheduler)
    assert memory.seated == [10, 16, 3]
    assert scheduler.counts.refused > 0
    assert all(request.writing.reason == "length" for request in (first, large, small))
    assert memory.free == 20


def test_short_ones_come_in_between() -> None:
    """A lane is free for who comes while a long reply goes on."""
    scheduler, _, _ = serving()
    long = request_of([1], 40)
    scheduler.add(long)
    scheduler.step()
    for start in (100, 200):
        short = request_of([start], 2)
        scheduler.add(short)
        while not short.ended:
            scheduler.step()
        assert not long.ended
    run(scheduler)
    assert long.writing.tokens == counting(2, 40)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_asked_for_when_a_prompt_is_queued() -> None:
    rows = Rows()
    scheduler, _, _ = serving(parallel=1, rows=rows, mixed=3)
    for start in (10, 50, 90):
        scheduler.add(request_of(counting(start, 20), 1))
    assert [len(asked) for asked in rows.asked] == [8, 3, 3]
    scheduler.step()
    # Those of the next two ubatches, and no more of the others.
    assert [len(asked) for asked in rows.asked] == [8, 3, 3, 8, 4]
    run(scheduler)
    assert all(asked.taken for asked in rows.asked)


def test_queued_prompts_are_read_ahead_as_long_as_there_is_room() -> None:
    rows = Rows(tokens_ahead=30)
    scheduler, _, _ = serving(parallel=1, rows=rows, mixed=4)
    requests = [request_of(counting(10 * i, 4), 2) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    assert [request.first is not None for request in requests] == [True, True, True, False, False, False]
    scheduler.step()
    assert [request.first is not None for request in requests] == [False, True, True, True, False, False]
    run(scheduler)
    assert all(asked.taken for asked in rows.asked)


def test_a_long_queue_is_not_gone_through_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _, _ = serving(parallel=2, rows=Rows(tokens_ahead=10**6))
    looked = 0
    first_of = Planner.first_of

    def counted(planner: Planner, request: Request, *, alone: bool) -> int:
        nonlocal looked
        looked += 1
        return first_of(planner, request, alone=alone)

    monkeypatch.setattr(Planner, "first_of", counted)
    requests = [request_of([5], 2) for _ in range(50)]
    for request in requests:
        scheduler.add(request)
    scheduler.cancel(requests[30])
    run(scheduler)
    assert looked == len(requests)
    assert [len(request.writing.tokens) for request in requests] == [2] * 30 + [0] + [2] * 19


def test_without_lookahead_nothing_is_asked_for_early() -> None:
    rows = Rows(lookahead=0)
    scheduler, _, _ = serving(rows=rows)
    scheduler.add(request_of(counting(10, 20), 1))
    assert rows.asked == []
    scheduler.step()
    assert [len(asked) for asked in rows.asked] == [8]


def test_prompts_of_a_ubatch_share_a_request_for_rows() -> None:
    rows = Rows(tokens_ahead=0)
    rows.beginnings = {10, 30, 50}
    scheduler, model, _ = serving(rows=rows, ubatch=16)
    for start in (10, 30, 50):
        scheduler.add(request_of(counting(start, 5), 2, ubatch=16))
    rows.asked.clear()
    scheduler.step()
    assert lengths_of(model) == [[5, 5, 5]]
    assert [len(asked) for asked in rows.asked] == [10, 3]  # the first prompt's had been asked for; then a step of all


def test_the_next_tokens_of_all_are_asked_for_before_any_text_is_made() -> None:
    rows, log = Rows(), list[str]()

    class Text:
        def stream(self) -> Any:
            return self

        def add(self, token: int) -> str:
            log.append(f"text {token} after {len(rows.steps)} steps")
            return "x"

        def end(self) -> str:
            return ""

    scheduler, _, _ = serving(rows=rows)
    for start in (10, 50):
        scheduler.add(request_of([start], 2, text=Text()))
    run(scheduler)
    assert rows.steps == [[11, 51]]
    assert log == ["text 11 after 1 steps", "text 51 after 1 steps", "text 12 after 1 steps", "text 52 after 1 steps"]


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(9))
def test_cancelled_at_any_moment(steps: int) -> None:
    rows = Rows()
    scheduler, _, memory = serving(parallel=2, rows=rows)
    others = [request_of(counting(start, 13), 4) for start in (10, 60)]
    gone = request_of(counting(100, 21), 5)
    for request in (others[0], gone, others[1]):
        scheduler.add(request)
    for _ in range(steps):
        scheduler.step()
    had = list(gone.writing.tokens)
    scheduler.cancel(gone)
    assert (gone.ended, gone.error) == (True, None)
    run(scheduler)
    assert gone.writing.tokens == had == counting(121, len(had))
    assert [other.writing.tokens for other in others] == [counting(23, 4), counting(73, 4)]
    assert memory.free == memory.room
    assert all(asked.taken or asked.cancelled for asked in rows.asked)


def test_who_ends_by_its_text_leaves_rows_behind_and_the_others_have_theirs() -> None:
    class Letters:
        def stream(self) -> Any:
            return self

        def add(self, token: int) -> str:
            return chr(token)

        def end(self) -> str:
            return ""

    rows = Rows()
    scheduler, _, _ = serving(rows=rows)
    stopped = request_of([ord("a")], 9, text=Letters(), stop_strings=["c"])
    others = [request_of([start], 5) for start in (10, 200)]
    for request in (others[0], stopped, others[1]):
        scheduler.add(request)
    run(scheduler)
    assert (stopped.writing.text, stopped.writing.reason) == ("b", "stop")
    assert [other.writing.tokens for other in others] == [counting(11, 5), counting(201, 5)]


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("place", [0, 2, 7, 12])
def test_rows_that_can_not_be_read_fail_who_needs_them(lookahead: int, place: int) -> None:
    """In a prompt, whose rows were asked for with those of others, or in a step."""
    rows = Rows(lookahead)
    scheduler, _, memory = serving(rows=rows, ubatch=30)
    failing = request_of(counting(UNREADABLE - place, 1 + place), 5, ubatch=30)
    if place == 12:
        failing = request_of(counting(UNREADABLE - 3, 3), 5)
    others = [request_of(counting(start, 9), 4, ubatch=30) for start in (10, 60)]
    for request in (others[0], failing, others[1]):
        scheduler.add(request)
    run(scheduler)
    assert isinstance(failing.error, ReadError)
    assert [other.error for other in others] == [None, None]
    assert [other.writing.tokens for other in others] == [counting(19, 4), counting(69, 4)]
    assert memory.free == memory.room


def test_logits_that_are_no_numbers_fail_one() -> None:
    scheduler, _, memory = serving()
    failing, other = request_of(counting(BROKEN - 4, 3), 5), request_of([5], 6)
    for request in (failing, other):
        scheduler.add(request)
    run(scheduler)
    assert failing.writing.tokens == [BROKEN - 1, BROKEN]
    with pytest.raises(ModelError, match="the logits after 5 tokens are no finite numbers"):
        raise failing.error or AssertionError
    assert other.writing.tokens == counting(6, 6)
    assert memory.free == memory.room


def test_a_forward_pass_that_fails_ends_who_was_in_it() -> None:
    scheduler, model, memory = serving(parallel=2)
    requests = [request_of([start], 6) for start in (10, 50, 90)]
    for request in requests:
        scheduler.add(request)
    model.exploding = {2}
    run(scheduler)
    assert [str(request.error) for request in requests] == ["out of something"] * 2 + ["None"]
    assert requests[2].writing.tokens == counting(91, 6)
    assert memory.free == memory.room


def test_memory_that_runs_out_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, model, memory = serving(parallel=2)
    for request in (requests := [request_of([start, start + 1], 6) for start in (10, 50)]):
        scheduler.add(request)
    monkeypatch.setattr(model, "step", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    run(scheduler)
    message = "memory ran out while 4 tokens of 2 sequences were computed: lower ubatch, mixed or parallel"
    for request in requests:
        with pytest.raises(NeverFits, match=message):
            raise request.error or AssertionError
    assert memory.free == memory.room


def test_rows_that_can_not_be_asked_for() -> None:
    rows = Rows()
    scheduler, _, memory = serving(rows=rows)
    request = request_of([5], 6)
    scheduler.add(request)
    rows.refusing = True
    run(scheduler)
    assert isinstance(request.error, ReadError)
    assert memory.free == memory.room


def test_an_interrupt_ends_all_and_the_next_ones_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, model, memory = serving(parallel=1)
    under_way, queued = request_of([5], 6), request_of([50], 6)
    for request in (under_way, queued):
        scheduler.add(request)
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
    assert (under_way.ended, queued.ended, under_way.error, memory.free) == (True, True, None, memory.room)
    after = request_of([100], 3)
    scheduler.add(after)
    run(scheduler)
    assert after.writing.tokens == [101, 102, 103]


@pytest.mark.parametrize("method", ["seat", "release"])
def test_an_interrupt_of_the_bookkeeping_leaves_nothing_behind(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _, memory = serving(parallel=2, rows=Rows())
    requests = [request_of([start], 3) for start in (10, 50, 90)]
    for request in requests:
        scheduler.add(request)
    inner = getattr(memory, method)

    def interrupted(*given: Any) -> None:
        if method == "seat":
            inner(*given)  # its result is lost
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(scheduler)
    assert all(request.ended for request in requests)
    assert memory.free == memory.room
    assert not scheduler.step()
    after = request_of([100], 3)
    scheduler.add(after)
    run(scheduler)
    assert after.writing.tokens == [101, 102, 103]
    assert memory.free == memory.room


def test_closing_ends_all() -> None:
    scheduler, _, memory = serving(parallel=1, rows=(rows := Rows()))
    requests = [request_of([start], 6) for start in (10, 50)]
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    scheduler.close()
    assert all(request.ended for request in requests)
    assert memory.free == memory.room
    assert not scheduler.step()
    assert all(asked.taken or asked.cancelled or len(asked) == 1 for asked in rows.asked)


def test_the_account_of_each() -> None:
    scheduler, _, _ = serving(parallel=2, rows=Rows())
    requests = [request_of(counting(start, 10), 3) for start in (10, 50, 90)]
    for request in requests:
        scheduler.add(request)
    run(scheduler)
    accounts = [request.meter.account(len(request.writing.tokens)) for request in requests]
    assert [sum(account.cuts) for account in accounts] == [10] * 3
    assert all(len(account.steps_s) == len(account.steps_waited_s) == 2 for account in accounts)
    assert all(waited >= 0.5 for account in accounts for waited in account.steps_waited_s)
    assert [account.most_together for account in accounts[:2]] == [2, 2]
    assert accounts[2].queued_s > accounts[0].queued_s


# --- all of it -------------------------------------------------------------------------------------------------------


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # of the prompt
        st.integers(1, 8),  # of the reply
        st.integers(0, 12),  # the step before which it comes
        st.sampled_from([None, None, *range(25)]),  # how many steps later it is cancelled
        st.booleans(),  # whether its prompt can't be read
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    parallel=st.integers(1, 5),
    ubatch=st.integers(1, 12),
    mixed=st.integers(1, 12),
    lookahead=st.integers(0, 3),
    tokens_ahead=st.sampled_from([0, 20, 1000]),
    room=st.sampled_from([40, 100, 10_000]),
)
def test_whatever_comes_everyone_gets_what_is_theirs(
    requests: list[tuple[int, int, int, int | None, bool]],
    parallel: int,
    ubatch: int,
    mixed: int,
    lookahead: int,
    tokens_ahead: int,
    room: int,
) -> None:
    mixed = min(mixed, ubatch)
    rows = Rows(lookahead, tokens_ahead=tokens_ahead)
    scheduler, model, memory = serving(parallel=parallel, ubatch=ubatch, mixed=mixed, room=room, rows=rows)
    made = list[Request]()
    for prompt, reply, _, _, fails in requests:
        start = UNREADABLE + 1 - prompt if fails else 200 - prompt
        rows.beginnings.add(start)
        made.append(request_of(counting(start, prompt), reply, ubatch))
    turn, came, gone = 0, set[int](), set[int]()
    while True:
        for i, (_, _, comes, cancels, _) in enumerate(requests):
            if i not in came and comes <= turn:
                came.add(i)
                scheduler.add(made[i])
            if i in came and cancels is not None and turn >= comes + cancels and not made[i].ended:
                gone.add(i)
                scheduler.cancel(made[i])
        before = len(model.ubatches)
        more = scheduler.step()
        for ubatch_now in model.ubatches[before:]:
            replies = sum(len(state.seen) > state.prompt_tokens for state, _ in ubatch_now)
            prompts = sum(len(tokens) for _, tokens in ubatch_now) - replies
            assert prompts <= (mixed if replies else ubatch)
            assert len(ubatch_now) <= parallel
        turn += 1
        if not more and len(came) == len(requests):
            break
    assert memory.free == memory.room
    assert all(asked.taken or asked.cancelled or len(asked) <= parallel for asked in rows.asked)
    for i, (request, (_, reply, _, _, fails)) in enumerate(zip(made, requests, strict=True)):
        assert request.ended
        first = request.plan.tokens[-1] + 1
        assert request.writing.tokens == counting(first, len(request.writing.tokens))
        if i not in gone:
            assert isinstance(request.error, ReadError) if fails else request.error is None
            assert len(request.writing.tokens) == (0 if fails else reply)
