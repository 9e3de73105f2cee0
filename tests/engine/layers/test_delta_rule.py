from __future__ import annotations

import pytest
import torch

from lazyio.engine.layers import delta_rule
from lazyio.engine.layers.delta_rule import BLOCK, Tokens, follow, step

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 24


def random_tokens(count: int, decay: float = 0.3, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, HEADS, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(KEY_DIM), dim=-1) for _ in range(2))
    return Tokens(q, k, normal(VALUE_DIM), normal().sigmoid(), -decay * normal().abs())


def random_memory(seed: int = 1) -> torch.Tensor:
    return torch.randn(HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(seed))


def token_by_token(tokens: Tokens, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as it is written down, in float64."""
    q, k, v, beta, log_decay = (x.double() for x in (tokens.q, tokens.k, tokens.v, tokens.beta, tokens.log_decay))
    memory = memory.double()
    outputs = []
    for t in range(len(tokens)):
        memory = memory * log_decay[t].exp()[:, None, None]
        correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
        memory = memory + torch.einsum("hk,hv->hkv", k[t], correction)
        outputs.append(torch.einsum("hkv,hk->hv", memory, q[t]))
    return torch.stack(outputs), memory


def assert_near(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3, 40.0])
@pytest.mark.parametrize(
    ("count", "before"), [(1, 0), (2, 0), (64, 0), (65, 0), (150, 37), (26, 37), (2, 63), (28, 101)]
)
def test_blocks_give_what_one_token_after_the_other_gives(count: int, before: int, decay: float):
    tokens, memory = random_tokens(count, decay), random_memory()
    expected = token_by_token(tokens, memory)
    assert_near(follow(tokens, before, memory.clone()), expected)


def test_the_same_key_again_and_again():
    """Powers of the triangular matrix, by which it could be inverted too, are far larger than its inverse here."""
    one, rest = random_tokens(1), random_tokens(2 * BLOCK)
    q, k = one.q.expand_as(rest.q), one.k.expand_as(rest.k)
    tokens = Tokens(q, k, rest.v, torch.ones_like(rest.beta), torch.zeros_like(rest.log_decay))
    expected = token_by_token(tokens, random_memory())
    assert_near(follow(tokens, 0, random_memory()), expected)


@pytest.mark.parametrize("cuts", [[64, 136], [64, 64, 64, 8], [192, 8], [192, 1], [128, 65], [64, 128, 1]])
def test_cuts_between_blocks_change_no_bit(cuts: list[int]):
    tokens = random_tokens(sum(cuts))
    whole, last = follow(tokens, 0, random_memory())
    memory, parts, before = random_memory(), [], 0
    for size in cuts:
        found, memory = follow(tokens[before : before + size], before, memory)
        parts.append(found)
        before += size
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(memory, last)


def test_a_bounded_number_of_blocks_at_once(monkeypatch: pytest.MonkeyPatch):
    tokens = random_tokens(5 * BLOCK + 10)
    whole, last = follow(tokens, 30, random_memory())
    monkeypatch.setattr(delta_rule, "_BLOCKS_AT_ONCE", 2)
    parts = [part.stop - part.start for part in delta_rule._parts(len(tokens), 30)]
    assert parts == [2 * BLOCK - 30, 2 * BLOCK, BLOCK + 40]
    found, memory = follow(tokens, 30, random_memory())
    assert torch.equal(found, whole)
    assert torch.equal(memory, last)


def test_steps_of_several_sequences_are_the_steps_of_each():
    tokens = random_tokens(4)
    memories = [random_memory(seed) for seed in range(4)]
    outputs, after = step(tokens, torch.stack(memories))
    for i, memory in enumerate(memories):
        assert_near((outputs[i : i + 1], after[i]), token_by_token(tokens[i : i + 1], memory))


def test_a_token_that_forgets_all_leaves_no_trace_of_what_was_before():
    tokens = random_tokens(100)
    tokens.log_decay[50] = -1e5
    outputs, memory = follow(tokens, 0, random_memory())
    expected = token_by_token(tokens[50:], torch.zeros(HEADS, KEY_DIM, VALUE_DIM))
    assert_near((outputs[50:], memory), expected)
