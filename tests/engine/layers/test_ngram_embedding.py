from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from lazyio.engine.layers.ngram_embedding import NgramEmbedding
from lazyio.engine.state import State
from lazyio.engine.ubatch import Ubatch

HIDDEN, STREAMS, VALUES, KERNEL, DILATION, EPS = 16, 3, 48, 4, 3, 1e-6


class Ready(NamedTuple):
    """Rows that are there."""

    rows: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.rows


class GivenRows(nn.Module):
    """In place of the hash and the table of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.empty(0)

    def forward(self, input_ids: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
        return self.rows


def both() -> tuple[Qwen4ExpTextPLELayer, NgramEmbedding]:
    """The module of transformers, its table aside, and ours, with the same random weights."""
    config = Qwen4ExpTextConfig(
        hidden_size=HIDDEN,
        hc_count=STREAMS,
        num_hidden_layers=2,
        ple_embed_dim=VALUES,
        ple_layer_ids=[1],
        eos_token_id=3,
        heads_per_ngram=4,
        ngram_vocab_size_base=100,
        ngram_size=DILATION,
        ple_conv_kernel_size=KERNEL,
        rms_norm_eps=EPS,
    )
    reference = Qwen4ExpTextPLELayer(config, 0, 0).requires_grad_(False)
    reference.ple_embedding = GivenRows()
    generator = torch.Generator().manual_seed(1)
    for parameter in reference.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    ours = NgramEmbedding(HIDDEN, STREAMS, VALUES, KERNEL, DILATION, EPS)
    ours.load_state_dict(reference.state_dict())
    return reference, ours.requires_grad_(False)


def inputs(tokens: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams of different sizes, and rows."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.1, 1.0, 30.0]).repeat_interleave(HIDDEN)
    streams = scale * torch.randn(tokens, STREAMS * HIDDEN, generator=generator)
    return streams, torch.randn(tokens, VALUES, generator=generator)


def expected(reference: Qwen4ExpTextPLELayer, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    reference.ple_embedding.rows = rows[None]
    return reference(streams[None], torch.zeros(1, len(rows), dtype=torch.int64), None)[0]


def new_state(ours: NgramEmbedding, dtype: torch.dtype = torch.float32) -> State:
    return State({ours.conv1d: ours.conv1d.new_piece(64, dtype, torch.device("cpu"))}, 64)


def step(
    ours: NgramEmbedding, states: list[State], streams: list[torch.Tensor], rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What is added to the streams of several sequences in one ubatch, and their states moved on."""
    lengths = [len(part) for part in rows]
    ubatch = Ubatch.of([(state, [0] * n) for state, n in zip(states, lengths, strict=True)], torch.device("cpu"))
    found = ours(torch.cat(streams), ubatch, Ready(torch.cat(rows)))
    for state, length in zip(states, lengths, strict=True):
        state.tokens += length
    return list(found.split(lengths))


@pytest.mark.parametrize("cuts", [[23], [1, 7, 3, 12], [1] * 23, [22, 1]], ids=str)
def test_as_in_transformers_at_any_cuts(cuts: list[int]):
    reference, ours = both()
    streams, rows = inputs(23)
    state = new_state(ours)
    ends = [0, *(sum(cuts[: i + 1]) for i in range(len(cuts)))]
    found = [step(ours, [state], [streams[a:b]], [rows[a:b]])[0] for a, b in pairwise(ends)]
    torch.testing.assert_close(torch.cat(found), expected(reference, streams, rows))


def test_sequences_of_one_ubatch_do_not_mix():
    reference, ours = both()
    first, second = inputs(12), inputs(9, seed=3)
    states = [new_state(ours), new_state(ours)]
    one = step(ours, states, [first[0][:5], second[0][:1]], [first[1][:5], second[1][:1]])
    two = step(ours, states, [first[0][5:], second[0][1:]], [first[1][5:], second[1][1:]])
    torch.testing.assert_close(torch.cat([one[0], two[0]]), expected(reference, *first))
    torch.testing.assert_close(torch.cat([one[1], two[1]]), expected(reference, *second))


def test_the_smallest_gate():
    """A key at right angles to the streams opens the gate half, one almost so by the square root of the least."""
    reference, ours = both()
    streams, rows = inputs(5)
    for layer in (reference, ours):
        layer.key_proj.weight *= 1e-9
    torch.testing.assert_close(step(ours, [new_state(ours)], [streams], [rows])[0], expected(reference, streams, rows))
    zeros = torch.zeros_like(streams)
    torch.testing.assert_close(step(ours, [new_state(ours)], [zeros], [rows])[0], expected(reference, zeros, rows))


def test_rows_are_asked_for_after_what_does_not_need_them():
    _, ours = both()
    streams, rows = inputs(4)
    order: list[str] = []

    class Watched:
        def values(self) -> torch.Tensor:
            order.append("rows")
            return rows

    for name in ("norm_query", "key_proj", "value_proj"):
        getattr(ours, name).register_forward_pre_hook(lambda *_, name=name: order.append(name))
    state = new_state(ours)
    ours(streams, Ubatch.of([(state, [0] * 4)], torch.device("cpu")), Watched())
    assert order == ["norm_query", "rows", "key_proj", "value_proj"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype):
    reference, ours = both()
    streams, rows = inputs(15)
    wanted = expected(reference, streams, rows)
    ours.to(dtype)
    found = step(ours, [new_state(ours, dtype)], [streams.to(dtype)], [rows.to(dtype)])[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-2)
