"""Replies of a model whose sequences lie in pages, beside those of the same model with windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyio.engine import LLM
from lazyio.engine.kv.paged import Paged
from lazyio.engine.kv.pool import PAGE
from lazyio.engine.kv.prefixes import Prefixes
from lazyio.errors import ModelError, NeverFits, NoRoom, SettingError

from ..serving import followed, lanes, replied

ALL = ("qwen4_exp", "gemma4", "gemma3n", "qwen3_5", "qwen3_5_moe")
Saved = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="session")
def saved(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(name)`: a tiny pair of models for sequences of some pages, and the folder that has them."""
    known: dict[str, tuple[Any, Path]] = {}

    def save(name: str) -> tuple[Any, Path]:
        if name not in known:
            pair, folder = tiny(name, max_position_embeddings=2048), tmp_path_factory.mktemp(name)
            pair.reference.generation_config.eos_token_id = None
            pair.reference.save_pretrained(folder)
            known[name] = pair, folder
        return known[name]

    return save


@contextmanager
def opened(folder: Path, pages: int = 60, **options: Any) -> Iterator[tuple[LLM, list[torch.Tensor]]]:
    """A model in poisoned pages, and all logits that tokens were chosen by; at the end nothing may be held."""
    with LLM(folder, device="cpu", kv_pages=pages, poison_state=True, **options) as llm:
        seen: list[torch.Tensor] = []
        logits = llm.scheduler._forward.logits

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            seen.append(found.clone())
            return found

        llm.scheduler._forward.logits = noted  # type: ignore[method-assign]
        yield llm, seen
        assert isinstance(llm.admission, Paged)
        ledger = llm.admission.ledger
        assert ledger.seated == 0
        ledger.prefixes.clear()
        assert ledger.pool.used == 0
        assert llm.admission.buffer.null_is_clean()


