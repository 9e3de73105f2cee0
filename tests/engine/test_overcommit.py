"""More than there is room for: all finish, equal to each by itself, with short ones coming in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyio.engine import LLM
from lazyio.engine.generate import Reply
from lazyio.engine.kv.paged import Paged

LONG, SHORT = 12, 4


@pytest.mark.parametrize("name", ["qwen4_exp", "gemma3n"])
def test_twice_the_room_and_short_ones_in_between(name: str, saved: Callable[[str], tuple[Any, Path]]) -> None:
    pair, folder = saved(name)
    prompts = [pair.tokens(250 + 12 * i, seed=20 + i) for i in range(LONG)]
    prompts += [pair.tokens(5 + i, seed=50 + i) for i in range(SHORT)]
    lengths = [10 + i % 5 if i < LONG else 3 for i in range(LONG + SHORT)]
    given: dict[str, Any] = {"device": "cpu", "ubatch": 256, "prefix_reuse": False}
    with LLM(folder, kv_pages=200, **given) as llm:
        alone = [llm.generate(p, max_tokens=n)[0].token_ids for p, n in zip(prompts, lengths, strict=True)]
        assert isinstance(llm.admission, Paged)
        ledger = llm.admission.ledger
        needed = sum(ledger.pages_of(len(p) + n) + ledger.run_pages for p, n in zip(prompts, lengths, strict=True))
    with LLM(folder, kv_pages=needed // 2, parallel=16, mixed=128, **given) as llm:
        assert isinstance(llm.admission, Paged)
        replies: list[Reply] = [llm.reply(p, max_tokens=n) for p, n in zip(prompts[:LONG], lengths, strict=False)]
        for prompt in prompts[LONG:]:
            for _ in range(3):
                llm.scheduler.step()
            replies.append(llm.reply(prompt, max_tokens=3))
        found = [tuple(piece.token for piece in reply) for reply in replies]
        counts, pool = llm.scheduler.counts, llm.admission.ledger.pool
        assert counts.refused > 0
        assert 1 < counts.most_lanes < LONG
        assert pool.peak <= needed // 2
        assert pool.used == 0
    assert found == alone
