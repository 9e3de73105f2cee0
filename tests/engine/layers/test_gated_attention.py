from __future__ import annotations

import pytest
import torch
from torch import nn

from lazyio.engine.layers.gated_attention import GatedAttention
from lazyio.engine.layers.rope import Rope
from lazyio.engine.state import State
from lazyio.engine.ubatch import Span, Ubatch

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EPS = 20, 4, 2, 8, 1e-6
ROPE = Rope(100.0, 4)


class EverySecond(nn.Module):
    """Allows the keys at even positions and each token itself, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.asked: list[tuple[torch.Tensor, torch.Tensor, Span]] = []

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], span: Span) -> torch.Tensor | None:
        self.asked.append((x, angles[0], span))
        keys = torch.arange(span.before + span.length)
        query = keys[span.before :, None]
        return (keys <= query) & ((keys % 2 == 0) | (keys == query))


class All(nn.Module):
    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], span: Span) -> None:
        return None


def layer_with(selection: nn.Module | None) -> GatedAttention:
    layer = GatedAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EPS, selection)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in layer.named_parameters():
        if not name.startswith("indexer"):
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return layer.requires_grad_(False)


def new_state(layer: GatedAttention) -> State:
    return State({layer: layer.new_piece(50, torch.float32, CPU)}, 50)


def run(layer: GatedAttention, chunks: list[tuple[State, torch.Tensor]]) -> list[torch.Tensor]:
    ubatch = Ubatch.of([(state, [0] * len(x)) for state, x in chunks], CPU)
    with torch.inference_mode():
        angles = ROPE.angles(ubatch.positions, torch.float32)
        found = layer(torch.cat([x for _, x in chunks]), angles, ubatch)
    for state, x in chunks:
        state.tokens += len(x)
    return list(found.split([len(x) for _, x in chunks]))


def inputs(tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def as_written(layer: GatedAttention, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The formulas of the class, head by head, in float64."""
    w = {name: parameter.double() for name, parameter in layer.named_parameters()}
    x = x.double()

    def turned(vectors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = vectors / (vectors.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * torch.tensor([1.0, 100.0**-0.5])
        pair = torch.complex(normed[:, :2], normed[:, 2:4]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag, normed[:, 4:]], -1)

    def rows(name: str, head: int, count: int = HEAD_DIM) -> torch.Tensor:
        return x @ w[name][head * count : (head + 1) * count].T

    heads = []
    for head in range(HEADS):
        q, gate = rows("q_proj.weight", head, 2 * HEAD_DIM).chunk(2, -1)
        of = head // (HEADS // KV_HEADS)
        q, k = turned(q, w["q_norm.weight"]), turned(rows("k_proj.weight", of), w["k_norm.weight"])
        weights = (q @ k.T / HEAD_DIM**0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
        heads.append(weights @ rows("v_proj.weight", of) * gate.sigmoid())
    return torch.cat(heads, -1) @ w["o_proj.weight"].T


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("selection", [None, All()])
@pytest.mark.parametrize("cuts", [[12], [1, 1, 6, 4], [11, 1]], ids=str)
def test_all_keys_up_to_each_token(selection: nn.Module | None, cuts: list[int]):
    layer, x = layer_with(selection), inputs(12)
    state = new_state(layer)
    found = torch.cat([run(layer, [(state, part)])[0] for part in x.split(cuts)])
    assert_near(found, as_written(layer, x, torch.ones(12, 12, dtype=torch.bool).tril()))


@pytest.mark.parametrize("cuts", [[12], [1, 1, 6, 4], [11, 1]], ids=str)
def test_only_the_keys_that_were_selected(cuts: list[int]):
    layer, x = layer_with(EverySecond()), inputs(12)
    state = new_state(layer)
    found = torch.cat([run(layer, [(state, part)])[0] for part in x.split(cuts)])
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    allowed[:, 1::2] &= torch.eye(12, dtype=torch.bool)[:, 1::2]
    assert_near(found, as_written(layer, x, allowed))


def test_a_selection_is_asked_for_each_span_and_has_the_name_of_an_indexer():
    selection = EverySecond()
    layer = layer_with(selection)
    assert "indexer.scale" in dict(layer.named_parameters())
    first, second = new_state(layer), new_state(layer)
    run(layer, [(first, inputs(3))])
    selection.asked.clear()
    x = [inputs(2, 8), inputs(5, 9)]
    run(layer, [(first, x[0]), (second, x[1])])
    for (asked, cos, span), given, positions in zip(selection.asked, x, [range(3, 5), range(5)], strict=True):
        assert torch.equal(asked, given)
        assert torch.equal(cos, ROPE.angles(torch.tensor(positions), torch.float32)[0])
        assert span.before == positions[0]


def test_sequences_of_one_ubatch_do_not_see_each_other():
    layer = layer_with(None)
    x = [inputs(9, 1), inputs(7, 2)]
    states = [new_state(layer), new_state(layer)]
    parts = [x[0].split([2, 6, 1]), x[1].split([1, 1, 5])]
    together = [run(layer, list(zip(states, chunks, strict=True))) for chunks in zip(*parts, strict=True)]
    for i, tokens in enumerate(x):
        (alone,) = run(layer, [(new_state(layer), tokens)])
        assert_near(torch.cat([outputs[i] for outputs in together]), alone)


def test_what_is_kept_of_a_sequence():
    layer = layer_with(None)
    state = new_state(layer)
    assert state.nbytes == 2 * 50 * KV_HEADS * HEAD_DIM * 4
    x = inputs(8)
    run(layer, [(state, x[:5])])
    kept = state.clone()
    first = run(layer, [(state, x[5:])])[0]
    assert torch.equal(run(layer, [(kept, x[5:])])[0], first)
