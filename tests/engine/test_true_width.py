"""What the tests of batches and of pages say of tiny models, said of four layers of true width on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyio.engine import LLM
from lazyio.engine.kv.paged import Paged
from lazyio.engine.kv.pool import PAGE
from lazyio.engine.synthetic.folder import write_folder
from lazyio.engine.synthetic.plan import plan_model

from .serving import followed, lanes, replied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DUMMY: dict[str, Any] = {"load_format": "dummy", "trunk": "Q4_0"}
STREAMS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "model"
    write_folder(plan_model("qwen4_exp", "true", layers=4, rows=1_000_000), folder, with_trunk=False)
    return folder


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()  # type: ignore[no-any-return]


def texts(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what follows them."""
    return [(tokens(length, 2 * i), tokens(3 + 5 * i % 12, 2 * i + 1)) for i, length in enumerate(lengths)]


def test_streams_equal_solo(wide: Path, agree: Callable[..., None]) -> None:
    some = texts([3, 40, 1, 20, 30, 7, 25, 2])
    solo: list[torch.Tensor] = []
    for streams in STREAMS:
        with LLM(wide, device="cuda", dtype="float32", **lanes(streams, mixed=24), ubatch=32, **DUMMY) as llm:
            found = followed(llm, some)[0]
            assert llm.scheduler.counts.most_lanes == streams
        solo = solo or found
        for one, expected in zip(found, solo, strict=True):
            agree(one.cpu(), expected.cpu())


def test_batches_change_no_bit(wide: Path) -> None:
    some = texts([3, 480, 1, 20, 240, 7, 257, 2])
    solo: list[torch.Tensor] = []
    given: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True, "ubatch": 2 * PAGE, **DUMMY}
    for streams in STREAMS:
        with LLM(wide, device="cuda", **lanes(streams, mixed=PAGE), **given) as llm:
            found = followed(llm, some)[0]
        solo = solo or found
        for one, expected in zip(found, solo, strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize("parallel", [1, 4])
def test_paged_is_windowed_bit_for_bit(wide: Path, parallel: int) -> None:
    prompts = [tokens(length, length) for length in (PAGE - 2, 40, 300, 2 * PAGE, 3 * PAGE + 20)]
    given = {"dtype": "bfloat16", "parallel": parallel, **DUMMY}
    _, expected = replied(wide, prompts, **given)
    _, found = replied(wide, prompts, kv_pages=200, poison_state=True, prefix_reuse=False, **given)
    assert torch.equal(torch.cat(found), torch.cat(expected))


@pytest.mark.parametrize("shared", [PAGE - 1, PAGE, PAGE + 1])
def test_resumed_is_fresh_bit_for_bit(wide: Path, shared: int) -> None:
    first = tokens(2 * PAGE + 20, 0)
    other = [*first[:shared], *tokens(2 * PAGE, 1)]
    given = {"dtype": "bfloat16", "kv_pages": 200, "poison_state": True, **DUMMY}
    _, fresh = replied(wide, [other], **given)
    known, found = replied(wide, [first[: PAGE + 44], other], **given)
    assert known == [0, shared // PAGE * PAGE]
    assert torch.equal(torch.cat(found[6:]), torch.cat(fresh))


def test_twice_the_room_and_short_ones_in_between(wide: Path) -> None:
    lengths = [250 + 40 * i if i % 4 else 5 + i for i in range(24)]
    some = [(tokens(length, 2 * i), tokens(3 if length < 50 else 12, 2 * i + 1)) for i, length in enumerate(lengths)]
    given: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True, "ubatch": 2 * PAGE, **DUMMY}
    with LLM(wide, device="cuda", kv_pages=400, **given) as llm:
        alone = [followed(llm, [one])[0][0] for one in some]
        assert isinstance(llm.admission, Paged)
        ledger = llm.admission.ledger
        window = ledger.pages_of(max(len(prompt) + len(text) for prompt, text in some)) + ledger.run_pages
    with LLM(wide, device="cuda", kv_pages=16 * window // 2, parallel=16, mixed=PAGE, **given) as llm:
        found = followed(llm, some)[0]
        assert isinstance(llm.admission, Paged)
        counts, pool = llm.scheduler.counts, llm.admission.ledger.pool
        assert counts.refused > 0
        assert 8 <= counts.most_lanes <= 16
        assert pool.peak <= 16 * window // 2
    for one, expected in zip(found, alone, strict=True):
        assert torch.equal(one, expected)
