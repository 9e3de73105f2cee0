from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, Qwen4ExpTextRotaryEmbedding

from lazyio.engine.layers import block_selection
from lazyio.engine.layers.attention import causal
from lazyio.engine.layers.block_selection import BlockSelection, best, scores
from lazyio.engine.layers.rope import Rope
from lazyio.engine.state import State
from lazyio.engine.ubatch import Span

HIDDEN, HEADS, DIM, BUDGET, RATIO, EPS = 32, 3, 16, 12, 4, 1e-6
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
CPU = torch.device("cpu")


class Both:
    """The indexer of transformers and ours, with the same random weights."""

    def __init__(self) -> None:
        config = Qwen4ExpTextConfig(
            hidden_size=HIDDEN,
            head_dim=32,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            indexer_n_heads=HEADS,
            indexer_kv_heads=1,
            indexer_head_dim=DIM,
            indexer_budget=BUDGET,
            indexer_compress_ratio=RATIO,
            rope_parameters=ROPE,
            rms_norm_eps=EPS,
        )
        self.embedding = Qwen4ExpTextRotaryEmbedding(config)
        self.reference = Qwen4ExpTextQSAIndexer(config, 0).requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.reference.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        self.rope = Rope(1e4, 8)
        self.ours = BlockSelection(HIDDEN, HEADS, DIM, BUDGET, RATIO, self.rope, EPS).requires_grad_(False)
        self.ours.load_state_dict(self.reference.state_dict())

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """The mask of transformers, bool [tokens, tokens]."""
        position_ids = torch.arange(len(x)).expand(3, 1, -1)
        angles = self.embedding(x[None], position_ids)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        found: torch.Tensor = self.reference(x[None], angles, mask[None, None], None)
        return found[0, 0] & mask

    def found(self, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        """Ours of chunks of these sizes."""
        state = new_state(self.ours, x.dtype)
        whole = torch.zeros(len(x), len(x), dtype=torch.bool)
        for start, end in pairwise([0, *(sum(cuts[: i + 1]) for i in range(len(cuts)))]):
            whole[start:end, :end] = self.step(x[start:end], state)
        return whole

    def step(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """The mask of the next tokens of a sequence, bool [tokens, keys]."""
        span = Span(state, 0, len(x), state.tokens)
        state.tokens += len(x)
        angles = self.rope.angles(torch.arange(span.before, state.tokens), x.dtype)
        mask = self.ours(x, angles, span)
        return torch.ones(len(x), state.tokens, dtype=torch.bool).tril(span.before) if mask is None else mask


def new_state(ours: BlockSelection, dtype: torch.dtype = torch.float32) -> State:
    return State({ours: ours.new_piece(64, dtype, CPU)}, 64)


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2))


CUTS = [[61], [1, 7, 3, 9, 30, *[1] * 11], [1] * 61, [59, 2], [15, 1, 45]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_as_in_transformers_at_any_cuts(cuts: list[int]):
    both = Both()
    x = inputs(61)
    expected = both.expected(x)
    # It must select for the test to mean something.
    assert expected.sum() < causal(61, 61, CPU).sum() / 2
    assert torch.equal(both.found(x, cuts), expected)


def test_dense_as_long_as_the_budget_reaches():
    both = Both()
    most = BUDGET + RATIO - 1
    assert torch.equal(both.found(inputs(most), [most]), causal(most, most, CPU))
    assert not torch.equal(both.found(inputs(most + 1), [most + 1]), causal(most + 1, most + 1, CPU))
    state = new_state(both.ours)
    angles = both.rope.angles(torch.arange(most), torch.float32)
    assert both.ours(inputs(most), angles, Span(state, 0, most, 0)) is None


def test_of_blocks_with_equal_scores_the_first_are_taken():
    both = Both()
    # All blocks have the score 0 for every query.
    both.ours.index_qk_proj.weight[: HEADS * DIM] = 0
    mask = both.found(inputs(30), [27, 1, 2])
    for position in range(30):
        complete = (position + 1) // RATIO * RATIO
        expected = [*range(min(BUDGET, complete)), *range(complete, position + 1)]
        assert mask[position].nonzero().flatten().tolist() == expected


def test_a_clone_goes_its_own_way():
    both = Both()
    x = inputs(61)
    expected = both.expected(x)
    state = new_state(both.ours)
    both.step(x[:30], state)
    copy = state.clone()
    both.step(x[:20], state)
    assert torch.equal(both.step(x[30:], copy), expected[30:])


def test_queries_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch):
    both = Both()
    x = inputs(61)
    sizes: list[int] = []

    def counted(queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        sizes.append(len(queries))
        return scores(queries, blocks)

    monkeypatch.setattr(block_selection, "_MOST_SCORES", 7 * HEADS * (61 // RATIO))
    monkeypatch.setattr(block_selection, "scores", counted)
    assert torch.equal(both.found(x, [61]), both.expected(x))
    assert sizes == [7] * 8 + [5]


def test_the_state_keeps_one_key_a_block():
    both = Both()
    piece = both.ours.new_piece(4096, torch.bfloat16, CPU)
    assert piece.nbytes == (4096 // RATIO + RATIO - 1) * DIM * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype):
    """As many keys as in float32, and nearly all of them the same."""
    both = Both()
    expected = both.expected(inputs(61))
    both.ours.to(dtype)
    found = both.found(inputs(61).to(dtype), [61])
    assert torch.equal(found.sum(-1), expected.sum(-1))
    assert (found != expected).sum() <= 0.05 * expected.sum()


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), min_size=9, max_size=9), min_size=1), st.data())
def test_the_best_are_those_of_a_stable_sort(rows: list[list[float]], data: st.DataObject):
    count = data.draw(st.integers(1, 9))
    values = torch.tensor(rows)
    expected = torch.zeros_like(values, dtype=torch.bool)
    expected.scatter_(1, values.sort(dim=-1, descending=True, stable=True).indices[:, :count], True)
    assert torch.equal(best(values, count), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_ties_are_broken_alike():
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 40, (64, 4096), generator=generator).float()
    assert torch.equal(best(values.cuda(), 512).cpu(), best(values, 512))
