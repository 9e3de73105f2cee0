from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lazyio.engine.layers.kv_sharing import KeysAndValues, Kind, OwnAttention, SharedAttention, Sight
from lazyio.engine.layers.norm import rms
from lazyio.engine.layers.rope import Rope, rotate
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch

CPU, HIDDEN, EPS = torch.device("cpu"), 24, 1e-6
ROPE = Rope(100.0, 8)


def kind(window: int | None, *, values_are_keys: bool = False) -> Kind:
    return Kind(window, heads=4, kv_heads=2, head_dim=8, rope=ROPE, values_are_keys=values_are_keys)


def random_weights(attention: SharedAttention, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in attention.requires_grad_(False).parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))


def layers(of: Kind) -> tuple[OwnAttention, SharedAttention]:
    own, shared = OwnAttention(of, HIDDEN, EPS), SharedAttention(of, HIDDEN, EPS)
    random_weights(own, 1)
    random_weights(shared, 2)
    return own, shared


def run(own: OwnAttention, shared: SharedAttention, x: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """Both layers over x [tokens, hidden], cut in chunks of these sizes."""
    state = State({own: own.new_piece(len(x), x.dtype, CPU)}, len(x))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunk in x.split(cuts):
        sight = Sight(own.kind, Ubatch.of([(state, [0] * len(chunk))], CPU), x.dtype)
        found.append((own(chunk, sight), shared(chunk, sight)))
        state.tokens += len(chunk)
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def expected(own: OwnAttention, asking: SharedAttention, x: torch.Tensor) -> torch.Tensor:
    """The formula for all of a sequence, with a mask."""
    of = own.kind
    heads = [functional.linear(x, p.weight).view(len(x), -1, 8) for p in (asking.q_proj, own.k_proj)]
    angles = ROPE.angles(torch.arange(len(x)), x.dtype)
    q, k = (
        rotate(rms(y, EPS) * norm.weight, angles) for y, norm in zip(heads, (asking.q_norm, own.k_norm), strict=True)
    )
    v = heads[1] if own.v_proj is None else functional.linear(x, own.v_proj.weight).view(len(x), -1, 8)
    k, v = (y.repeat_interleave(2, 1).transpose(0, 1) for y in (k, rms(v, EPS)))
    far = torch.arange(len(x))[:, None] - torch.arange(len(x))
    mask = (far < 0) | (far >= (of.window or len(x)))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)).masked_fill(mask, -torch.inf)
    return functional.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), asking.o_proj.weight)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("values_are_keys", [False, True])
@pytest.mark.parametrize("cuts", [[17], [1, 7, 1, 1, 6, 1]])
def test_layers_without_keys_see_those_of_the_layer_before(window: int | None, values_are_keys: bool, cuts: list[int]):
    own, shared = layers(kind(window, values_are_keys=values_are_keys))
    x = torch.randn(17, HIDDEN, generator=torch.Generator().manual_seed(3))
    found = run(own, shared, x, cuts)
    torch.testing.assert_close(found[0], expected(own, own, x), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], expected(own, shared, x), rtol=0, atol=1e-5)


def test_a_window_is_all_that_is_kept_and_only_where_keys_are_made():
    own, shared = layers(kind(5))
    piece = own.new_piece(1000, torch.float32, CPU)
    assert isinstance(piece, KeysAndValues)
    assert piece.nbytes == 2 * (2 * 5) * 2 * 8 * 4
    assert layers(kind(None))[0].new_piece(1000, torch.float32, CPU).nbytes == 2 * 1000 * 2 * 8 * 4
    assert not hasattr(shared, "new_piece")
    assert not hasattr(shared, "k_proj")
