"""What never fits is refused before weights are read, and that is exactly what is refused afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyio.engine import LLM
from lazyio.engine import llm as llm_module
from lazyio.engine import place as place_module
from lazyio.engine.kv.options import KvOptions
from lazyio.engine.kv.paged import Paged
from lazyio.engine.models import Model
from lazyio.errors import NeverFits

Saved = Callable[[str], tuple[Any, Path]]
POOLS = range(1, 30)
LONGEST = 20_000


def most_tokens(fits: Callable[[int], object]) -> int:
    """Those of the longest sequence that fits."""
    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        try:
            fits(middle)
            low = middle
        except NeverFits:
            high = middle - 1
    return low


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages(dtype: str, tiny: Callable[..., Any], tmp_path: Path) -> None:
    """States are of float32, and the less dtype takes the more pages they are."""
    tiny("qwen3_5", linear_key_head_dim=128, linear_value_head_dim=128).reference.save_pretrained(tmp_path)
    before: list[int] = []

    def check(llm: LLM) -> None:
        for pages in POOLS:
            kv = KvOptions(pages, reuse=True, poison=False)
            before.append(most_tokens(partial(kv.fits_ever, llm.trunk, streams=1)))

    def fits(model: Model, pages: int, tokens: int) -> None:
        Paged(model, pages, streams=1).fits_ever(tokens)

    with LLM(tmp_path, device="cpu", dtype=dtype, before_loading=check) as llm:
        after = [most_tokens(partial(fits, llm.model, pages)) for pages in POOLS]
    assert before == after
    assert before.count(0) == (7 if dtype == "float32" else 13)
    assert 0 < before[-1] < LONGEST


@pytest.mark.parametrize("parallel", [1, 3])
def test_windows(parallel: int, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, which are not there yet, will take of what there is."""
    folder, tokens = saved("qwen3_5")[1], [1] * 90
    with LLM(folder, device="cpu", dtype="bfloat16") as llm:
        state, weights = llm.model.new_state(100, torch.device("meta")).nbytes, llm.model.weights_bytes
    monkeypatch.setattr(llm_module, "check_room", lambda *_: None)
    monkeypatch.setattr(llm_module, "load_model", lambda *_, **__: (_ for _ in ()).throw(InterruptedError))
    for free, error in ((parallel * state + weights, InterruptedError), (parallel * state + weights - 1, NeverFits)):
        monkeypatch.setattr(place_module, "available_memory_bytes", lambda free=free: free)
        with pytest.raises(error) as raised:
            LLM(
                folder,
                device="cpu",
                dtype="bfloat16",
                parallel=parallel,
                before_loading=lambda llm: llm.check(tokens, max_tokens=10),
            )
    assert "of memory can be had on cpu beside weights of" in str(raised.value)


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        (1, "kv_pages comes to 1, and one stream takes 2 at least"),
        (1 << 24, "a pool of 16777216 pages .* lower kv_pages"),
    ],
)
def test_pools_that_can_not_be(pages: int, said: str, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(NeverFits, match=said):
        LLM(saved("qwen3_5")[1], device="cpu", kv_pages=pages)