@pytest.mark.parametrize("name", ALL)
def test_replies_are_those_of_windows_bit_for_bit(name: str, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, folder = saved(name)
    prompts = [pair.tokens(30), pair.tokens(12, seed=4), pair.tokens(7, seed=5)]
    sampling = {"max_tokens": 9, "temperature": 0.8, "seed": 5}
    with LLM(folder, device="cpu", ubatch=16, parallel=2) as llm:
        expected = [each.token_ids for each in llm.generate(prompts, **sampling)]
    with opened(folder, ubatch=16, parallel=2) as (llm, seen):
        assert [each.token_ids for each in llm.generate(prompts, **sampling)] == expected
        assert not torch.cat(seen).isnan().any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("at", [PAGE - 1, PAGE, PAGE + 1])
def test_a_prompt_that_begins_like_another_is_resumed(name: str, at: int, saved: Saved) -> None:
    """Rows that were asked for before it had a lane are those of a part that is known, and of more."""
    pair, folder = saved(name)
    first = pair.tokens(PAGE + 20)
    other = [*first[:at], first[at] + 1 if first[at] < 200 else 7, *pair.tokens(30, seed=9)]
    with opened(folder, ubatch=512) as (llm, expected):
        (fresh,) = llm.generate(other, max_tokens=4)
    with opened(folder, ubatch=512) as (llm, seen):
        llm.generate(first, max_tokens=3)
        seen.clear()
        (resumed,) = llm.generate(other, max_tokens=4)
    assert fresh.account.known_tokens == 0
    assert resumed.account.known_tokens == (0 if at < PAGE else PAGE)
    assert resumed.token_ids == fresh.token_ids
    assert torch.equal(torch.cat(seen), torch.cat(expected))


@pytest.mark.parametrize("name", ALL)
def test_the_next_turn_goes_on_where_the_last_one_ended(name: str, saved: Saved, agree: Callable[..., None]) -> None:
    pair, folder = saved(name)
    first = pair.tokens(40)
    with opened(folder, ubatch=16) as (llm, seen):
        (turn,) = llm.generate(first, max_tokens=6)
        second = [*first, *turn.token_ids, *pair.tokens(11, seed=6)]
        seen.clear()
        (resumed,) = llm.generate(second, max_tokens=5)
    assert resumed.account.known_tokens == len(first) + 5  # the last token had not been computed
    assert f"{len(second)} tokens, 45 of them known, at" in resumed.account.line()
    with opened(folder, ubatch=16) as (llm, expected):
        (fresh,) = llm.generate(second, max_tokens=5)
    assert resumed.token_ids == fresh.token_ids
    agree(torch.cat(seen), torch.cat(expected))


def test_batch_invariant_replies_do_not_depend_on_what_is_known(saved: Saved) -> None:
    pair, folder = saved("qwen4_exp")
    first = pair.tokens(PAGE + 20)
    with opened(folder, ubatch=512, batch_invariant=True) as (llm, seen):
        (turn,) = llm.generate(first, max_tokens=6)
        second = [*first, *turn.token_ids, *pair.tokens(11, seed=6)]
        seen.clear()
        (resumed,) = llm.generate(second, max_tokens=5)
    assert resumed.account.known_tokens == PAGE  # no cut is anywhere else
    with opened(folder, ubatch=512, batch_invariant=True, prefix_reuse=False) as (llm, expected):
        llm.generate(second, max_tokens=5)
    assert torch.equal(torch.cat(seen), torch.cat(expected))


@pytest.mark.parametrize("name", ALL)
def test_streams_that_begin_alike_are_each_as_if_alone(name: str, saved: Saved, agree: Callable[..., None]) -> None:
    """Later ones are resumed from what earlier ones, which still go on, have left at a page edge."""
    pair, folder = saved(name)
    first, replies = pair.tokens(2 * PAGE), (9, 3, 5, 2, 7, 4, 6, 8)
    texts = []
    for number, reply in enumerate(replies):
        own = pair.tokens(30 + number, seed=20 + number)
        texts.append(([*first[: PAGE + 10 * number], *own[:-reply]], own[-reply:]))
    for invariant in (True, False):
        given: dict[str, Any] = {"ubatch": 512, "batch_invariant": invariant}
        alone = []
        with opened(folder, prefix_reuse=False, **given) as (llm, _):
            alone = [followed(llm, [text])[0][0] for text in texts]
        for streams in (1, 2, 4, 8):
            with opened(folder, pages=150, **lanes(streams, mixed=256), **given) as (llm, _):
                found, known = followed(llm, texts)
            assert known[0] == 0
            assert known[-1] >= PAGE or streams == 8
            for one, expected in zip(found, alone, strict=True):
                if invariant:
                    assert torch.equal(one, expected)
                else:
                    agree(one, expected)


@pytest.mark.parametrize("name", ["qwen4_exp", "gemma4"])
def test_more_requests_than_the_pool_has_room_for_all_finish(name: str, saved: Saved) -> None:
    """Short ones and long ones, which together take twice the pages there are."""
    pair, folder = saved(name)
    lengths = [40 if number % 3 else PAGE + 5 * number for number in range(16)]
    prompts = [pair.tokens(length, seed=length + number) for number, length in enumerate(lengths)]
    with opened(folder, pages=80, ubatch=512) as (llm, _):
        expected = [llm.generate(prompt, max_tokens=4)[0].token_ids for prompt in prompts]
        ledger = llm.admission.ledger  # type: ignore[union-attr]
        needed = sum(ledger.pages_of(length + 4) + ledger.run_pages for length in lengths)
    with opened(folder, pages=needed // 2, ubatch=512, parallel=16) as (llm, _):
        found = [completion.token_ids for completion in llm.generate(prompts, max_tokens=4)]
        counts, pool = llm.scheduler.counts, llm.admission.ledger.pool  # type: ignore[union-attr]
        assert counts.refused > 0
        assert 1 < counts.most_lanes < 16
        assert pool.peak <= needed // 2
    assert found == expected


def test_what_ends_early_leaves_nothing_behind(saved: Saved) -> None:
    pair, folder = saved("qwen4_exp")
    with opened(folder, ubatch=16, parallel=3) as (llm, _):
        replies = [llm.reply(pair.tokens(40, seed=seed), max_tokens=20) for seed in range(5)]
        next(replies[0])
        next(replies[1])
        replies[4].close()  # is queued
        replies[0].close()  # replies
        replies[2].close()
        assert len(list(replies[1])) == 19
        replies[3].close()


def test_a_state_that_is_no_numbers_is_not_kept(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, folder = saved("qwen3_5")
    with opened(folder) as (llm, _):
        llm.model.lm_head.weight.data.fill_(float("nan"))  # type: ignore[union-attr]
        with pytest.raises(ModelError, match="no finite numbers"):
            llm.generate(pair.tokens(20), max_tokens=3)
        assert llm.admission.ledger.prefixes.pages == 0  # type: ignore[union-attr]


def test_an_interrupt_keeps_nothing(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, folder = saved("qwen3_5")
    with opened(folder) as (llm, _):
        with llm.reply(pair.tokens(20), max_tokens=9) as reply:
            next(reply)

            def interrupted(*_: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(llm.scheduler._forward, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(reply)
        assert llm.admission.ledger.prefixes.pages == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_windows_bit_for_bit(name: str, saved: Saved) -> None:
    """Nothing of the prompt is taken from what is known, and nothing of it is kept."""
    pair, folder = saved(name)
    tokens = pair.tokens(PAGE + 40)
    with LLM(folder, device="cpu", ubatch=100) as llm:
        expected = llm.logits(tokens)
    with opened(folder, ubatch=100) as (llm, _):
        llm.generate(tokens, max_tokens=2)
        before = llm.admission.ledger.prefixes.pages  # type: ignore[union-attr]
        assert torch.equal(llm.logits(tokens), expected)
        assert llm.admission.ledger.prefixes.pages == before  # type: ignore[union-attr]


def test_logits_have_no_room_beside_replies_that_hold_it(saved: Saved) -> None:
    pair, folder = saved("qwen3_5")
    with opened(folder, pages=4) as (llm, _), llm.reply(pair.tokens(300), max_tokens=100) as reply:
        next(reply)
        with pytest.raises(NoRoom, match="held by 1 lanes"):
            llm.logits(pair.tokens(300))


def test_what_can_never_fit_is_refused_before_it_is_queued(saved: Saved) -> None:
    pair, folder = saved("qwen3_5")
    with opened(folder, pages=3) as (llm, seen):
        with pytest.raises(NeverFits, match=r"take 3 pages of 256 positions and 1 for its state, .* set kv_pages to 4"):
            llm.generate(pair.tokens(500), max_tokens=100)
        assert not seen


@pytest.mark.parametrize("name", ["prefix_reuse", "poison_state"])
def test_settings_without_pages_have_no_effect(name: str, saved: Saved) -> None:
    with pytest.raises(SettingError, match=f"{name} has no effect while kv_pages is off"):
        LLM(saved("qwen3_5")[1], device="cpu", **{name: True})


def test_a_pool_as_large_as_can_be_made_use_of(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(saved("qwen3_5")[1], device="cpu", kv_pages="auto", parallel=2) as llm:
        ledger = llm.admission.ledger  # type: ignore[union-attr]
        assert len(ledger.pool) == 2 * 2 * (9 + ledger.run_pages)
        assert "weights" in ledger.summary()
        assert isinstance(ledger.prefixes, Prefixes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_on_a_gpu(name: str, dtype: str, saved: Saved) -> None:
    """Paged equal to windowed at the same cuts, and resumed to fresh, bit for bit."""
    pair, folder = saved(name)
    first = pair.tokens(3 * PAGE + 20)
    other = [*first[: PAGE + 5], *pair.tokens(2 * PAGE, seed=9)]
    paged = {"dtype": dtype, "kv_pages": 80, "poison_state": True}
    _, expected = replied(folder, [first, other], dtype=dtype)
    _, found = replied(folder, [first, other], prefix_reuse=False, **paged)
    assert torch.equal(torch.cat(found), torch.cat(expected))
    _, fresh = replied(folder, [other], **paged)
    known, found = replied(folder, [first[:300], other], **paged)
    assert known == [0, PAGE]
    assert torch.equal(torch.cat(found[6:]), torch.cat(fresh))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_several_at_once_on_a_gpu(name: str, saved: Saved) -> None:
    """Steps of several sequences, whose pages are read together, are those of windows bit for bit."""
    pair, folder = saved(name)
    prompts = [pair.tokens(length, seed=length) for length in (PAGE - 2, 40, 300, 2 * PAGE)]
    given = {"dtype": "bfloat16", "parallel": 4}
    _, expected = replied(folder, prompts, **given)
    _, found = replied(folder, prompts, kv_pages=80, poison_state=True, prefix_reuse=False, **given)
    assert torch.equal(torch.cat(found), torch.cat(expected))
