from __future__ import annotations

import pytest
import torch

from lazyio.engine.layers import attention
from lazyio.engine.layers.attention import attend, attend_before, causal

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_each_head_of_keys_serves_its_queries_in_order(heads: int, tokens: int, masked: bool):
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(tokens, heads, 8, generator=generator)
    k, v = torch.randn(2, 7, 2, 8, generator=generator)
    allowed = torch.rand(tokens, 7, generator=generator) < 0.6 if masked else None
    if allowed is not None:
        allowed[:, 3] = True
    found = attend(q, k, v, scale=0.3, allowed=allowed)
    assert found.shape == q.shape
    for head in range(heads):
        of = head // (heads // 2)
        scores = q[:, head].double() @ k[:, of].double().T * 0.3
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        expected = scores.softmax(-1) @ v[:, of].double()
        torch.testing.assert_close(found[:, head].double(), expected, rtol=0, atol=1e-6)


def test_a_position_sees_itself_and_what_comes_before_it():
    assert causal(1, 9, CPU) is None
    allowed = causal(2, 4, CPU)
    assert allowed is not None
    assert allowed.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_with_a_window_only_the_last_so_many():
    assert causal(1, 3, CPU, 3) is None
    allowed = causal(2, 5, CPU, 3)
    assert allowed is not None
    assert allowed.tolist() == [[False, True, True, True, False], [False, False, True, True, True]]
    one = causal(1, 4, CPU, 3)
    assert one is not None
    assert one.tolist() == [[False, True, True, True]]


def test_one_token_and_the_last_of_several_see_all_keys(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    launched = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        launched.append(len(q))
        return torch.zeros_like(q)

    monkeypatch.setattr(attention, "attend_causal", kernel)
    q, k = torch.ones(2, 4, 16), torch.ones(5, 2, 16)
    for usable in (True, False):
        monkeypatch.setattr(attention, "usable", lambda _, usable=usable: usable)
        found = [
            attend(q[:1], k, k, scale=1.0, allowed=None),
            attend_before(q, k, k, scale=1.0),
            attend(q, k, k, scale=1.0, allowed=torch.ones(2, 5, dtype=torch.bool)),
        ]
        assert [bool(one.any()) for one in found] == [not usable, not usable, True]
    assert launched == [1, 2]
