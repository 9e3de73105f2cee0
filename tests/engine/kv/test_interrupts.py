"""An interrupt at any moment at which Python looks for one: no page stays held, and what comes next is as ever."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from lazyio.engine import LLM
from lazyio.engine.kv.paged import Paged

KEEPING_ACCOUNT = ("/engine/llm.py", "/engine/scheduler.py", "/engine/kv/", "contextlib.py")


@contextmanager
def interrupted(number: int) -> Iterator[list[int]]:
    """Interrupt at the moment of that number, of those in which pages are taken and given back; counts them.

    Moments are the beginning of each function and the end of each one of C: nowhere else, but for jumps back in loops,
    does Python look for signals.
    """
    moments = [0]

    def look(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in KEEPING_ACCOUNT):
            moments[0] += 1
            if moments[0] == number:
                raise KeyboardInterrupt

    before = sys.getprofile()
    gc.disable()  # an interrupt of what is collected would be swallowed
    sys.setprofile(look)
    try:
        yield moments
    finally:
        sys.setprofile(before)
        gc.enable()


@pytest.fixture(scope="module")
def llm(saved: Callable[[str], tuple[Any, Path]]) -> Iterator[LLM]:
    with LLM(saved("qwen3_5")[1], device="cpu", kv_pages=8, ubatch=16, parallel=2) as llm:
        yield llm


def balanced(llm: LLM) -> bool:
    """Whether nobody holds anything but what is kept for others."""
    admission = llm.admission
    assert isinstance(admission, Paged)
    admission.ledger.prefixes.clear()
    return (admission.ledger.seated, admission.ledger.pool.used) == (0, 0)


def each_moment(act: Callable[[], object], every: int = 1) -> Iterator[int]:
    """The numbers of all moments of `act`, or of one in so many."""
    with interrupted(0) as moments:
        act()
    assert moments[0] > 50
    yield from range(1, moments[0], every)


def test_logits(llm: LLM) -> None:
    tokens = list(range(3, 40))
    expected = llm.logits(tokens)
    for number in each_moment(lambda: llm.logits(tokens)):
        with pytest.raises(KeyboardInterrupt), interrupted(number):
            llm.logits(tokens)
        assert balanced(llm), number
    assert torch.equal(llm.logits(tokens), expected)


def test_logits_beside_a_reply_which_is_whole_or_ends_there(llm: LLM) -> None:
    tokens, prompt = list(range(3, 40)), list(range(60, 80))
    (whole,) = llm.generate(prompt, max_tokens=5)
    reasons = set()
    for number in each_moment(lambda: llm.logits(tokens), every=3):
        with llm.reply(prompt, max_tokens=5) as reply:
            next(reply)
            with pytest.raises(KeyboardInterrupt), interrupted(number):
                llm.logits(tokens)
            list(reply)
        reasons.add(reply.completion.finish_reason)
        assert reply.completion.finish_reason == "interrupted" or reply.completion.token_ids == whole.token_ids
        assert balanced(llm), number
    assert reasons == {"interrupted", "length"}


def test_logits_that_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they fail with, replies go on; an interrupt while they do ends these."""
    prompt = list(range(60, 80))
    (whole,) = llm.generate(prompt, max_tokens=5)

    def failing() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm._forward, "logits", lambda _: (_ for _ in ()).throw(RuntimeError("out of something")))
            with pytest.raises(RuntimeError, match="out of something"):
                llm.logits([1, 2, 3])

    with llm.reply(prompt, max_tokens=5) as reply:
        next(reply)
        failing()
        list(reply)
    assert reply.completion.token_ids == whole.token_ids
    for number in each_moment(failing):
        with pytest.raises(KeyboardInterrupt), interrupted(number):
            failing()
        assert balanced(llm), number


def test_replies(llm: LLM) -> None:
    prompts = [list(range(60, 80)), list(range(60, 75)), [5, 6, 7]]

    def replies() -> list[tuple[int, ...]]:
        return [each.token_ids for each in llm.generate(prompts, max_tokens=3)]

    expected = replies()
    assert balanced(llm)
    for number in each_moment(replies, every=17):
        with pytest.raises(KeyboardInterrupt), interrupted(number):
            replies()
        assert balanced(llm), number
    assert replies() == expected
