"""Rows that can't be read, in a real table: whoever needs them fails, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lazyio.engine import LLM
from lazyio.errors import ReadError
from lazyio.fetchers.base import Bytes, Fetcher, Landed, Pending, ReadPlan, ReadStats
from lazyio.fetchers.wrapping import take_after


class BadRow(Fetcher):
    """A fetcher, above a device on which one row can't be read."""

    name: ClassVar[str] = "bad row"

    def __init__(self, inner: Fetcher, row: int) -> None:
        take_after(self, inner)
        self._inner = inner
        (extent,) = self.extents
        self._first = extent.offset + row * self.row_bytes

    def read(self, plan: ReadPlan, buffer: Bytes, landed: Landed | None = None) -> ReadStats:
        self._check(plan)
        return self._inner.read(plan, buffer, landed)

    def begin(self, plan: ReadPlan, buffer: Bytes) -> Pending:
        self._check(plan)
        return self._inner.begin(plan, buffer)

    def _check(self, plan: ReadPlan) -> None:
        if np.any((plan.offset < self._first + self.row_bytes) & (plan.offset + plan.length > self._first)):
            raise ReadError("bad sector", path="rows", offset=self._first, wanted=self.row_bytes, got=None)

    def close(self) -> None:
        self._inner.close()


PROMPTS = [list(range(3, 20)), [40, 41, 42], list(range(60, 95)), [33]]


@pytest.fixture(scope="module")
def whole(saved: Callable[[str], tuple[Any, Path]]) -> list[tuple[int, ...]]:
    """Their replies on a good device."""
    with LLM(saved("gemma4")[1], device="cpu") as llm:
        return [each.token_ids for each in llm.generate(PROMPTS, max_tokens=6)]


def row_apart(used: list[int]) -> int:
    """A row that shares no block with those in use."""
    return next(row for row in range(120, 250) if min(abs(row - token) for token in used) > 4)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("place", ["begins", "ends", "replies"])
def test_one_fails_and_the_others_are_whole(
    place: str, lookahead: int, saved: Callable[[str], tuple[Any, Path]], whole: list[tuple[int, ...]]
) -> None:
    used = [token for tokens in (*PROMPTS, *whole) for token in tokens]
    bad = row_apart(used)
    prompts = [*PROMPTS[:2], {"begins": [bad, *range(3, 30)], "ends": [*range(3, 30), bad]}.get(place, [])]
    if place == "replies":
        # A row that the reply to the first prompt needs, and no other.
        alone = [t for t in whole[0][:5] if min(abs(t - u) for u in [*used[: used.index(whole[0][0])]]) > 4]
        others = [token for tokens in whole[1:] for token in tokens]
        alone = [token for token in alone if min(abs(token - other) for other in others) > 4]
        if not alone:
            pytest.skip("the replies of this model have nothing that suits")
        bad, prompts[2] = alone[0], PROMPTS[0]
        prompts[0] = PROMPTS[3]
    prompts += PROMPTS[2:]
    given: dict[str, Any] = {"lazy_mode": "on-direct", "row_cache": 0, "lookahead": lookahead, "mixed": 16}
    with LLM(
        saved("gemma4")[1], device="cpu", parallel=5, ubatch=64, wrap=lambda inner: BadRow(inner, bad), **given
    ) as llm:
        completions = llm.generate(prompts, max_tokens=6, raise_errors=False)
        assert isinstance(completions[2].error, ReadError)
        assert completions[2].finish_reason == "error"
        for prompt, completion in zip(prompts, completions, strict=True):
            if completion is not completions[2]:
                assert completion.error is None
                assert completion.token_ids == whole[PROMPTS.index(prompt)]
        with pytest.raises(ReadError, match="bad sector"):
            llm.generate(prompts, max_tokens=6)
        assert llm.generate(PROMPTS[1], max_tokens=6)[0].token_ids == whole[1]
