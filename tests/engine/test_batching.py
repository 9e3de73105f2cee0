"""Sequences computed together, on all models: equal to each by itself, and bit-equal where batches must not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyio.engine import LLM
from lazyio.engine.generate import Completion

from .serving import followed, lanes

MODELS = ("qwen4_exp", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma3n")


def logits_of(llm: LLM, texts: Sequence[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """Of each prompt and the text that follows it, the logits [tokens, vocab] that each token of this was chosen by."""
    return followed(llm, texts)[0]


def texts_of(pair: Any, count: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of very different lengths, with texts that go on for long, and one token."""
    lengths = [3, longest, 1, 20, longest // 2, 7, 40, 2]
    replies = [12, 4, 9, 1, 6, 15, 3, 10]
    tokens = [pair.tokens(lengths[i] + replies[i], seed=10 + i) for i in range(count)]
    return [(each[: lengths[i]], each[lengths[i] :]) for i, each in enumerate(tokens)]


@pytest.mark.parametrize("name", MODELS)
def test_streams_equal_solo(name: str, saved: Callable[[str], tuple[Any, Path]], agree: Callable[..., None]) -> None:
    pair, folder = saved(name)
    texts = texts_of(pair, 8, 70)
    with LLM(folder, device="cpu", ubatch=32) as llm:
        solo = [logits_of(llm, [text])[0] for text in texts]
    for (prompt, text), logits in zip(texts, solo, strict=True):
        agree(logits, pair.expected([*prompt, *text])[len(prompt) - 1 : -1])
    for streams in (1, 2, 4, 8):
        with LLM(folder, device="cpu", ubatch=32, **lanes(streams, mixed=24)) as llm:
            for found, expected in zip(logits_of(llm, texts), solo, strict=True):
                agree(found, expected)
            assert llm.scheduler.counts.most_lanes == streams


@pytest.mark.parametrize("name", MODELS)
def test_batches_change_no_bit(name: str, saved: Callable[[str], tuple[Any, Path]]) -> None:
    pair, folder = saved(name)
    texts = texts_of(pair, 8, 480)
    given: dict[str, Any] = {"device": "cpu", "batch_invariant": True}
    with LLM(folder, ubatch=512, **given) as llm:
        solo = [logits_of(llm, [text])[0] for text in texts]
    for streams in (1, 2, 4, 8):
        with LLM(folder, ubatch=256 if streams == 4 else 512, **lanes(streams, mixed=256), **given) as llm:
            for found, expected in zip(logits_of(llm, texts), solo, strict=True):
                assert torch.equal(found, expected)


def test_without_it_they_do(saved: Callable[[str], tuple[Any, Path]]) -> None:
    """So the test above can fail."""
    pair, folder = saved("qwen4_exp")
    texts = texts_of(pair, 8, 480)
    found = []
    for streams in (1, 8):
        with LLM(folder, device="cpu", **lanes(streams, mixed=256)) as llm:
            found.append(torch.cat(logits_of(llm, texts)))
    assert not torch.equal(*found)


def test_replies_come_in_the_order_of_prompts(saved: Callable[[str], tuple[Any, Path]]) -> None:
    pair, folder = saved("qwen4_exp")
    prompts = [prompt for prompt, _ in texts_of(pair, 8, 70)]

    def replies(**given: Any) -> list[Completion]:
        with LLM(folder, device="cpu", **given) as llm:
            return llm.generate(prompts, max_tokens=7, temperature=0.7, seed=3)

    alone, together = replies(), replies(parallel=3, mixed=16)
    assert [each.token_ids for each in alone] == [each.token_ids for each in together]
    assert {each.account.most_together for each in alone} == {1}
    assert {each.account.most_together for each in together} >= {3}
    assert all(len(each.account.steps_s) == len(each.account.steps_waited_s) == 6 for each in together)
    assert [sum(each.account.cuts) for each in together] == [len(prompt) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name: str, saved: Callable[[str], tuple[Any, Path]], agree: Callable[..., None]) -> None:
    """Near in float32, and bit-equal where batches must not matter, in bfloat16 too."""
    pair, folder = saved(name)
    given: dict[str, Any] = {"device": "cuda", "ubatch": 512}
    if not name.startswith("qwen3_5"):  # they have no table
        given["lazy_mode"] = "uring"
    for dtype, invariant in (("float32", False), ("float32", True), ("bfloat16", True)):
        solo: list[torch.Tensor] = []
        # Long prompts have choices of blocks and experts that the least rounding turns.
        texts = texts_of(pair, 8, 480 if invariant else 70)
        for streams in (1, 4, 8):
            with LLM(folder, dtype=dtype, batch_invariant=invariant, **lanes(streams, mixed=256), **given) as llm:
                found = [each.cpu() for each in logits_of(llm, texts)]
            solo = solo or found
            for one, expected in zip(found, solo, strict=True):
                if invariant:
                    assert torch.equal(one, expected)
                else:
                    agree(one, expected)
